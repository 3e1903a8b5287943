"""How long training stands still for a checkpoint: ours beside `torch.save` by rank 0 and HF Trainer's, on one model.

``python -m benchmarks.checkpoint_stall [--rounds 5] [--saves 4] [--work FOLDER] [--json benchmarks/results/checkpoint_stall.json]``.
Two gloo ranks, each program fresh, all in turns; the first save of a program is warm-up. Ratios are formed within a round, to
`torch.save` by rank 0 in the same form. The exit code is 1 if async stalls for more than a twentieth of it, if a checkpoint came while
the one before was in flight, if weights_only writes more than the adapter and its small files, if the programs did not train one model, or
if something could not be measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from allranks import api
from allranks.errors import AllranksError
from allranks.rundir.events import read_events
from allranks.rundir.paths import RunDir
from benchmarks import machine, programs
from benchmarks.checkpoint_peers import LORA, files_of

AIM = 0.05
SMALL_FILES = 1 << 16  # headers of safetensors
RANKS = 2
EVERY = 5  # steps between saves that training waits for
EVERY_ASYNC = 40  # longer than it takes to write one behind training's back
MODEL = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
VOCABULARY = 2048
ROWS, LENGTH = 4, 32  # a rank's micro-batch, in sequences and in tokens each
OURS: dict[str, dict[str, dict[str, Any]]] = {
    "whole": {
        "weights_only": {"mode": "weights_only"},
        "full": {"mode": "full"},
        "async": {"mode": "full", "async": True},
    },
    "lora": {
        "weights_only": {"mode": "weights_only"},
        "full": {"mode": "full"},
        "async": {"mode": "full", "async": True},
    },
}
PEERS = ("torch_save", "torch_save_synced", "hf_trainer")


class NotMeasured(Exception):
    """A program could not run; the reason is its text."""


def make_base(folder: Path) -> None:
    """The model with its tokenizer, which every program begins with, and rows for ours."""
    from tests.dist.making import build_model

    from allranks.spec.records import ModelSpec
    from allranks.train.data.tokenization import train_tokenizer

    rows = [{"text": f"Number {i} is followed by {i + 1}, and by {i * 7919 % 10007} later on."} for i in range(2000)]
    (folder / "rows.json").write_text(json.dumps(rows))
    # too few texts for so many tokens: filled up, so that embeddings and head have their usual size
    tokenizer = train_tokenizer((r["text"] for r in rows), VOCABULARY, classifier=False)
    tokenizer.add_tokens([f"<{i}>" for i in range(len(tokenizer), VOCABULARY)])
    model: Any = build_model(
        ModelSpec(name="tiny:mistral", config=MODEL), tokenizer, dtype="float32", labels={}, seed=1
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def spec(folder: Path, form: str, checkpoint: dict[str, Any], saves: int, every: int) -> dict[str, Any]:
    """Our run: the peers' model, and a checkpoint every few steps."""
    return {
        "name": "stall",
        "model": {"name": str(folder / "model"), "dtype": "float32"},
        "data": {"source": str(folder / "rows.json"), "max_length": LENGTH, "eval_fraction": 0.0},
        "adapter": LORA if form == "lora" else {"type": "none"},
        # the last one behind training's back has steps beside it, too
        "train": {
            "max_steps": every * saves + every // 2,
            "micro_batch_size": ROWS,
            "schedule": "constant",
            "lr": 1e-4,
        },
        "checkpoint": {**checkpoint, "every": every, "keep": 2, "at_end": False},
        "cluster": {"cache": str(folder / "cache"), "procs_per_node": RANKS, "env": {"OMP_NUM_THREADS": "1"}},
        "run_root": str(folder / "runs"),
    }


def ours(folder: Path, form: str, name: str, saves: int, every_async: int) -> dict[str, Any]:
    """Seconds of each save by all ranks' own events, the bytes of the last one, and how steps went beside it."""
    every = every_async if name == "async" else EVERY
    try:
        result = api.run(spec(folder, form, OURS[form][name], saves, every))
    except AllranksError as error:
        raise NotMeasured(str(error)) from None
    if result.exit_code:
        raise NotMeasured(result.message)
    run = RunDir(Path(result.folder))
    ranks = [list(read_events(run.events_of(r))) for r in range(RANKS)]
    model = next(e for e in ranks[0] if e["event"] == "model")
    told = [[e for e in events if e["event"] == "checkpoint"] for events in ranks]
    if [len(t) for t in told] != [saves] * RANKS:
        raise NotMeasured(f"{[len(t) for t in told]} checkpoints by rank, {saves} were asked for")
    last = run.checkpoint(run.checkpoint_steps()[-1])
    found = {
        "seconds": [max(e["seconds"] for e in same) for same in zip(*told, strict=True)],
        "written_s": [max(e["written_s"] for e in same) for same in zip(*told, strict=True)],
        "ranks_bytes": sum(t[-1]["bytes"] for t in told),
        "files_bytes": files_of(last),
        "parameters": model["parameters"],
        "parameters_trained": model["parameters_trained"],
        "shapes": published_shapes(last),
        **beside(ranks[0]),
    }
    shutil.rmtree(run.root)
    return found


