"""Reading a piece at a time, and damage: figures that add up or a plain refusal, never another error."""

import copy
import gzip
import json
import math
import tempfile
from collections.abc import Iterator
from itertools import accumulate, count, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from allranks.analysis.trace import analyse, chrome_trace
from allranks.analysis.trace.chrome_trace import TraceStream, distributed_info
from allranks.analysis.trace.diff import compare_last
from allranks.analysis.trace.output import write_all
from allranks.analysis.trace.records import Breakdown
from allranks.analysis.trace.tables import comparison_blocks, report_blocks, text_lines
from allranks.cli.trace import as_document
from allranks.errors import AllranksError, RequestError
from tests.sampling import examples
from tests.unit.trace_builder import document, kernel, launch, mark, memory, nccl, op, span, step, thread, write


def names_of(stream: TraceStream) -> list[str]:
    return [e.name for piece in stream.pieces() for e in piece]


def many(n: int) -> list[dict[str, Any]]:
    return [step(1, 0, n * 10), *(op(f"aten::op{i}", i * 10, i * 10 + 5) for i in range(n))]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a piece ends within nearly every event."""
    monkeypatch.setattr(chrome_trace, "PIECE_BYTES", 1500)
    monkeypatch.setattr(chrome_trace, "CHUNK_BYTES", 211)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_pieces_end_between_events_whatever_stands_in_them(tmp_path: Path, small_pieces: None, name: str) -> None:
    events = many(200)
    for i, e in enumerate(events[1:]):
        e["args"] = [
            {"Call stack": 'a "quoted" }, { b'},
            {"list": [{"a": 1}, {"b": {"c": 2}}, {}]},
            {"text": "\\\\ \u00e4\u2603 }\n,\n{ ]}"},
        ][i % 3]  # fmt: skip
    stream = TraceStream(write(tmp_path / name, events))
    assert names_of(stream) == [e["name"] for e in events]
    assert (stream.damage, stream.skipped) == (None, 0)
    assert stream.head.base_ns == 1_700_000_000_000_000_000


def test_what_stands_behind_the_events_is_read(tmp_path: Path, small_pieces: None) -> None:
    told = document(many(100), rank=3, world=4)
    events = told.pop("traceEvents")
    late = {"traceEvents": events, **told}
    path = tmp_path / "t.json"
    path.write_text(json.dumps(late, indent=1))
    stream = TraceStream(path)
    assert sum(len(p) for p in stream.pieces()) == len(events)
    assert distributed_info(stream.head)["rank"] == 3


def test_a_bare_list_of_events(tmp_path: Path) -> None:
    (tmp_path / "bare.json").write_text(json.dumps(many(50)))
    assert names_of(TraceStream(tmp_path / "bare.json")) == [e["name"] for e in many(50)]


@pytest.mark.timeout(30)  # a reader that is wrong would not end
@pytest.mark.parametrize("behind", [b"", b"\0" * 70_000, b"garbage", b"\x1f"])
@pytest.mark.parametrize("sizes", [(10, 70_000), (250_000, 1_000), (300_000, 0, 131_072), (0, 1, 0, 400_000)])
def test_gzip_members_of_any_sizes(tmp_path: Path, sizes: tuple[int, ...], behind: bytes) -> None:
    """A member can end anywhere in the data that was read or unpacked at once, and need not have any."""
    rows = (b'{"ph": "X", "name": "aten::op%d"},\n' % i for i in count())
    text = (b'{"traceEvents": [' + b"".join(islice(rows, sum(sizes) // 30)))[: sum(sizes)]
    members = [gzip.compress(text[a:b]) for a, b in pairwise([0, *accumulate(sizes[:-1]), len(text)])]
    path = tmp_path / "t.json.gz"
    path.write_bytes(b"".join(members) + behind)
    stream = TraceStream(path)
    assert b"".join(stream._chunks()) == text
    assert stream.damage is None


BROKEN = [b"hello", b"\x1f\x8b\x08broken", b"[1, 2, 3]", b'{"traceEvents": 5}', b'{"traceEvents": []}']


@pytest.mark.parametrize("text", [b"", b"{}", b'{"rows": [1, 2]}', *BROKEN])
def test_what_is_no_trace_is_a_request_that_is_wrong(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(RequestError, match=r"x\.json"):
        analyse([path])


def test_an_event_that_cannot_be_understood_costs_itself_only(tmp_path: Path) -> None:
    events = many(20)
    events[4]["ts"] = "soon"
    events[7]["args"] = {"Total Allocated": "x"}
    text = json.dumps(document(events)).replace('"aten::op9"', '"aten::op9')  # a quote is missing
    path = tmp_path / "t.json"
    path.write_text(text.replace('"dur": 5', '"dur": NaN', 1))
    stream = TraceStream(path)
    found = names_of(stream)
    lost = {"aten::op3", "aten::op9", "aten::op0"}
    assert {e["name"] for e in events} - set(found) == lost
    assert stream.skipped == len(lost) + 1  # op6 is there without its arguments
    (report,) = analyse([path])
    assert any(p.kind == "damaged_events" for p in report.problems)
    assert not report.ranks[0].whole


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_what_lies_before_a_cut_is_kept(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, many(3000))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    (report,) = analyse([path])
    assert 1500 < report.ranks[0].n_events < 2500
    assert [p.kind for p in report.problems if p.severity == "warning"] == ["truncated"]


@pytest.mark.parametrize("behind", [b"garbage", b"\n{}", None])
def test_a_second_document_in_the_file_is_told(tmp_path: Path, behind: bytes | None) -> None:
    """Two ranks that wrote to one file, for example. The first is read."""
    path = write(tmp_path / "rank0.json", many(5))
    path.write_bytes(path.read_bytes() + (path.read_bytes() if behind is None else behind))
    (report,) = analyse([path])
    assert not report.ranks[0].whole and report.ranks[0].n_events == 6
    assert any(p.kind == "truncated" and "after the events" in p.message for p in report.problems)


def test_events_without_a_time_that_can_be_are_left_out_and_counted(tmp_path: Path) -> None:
    """Taken for 0 or for the year 3000 they would stretch steps and sums."""
    good = [step(1, 1000, 2000), *(kernel("gemm", 1000 + 10 * i, 1005 + 10 * i, i) for i in range(10))]
    odd = [{**kernel("gemm", 1500, 1505), "ts": ts} for ts in (1e300, -1e300, 10**40)]
    odd.append({k: v for k, v in kernel("gemm", 1500, 1505).items() if k != "ts"})
    no_time = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "x"}}  # needs none
    plain = analyse([write(tmp_path / "a" / "rank0.json", [*good, no_time])])[0]
    assert plain.ranks[0].whole
    report = analyse([write(tmp_path / "b" / "rank0.json", [*good, *odd, no_time])])[0]
    assert report.ranks[0].total == plain.ranks[0].total
    (told,) = [p for p in report.problems if p.kind == "damaged_events"]
    assert "4 events" in told.message


def test_deep_nesting_before_the_events_is_no_traceback(tmp_path: Path) -> None:
    text = json.dumps(document(many(5))["traceEvents"]).encode()
    (tmp_path / "rank0.json").write_bytes(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"traceEvents":' + text + b"}")
    assert analyse([tmp_path])[0].ranks[0].n_events == 6


# any JSON value anywhere in a trace, and any bytes in its file

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
BOUNDED = settings(max_examples=examples(120), deadline=None, derandomize=True, suppress_health_check=SLOW)
Path_ = tuple[Any, ...]


def events(rank: int) -> list[dict[str, Any]]:
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
            memory(at + 50, 4096),
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": number, "pid": 100, "tid": 100, "ts": at + 30},
        ]
    return out


GOOD = [document(events(rank), rank, 2, backend="nccl") for rank in (0, 1)]


def places(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    if at:
        yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*at, key))


PLACES = list(places(GOOD[0]))
HUGE = st.sampled_from([10**30, -(10**30), 10**400, 2**63, -1, 0, 1e300, 5e-324, 1 << 20, 10**7])
TEXTS = st.text(max_size=8) | st.sampled_from(["9" * 5000, "NaN", "\ud800", "1", "[[[["])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | HUGE | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
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


EDIT = st.tuples(st.integers(0, len(WHOLE[0]) - 1), st.binary(max_size=4))


@given(st.lists(EDIT, min_size=1, max_size=5), st.booleans(), st.booleans())
@BOUNDED
def test_any_bytes_anywhere(edits: list[tuple[int, bytes]], zipped: bool, cut: bool) -> None:
    text = gzip.compress(WHOLE[0], mtime=0) if zipped else WHOLE[0]
    for at, new in edits:
        place = at % len(text)
        text = text[:place] + new + text[place + len(new) :]
    tried(text[: edits[0][0] % len(text)] if cut else text)
