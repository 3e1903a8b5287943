"""Benches of `benchmarks.gpu`: speed and memory on a part of a 7B model, the whole model, and a stop within a run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from allranks.analysis.metrics import step_times
from benchmarks.gpu_kit import Check, CheckFailed, Kit, NotPossible, simple, tail
from benchmarks.programs import ROOT, end_group

BENCH = ROOT / "benchmarks" / "gpu_lora_mfu.yaml"
VOCABULARY = 32_000  # of the 7B models; a tiny: model has 2,048, which hides the cost of the logits
TINY = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FIGURES = (
    "run_name", "steps", "tokens_per_s", "mfu", "mfu_with_attention", "step_time_s", "peak_memory_bytes",
    "train_loss_last", "wall_time_s", "attention",
)  # fmt: skip
TOP_KERNELS = 12
MEMORY_ERROR = 0.10  # docs/fit.md
NO_COMPILER = "torch.compile needs a C compiler, and there is no cc, gcc or clang"


def layers_of(kit: Kit, what: str) -> int:
    """Layers of the two base models: 8 and 32, in a rehearsal 1 and 2."""
    return {"part": 1, "full": 2}[what] if kit.rehearsal else {"part": 8, "full": 32}[what]


def base_model(kit: Kit, what: str, limit_s: float) -> Path:
    """Return a folder with random weights of the bench's shapes, drawn on the device: one core takes minutes for 7B."""
    folder, layers = kit.models / what, layers_of(kit, what)
    if (folder / "config.json").exists():
        return folder
    shapes = {**yaml.safe_load(BENCH.read_text())["model"]["config"], "vocab_size": VOCABULARY}
    shapes |= TINY if kit.rehearsal else {}
    shapes["num_hidden_layers"] = layers
    wanted = 0 if kit.rehearsal else layers * 440_000_000 + 700_000_000  # bytes in bf16, rounded up
    kit.work.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(kit.work).free) < 1.3 * wanted:
        raise NotPossible(
            f"the model has {wanted / 1e9:.0f} GB, {kit.work} has {free / 1e9:.0f} GB free; --work names another folder"
        )
    words = ["-m", "benchmarks.gpu_benches", str(folder), kit.device, json.dumps(shapes)]
    code, _, err = kit.command(f"base-{what}", words, limit_s)
    if code:
        raise CheckFailed(f"the base model could not be made: {' '.join(err.split())[-600:]}")
    return folder


def bench_spec(kit: Kit, name: str, base: Path, **sections: dict[str, Any]) -> Path:
    """Write the spec of a bench on a base model."""
    spec = yaml.safe_load(BENCH.read_text())
    spec["name"] = f"gpu-{name}"
    spec["model"] = {"name": str(base), "dtype": "bfloat16"}
    spec["cluster"] |= {"device": kit.device, "cache": str(kit.work / "cache")}
    spec["run_root"] = str(kit.work / "runs")
    if kit.rehearsal:
        spec["data"] |= {"max_length": 64, "subset": 200}
        spec["train"] |= {"micro_batch_size": 2, "max_steps": 12}
    for section, values in sections.items():
        spec[section] = {**spec.get(section, {}), **values}
    path = kit.work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def planned_bytes(kit: Kit, name: str, path: Path) -> tuple[int | None, str, int]:
    """Return what `plan` says of a rank: bytes of tensors at the peak, the verdict, and the micro-batch size."""
    found = kit.allranks(f"plan-{name}", ["plan", str(path)], 60)
    fit = found["fit"]
    peak = next((m for m in fit["moments"] if m["name"] == fit["peak"]), None)
    parts = peak["parts"] if peak else {}
    outside = parts.get("runtime", 0) if kit.device == "cuda" else 0
    return sum(parts.values()) - outside if parts else None, fit["verdict"], found["batch"]["micro_batch_size"]


def bench(kit: Kit, name: str, path: Path, limit_s: float) -> dict[str, Any]:
    """Run a bench; return its speed, and its memory beside what `plan` says."""
    planned, verdict, micro = planned_bytes(kit, name, path)
    metrics = kit.allranks(name, ["run", str(path)], limit_s)
    figures = {key: metrics[key] for key in FIGURES}
    figures["step_times_s"] = step_times(step_events(kit.work / "runs" / metrics["run_name"]))
    figures |= {"micro_batch_size": micro, "planned_memory_bytes": planned, "plan_verdict": verdict}
    if planned:
        figures["planned_of_measured"] = round(planned / metrics["peak_memory_bytes"], 3)
    kit.bench[name] = figures
    if not metrics["tokens_per_s"]:
        raise CheckFailed(f"no speed was measured in {metrics['steps']} steps")
    return figures


