"""Events that every trace has."""

from __future__ import annotations

from typing import Any

from tests.tracegen.scenario import Scenario
from tests.tracegen.schedule import StepOf

Event = dict[str, Any]


def span(cat: str, name: str, pid: Any, tid: Any, start: int, end: int, **args: Any) -> Event:
    """A complete event."""
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}


def thread_name(pid: Any, tid: Any, name: str) -> Event:
    return {"name": "thread_name", "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def marks(s: Scenario, step: StepOf, number: int, pid: int) -> list[Event]:
    """The step and its parts, on the main thread."""
    made = []
    if s.step_marks:
        made.append(span("user_annotation", f"ProfilerStep#{number + 1}", pid, pid, step.start, step.end))
    if s.part_marks:
        made += [span("user_annotation", f"allranks.{name}", pid, pid, a, b) for name, (a, b) in step.parts.items()]
    return made


def fillers(s: Scenario, step: StepOf, pid: int) -> list[Event]:
    """Small operators on a thread of their own, for size alone: no time of the device."""
    each = max((step.end - step.start) // max(s.filler_ops, 1), 2)
    told = {"Input Dims": [[8, 8], [], []], "Input type": ["float", "ScalarList", "ScalarList"]}
    at = [(i, step.start + i * each) for i in range(s.filler_ops)]
    return [
        span("cpu_op", f"aten::as_strided_{i % 40}", pid, pid + 7, t, t + each - 1, **{"External id": i}, **told)
        for i, t in at
    ]
