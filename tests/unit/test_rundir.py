"""Runs are never overwritten, are found by name, and files are written whole."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from allranks.errors import EnvironmentNotAble, RunFailed, RunNotFound
from allranks.rundir.events import FILES_PER_POLL, EventLog, EventTail, read_events
from allranks.rundir.files import read_json, write_json
from allranks.rundir.paths import RunDir, create_run, find_run
from allranks.utils import inputs


def test_second_run_of_the_same_name_and_second_gets_its_own_folder(tmp_path: Path) -> None:
    a, b = (create_run(tmp_path, "x", now=1e9) for _ in range(2))
    (tmp_path / f"{a.name}-3").write_text("a file is in the way, too")
    c = create_run(tmp_path, "x", now=1e9)
    assert [run.name for run in (b, c)] == [f"{a.name}-2", f"{a.name}-4"]
    assert all(run.logs.is_dir() for run in (a, b, c))


def test_unwritable_root_is_the_environments_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentNotAble, match="run_root"):
        create_run(tmp_path / "file" / "runs", "x")


def test_finding_runs(tmp_path: Path) -> None:
    for name in ("alpha-1", "alpha-2", "beta-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.yaml").write_text("{}")
    assert find_run("beta", tmp_path).name == "beta-1"
    assert find_run(str(tmp_path / "alpha-1")).name == "alpha-1"
    assert find_run("latest", tmp_path).root.exists()
    with pytest.raises(RunNotFound, match="alpha-1, alpha-2"):
        find_run("alpha", tmp_path)
    with pytest.raises(RunNotFound, match="did you mean beta-1"):
        find_run("betta-1", tmp_path)
    (tmp_path / "alpha-10").mkdir()
    (tmp_path / "alpha-10" / "spec.yaml").write_text("{}")
    assert find_run("alpha-1", tmp_path).name == "alpha-1", "a whole name counts before a beginning"
    with pytest.raises(RunNotFound):
        find_run("x" * 300, tmp_path)  # longer than a file's name can be


def test_what_could_not_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match=r"x\.json"):
        write_json(tmp_path / "x.json", {})
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_events_survive_a_line_cut_by_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    log = EventLog(path, 0)
    log.write("step", step=1, loss=float("nan"))
    log.close()
    with path.open("ab") as file:
        file.write(b'{"event":"step","ste')
    again = EventLog(path, 0)
    again.write("step", step=2)
    again.close()
    assert [(e["step"], e.get("loss")) for e in read_events(path)] == [(1, None), (2, None)]


def test_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log = EventLog(run.events_of(0), 0)
    tail = EventTail(run, 1)
    log.write("step", step=1)
    with run.events_of(0).open("ab") as file:
        file.write(b'{"event":')
    assert [e["step"] for e in tail.new()] == [1]
    with run.events_of(0).open("ab") as file:
        file.write(b'"step","time":1,"step":2}\n')
    assert [e["step"] for e in tail.new()] == [2]
    assert tail.new() == []


def test_tail_gives_the_ranks_lines_in_order_of_time_and_can_begin_at_the_end(tmp_path: Path) -> None:
    run, written = RunDir(tmp_path), {0: (3.0, 1.0), 1: (2.0,)}
    run.events.mkdir()
    for rank, times in written.items():
        run.events_of(rank).write_text("".join([f'{{"event": "step", "time": {time}}}\n' for time in times]))
    assert [e["time"] for e in EventTail(run, 2).new()] == [1.0, 2.0, 3.0]
    tail = EventTail(run, 2)
    tail.skip_existing()
    with run.events_of(1).open("a") as file:
        file.write('{"event": "step", "time": 9.0}\n')
    assert [e["time"] for e in tail.new()] == [9.0]


def test_a_look_at_the_events_of_many_ranks_opens_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is in every look, every other rank gets its turn, and the end of the run misses nothing."""
    run, world_size = RunDir(tmp_path), 1000
    run.events.mkdir()
    for rank in range(world_size):
        run.events_of(rank).write_text(f'{{"event": "step", "time": {rank}.0, "rank": {rank}}}\n')
    opened: list[int] = []
    usual = inputs.open_regular

    def counting(path: Path) -> BinaryIO:
        opened.append(int(path.stem.removeprefix("rank")))
        return usual(path)

    monkeypatch.setattr(inputs, "open_regular", counting)
    tail, seen = EventTail(run, world_size), set()
    looks = -(-(world_size - 1) // (FILES_PER_POLL - 1))  # as few as there can be
    for look in range(looks):
        opened.clear()
        fresh = [e["rank"] for e in tail.new()]
        assert len(opened) == len(set(opened)) <= FILES_PER_POLL
        assert 0 in opened
        assert (0 in fresh) == (look == 0)
        seen |= set(fresh)
    assert seen == set(range(world_size))
    with run.events_of(737).open("a") as file:
        file.write('{"event": "end", "time": 2000.0, "rank": 737}\n')
    assert [(e["event"], e["rank"]) for e in tail.rest()] == [("end", 737)]
    assert tail.rest() == []


def test_a_disk_that_takes_half_a_line_costs_that_line_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, plain = EventLog(tmp_path / "rank0.jsonl", 0), os.write
    log.write("first")
    room = [10]

    def full(fd: int, data: bytes) -> int:
        if not room:
            raise OSError(28, "No space left on device")
        return plain(fd, data[: room.pop()])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunFailed, match="No space left on device"):
        log.write("second")
    monkeypatch.setattr(os, "write", plain)
    log.write("third")
    log.close()
    assert [e["event"] for e in read_events(tmp_path / "rank0.jsonl")] == ["first", "third"]


def test_the_end_of_a_log_of_events_does_not_hide_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="the first"), EventLog(tmp_path / "a.jsonl", 0):
        raise ValueError("the first")
    with pytest.raises(RunFailed, match="No space left on device"), EventLog(tmp_path / "b.jsonl", 0) as log:
        log.write("x")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(log._fd)  # closed all the same
    with pytest.raises(RunFailed, match="cannot be written"):
        EventLog(tmp_path / "a.jsonl" / "none" / "b.jsonl", 0)


def test_agents_of_one_host_keep_their_records_apart(tmp_path: Path) -> None:
    """Three processes write the record of their node at the same moment, each of them several times."""
    program = (
        "import sys, time; from pathlib import Path; from allranks.rundir.files import write_node_json\n"
        "node, start = int(sys.argv[1]), float(sys.argv[3])\n"
        "time.sleep(max(0, start - time.time()))\n"
        "for turn in range(3): write_node_json(Path(sys.argv[2]), node, {'node': node, 'turn': turn})\n"
    )
    path, start = tmp_path / "n1.cluster.exit.json", str(time.time() + 1.0)
    made = [subprocess.Popen([sys.executable, "-c", program, str(node), str(path), start]) for node in range(3)]
    assert [process.wait(60) for process in made] == [0] * 3
    records = [read_json(file) for file in tmp_path.glob("*.exit.json")]
    assert sorted(record["node"] for record in records) == list(range(3))
    assert {record["turn"] for record in records} == {2}
    assert path.exists() and len(list(tmp_path.iterdir())) == 3
    first = read_json(path)["node"]
    assert all((tmp_path / f"n1.cluster.node{node}.exit.json").exists() for node in range(3) if node != first)