def variant(
    name: str, title: str, limit_s: float, *, compiler: bool = False, cuda: bool = False, **sections: dict[str, Any]
) -> Check:
    """A bench of the 8-layer model that differs from the plain one in `sections`."""

    def action(kit: Kit, limit_s: float) -> dict[str, Any]:
        if compiler and not kit.compiler:
            raise NotPossible(NO_COMPILER)
        if cuda and kit.rehearsal:
            raise NotPossible("FlexAttention has no backward pass on a CPU")
        began = time.monotonic()
        base = base_model(kit, "part", limit_s)
        path = bench_spec(kit, name, base, train={"max_steps": 20 if not kit.rehearsal else 8}, **sections)
        return bench(kit, name, path, limit_s - (time.monotonic() - began))

    return Check(name, f"8 layers, {title}", limit_s, simple(action))


def profiled(kit: Kit, limit_s: float, name: str = "profiled", **sections: dict[str, Any]) -> dict[str, Any]:
    """A bench with a profile window, and `allranks trace` of it."""
    began, model = time.monotonic(), base_model(kit, "part", limit_s)
    window = {"profile": {"wait": 5, "warmup": 2, "active": 3}}
    path = bench_spec(kit, name, model, train={"max_steps": 14}, observe=window, **sections)
    figures = bench(kit, name, path, limit_s)
    left = max(limit_s - (time.monotonic() - began), 20)
    trace = kit.allranks("trace", ["trace", str(kit.work / "runs" / figures["run_name"])], left)
    ranks = [rank for report in trace["reports"] for rank in report["ranks"]]
    if not ranks or not ranks[0]["steps"] or ranks[0]["device"] != ("cpu" if kit.rehearsal else "gpu"):
        raise CheckFailed(f"allranks trace found no steps of a rank on {kit.device}: {str(trace)[:300]}")
    kernels = [
        {"name": k["name"][:80], "count": k["count"], "total_s": round(k["total_s"], 6)}
        for report in trace["reports"]
        for k in report["top_kernels"][:TOP_KERNELS]
    ]
    return figures | {"trace": ranks[0]["total"], "steps_traced": len(ranks[0]["steps"]), "kernels": kernels}


def profiled_compiled(kit: Kit, limit_s: float) -> dict[str, Any]:
    """The same with compiled blocks."""
    if not kit.compiler:
        raise NotPossible(NO_COMPILER)
    return profiled(kit, limit_s, "profiled_compiled", model={"compile": True})


def step_floor(kit: Kit, limit_s: float) -> dict[str, Any]:
    """The matrix products and the attention of the 8-layer bench alone, and the device's ceilings."""
    spec = yaml.safe_load(BENCH.read_text())
    shapes = {**spec["model"]["config"], "vocab_size": VOCABULARY, **(TINY if kit.rehearsal else {})}
    micro, length = (2, 64) if kit.rehearsal else (spec["train"]["micro_batch_size"], spec["data"]["max_length"])
    values = {
        "device": kit.device, "dtype": "bfloat16", "tokens": micro * length, "length": length,
        "hidden": shapes["hidden_size"], "intermediate": shapes["intermediate_size"], "layers": layers_of(kit, "part"),
        "heads": shapes["num_attention_heads"], "kv-heads": shapes["num_key_value_heads"],
        "head-dim": shapes["head_dim"], "vocabulary": shapes["vocab_size"], "rank": spec["adapter"]["r"],
    }  # fmt: skip
    words = ["-m", "benchmarks.step_floor", *(f"--{key}={value}" for key, value in values.items())]
    code, out, err = kit.command("floor", words, limit_s)
    if code:
        raise CheckFailed(f"exit code {code}: {' '.join(err.split())[-600:]}")
    return json.loads(out)


def memory_of_benches(kit: Kit, limit_s: float) -> dict[str, Any]:
    """All benches of this call: the allocator's peak against `plan`."""
    if kit.rehearsal:
        raise NotPossible("tiny models on a CPU: the memory of the process is that of its libraries")
    ratios = {name: f["planned_of_measured"] for name, f in kit.bench.items() if "planned_of_measured" in f}
    if not ratios:
        raise NotPossible("no bench ran in this call")
    wrong = {name: r for name, r in ratios.items() if abs(r - 1) > MEMORY_ERROR}
    if wrong:
        raise CheckFailed(f"planned over measured memory: {wrong}; all: {ratios}")
    return ratios


