"""Define and measure the figures of the smoke tests. Pure.

A figure is shown next to that of the field notes, with the same definition; if they are not comparable, the reason is given.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from allranks.lab.smoke.records import ComparableBy, Evidence, Figure, FigureRow, SmokeTest


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


_ALL: tuple[ComparableBy, ...] = ("hardware", "size", "ranks")
FIGURES: dict[str, tuple[str, str, Callable[[Evidence], float | None], tuple[ComparableBy, ...]]] = {
    "parameters": ("", "all weights and biases", parameters, ("size",)),
    "global batch": ("rows", "rows of a step over all ranks", global_batch, ("ranks",)),
    "training time": ("s", "all steps, including the first", training_time, _ALL),
    "steps": ("1/s", "steps by training time", steps_per_s, _ALL),
    "samples": ("1/s", "batch rows over all ranks, by training time", samples_per_s, _ALL),
    "samples after warm-up": (
        "1/s",
        "batch rows over all ranks, by the median step after five",
        warm_samples_per_s,
        _ALL,
    ),
    "first step beyond the median": ("s", "compilation, first allocations and connections", first_step, _ALL),
    "engine start-up": (
        "s",
        "DeepSpeed's initialisation including operator builds; in the notes only the compilation",
        engine_start,
        ("hardware",),
    ),
    "optimizer state per rank": (
        "GB",
        "master weights and two moments in float32, 12 bytes x parameters / ranks",
        state_gb_a_rank,
        ("size", "ranks"),
    ),
    "last loss": ("", "mean squared error of step 100", last_loss, ("size", "ranks")),
    "peak GPU memory": ("GB", "most that torch had allocated on a rank", peak_gb, _ALL),
    "wall time": ("s", "training of 10 steps, without starting the ranks", wall_time, _ALL),
    "tokens per rank, with padding": (
        "1/s",
        "steps x rows x max_length by wall time: padding and warm-up count",
        padded_tokens_per_s_per_rank,
        _ALL,
    ),
    "tokens, all ranks": ("1/s", "without padding, after warm-up", real_tokens_per_s, _ALL),
    "evaluation": ("s", "200 rows in the notes, 40 here", eval_seconds, _ALL),
    "checkpoint": ("s", "time without training", save_seconds, _ALL),
    "perplexity before training": (
        "",
        "weighted by tokens; in the notes of a trained model",
        first_perplexity,
        ("size",),
    ),
    "epoch": ("s", "every row once, without evaluation", epoch_seconds, ("hardware",)),
}
"""Unit, definition, measurement and dependence of each figure that tests.yaml names."""


def figure_of(entry: dict[str, Any]) -> Figure:
    """Return the figure of an entry of tests.yaml."""
    unit, definition, measure, depends = FIGURES[entry["name"]]
    return Figure(
        **{"unit": unit, "definition": definition, "measure": measure, "depends": depends, "seed": None, **entry}
    )
