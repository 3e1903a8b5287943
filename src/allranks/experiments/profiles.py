"""Read the profiler traces of a comparison's ranks, and add their figures to the measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allranks.analysis.trace import read_traces
from allranks.analysis.trace.rank import RankResult, UnreadableTrace
from allranks.analysis.trace.records import PHASES, Breakdown

UNPHASED = PHASES.index("other")  # the loop's own small reduction is launched outside of training phases
Json = dict[str, Any]


def add_profiles(folder: Path, measured: Json) -> None:
    """Add ``window`` and the peak of memory to every rank's verified strategies, in place.

    A trace that cannot be read marks its strategy as failed on all ranks; the other strategies keep their figures.

    Args:
        folder: the folder ``compare`` of the run, with ``<strategy>/traces/rank<R>.json.gz``.
        measured: the content of measured.json.
    """
    traces = {
        (r, name): folder / name / "traces" / f"rank{r}.json.gz"
        for r, rank in enumerate(measured["ranks"])
        for name, known in rank.items()
        if known["verified"]
    }
    results = read_traces(list(traces.values()))
    for (r, name), path in traces.items():
        known, found = measured["ranks"][r][name], results[path]
        if isinstance(found, UnreadableTrace):
            known["verified"] = {}
            _fail(measured, name, f"rank {r}: {path}: {found.message}")
        else:
            _add_profile(known["verified"], found)


def _fail(measured: Json, name: str, reason: str) -> None:
    for rank in measured["ranks"]:
        rank[name]["failed"] = rank[name]["failed"] or reason


def _add_profile(verified: Json, found: RankResult) -> None:
    memory, before = verified["memory"], verified.pop("before_bytes")
    memory["peak_bytes"] = memory["peak_bytes"] or before + peak_new_bytes(found)
    verified["window"] = trace_figures(found)


def trace_figures(found: RankResult) -> Json:
    """Return the seconds per step as in `allranks trace`, and the collectives of training as (kind, bytes, seconds).

    The seconds are those of compute, communication (exposed and overlapped) and idle time; ``steps`` has them for each step.
    """
    n = max(len(found.steps), 1)
    training = [c for c in found.collectives if c.phase != UNPHASED]
    return {
        **_seconds(found.total, n),
        "steps": [_seconds(step, 1) for step in found.by_step],
        "collectives": [(c.kind, c.bytes or 0, c.duration / 1e6) for c in training],
    }


def _seconds(part: Breakdown, steps: int) -> Json:
    return {
        "step_s": part.span_s / steps,
        "compute_s": part.compute_s / steps,
        "comm_s": part.comm_s / steps,
        "overlapped_comm_s": part.overlapped_comm_s / steps,
        "exposed_comm_s": part.exposed_comm_s / steps,
        "idle_s": part.idle_s / steps,
    }


def peak_new_bytes(found: RankResult) -> int:
    """Return the maximum number of bytes that were allocated on the host during the trace and not yet freed."""
    return found.memory["cpu"][0] if "cpu" in found.memory else 0
