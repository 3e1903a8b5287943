"""Define the figures of the smoke tests, and choose sizes that fit a machine. Pure.

A figure is shown beside the one of the field notes, by one definition; what is not comparable says why. A test asks for the
notes' size and gets the nearest one that has room and, on CPU cores, ends in time.
"""

from __future__ import annotations

import statistics
from typing import Any

from allranks.lab.smoke.evidence import Evidence
from allranks.lab.smoke.records import Figure, FigureRow, Placement, SmokeTest
from allranks.planning import memory
from allranks.planning.memory.records import TOO_LARGE
from allranks.planning.planner import make_plan
from allranks.spec import parse_spec
from allranks.spec.models import mlp_shape


def figure_rows(test: SmokeTest, e: Evidence) -> list[FigureRow]:
    """All figures of a test."""
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
        return "theirs is not given"
    reasons = []
    if "hardware" in f.depends and e.plan.device != "cuda":
        reasons.append("other hardware")
    if "size" in f.depends and test.parameters is not None and parameters(e) != test.parameters:
        reasons.append("another size of model")
    if "ranks" in f.depends and len(e.ranks) != test.nodes * test.ranks:
        reasons.append(f"{len(e.ranks)} ranks, theirs {test.nodes * test.ranks}")
    return "; ".join(reasons)


def parameters(e: Evidence) -> float | None:
    """All of the model."""
    return e.last("model").get(0, {}).get("parameters")


def global_batch(e: Evidence) -> float | None:
    """Rows of one optimizer step over all ranks."""
    return e.plan.batch.global_batch_size if e.plan.batch else None


def training_time(e: Evidence) -> float | None:
    """Seconds of all steps, the first among them."""
    return sum(e.step_times_s) or None


def steps_per_s(e: Evidence) -> float | None:
    """All steps by the seconds of all steps: warm-up counts, as the notes count."""
    seconds = training_time(e)
    return len(e.step_times_s) / seconds if seconds else None


def samples_per_s(e: Evidence) -> float | None:
    """Batch rows over all ranks a second."""
    rate, batch = steps_per_s(e), global_batch(e)
    return rate * batch if rate and batch else None


def warm_samples_per_s(e: Evidence) -> float | None:
    """Batch rows over all ranks by the median of the steps after the first five."""
    times, batch = e.step_times_s[5:], global_batch(e)
    return batch / statistics.median(times) if times and batch else None


def first_step(e: Evidence) -> float | None:
    """Seconds of the first step beyond the median one: compilation, first allocations, first connections."""
    times = e.step_times_s
    return max(0.0, times[0] - statistics.median(times[1:])) if len(times) > 2 else None


def engine_start(e: Evidence) -> float | None:
    """Seconds in which DeepSpeed was initialised, its operators built among them."""
    return e.last("engine").get(0, {}).get("initialize_s")


def last_loss(e: Evidence) -> float | None:
    """Of the last step, over all ranks."""
    return e.last("step").get(0, {}).get("loss")


def peak_gb(e: Evidence) -> float | None:
    """The most that torch had allocated on a rank's GPU, in 1e9 bytes; None on a CPU, whose peak counts libraries too."""
    if e.plan.device != "cuda":
        return None
    return max((s["peak_memory_bytes"] for steps in e.events("step").values() for s in steps), default=0) / 1e9 or None


def state_gb_a_rank(e: Evidence) -> float | None:
    """Optimizer state a rank writes, in 1e9 bytes: the two moments, and beside weights stored in bfloat16 DeepSpeed's float32 master weights."""
    ends = e.last("end")
    if not ends:
        return None
    each = 12 if e.plan.param_dtype == "bfloat16" else 8
    return max(end["state_elements"] for end in ends.values()) * each / 1e9


def wall_time(e: Evidence) -> float | None:
    """Seconds of training and what is around it, without starting the ranks: from the model being ready to the end."""
    phases = e.events("phase").get(0, [])
    begun = [p["time"] for p in phases if p["name"] == "train"]
    ended = [p["time"] for p in phases if p["name"] in ("save", "evaluate", "done")]
    return ended[0] - begun[0] if begun and ended else None


