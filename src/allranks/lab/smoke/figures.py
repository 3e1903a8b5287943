"""Measure the figures of the smoke tests by the definitions of the field notes, so that both can be compared. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from allranks.lab.smoke.records import Evidence, FigureRow, SmokeTest

Measure = Callable[[Evidence], float | None]


class Definition(NamedTuple):
    """How a figure is measured. ``depends`` says what must match to compare it: hardware (GPU), size (model), ranks."""

    measure: Measure
    unit: str
    text: str
    depends: str = "hardware size ranks"


def figure_rows(test: SmokeTest, e: Evidence) -> list[FigureRow]:
    """Return all figures of a test; in tests.yaml each has the value of the notes, and what corrects it."""
    rows = []
    for name, value in test.figures.items():
        known, notes = FIGURES[name], value if isinstance(value, dict) else {"seed": value}
        why = _why_not(known.depends, test, e) if notes["seed"] is not None else "the notes give no value"
        measured = known.measure(e)
        row = FigureRow(name=name, unit=known.unit, definition=known.text, ours=measured, not_comparable=why, **notes)
        rows.append(row)
    return rows


def _why_not(depends: str, test: SmokeTest, e: Evidence) -> str:
    reasons = []
    if "hardware" in depends and e.plan.device != "cuda":
        reasons.append("different hardware")
    if "size" in depends and test.parameters not in (None, _last("model", "parameters")(e)):
        reasons.append("different model size")
    if "ranks" in depends and len(e.ranks) != test.nodes * test.ranks:
        reasons.append(f"{len(e.ranks)} ranks instead of {test.nodes * test.ranks}")
    return "; ".join(reasons)


def _last(kind: str, key: str) -> Measure:
    """Return the measure of a value of the last event of a kind of rank 0."""
    return lambda e: e.last(kind).get(0, {}).get(key)


def _batch(e: Evidence) -> int:
    return e.plan.batch.global_batch_size if e.plan.batch else 0


def _training_s(e: Evidence) -> float | None:
    return sum(e.step_times_s) or None


def _steps_per_s(e: Evidence) -> float | None:
    seconds = _training_s(e)
    return len(e.step_times_s) / seconds if seconds else None


def _samples_per_s(e: Evidence) -> float | None:
    return (_steps_per_s(e) or 0) * _batch(e) or None


def _peak_gb(e: Evidence) -> float | None:
    """Return torch's peak on a rank's GPU; None on a CPU, whose peak includes libraries."""
    peaks = [s["peak_memory_bytes"] for steps in e.events("step").values() for s in steps]
    return max(peaks, default=0) / 1e9 or None if e.plan.device == "cuda" else None


def state_gb_a_rank(e: Evidence) -> float | None:
    """Return a rank's saved optimizer state in 1e9 bytes: moments; for bfloat16, DeepSpeed's float32 master weights."""
    elements = [end["state_elements"] for end in e.last("end").values()]
    return max(elements) * (12 if e.plan.param_dtype == "bfloat16" else 8) / 1e9 if elements else None


def _wall_s(e: Evidence) -> float | None:
    """Return the seconds from the built model to the end of the run, without the start of the ranks."""
    phases = e.events("phase").get(0, [])
    begun = [p["time"] for p in phases if p["name"] == "train"]
    ended = [p["time"] for p in phases if p["name"] in ("save", "evaluate", "done")]
    return ended[0] - begun[0] if begun and ended else None


def _padded_tokens_per_s(e: Evidence) -> float | None:
    seconds, length = _wall_s(e), e.spec.data.max_length if e.spec.data else 0
    return len(e.step_times_s) * _batch(e) / len(e.ranks) * length / seconds if seconds else None


def _first_perplexity(e: Evidence) -> float | None:
    return e.events("eval").get(0, [{}])[0].get("perplexity")


FIGURES = {
    "parameters": Definition(_last("model", "parameters"), "", "all weights and biases", "size"),
    "global batch": Definition(lambda e: _batch(e) or None, "rows", "rows of a step over all ranks", "ranks"),
    "training time": Definition(_training_s, "s", "all steps, including the first"),
    "steps": Definition(_steps_per_s, "1/s", "steps by training time"),
    "samples": Definition(_samples_per_s, "1/s", "batch rows over all ranks, by training time"),
    "engine start-up": Definition(
        _last("engine", "initialize_s"),
        "s",
        "DeepSpeed's initialisation including operator builds; in the notes only the compilation",
        "hardware",
    ),
    "optimizer state per rank": Definition(
        state_gb_a_rank, "GB", "master weights and two moments in float32, 12 bytes x parameters / ranks", "size ranks"
    ),
    "last loss": Definition(_last("step", "loss"), "", "mean squared error of step 100", "size ranks"),
    "peak GPU memory": Definition(_peak_gb, "GB", "most that torch had allocated on a rank"),
    "wall time": Definition(_wall_s, "s", "training of 10 steps, without starting the ranks"),
    "tokens per rank, with padding": Definition(
        _padded_tokens_per_s, "1/s", "steps x rows x max_length by wall time: padding and warm-up count"
    ),
    "evaluation": Definition(_last("eval", "seconds"), "s", "200 rows in the notes, 40 here"),
    "checkpoint": Definition(_last("checkpoint", "seconds"), "s", "time without training"),
    "perplexity before training": Definition(
        _first_perplexity, "", "weighted by tokens; in the notes of a trained model", "size"
    ),
    "epoch": Definition(lambda e: e.metrics.get("epoch_s"), "s", "every row once, without evaluation", "hardware"),
}