def full_model(kit: Kit, limit_s: float, name: str = "full", **sections: dict[str, Any]) -> dict[str, Any]:
    """30 steps of the 7B model with LoRA, with the largest micro-batch up to 4 that `plan` lets fit."""
    began, model = time.monotonic(), base_model(kit, "full", limit_s)
    for micro in (4, 2, 1):
        steps = {"max_steps": 30 if not kit.rehearsal else 12, "micro_batch_size": micro}
        path = bench_spec(kit, name, model, train=steps, **sections)
        if planned_bytes(kit, name, path)[1] in ("fits", "not known"):
            return bench(kit, name, path, limit_s - (time.monotonic() - began))
    raise NotPossible("plan: not even a micro-batch of 1 fits on this device")


def full_model_compiled(kit: Kit, limit_s: float) -> dict[str, Any]:
    """The same with compiled blocks."""
    if not kit.compiler:
        raise NotPossible(NO_COMPILER)
    return full_model(kit, limit_s, "full_compiled", model={"compile": True})


def stopped_and_resumed(kit: Kit, limit_s: float) -> dict[str, Any]:
    """SIGTERM in the middle of a run on 8 layers, and `resume` to its end."""
    began, model = time.monotonic(), base_model(kit, "part", limit_s)
    steps = 40
    path = bench_spec(
        kit, "stopped", model, train={"max_steps": steps, "schedule": "constant"}, checkpoint={"mode": "full"}
    )
    runs, out = kit.work / "runs", kit.work / "stopped.out"
    before = set(runs.glob("gpu-stopped-*"))
    command = [sys.executable, "-m", "allranks", "run", str(path)]
    with out.open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and not any(
                steps_done(run) >= 5 for run in set(runs.glob("gpu-stopped-*")) - before
            ):
                if time.monotonic() - began > limit_s * 0.5:
                    raise CheckFailed(f"no fifth step after {limit_s * 0.5:.0f} s: {tail(out)}")
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            process.wait(max(limit_s * 0.75 - (time.monotonic() - began), 5))
        except subprocess.TimeoutExpired as error:
            raise CheckFailed(f"the run did not end after SIGTERM: {tail(out)}") from error
        finally:
            end_group(process)
    (run,) = set(runs.glob("gpu-stopped-*")) - before
    stopped = [int(p.name.removeprefix("step-")) for p in (run / "checkpoints").glob("step-*")]
    if process.returncode != 1 or len(stopped) != 1 or not 5 <= stopped[0] < steps:
        raise CheckFailed(f"exit code {process.returncode}, checkpoints {stopped}: {tail(out)}")
    left = limit_s - (time.monotonic() - began)
    metrics = kit.allranks("resumed", ["resume", run.name, "--run-root", str(runs)], left)
    if metrics["steps"] != steps or metrics["attempts"] != 2:
        raise CheckFailed(f"resumed: {metrics['steps']} steps in {metrics['attempts']} attempts")
    return {"stopped_at": stopped[0], "steps": metrics["steps"], "checkpoint_s": metrics["checkpoint_s"]}


def step_events(run: Path) -> list[dict[str, Any]]:
    """Return the step events that rank 0 has written, in order; none before its file exists."""
    try:
        lines = (run / "events" / "rank0.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.startswith('{"event":"step"') and line.endswith("}")]


def steps_done(run: Path) -> int:
    """Return the last step that rank 0 has written."""
    return max((event["step"] for event in step_events(run)), default=0)


def make_base(folder: Path, device: str, shapes: dict[str, Any]) -> None:
    """Draw the weights on the device and save them with a tokenizer."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    from allranks.spec.builtin_data import BUILTIN
    from allranks.train.data.tokenization import train_tokenizer

    texts = [str(row["text"]) for row in BUILTIN["reviews"].rows(500, 0)]
    tokenizer = train_tokenizer(texts, shapes["vocab_size"], classifier=False)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = MistralForCausalLM(
            MistralConfig(**shapes, tie_word_embeddings=False, max_position_embeddings=4096, use_cache=False)
        )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="4GB")


if __name__ == "__main__":
    make_base(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