def published_shapes(folder: Path) -> dict[str, list[int]]:
    """By the files' own headers."""
    from safetensors import safe_open

    found: dict[str, list[int]] = {}
    for path in [*folder.glob("model*.safetensors"), *folder.glob("adapter_model.safetensors")]:
        with safe_open(path, framework="pt") as file:
            found |= {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    return found


def beside(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a checkpoint in flight did to the steps of rank 0: how many came while one was, and how much longer they took."""
    saves = [e for e in events if e["event"] == "checkpoint"]
    flights = [(e["time"] - e["written_s"] + e["seconds"], e["time"]) for e in saves]
    within, without = [], []
    for e in events:
        if e["event"] == "step" and e["time"] > flights[0][1]:  # steps up to the first save are warm-up
            began = e["time"] - e["step_time_s"]
            (within if any(began < end and e["time"] > start for start, end in flights) else without).append(
                e["step_time_s"]
            )
    late = sum(flights[i][1] > flights[i + 1][1] - saves[i + 1]["written_s"] for i in range(len(flights) - 1))
    return {
        "step_s": median(without) if without else None,
        "step_in_flight_s": median(within) if len(within) > 2 else None,
        "steps_in_flight": len(within),
        "came_too_early": late,
    }


def peer(folder: Path, form: str, name: str, saves: int) -> dict[str, Any]:
    """The same of a peer's program."""
    out = folder / "peer"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    asked = {"kind": name, "lora": form == "lora", "saves": saves, "every": EVERY, "rows": ROWS, "length": LENGTH}
    asked |= {"model": str(folder / "model")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "benchmarks.checkpoint_peers", str(out), json.dumps(asked)]
    try:
        programs.run(command, folder / "peer.log", 600, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    except programs.ProgramFailed as error:
        raise NotMeasured(str(error)) from None
    return json.loads((out / "result.json").read_text())


def measure(folder: Path, rounds: int, saves: int, every: int, forms: list[str]) -> list[dict[str, Any]]:
    """One record a program and round; the order of programs turns with the round."""
    make_base(folder)
    found = []
    for number in range(rounds):
        for form in forms:
            turn = [*PEERS, *OURS[form]]
            for name in turn if number % 2 == 0 else turn[::-1]:
                clock = machine.CpuClock.now()
                record: dict[str, Any] = {"round": number, "form": form, "name": name}
                try:
                    record |= (
                        peer(folder, form, name, saves) if name in PEERS else ours(folder, form, name, saves, every)
                    )
                    record["stall_s"] = median(record["seconds"][1:])
                except NotMeasured as error:
                    record["not_measured"] = str(error)
                found.append({**record, "disturbed": clock.disturbance()})
                told = f"{record['stall_s']:.4f} s" if "stall_s" in record else record["not_measured"].splitlines()[0]
                print(f"round {number} {form:>5} {name:<18} {told}", flush=True)
    require_one_model(found)
    return found


def require_one_model(found: list[dict[str, Any]]) -> None:
    """Every program of a form trained the same parameters, to the last name and shape; ratios would say nothing otherwise.

    Raises:
        AssertionError: names two programs and the first difference.
    """
    for form in {r["form"] for r in found}:
        done = [r for r in found if r["form"] == form and "shapes" in r]
        for r in done[1:]:
            first = done[0]
            who = f"{form}: {r['name']} and {first['name']}"
            for key in ("parameters", "parameters_trained"):
                if r[key] != first[key]:
                    raise AssertionError(f"{who} differ in {key}: {r[key]} and {first[key]}")
            odd = [k for k in sorted(r["shapes"] | first["shapes"]) if r["shapes"].get(k) != first["shapes"].get(k)]
            if odd:
                shapes = (r["shapes"].get(odd[0]), first["shapes"].get(odd[0]))
                raise AssertionError(f"{who} differ in {len(odd)} tensors, first {odd[0]}: {shapes[0]} and {shapes[1]}")
    for r in found:
        r.pop("shapes", None)  # compared, and of no further use


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": round(median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def table(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a form and program: stall, and its ratio to `torch.save` within a round."""
    base = {(r["round"], r["form"]): r["stall_s"] for r in found if r["name"] == "torch_save" and "stall_s" in r}
    rows = []
    for form, name in dict.fromkeys((r["form"], r["name"]) for r in found):
        mine = [r for r in found if (r["form"], r["name"]) == (form, name)]
        done = [r for r in mine if "stall_s" in r]
        row: dict[str, Any] = {"form": form, "name": name, "rounds": len(done)}
        if len(done) < len(mine):
            row["not_measured"] = next(r["not_measured"] for r in mine if "not_measured" in r)
        if done:
            pairs = [r["stall_s"] / base[r["round"], form] for r in done if (r["round"], form) in base]
            row["stall_s"] = spread([r["stall_s"] for r in done])
            row["ratio_to_torch_save"] = spread(pairs) if pairs else None
            row |= sizes_of(done[-1])
            if "written_s" in done[0]:
                row |= flights_of(done)
        rows.append(row)
    return rows


def sizes_of(record: dict[str, Any]) -> dict[str, Any]:
    files = record["files_bytes"]
    return {
        "files_bytes": sum(files.values()),
        "tensors_bytes": sum(n for f, n in files.items() if f.endswith(".safetensors")),
        "parameters": record["parameters"],
        "parameters_trained": record["parameters_trained"],
    }


def flights_of(done: list[dict[str, Any]]) -> dict[str, Any]:
    """What ours alone tells: until when a checkpoint was published, what ranks wrote, how steps went meanwhile."""
    slower = [r["step_in_flight_s"] / r["step_s"] for r in done if r["step_in_flight_s"] and r["step_s"]]
    return {
        "published_after_s": spread([median(r["written_s"][1:]) for r in done]),
        "ranks_bytes": done[-1]["ranks_bytes"],
        "came_too_early": sum(r["came_too_early"] for r in done),
        "step_beside_it": spread(slower) if slower else None,
    }


def short_of(rows: list[dict[str, Any]]) -> list[str]:
    """What is not as it should be, one line each."""
    lines = []
    for r in rows:
        who, ratio = f"{r['form']} {r['name']}", r.get("ratio_to_torch_save")
        if "not_measured" in r:
            lines.append(f"{who}: not measured: {r['not_measured'].splitlines()[0]}")
        if r["name"] == "async" and ratio and ratio["median"] > AIM:
            lines.append(f"{who} stalls for {ratio['median']:.2f} of torch.save; the aim is {AIM}")
        if r["name"] == "async" and r.get("came_too_early"):
            lines.append(f"{who}: {r['came_too_early']} saves waited for the one before: take more steps with --every")
        if (r["form"], r["name"]) == ("lora", "weights_only") and "ranks_bytes" in r:
            adapter = 4 * r["parameters_trained"]
            if r["ranks_bytes"] != adapter:
                lines.append(f"{who}: ranks wrote {r['ranks_bytes']} bytes of tensors; the adapter has {adapter}")
            if not adapter <= r["tensors_bytes"] <= adapter + SMALL_FILES:
                lines.append(f"{who}: its files have {r['tensors_bytes']} bytes of tensors; the adapter has {adapter}")
    return lines


def show(rows: list[dict[str, Any]]) -> None:
    for r in rows:
        if "stall_s" not in r:
            continue
        s, ratio, more = r["stall_s"], r["ratio_to_torch_save"], ""
        beside = f"{ratio['median']:6.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) of torch.save" if ratio else ""
        if "published_after_s" in r:
            more = f", published after {r['published_after_s']['median']:.2f} s"
        if r["name"] == "async" and r.get("step_beside_it"):
            more += f", steps meanwhile take {r['step_beside_it']['median']:.2f} of others"
        size = f"{r['files_bytes'] / 2**20:.1f} MiB"
        print(f"{r['form']:>5} {r['name']:<18} {s['median']:.4f} s {beside}, {size}{more}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--every", type=int, default=EVERY_ASYNC, help="steps between two saves of async")
    parser.add_argument("--forms", default="whole,lora")
    parser.add_argument("--work", type=Path, help="a folder on the disk that is to be measured")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rounds < 1 or args.saves < 2:
        parser.error("--rounds must be at least 1, --saves at least 2 (the first is warm-up)")
    programs.exit_on_sigterm()
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        found = measure(Path(folder), args.rounds, args.saves, args.every, args.forms.split(","))
    rows = table(found)
    show(rows)
    lines = short_of(rows)
    print("\n".join(lines) or "all as it should be")
    if args.json:
        workload = {"model": MODEL, "vocabulary": VOCABULARY, "rows": ROWS, "length": LENGTH, "ranks": RANKS}
        workload |= {"every_steps": EVERY, "every_steps_async": args.every, "saves": args.saves}
        written = {"workload": workload, "rows": rows, "short_of": lines, "runs": found, "machine": machine.facts()}
        args.json.write_text(json.dumps(written, indent=2) + "\n")
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
