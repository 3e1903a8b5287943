"""The schedule as a rank's profiler on a CPU over gloo shows it: operators on the caller's threads, collectives on gloo's own."""

from __future__ import annotations

from tests.tracegen.common import Event, fillers, marks, span, thread_name
from tests.tracegen.scenario import Scenario
from tests.tracegen.schedule import MAIN, Collective, Timeline
from tests.tracegen.shapes import SHAPES
from tests.tracegen.truth import has


def events(s: Scenario, timeline: Timeline, rank: int, pid: int) -> list[Event]:
    """All events of one rank, on the true clock. Gloo tells neither group nor number, and takes its two threads in turn."""
    made = [thread_name(pid, pid, f"thread {pid} (python)")]
    for i in (11, 12):
        made += [
            thread_name(pid, pid + i, f"thread {pid + i} (python)"),
            thread_name(pid, pid + i, f"thread {pid + i} (pt_gloo_runloop)"),
        ]
    number_of = 0
    for number, row in enumerate(timeline.steps):
        step = row[rank]
        made += marks(s, step, number, pid) + fillers(s, step, pid)
        for p in step.pieces:
            tid = pid if p.stream == MAIN else pid + 3
            told = {"External id": 1, "Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
            made.append(span("cpu_op", f"aten::{p.name}", pid, tid, p.start, p.end, **told))
            middle = (p.start + p.end) // 2
            made.append(span("cpu_op", "aten::mm", pid, tid, p.start + 2, middle, **told))  # nested: counts once
        for c in timeline.collectives:
            if c.step == number and has(s, rank, c):
                made += _collective(c, rank, pid, pid + 11 + number_of % 2, s.world)
                number_of += 1
    return made


def _collective(c: Collective, rank: int, pid: int, runloop: int, world: int) -> list[Event]:
    m, shape = c.members[rank], SHAPES[c.kind]
    whole, shard = [c.elements], [c.elements // world]
    if c.kind in ("all_gather", "reduce_scatter"):
        dims = [whole, shard] if shape.shard_in else [shard, whole]
        types = ["float", "float", "", "Scalar"]
    else:
        dims, types = [[whole]], ["TensorList", "", "", "Scalar"]
    given = [shard if shape.shard_in else whole]
    return [
        span(
            "cpu_op",
            shape.operator,
            pid,
            pid,
            m.launched,
            m.launched + 3,
            **{"Input Dims": [*dims, [], []], "Input type": types},
        ),
        span(
            "user_annotation",
            shape.gloo,
            pid,
            runloop,
            m.arrived,
            m.end,
            **{"Input Dims": given, "Input type": ["float"]},
        ),
    ]
