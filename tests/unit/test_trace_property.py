"""Any JSON value anywhere in a trace, and any bytes in its file: figures that add up or a plain refusal, never another
error."""

from __future__ import annotations

import copy
import gzip
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from allranks.analysis.trace import analyse
from allranks.analysis.trace.diff import compare_last
from allranks.analysis.trace.output import write_all
from allranks.analysis.trace.records import Breakdown
from allranks.analysis.trace.tables import comparison_blocks, report_blocks, text_lines
from allranks.cli.trace import as_document
from allranks.errors import AllranksError
from tests.sampling import examples
from tests.unit.trace_builder import document, kernel, launch, mark, nccl, op, span, step, thread

BOUNDED = settings(
    max_examples=examples(120),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
Path_ = tuple[Any, ...]


def events(rank: int) -> list[dict[str, Any]]:
    memory = {"Device Type": 1, "Device Id": 0, "Total Allocated": 4096, "Total Reserved": 8192}
    out: list[dict[str, Any]] = [thread(100, "main"), thread(111, "pt_gloo_runloop")]
    for number in (1, 2):
        at = 1000.0 * number
        out += [
            step(number, at, at + 900),
            mark("allranks.module:layer", at + 10, at + 200),
            op("aten::mm", at + 20, at + 60, in_dims=[[2, 3], [3, 4]], in_types=["float", "float"], sequence=number),
            launch(10 * number, at + 30),
            kernel("gemm<x>(int)", at + 70, at + 300, 10 * number),
            launch(10 * number + 1, at + 80),
            nccl("allreduce", at + 250 + 100 * rank, at + 600, number, 10 * number + 1),
            op("c10d::allreduce_", at + 610, at + 640, in_dims=[[[8]]], in_types=["TensorList"]),
            span("user_annotation", "gloo:all_reduce", at + 620, at + 700, 111, in_dims=[[8]], in_types=["float"]),
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "name": "[memory]",
                "pid": 100,
                "tid": 100,
                "ts": at + 50,
                "args": memory,
            },
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": number, "pid": 100, "tid": 100, "ts": at + 30},
        ]
    return out


GOOD = [document(events(rank), rank, 2, backend="nccl") for rank in (0, 1)]


def places(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Where a value stands in a document, each place once."""
    if at:
        yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*at, key))


PLACES = list(places(GOOD[0]))
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([10**30, -(10**30), 10**400, 2**63, -1, 0, 1e300, 5e-324, 1 << 20, 10**7]),
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        NUMBERS,
        st.text(max_size=8),
        st.sampled_from(["9" * 5000, "NaN", "\ud800", "1", "[[[["]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)


def put(made: Any, place: Path_, value: Any) -> None:
    """The value at a place; nothing where an earlier change took the place away."""
    for key in place[:-1]:
        try:
            made = made[key]
        except (KeyError, IndexError, TypeError):
            return
    if (isinstance(made, list) and isinstance(place[-1], int) and place[-1] < len(made)) or isinstance(made, dict):
        made[place[-1]] = value


def add_up(b: Breakdown) -> None:
    parts = b.compute_s + b.exposed_comm_s + b.copy_s + b.idle_s
    assert all(math.isfinite(getattr(b, name)) and getattr(b, name) >= 0 for name in b.__struct_fields__), b
    assert math.isclose(parts, b.span_s, rel_tol=1e-6, abs_tol=1e-9), b


def use(folder: Path) -> bool:
    """Everything that `allranks trace` does with a folder; False if it was refused."""
    try:
        reports = analyse([folder / "in"], select="all", workers=1)
    except AllranksError as error:
        assert str(error)
        return False
    comparison = compare_last(reports, reports)
    for report in reports:
        assert list(text_lines(report_blocks(report, 80), 80))
        for rank in report.ranks:
            for b in (rank.total, *(s.breakdown for s in rank.steps)):
                add_up(b)
    assert list(text_lines(comparison_blocks(comparison, 80), 80))
    json.dumps(as_document(reports, comparison), allow_nan=False)
    for path in write_all(reports, folder / "out", comparison):
        assert path.stat().st_size > 0
    return True


def tried(*texts: bytes) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        for rank, text in enumerate(texts):
            (folder / "in" / f"rank{rank}.json").write_bytes(text)
        return use(folder)


def changed(changes: list[tuple[Path_, Any]]) -> bytes:
    made = copy.deepcopy(GOOD[0])
    for place, value in changes:
        put(made, place, value)
    return json.dumps(made).encode()


WHOLE = [json.dumps(d).encode() for d in GOOD]


def test_the_trace_that_is_changed_is_good() -> None:
    assert tried(*WHOLE)


@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=4))
@example([(("distributedInfo", "world_size"), 10**30)])  # a list of all the missing ranks
@example([(("distributedInfo", "pg_config"), [{"pg_size": [1]}])])
@example([(("traceEvents", 8, "args", "In msg nelems"), 10**400)])
@example([(("traceEvents", 11, "args", "Total Allocated"), 10**400)])
@example([(("traceEvents", 2, "name"), "ProfilerStep#" + "9" * 5000)])
@BOUNDED
def test_any_value_anywhere(changes: list[tuple[Path_, Any]]) -> None:
    assert tried(changed(changes), WHOLE[1])  # the other rank is always there


@given(
    st.lists(st.tuples(st.integers(0, len(WHOLE[0]) - 1), st.binary(max_size=4)), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)
@BOUNDED
def test_any_bytes_anywhere(edits: list[tuple[int, bytes]], zipped: bool, cut: bool) -> None:
    text = gzip.compress(WHOLE[0], mtime=0) if zipped else WHOLE[0]
    for at, new in edits:
        place = at % len(text)
        text = text[:place] + new + text[place + len(new) :]
    tried(text[: edits[0][0] % len(text)] if cut else text)
