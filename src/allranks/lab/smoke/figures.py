"""Define and measure the figures of the smoke tests. Pure.

A figure is shown next to that of the field notes, with the same definition; if they are not comparable, the reason is
given.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from allranks.lab.smoke.records import Evidence, Figure, FigureRow, SmokeTest


def figure_rows(test: SmokeTest, e: Evidence) -> list[FigureRow]:
    """Return all figures of a test."""
    shown = [name for name in FigureRow.__struct_fields__ if name not in ("ours", "not_comparable")]
    return [
        FigureRow(
            **{name: getattr(f, name) for name in shown},
            ours=MEASURED[f.measure](e) if f.measure in MEASURED else value_at(e, f.measure),
            not_comparable=_why_not(f, test, e),
        )
        for f in test.figures
    ]


def value_at(e: Evidence, place: str) -> float | None:
    """Return a value of metrics.json (``metrics.epoch_s``) or of the last event of a kind of rank 0
    (``eval.seconds``)."""
    kind, _, key = place.partition(".")
    return (e.metrics if kind == "metrics" else e.last(kind).get(0, {})).get(key)


def _why_not(f: Figure, test: SmokeTest, e: Evidence) -> str:
    if f.seed is None:
        return "the notes give no value"
    reasons = []
    if "hardware" in f.depends and e.plan.device != "cuda":
        reasons.append("different hardware")
    if "size" in f.depends and test.parameters is not None and value_at(e, "model.parameters") != test.parameters:
        reasons.append("different model size")
    if "ranks" in f.depends and len(e.ranks) != test.nodes * test.ranks:
        reasons.append(f"{len(e.ranks)} ranks instead of {test.nodes * test.ranks}")
    return "; ".join(reasons)


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


def peak_gb(e: Evidence) -> float | None:
    """Return torch's peak allocation on a rank's GPU, in 1e9 bytes; None on a CPU, whose peak includes libraries."""
    if e.plan.device != "cuda":
        return None
    return max((s["peak_memory_bytes"] for steps in e.events("step").values() for s in steps), default=0) / 1e9 or None


def state_gb_a_rank(e: Evidence) -> float | None:
    """Return the optimizer state that a rank writes, in 1e9 bytes: the two moments, and with bfloat16 weights
    DeepSpeed's float32 master weights."""
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


def first_perplexity(e: Evidence) -> float | None:
    """Return the perplexity before the first step."""
    evals = e.events("eval").get(0, [])
    return evals[0].get("perplexity") if evals else None


MEASURED: dict[str, Callable[[Evidence], float | None]] = {
    one.__name__: one
    for one in (
        global_batch,
        training_time,
        steps_per_s,
        samples_per_s,
        warm_samples_per_s,
        first_step,
        peak_gb,
        state_gb_a_rank,
        wall_time,
        padded_tokens_per_s_per_rank,
        first_perplexity,
    )
}
"""Functions of the figures that are computed, by the name in tests.yaml."""
