"""The checks of `benchmarks.gpu`, by stage. A new one is a function and a line in `STAGES`."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu_benches import (
    full_model,
    full_model_compiled,
    memory_of_benches,
    profiled,
    profiled_compiled,
    step_floor,
    stopped_and_resumed,
    variant,
)
from benchmarks.gpu_kit import (
    FAILED,
    PASSED,
    SKIPPED,
    Check,
    CheckFailed,
    Kit,
    NotPossible,
    Result,
    Stage,
    simple,
    tail,
)
from benchmarks.programs import ROOT

SHARING = ("simple_ddp", "simple_ddp_ga", "simple_ddp_hook", "simple_ddp_async", "bucket_ddp_async", "pytorch_ddp")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
DEMO = ("model.dtype=bfloat16", "train.max_steps=20", "train.warmup_steps=0", "eval.samples=0")
SINGLE_RANK_ERROR = 0.02  # strategies differ on one rank by rounding only


# ---------------------------------------------------------------- tests


def tests(where: str, choose: str = "", *, parallel: bool = False) -> Callable[[Kit, Check, float], list[Result]]:
    """A check whose cases are tests of tests/gpu, each with its own result, also if pytest has to be ended.

    Args:
        parallel: the cases have nothing in common, and where there are cores and pytest-xdist, several run at a time.
    """

    def run(kit: Kit, check: Check, limit_s: float) -> list[Result]:
        log = kit.work / f"{check.name}.jsonl"
        env = {"ALLRANKS_GPU_LOG": str(log)} | ({"ALLRANKS_GPU_REHEARSAL": "1"} if kit.rehearsal else {})
        words = [*PYTEST, where, f"--basetemp={kit.work / check.name}"]
        words += [
            *(["-k", choose] if choose else []),
            *(["-n", "4"] if parallel and kit.cores >= 8 and find_spec("xdist") else []),
        ]
        problem = ""
        try:
            code, out, err = kit.command(check.name, words, limit_s, env)
            problem = "" if code in (0, 1) else f"pytest ended with {code}: {' '.join((err or out).split())[-500:]}"
        except CheckFailed as error:
            problem = str(error)
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        found = []
        for line in lines:
            case, status, reason = case_of(line["test"]), line["status"], line["reason"]
            found.append(Result(f"{check.name}.{case}", case.replace("_", " "), status, reason, {}, line["seconds"]))
        if problem or not found:
            found.append(Result(check.name, check.title, FAILED, problem or "no test ran"))
        shutil.rmtree(kit.work / check.name, ignore_errors=True)
        return found

    return run


def case_of(node: str) -> str:
    """Return the name of a test without its file."""
    return node.rpartition("::")[2].removeprefix("test_")


def unit_tests(kit: Kit, limit_s: float) -> dict[str, Any]:
    """Unit tests of what runs inside a rank, as many as the time allows."""
    if kit.rehearsal:
        files = ["tests/unit/test_losses.py", "tests/unit/test_precision.py"]
        chosen = [f for f in files if (ROOT / f).exists()] or ["tests/unit/test_spec.py"]
    else:
        files = sorted((ROOT / "tests" / "unit").glob("test_*.py"))
        chosen = [f"tests/unit/{p.name}" for p in files if "import torch" in p.read_text()]
    if not chosen:
        raise NotPossible("there are no unit tests here")
    log = kit.work / "unit.jsonl"
    words = [*PYTEST, "-p", "tests.gpu.conftest", "-m", "not full and not docs", *chosen]
    late = ""
    try:
        kit.command("unit", words, limit_s - 5, {"ALLRANKS_GPU_LOG": str(log)})
    except CheckFailed:
        late = f"cut off after {limit_s:.0f} s"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    counts = {status: sum(x["status"] == status for x in lines) for status in (PASSED, FAILED, SKIPPED)}
    if not counts[PASSED] or counts[FAILED]:
        bad = [
            f"{case_of(x['test'])}: {x['reason'].splitlines()[0] if x['reason'] else ''}"
            for x in lines
            if x["status"] == FAILED
        ]
        raise CheckFailed(f"{counts}; {'; '.join(bad[:8]) or tail(kit.work / 'unit.out')}")
    return counts | ({"note": late} if late else {})


# ---------------------------------------------------------------- correctness


def doctor(kit: Kit, limit_s: float) -> dict[str, Any]:
    """The preflight of this machine."""
    found = kit.allranks("doctor", ["doctor"], limit_s, ok=(0, 1))
    bad = [c for node in found["nodes"] for c in node["checks"] if not c["ok"]]
    if any(c.get("blocks") for c in bad):
        raise CheckFailed("; ".join(f"{c['name']}: {c['found']}" for c in bad))
    return {"ok": found["ok"], "notes": [f"{c['name']}: {c['found']}" for c in bad]}


def smoke(kit: Kit, limit_s: float) -> dict[str, Any]:
    """Smoke tests 01, 02, 03 and 05 in their tiny form."""
    rungs = ["01", "02"] if kit.rehearsal else ["01", "02", "03", "05"]
    words = ["smoke", *rungs, "--scale", "tiny", "--run-root", str(kit.work / "smoke")]
    words += ["--set", f"cluster.device={kit.device}"]
    found = kit.allranks("smoke", words, limit_s, ok=(0, 1))
    states = {t["name"]: t["status"] for t in found["tests"]}
    wrong = []
    for t in (t for t in found["tests"] if t["status"] == "failed"):
        unmet = (c.get("title", "") for c in t.get("criteria", []) if c.get("status") == "failed")
        wrong.append(f"{t['name']}: {t.get('message') or '; '.join(unmet)}")
    if wrong:
        raise CheckFailed("; ".join(wrong))
    return states


def strategy_names() -> list[str]:
    """Return all strategies whose package is installed."""
    from allranks.spec.strategies import REGISTRY

    return [name for name, info in REGISTRY.items() if not info.package or find_spec(info.package)]


def demo(kit: Kit, check: Check, limit_s: float) -> list[Result]:
    """20 steps of the demo in bf16 under every strategy; their losses must agree."""
    names = strategy_names()[:: 5 if kit.rehearsal else 1]
    deadline, found, losses = time.monotonic() + limit_s, {}, {}
    gate, waiting = threading.Semaphore(4 if kit.cores >= 8 else 1), []

    def one(name: str) -> None:
        with gate:
            began = time.monotonic()
            result = found[name] = Result(f"{check.name}.{name}", f"the demo in bf16 under {name}", PASSED)
            words = [
                "run",
                "examples/demo.yaml",
                "--set",
                f"strategy.name={name}",
                *(w for value in DEMO for w in ("--set", value)),
                *kit.settings(),
            ]
            try:
                if deadline - began < 5:
                    raise NotPossible("the time of the check was used up")
                metrics = kit.allranks(f"demo-{name}", words, deadline - began)
                result.figures = {
                    k: metrics[k] for k in ("steps", "train_loss_first", "train_loss_last", "peak_memory_bytes")
                }
                loss = losses[name] = metrics["train_loss_last"]
                if metrics["steps"] != 20 or not math.isfinite(loss or math.nan):
                    result.status, result.reason = FAILED, f"steps {metrics['steps']}, loss {loss}"
            except NotPossible as error:
                result.status, result.reason = SKIPPED, str(error)
            except Exception as error:  # noqa: BLE001 - the other strategies go on
                result.status, result.reason = FAILED, str(error)
            result.seconds = round(time.monotonic() - began, 1)

    for name in names:
        waiting.append(threading.Thread(target=one, args=(name,)))
        waiting[-1].start()
    for thread in waiting:
        thread.join()
    right = losses.get("single")
    for name, loss in losses.items():
        if right and found[name].status == PASSED and abs(loss - right) > SINGLE_RANK_ERROR * right:
            found[name].status, found[name].reason = FAILED, f"loss {loss:.4f} after 20 steps; single has {right:.4f}"
    return [found[name] for name in names]


def compared(kit: Kit, limit_s: float, name: str, words: list[str]) -> dict[str, Any]:
    """`allranks compare` with its gates: parity, mechanism, equal work."""
    base = ["compare", "examples/compare-tiny.yaml", "--repeats", "1", "--set", "train.max_steps=4"]
    found = kit.allranks(name, [*base, *words], limit_s, ok=(0, 1))
    gates = {row["strategy"]: row["gates"] for row in found["rows"]}
    wrong = [
        f"{row['strategy']}: {'; '.join(row.get('reasons', []))[:300]}"
        for row in found["rows"]
        if not all(row["gates"].values())
    ]
    if wrong:
        raise CheckFailed(" | ".join(wrong))
    return {"gates": gates}


def two_on_one(kit: Kit, limit_s: float) -> dict[str, Any]:
    """Compare the data-parallel family with two Gloo ranks that share the device."""
    names = SHARING[-1:] if kit.rehearsal else SHARING
    return compared(
        kit, limit_s, "sharing", ["--strategies", ",".join(names), *kit.settings(2), "--set", "cluster.backend=gloo"]
    )


def several(kit: Kit, limit_s: float) -> dict[str, Any]:
    """Compare every strategy with one NCCL rank per GPU."""
    if kit.gpus < 2:
        raise NotPossible(f"needs at least two GPUs, here {'is one' if kit.gpus == 1 else 'is none'}")
    return {"gpus": kit.gpus, **compared(kit, limit_s, "several", ["--strategies", "all", *kit.settings(kit.gpus)])}


STRATEGY_TESTS, RUN_TESTS = "tests/gpu/test_strategies.py", "tests/gpu/test_runs.py"
COMPILED, ISOLATED, BY_TRIAL = {"compile": True}, {"packing": "isolated"}, {"compile": True, "attention": "auto"}
FULL_FLOAT8 = partial(full_model, name="full_float8", model={**BY_TRIAL, "float8": True})
OPEN = (
    Check("smoke", "smoke tests 01 02 03 05, tiny", 300, simple(smoke)),
    Check("profiled_compiled", "the same with torch.compile", 150, simple(profiled_compiled)),
    Check("full_compiled", "30 steps of a 7B model with LoRA, compiled blocks", 420, simple(full_model_compiled)),
    Check("products", "products in 8-bit floats are those of a CPU", 90, tests("tests/gpu/test_float8.py")),
    variant("float8", "torch.compile, products in 8-bit floats", 120, compiler=True,
            model={**COMPILED, "float8": True}),
    variant("attention_rows", "torch.compile, packed rows isolated, kernel by a trial", 120, compiler=True,
            data=ISOLATED, model=BY_TRIAL),
    variant("attention_whole", "torch.compile, kernel of attention by a trial", 120, compiler=True, model=BY_TRIAL),
    Check("batches", "batches that are copied ahead have their values", 60, tests("tests/gpu/test_batch_feed.py")),
    Check("unit", "unit tests of what runs inside a rank", 120, simple(unit_tests)),
    variant("recomputed", "activations recomputed", 90, model={"gradient_checkpointing": True}),
    variant("selective", "element-wise operations recomputed", 90, model={"gradient_checkpointing": "selective"}),
    variant("flex", "packed rows isolated by FlexAttention", 150, compiler=True, cuda=True, data=ISOLATED,
            model={"attention": "flex_attention"}),
)  # fmt: skip
CORRECTNESS = (
    Check("one_rank", "every strategy on one rank equals plain torch", 300, tests(STRATEGY_TESTS, "one_rank")),
    Check("nan", "a NaN in step 5 leaves the weights of step 4", 240, tests(RUN_TESTS, "nan", parallel=True)),
    Check("lora", "LoRA of layers and of experts is as precise as PEFT's", 120, tests("tests/gpu/test_lora.py")),
    Check("qlora", "QLoRA: weights in 4 bits, computed as the same values", 120, tests("tests/gpu/test_qlora.py")),
    Check("host_sync", "nothing in a step waits for the GPU", 240,
          tests(RUN_TESTS, "waits or host_sync", parallel=True)),
    Check("resume", "20 steps resumed to 30 equal 30 unbroken ones", 200, tests(RUN_TESTS, "20_steps", parallel=True)),
    Check("two_ranks", "two Gloo ranks that share the device equal one process", 150,
          tests(STRATEGY_TESTS, "two_ranks")),
    Check("memory", "peak memory is what plan says", 200, tests(RUN_TESTS, "memory", parallel=True)),
    Check("doctor", "allranks doctor", 60, simple(doctor)),
    Check("sharing", "allranks compare, two Gloo ranks on one device", 180, simple(two_on_one)),
    Check("several", "allranks compare, one NCCL rank per GPU", 300, simple(several)),
    Check("demo", "20 steps of the demo in bf16 under every strategy", 240, demo),
)  # fmt: skip
SPEED = (
    variant("plain", "eager, rows joined and cut", 150),
    variant("isolated", "eager, packed rows isolated", 90, data=ISOLATED),
    variant("compiled", "torch.compile", 150, compiler=True, model=COMPILED),
    variant("compiled_isolated", "torch.compile, packed rows isolated", 120, compiler=True, data=ISOLATED,
            model=COMPILED),
    variant("quantized", "weights in 4 bits", 90, model={"quantize": "nf4"}),
    Check("floor", "the matrix products and attention of 8 layers alone", 60, simple(step_floor)),
    Check("profiled", "8 layers with a profile window, and allranks trace", 120, simple(profiled)),
    Check("bench_memory", "peak memory of the benches against plan", 30, simple(memory_of_benches)),
)  # fmt: skip
MODEL = (
    Check("full_float8", "30 steps of a 7B model with LoRA, compiled, 8-bit products, attention by a trial", 240,
          simple(FULL_FLOAT8)),
    Check("full", "the same without a compiler", 240, simple(full_model)),
    Check("spin", "a rank that spins in a kernel is named", 90, tests(RUN_TESTS, "spins")),
    Check("stopped", "SIGTERM and resume on 8 layers", 150, simple(stopped_and_resumed)),
)  # fmt: skip
STAGES = (
    Stage("open", 600, OPEN),  # one at a time: other checks beside them would change what is measured
    Stage("correctness", 400, CORRECTNESS, lanes=8),
    Stage("speed", 380, SPEED),
    Stage("model", 300, MODEL),
)