def padded_tokens_per_s_per_rank(e: Evidence) -> float | None:
    """steps x rows x max_length by the wall time: padding and warm-up count, as the notes count."""
    seconds, length = wall_time(e), e.spec.data.max_length if e.spec.data else 0
    rows = e.plan.batch.micro_batch_size * e.plan.batch.grad_accum if e.plan.batch else 0
    return len(e.step_times_s) * rows * length / seconds if seconds else None


def real_tokens_per_s(e: Evidence) -> float | None:
    """Tokens without padding over all ranks after warm-up (tokens_per_s of metrics.json)."""
    return e.metrics.get("tokens_per_s")


def eval_seconds(e: Evidence) -> float | None:
    """Of one evaluation."""
    return e.last("eval").get(0, {}).get("seconds")


def first_perplexity(e: Evidence) -> float | None:
    """Before the first step."""
    evals = e.events("eval").get(0, [])
    return evals[0].get("perplexity") if evals else None


def save_seconds(e: Evidence) -> float | None:
    """In which training stood still for a checkpoint."""
    return e.last("checkpoint").get(0, {}).get("seconds")


def epoch_seconds(e: Evidence) -> float | None:
    """Of showing every row once (epoch_s of metrics.json)."""
    return e.metrics.get("epoch_s")


CPU_FLOPS = (
    15e9  # a core's, roughly, in these layers' float32 products; only to choose a size, nothing is reported from it
)
CPU_BUDGET_S = 120.0
TINY = {"width": 16, "rows": 4, "steps": 4}
SPARE = 0.6  # of the memory: other programs are there too


def base_spec(asked: Placement, name: str) -> dict[str, Any]:
    """What all tests share: full checkpoints, proofs at the end, no evaluation unless a test wants one."""
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
    """A rank's share of the cores it can have here."""
    together = asked.world if asked.place == "cluster" else asked.ranks
    return max(1, asked.machine.cpus // together)


def mlp_spec(
    asked: Placement, base: dict[str, Any], width: int, layers: int, shape: str, rows: int, steps: int
) -> tuple[dict[str, Any], list[str]]:
    """The base with a perceptron on noise of the notes' size, or the largest half, quarter, ... of its width that fits."""
    if asked.scale == "tiny":
        chosen, rows_now, steps_now = TINY["width"], TINY["rows"], TINY["steps"]
        why = "asked for with --scale tiny"
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
        scaled.append(f"{rows_now} rows a rank instead of {rows}; {why}")
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
    """Why a size does not fit; empty if it does. What is not known of other machines is taken for enough."""
    spec = parse_spec(_with_mlp(base, width, layers, shape, rows, steps))
    if asked.place == "cluster":  # all its nodes are this machine
        each = asked.machine.memory_bytes * SPARE / asked.world / (1 << 30)
        spec = parse_spec(_with_mlp(_limited(base, each), width, layers, shape, rows, steps))
    found = memory.fit(spec, make_plan(spec, asked.machine), asked.machine)
    limit = found.capacity.bytes
    room = limit * (SPARE if asked.place == "local" and not asked.gpu else 1.0) if limit else None
    if found.verdict == TOO_LARGE or (room is not None and found.needed_bytes > room):
        return f"{width} would need {found.needed_bytes / 2**30:.1f} GiB a rank of {(room or 0) / 2**30:.1f} GiB"
    if asked.gpu or asked.place == "slurm":
        return ""
    parameters = mlp_shape(f"mlp:{width}x{layers}", {"shape": shape}).parameters
    together = asked.world if asked.place == "cluster" else asked.ranks
    cores = min(1.0, asked.machine.cpus / together) * threads(asked)
    seconds = 6 * parameters * rows * steps / (CPU_FLOPS * cores)
    return f"{steps} steps of {width} would take these cores about {seconds:.0f} s" if seconds > CPU_BUDGET_S else ""


def _limited(base: dict[str, Any], gib: float) -> dict[str, Any]:
    return {**base, "cluster": {**base["cluster"], "device_memory_gib": gib}}
