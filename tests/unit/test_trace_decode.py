"""Reading a piece at a time, and damage."""

from __future__ import annotations

import gzip
import json
import random
import signal
from collections.abc import Iterator
from itertools import accumulate, count, islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.trace import analyse, chrome_trace
from allranks.analysis.trace.chrome_trace import TraceStream, distributed_info
from allranks.errors import RequestError
from tests.conftest import shared
from tests.unit.trace_builder import document, kernel, op, step, write


def names_of(path: Path) -> list[str]:
    return [e.name for piece in TraceStream(path).pieces() for e in piece]


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
    path = write(tmp_path / name, events)
    stream = TraceStream(path)
    found = [e.name for piece in stream.pieces() for e in piece]
    assert found == [e["name"] for e in events]
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


def test_a_bare_list_of_events_and_several_gzip_members(tmp_path: Path) -> None:
    text = json.dumps(many(50)).encode()
    bare, parts = tmp_path / "bare.json", tmp_path / "parts.json.gz"
    bare.write_bytes(text)
    half = len(text) // 2
    parts.write_bytes(gzip.compress(text[:half]) + gzip.compress(text[half:]))
    assert names_of(bare) == names_of(parts) == [e["name"] for e in many(50)]


@pytest.fixture
def ten_seconds() -> Iterator[None]:
    """End the test, which a reader that never ends would not."""

    def late(*_: object) -> None:
        raise TimeoutError("the reader does not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("behind", [b"", b"\0" * 70_000, b"garbage", b"\x1f"])
@pytest.mark.parametrize("sizes", [(10, 70_000), (250_000, 1_000), (300_000, 0, 131_072), (0, 1, 0, 400_000)])
def test_gzip_members_of_any_sizes(tmp_path: Path, ten_seconds: None, sizes: tuple[int, ...], behind: bytes) -> None:
    """A member can end anywhere in the data that was read or unpacked at once, and need not have any."""
    rows = (b'{"ph": "X", "name": "aten::op%d"},\n' % i for i in count())
    text = (b'{"traceEvents": [' + b"".join(islice(rows, sum(sizes) // 30)))[: sum(sizes)]
    cuts = [0, *accumulate(sizes[:-1]), len(text)]
    members = [gzip.compress(text[a:b]) for a, b in pairwise(cuts)]
    path = tmp_path / "t.json.gz"
    path.write_bytes(b"".join(members) + behind)
    stream = TraceStream(path)
    assert b"".join(stream._chunks()) == text
    assert stream.damage is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b'{"rows": [1, 2]}',
        b"hello",
        b"\x1f\x8b\x08broken",
        b"[1, 2, 3]",
        b'{"traceEvents": 5}',
        b'{"traceEvents": []}',
    ],
)
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
    found = [e.name for piece in stream.pieces() for e in piece]
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


@pytest.mark.parametrize("name", ["a100_nccl_rank0_of_2.json.gz", "mi250_rocm.json.gz", "no_gpu_kernels.json.gz"])
def test_a_real_trace_cut_or_changed_anywhere_never_ends_in_a_traceback(tmp_path: Path, name: str) -> None:
    data = shared("traces", name).read_bytes()
    plain = gzip.decompress(data)
    rng = random.Random(name)
    outcomes = {"report": 0, "refused": 0}
    for i in range(16):
        source, target = (data, tmp_path / "x.json.gz") if i % 2 else (plain, tmp_path / "x.json")
        at = rng.randrange(len(source))
        hurt = source[:at] if i % 4 < 2 else source[:at] + bytes([rng.randrange(256)]) + source[at + 1 :]
        target.write_bytes(hurt)
        try:
            (report,) = analyse([target])
        except RequestError:
            outcomes["refused"] += 1
            continue
        outcomes["report"] += 1
        b = report.ranks[0].total
        assert b.compute_s + b.exposed_comm_s + b.copy_s + b.idle_s == pytest.approx(b.span_s)
    assert outcomes["report"] > outcomes["refused"]


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
