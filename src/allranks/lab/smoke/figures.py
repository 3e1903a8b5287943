"""Define the figures of the smoke tests, and choose sizes that fit a machine. Pure.

A figure is shown next to that of the field notes, with the same definition; if they are not comparable, the reason is given. A
test requests the size of the notes and gets the nearest size that fits into memory and, on CPU cores, ends in time.
"""

from __future__ import annotations

import statistics
from typing import Any

from allranks.lab.smoke.records import Evidence, Figure, FigureRow, Placement, SmokeTest
from allranks.planning import memory
from allranks.planning.memory.estimate import TOO_LARGE
from allranks.spec import parse_spec
from allranks.spec.models import mlp_shape


def figure_rows(test: SmokeTest, e: Evidence) -> list[FigureRow]:
    """Return all figures of a test."""
    return [
        FigureRow(
            name=f.name,
            unit=f.unit,
            definition=f.definition,
            seed=f.seed,
            correct=f.correct,
            correction=f.correction,
            ours=f.measure(e),
            not_comparable=_why_not(f, test, e),
        )
        for f in test.figures
    ]


def _why_not(f: Figure, test: SmokeTest, e: Evidence) -> str:
    if f.seed is None:
        return "the notes give no value"
    reasons = []
    if "hardware" in f.depends and e.plan.device != "cuda":
        reasons.append("different hardware")
    if "size" in f.depends and test.parameters is not None and parameters(e) != test.parameters:
        reasons.append("different model size")
    if "ranks" in f.depends and len(e.ranks) != test.nodes * test.ranks:
        reasons.append(f"{len(e.ranks)} ranks instead of {test.nodes * test.ranks}")
    return "; ".join(reasons)


def parameters(e: Evidence) -> float | None:
    """Return all parameters of the model."""
    return e.last("model").get(0, {}).get("parameters")


def global_batch(e: Evidence) -> float | None:
    """Return the rows of one optimizer step over all ranks."""
    return e.plan.batch.global_batch_size if e.plan.batch else None


def training_time(e: Evidence) -> float | None:
    """Return the seconds of all steps, including the first."""
    return sum(e.step_times_s) or None


def steps_per_s(e: Evidence) -> float | None:
    """Return all steps over the seconds of all steps, including warm-up, as in the notes."""
    seconds = training_time(e)
    return len(e.step_times_s) / seconds if seconds else None


def samples_per_s(e: Evidence) -> float | None:
    """Return batch rows over all ranks per second."""
    rate, batch = steps_per_s(e), global_batch(e)
    return rate * batch if rate and batch else None


def warm_samples_per_s(e: Evidence) -> float | None:
    """Return batch rows over all ranks by the median of the steps after the first five."""
    times, batch = e.step_times_s[5:], global_batch(e)
    return batch / statistics.median(times) if times and batch else None


def first_step(e: Evidence) -> float | None:
    """Return the seconds of the first step beyond the median: compilation, first allocations, first connections."""
    times = e.step_times_s
    return max(0.0, times[0] - statistics.median(times[1:])) if len(times) > 2 else None


def engine_start(e: Evidence) -> float | None:
    """Return the seconds of DeepSpeed's initialisation, including the build of its operators."""
    return e.last("engine").get(0, {}).get("initialize_s")


def last_loss(e: Evidence) -> float | None:
    """Return the loss of the last step, over all ranks."""
    return e.last("step").get(0, {}).get("loss")


def peak_gb(e: Evidence) -> float | None:
    """Return torch's peak allocation on a rank's GPU, in 1e9 bytes; None on a CPU, whose peak includes libraries."""
    if e.plan.device != "cuda":
        return None
    return max((s["peak_memory_bytes"] for steps in e.events("step").values() for s in steps), default=0) / 1e9 or None


def state_gb_a_rank(e: Evidence) -> float | None:
    """Return the optimizer state that a rank writes, in 1e9 bytes: the two moments, and with bfloat16 weights DeepSpeed's float32 master weights."""
    ends = e.last("end")
    if not ends:
        return None
    each = 12 if e.plan.param_dtype == "bfloat16" else 8
    return max(end["state_elements"] for end in ends.values()) * each / 1e9


def wall_time(e: Evidence) -> float | None:
    """Return the seconds from the built model to the end of the run, without the start of the ranks."""
    phases = e.events("phase").get(0, [])
    begun = [p["time"] for p in phases if p["name"] == "train"]
    ended = [p["time"] for p in phases if p["name"] in ("save", "evaluate", "done")]
    return ended[0] - begun[0] if begun and ended else None


def padded_tokens_per_s_per_rank(e: Evidence) -> float | None:
    """Return steps x rows x max_length by the wall time, including padding and warm-up, as in the notes."""
    seconds, length = wall_time(e), e.spec.data.max_length if e.spec.data else 0
    rows = e.plan.batch.micro_batch_size * e.plan.batch.grad_accum if e.plan.batch else 0
    return len(e.step_times_s) * rows * length / seconds if seconds else None


def real_tokens_per_s(e: Evidence) -> float | None:
    """Return tokens per second without padding over all ranks after warm-up (tokens_per_s of metrics.json)."""
    return e.metrics.get("tokens_per_s")


def eval_seconds(e: Evidence) -> float | None:
    """Return the seconds of one evaluation."""
    return e.last("eval").get(0, {}).get("seconds")


