"""The merged trace: every event of every rank, on one clock, none mistaken for another rank's."""

import gzip
import json
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.output import PIDS_PER_RANK, write_merged
from allranks.errors import RequestError
from tests.tracegen import Scenario, generate
from tests.unit.trace_builder import mark, nccl, step, write

OURS = ("process_name", "process_sort_index")
OFFSETS = {0: 40, 3: -7000, 5: 5000, 7: 1_000_000}


def merge(folder: Path) -> dict[str, Any]:
    merged = folder.parent / "out" / "merged.json.gz"
    write_merged(analyse([folder], workers=1)[0], merged)
    return json.loads(gzip.decompress(merged.read_bytes()))


def by_rank(merged: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in merged["traceEvents"]:
        found[event["pid"] // PIDS_PER_RANK].append(event)
    return found


def theirs(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are the profiler's."""
    return [e for e in events if not (e["ph"] == "M" and e["name"] in OURS)]


def source(path: Path) -> list[dict[str, Any]]:
    return theirs(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("merge") / "traces"
    generate(Scenario(slow={(3, 1): 900}, offset_us=OFFSETS, memcpy=True, second_stream=True), folder)
    return folder, merge(folder)


def test_all_ranks_are_on_one_clock(eight: Any) -> None:
    """Every event of every rank is there, unchanged but for time, process and id."""
    folder, merged = eight
    found = by_rank(merged)
    assert sorted(found) == list(range(8))
    shifts, ours = set(), {"ts": 0, "pid": 0, "id": 0}
    for rank, events in found.items():
        for new, old in zip(theirs(events), source(folder / f"rank{rank}.json.gz"), strict=True):
            assert {**new, **ours} == {**old, **ours}
            if "ts" in old:
                shifts.add(round(new["ts"] - (old["ts"] - OFFSETS.get(rank, 0)), 3))
    assert len(shifts) == 1  # from the one true clock to the merged one, for every event of every rank
    assert min(e["ts"] for e in merged["traceEvents"] if "ts" in e) >= 0


def test_traces_with_other_beginnings_of_time_meet(tmp_path: Path) -> None:
    base, late = 1_700_000_000_000_000_000, 5_000
    for rank, shift in ((0, 0), (1, late)):
        events = [step(1, 6000 - shift, 9000 - shift), nccl("allreduce", 7000 - shift + rank, 7700 - shift, 0)]
        write(tmp_path / "t" / f"rank{rank}.json.gz", events, rank, 2, backend="nccl", base=base + shift * 1000)
    merged = merge(tmp_path / "t")
    ends = {round(e["ts"] + e["dur"], 3) for e in merged["traceEvents"] if e.get("cat") == "kernel"}
    assert len(ends) == 1
    wall = merged["baseTimeNanoseconds"] + ends.pop() * 1000
    assert wall == pytest.approx(base + 7_700_000, abs=1)  # and the wall clock is still right


def test_processes_and_arrows_of_ranks_are_distinct_and_named(eight: Any) -> None:
    folder, merged = eight
    pids, ids, names = defaultdict(set), defaultdict(set), {}
    for rank, events in by_rank(merged).items():
        pids[rank] = {e["pid"] for e in events if e["ph"] != "M"}
        ids[rank] = {e["id"] for e in events if "id" in e}
        before = source(folder / f"rank{rank}.json.gz")
        assert len(pids[rank]) == len({e["pid"] for e in before if e["ph"] != "M"}) > 1
        assert len(ids[rank]) == len({e["id"] for e in before if "id" in e})
        names |= {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for kind in (pids, ids):
        assert sum(map(len, kind.values())) == len(set().union(*kind.values()))
    assert set(names) == set().union(*pids.values())
    assert all(name.startswith(f"rank {pid // PIDS_PER_RANK}") for pid, name in names.items())
    assert names[3 * PIDS_PER_RANK] != names[3 * PIDS_PER_RANK + 1]  # the host's process and the device's


def test_the_profilers_own_processes_have_names_and_stand_last(tmp_path: Path) -> None:
    """Kineto calls them "Spans", "Traces" and ""; they have no metadata."""
    own = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0, "dur": 9}
    end = {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 9, "s": "g"}
    label = {"ph": "M", "name": "process_labels", "pid": 100, "tid": 0, "ts": 0, "args": {"labels": "CPU"}}
    write(tmp_path / "t" / "rank0.json", [own, end, label, step(1, 0, 10)], 0, 1)
    found = [e for e in merge(tmp_path / "t")["traceEvents"] if e["ph"] == "M"]
    order = {e["pid"]: e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index"}
    names = {order[e["pid"]]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert [names[place] for place in sorted(names)] == ["rank 0: CPU", "rank 0: Spans", "rank 0: profiler"]


def test_threads_beyond_32_bits_keep_apart(tmp_path: Path) -> None:
    """Perfetto reads a thread's number as 32 bits without a sign, and puts those that do not fit together."""
    threads = [-549452224, 139_872_345_678_912, 7, "a thread"]
    events = [mark(f"m{i}", i, i + 1, tid) for i, tid in enumerate(threads)]
    named = [{"ph": "M", "name": "thread_name", "pid": 100, "tid": tid, "args": {"name": str(tid)}} for tid in threads]
    write(tmp_path / "t" / "rank0.json", [step(1, 0, 10), *events, *named], 0, 1)
    merged = merge(tmp_path / "t")
    tids = [e["tid"] for e in merged["traceEvents"] if e["name"].startswith("m")]
    assert len(set(tids)) == 4 and all(isinstance(t, str) or 0 <= t < 1 << 32 for t in tids)
    names = {e["args"]["name"]: e["tid"] for e in merged["traceEvents"] if e["name"] == "thread_name"}
    assert [names[str(tid)] for tid in threads] == tids


def test_what_is_left_of_damaged_files_is_merged_to_valid_json(tmp_path: Path) -> None:
    good = [step(1, 0, 5000), *(mark(f"m{i}", i, i + 1) for i in range(500))]
    folder = tmp_path / "t"
    write(folder / "rank0.json", good, 0, 3)
    text = write(folder / "rank1.json", good, 1, 3).read_text()
    (folder / "rank1.json").write_text(text[: len(text) // 2])
    odd = write(folder / "rank2.json", good, 2, 3).read_text()
    bad = odd.replace('"name": "m7",', '"name": "m7", "odd": NaN,').replace('"name": "m8"', '"name": "\\ud800"')
    (folder / "rank2.json").write_text(bad)
    assert bad != odd
    merged = merge(folder)
    found = {rank: sum(e["ph"] == "X" for e in events) for rank, events in by_rank(merged).items()}
    assert found[0] == found[2] == 501 and 200 < found[1] < 300
    assert next(e for e in by_rank(merged)[2] if e["name"] == "m7")["odd"] is None


def test_a_file_that_changed_is_said_and_no_half_file_is_left(tmp_path: Path) -> None:
    generate(Scenario(world=3), tmp_path / "t")
    report = analyse([tmp_path / "t"], workers=1)[0]
    (tmp_path / "t" / "rank1.json.gz").write_bytes(b"")
    with pytest.raises(RequestError, match=r"rank1\.json\.gz has changed since it was analysed"):
        write_merged(report, tmp_path / "out" / "merged.json.gz")
    assert not list((tmp_path / "out").iterdir())


def test_memory_does_not_grow_with_ranks(tmp_path: Path) -> None:
    peaks = []
    for world in (2, 8):
        generate(Scenario(world=world), tmp_path / str(world))
        report = analyse([tmp_path / str(world)], workers=1)[0]
        tracemalloc.start()
        write_merged(report, tmp_path / f"{world}.json.gz")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