def first_perplexity(e: Evidence) -> float | None:
    """Return the perplexity before the first step."""
    evals = e.events("eval").get(0, [])
    return evals[0].get("perplexity") if evals else None


def save_seconds(e: Evidence) -> float | None:
    """Return the seconds without training because of a checkpoint."""
    return e.last("checkpoint").get(0, {}).get("seconds")


def epoch_seconds(e: Evidence) -> float | None:
    """Return the seconds of one epoch (epoch_s of metrics.json)."""
    return e.metrics.get("epoch_s")


CPU_FLOPS = 15e9  # rough FLOP/s of a core for float32 matrix products; only used to choose a size
CPU_BUDGET_S = 120.0
TINY = {"width": 16, "rows": 4, "steps": 4}
SPARE = 0.6  # of the memory; other programs need some


def base_spec(asked: Placement, name: str) -> dict[str, Any]:
    """Return the common part of all tests: full checkpoints, final checks, and by default no evaluation."""
    cluster: dict[str, Any] = {
        "launcher": "local" if asked.place == "local" else "slurm",
        "nodes": asked.nodes,
        "procs_per_node": asked.ranks,
        "timeout_s": 600,
    }
    if asked.gpu and asked.place != "local":
        cluster["slurm"] = {"gpus_per_node": asked.ranks}
    if not asked.gpu:
        cluster |= {"device": "cpu", "env": {"OMP_NUM_THREADS": str(threads(asked))}}
    return {
        "name": f"smoke-{name}",
        "cluster": cluster,
        "checkpoint": {"mode": "full"},
        "observe": {"proof_at_end": True, "telemetry_s": 1.0},
    }


def threads(asked: Placement) -> int:
    """Return a rank's share of the available cores."""
    together = asked.world if asked.place == "cluster" else asked.ranks
    return max(1, asked.machine.cpus // together)


def mlp_spec(
    asked: Placement, base: dict[str, Any], width: int, layers: int, shape: str, rows: int, steps: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the base with a perceptron on noise of the notes' size, or the largest half, quarter, ... of its width that fits."""
    if asked.scale == "tiny":
        chosen, rows_now, steps_now = TINY["width"], TINY["rows"], TINY["steps"]
        why = "requested by --scale tiny"
    else:
        chosen, rows_now, steps_now, why = width, rows, steps, ""
        while (
            asked.scale == "fit"
            and chosen > 64
            and (reason := _too_much(asked, base, chosen, layers, shape, rows, steps))
        ):
            chosen, why = chosen // 2, reason
    spec = _with_mlp(base, chosen, layers, shape, rows_now, steps_now)
    scaled = []
    if (chosen, rows_now) != (width, rows):
        here, there = (mlp_shape(f"mlp:{w}x{layers}", {"shape": shape}).parameters for w in (chosen, width))
        scaled.append(f"width {chosen} instead of {width}: {here:,} parameters instead of {there:,}; {why}")
    if rows_now != rows:
        scaled.append(f"{rows_now} rows per rank instead of {rows}; {why}")
    if steps_now != steps:
        scaled.append(f"{steps_now} steps instead of {steps}; {why}")
    return spec, scaled


def _with_mlp(base: dict[str, Any], width: int, layers: int, shape: str, rows: int, steps: int) -> dict[str, Any]:
    return {
        **base,
        "model": {**base.get("model", {}), "name": f"mlp:{width}x{layers}", "config": {"shape": shape}},
        "data": {"source": "builtin:noise", "eval_fraction": 0.0},
        "train": {
            "max_steps": steps,
            "micro_batch_size": rows,
            "lr": 1e-4,
            "schedule": "constant",
            **base.get("train", {}),
        },
    }


def _too_much(
    asked: Placement, base: dict[str, Any], width: int, layers: int, shape: str, rows: int, steps: int
) -> str:
    """Return why a size does not fit; empty if it does. Unknown limits of other machines count as sufficient."""
    spec = parse_spec(_with_mlp(base, width, layers, shape, rows, steps))
    if asked.place == "cluster":  # all its nodes run on this machine
        each = asked.machine.memory_bytes * SPARE / asked.world / (1 << 30)
        spec = parse_spec(_with_mlp(_limited(base, each), width, layers, shape, rows, steps))
    found = memory.fit(spec, memory.make_plan(spec, asked.machine), asked.machine)
    limit = found.capacity.bytes
    room = limit * (SPARE if asked.place == "local" and not asked.gpu else 1.0) if limit else None
    if found.verdict == TOO_LARGE or (room is not None and found.needed_bytes > room):
        return (
            f"{width} would need {found.needed_bytes / 2**30:.1f} GiB per rank, available {(room or 0) / 2**30:.1f} GiB"
        )
    if asked.gpu or asked.place == "slurm":
        return ""
    parameters = mlp_shape(f"mlp:{width}x{layers}", {"shape": shape}).parameters
    together = asked.world if asked.place == "cluster" else asked.ranks
    cores = min(1.0, asked.machine.cpus / together) * threads(asked)
    seconds = 6 * parameters * rows * steps / (CPU_FLOPS * cores)
    return f"{steps} steps of {width} would take about {seconds:.0f} s on these cores" if seconds > CPU_BUDGET_S else ""


def _limited(base: dict[str, Any], gib: float) -> dict[str, Any]:
    return {**base, "cluster": {**base["cluster"], "device_memory_gib": gib}}
