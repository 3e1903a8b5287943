"""What counts as silence, what follows an alarm on each node, and what is recorded of a rank. No ranks: pages and
clocks are set by hand."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from allranks.analysis.stacks import blocking_location
from allranks.launch.channel_protocol import Orders
from allranks.launch.monitor import evidence as collect
from allranks.launch.monitor import hang_watch, procfs
from allranks.launch.monitor.evidence import EvidenceCollector, save_evidence
from allranks.launch.monitor.hang_watch import HangMonitor, ScriptSilence, WatchedNode
from allranks.launch.monitor.records import HangAlarm, NodeEvidence, RankEvidence, StackFrame
from allranks.planning.records import Limits
from allranks.rundir.files import read_json
from allranks.rundir.heartbeat import Heartbeat, HeartbeatPage, HeartbeatWriter, page_paths
from allranks.rundir.paths import RunDir
from allranks.train import rank_hooks
from tests.unit.hang_driver import DeafChannel, InProcessDriver

WAITS = [StackFrame(file="/v/torch/distributed/distributed_c10d.py", line=9, function="all_reduce")]
READS = [StackFrame(file="/home/u/rows.py", line=12, function="read")]


class Looker:
    """In a collector's place."""

    def __init__(self, evidence: NodeEvidence | None = None) -> None:
        self._evidence = evidence

    def node(self, pages: Any, beats: Any) -> NodeEvidence:
        if self._evidence is None:
            raise OSError(28, "No space left on device")
        return self._evidence


def watch_of(
    folder: Path,
    ranks: int = 1,
    *,
    node: int = 0,
    collector: Any = None,
    channel: Any = None,
    raised: list[HangAlarm] | None = None,
    ended: list[int] | None = None,
    limits: Limits = Limits(step_s=10.0, long_s=50.0),  # noqa: B008 - frozen
    device: str = "cpu",
    script: ScriptSilence | None = None,
) -> HangMonitor:
    run = RunDir(folder)
    for place in (run.events, run.logs_of(1)):
        place.mkdir(parents=True, exist_ok=True)
    channel = channel if channel is not None else DeafChannel()
    alarms, told = raised if raised is not None else [], ended if ended is not None else []
    raise_alarm = channel.raise_alarm(node) if isinstance(channel, InProcessDriver) else alarms.append
    pages = {r: HeartbeatPage() for r in range(node * ranks, (node + 1) * ranks)}
    return HangMonitor(
        WatchedNode(run, 1, node, f"n{node}", f"n{node}", pages),
        limits,
        collector if collector is not None else cast(EvidenceCollector, Looker()),
        channel,
        raise_alarm=raise_alarm,
        end=lambda: told.append(node),
        device=device,
        script=script,
    )


def pulse_of(watched: HangMonitor, rank: int = 0, phase: str = "train") -> HeartbeatWriter:
    """Of a rank that has begun its second step."""
    pulse = HeartbeatWriter()
    pulse.open(page_paths([watched._on.pages[rank]]).partition(":")[0])
    for step in (0, 1):
        pulse.step(step)
    pulse.phase(phase)
    return pulse


def alarm_at(watched: HangMonitor, later_s: float) -> HangAlarm | None:
    return watched.silence(time.monotonic() + later_s)


def test_the_rank_that_is_silent_raises_the_alarm_with_its_place(tmp_path: Path) -> None:
    raised: list[HangAlarm] = []
    watched = watch_of(tmp_path, 2, raised=raised)
    pulse_of(watched)
    pulse_of(watched, 1).part("forward")
    watched._floor -= 100.0
    assert alarm_at(watched, 5.0) is None
    alarm = alarm_at(watched, 20.0)
    assert alarm is not None
    assert (alarm.rank, alarm.host, alarm.phase, alarm.step, alarm.limit_s) == (0, "n0", "train", 1, 10.0)
    assert 20.0 <= alarm.time - alarm.since < 40.0  # the 20 s of this test's clock, and what it took
    assert raised == [alarm]


def test_ranks_that_are_done_and_those_that_wait_for_one_that_died_raise_none(tmp_path: Path) -> None:
    watched = watch_of(tmp_path, 2)
    pulse_of(watched, 0, "done")
    dead = pulse_of(watched, 1)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead._pid = gone.pid
    dead.beat()
    assert alarm_at(watched, 99.0) is None
    dead._pid = os.getpid()
    dead.beat()
    alarm = alarm_at(watched, 99.0)
    assert alarm is not None
    assert alarm.rank == 1
    alone = watch_of(tmp_path / "alone")
    pulse_of(alone, 0, "done")
    assert [alarm_at(alone, later_s) for later_s in (99.0, 199.0)] == [None, None]


def test_a_users_own_program_raises_its_alarm_once_and_withdraws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "work_of", lambda pid: procfs.ProcessWork())
    raised: list[HangAlarm | None] = []
    watched = watch_of(tmp_path, 2, raised=cast(list[HangAlarm], raised))
    script = ScriptSilence(Limits(step_s=10.0, long_s=40.0), "cpu")
    pulses = [pulse_of(watched, rank, phase="script") for rank in (0, 1)]
    for pulse, stack in zip(
        pulses, (["/v/torch/distributed/distributed_c10d.py:barrier"], ["/home/u/rows.py:read"]), strict=True
    ):
        pulse.alive({"default_pg": 1}, stack)
    watched._floor -= 100.0
    for later_s in (0.0, 3.0, 14.0, 15.0):
        watched.suspect(script, time.monotonic() + later_s)
    (alarm,) = raised
    assert alarm is not None
    assert (alarm.rank, alarm.phase, alarm.whole_job, alarm.stuck, alarm.waiting) == (1, "script", True, True, True)
    RunDir(tmp_path).log_of(1, "n0", 0).write_text("a line\n")  # of the other rank
    watched.suspect(script, time.monotonic() + 16.0)
    assert raised == [alarm, None]
    pulses[1].beat()  # a call of allranks.report
    watched.suspect(script, time.monotonic() + 17.0)
    watched.suspect(script, time.monotonic() + 26.5)  # at work on this clock: it began anew
    assert raised == [alarm, None]


ON_GPU = {
    # what the rank does, in which phase: whether it counts as silent
    "waits for the GPU": ("build", True),
    "waits in the first step": ("first step", True),
    "tokenizes": ("prepare", False),
    "compiles in a child": ("first step", False),
    "calls collectives": ("build", False),
    "writes lines": ("evaluate", False),
    "reads": ("save", False),
}


@pytest.mark.parametrize("does", ON_GPU)
def test_on_gpus_a_core_that_waits_for_the_gpu_is_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    phase, silent = ON_GPU[does]
    own, children, io = 0.0, 0.0, 0
    monkeypatch.setattr(procfs, "work_of", lambda pid: procfs.ProcessWork(own, children, io))
    watched = watch_of(tmp_path, device="cuda")
    pulse = pulse_of(watched, phase=phase)
    log = RunDir(tmp_path).log_of(1, "n0", 0)
    now = time.monotonic()
    alarms = []
    for later in range(0, 120, 10):
        own += 10.0  # a whole core, always
        children += 9.0 * (does == "compiles in a child")
        io += (1 << 20) * (does == "reads")
        pulse.alive({"default_pg": later if does == "calls collectives" else 1})
        if does == "writes lines":
            log.write_text("x" * (later + 1))
        alarms.append(watched.silence(now + later))
    assert any(alarms) is silent


@pytest.mark.parametrize("by", ["computing", "reading", "nothing"])
def test_in_long_phases_a_process_that_works_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    done = [0.0, 0]
    monkeypatch.setattr(procfs, "work_of", lambda pid: procfs.ProcessWork(done[0], 0.0, done[1]))
    watched = watch_of(tmp_path)
    pulse_of(watched, phase="prepare")
    now = time.monotonic()
    alarms = []
    for later in range(0, 120, 10):
        alarms.append(watched.silence(now + later))
        if by == "computing":
            done[0] += 0.05 * 10
        elif by == "reading":
            done[1] += 1 << 20
        else:
            done[0], done[1] = done[0] + 0.01 * 10, done[1] + 1000
    assert any(alarms) == (by == "nothing")


def evidence(node: int, **more: Any) -> NodeEvidence:
    usual = {"pid": 7, "state": "S sleeping", "phase": "train", "step": 3, "stack": WAITS, **more}
    return NodeEvidence(node=node, host=f"n{node}", time=1.0, ranks=[RankEvidence(rank=node, **usual)])


ALARM = HangAlarm(node=0, host="n0", rank=0, phase="train", part="", step=3, since=1.0, time=11.0, limit_s=10.0)


def test_an_alarm_of_one_node_has_all_examined_the_driver_judges_once_and_all_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only node 1 notices the silence. The others examine their ranks because the driver asks for it."""
    monkeypatch.setattr(hang_watch, "LOOK_S", 0.02)
    monkeypatch.setattr("allranks.launch.supervisor.ALL_ANSWER_S", 1000.0)  # complete evidence is judged at once
    ended: list[int] = []
    run = RunDir(tmp_path)
    driver = InProcessDriver(run, {r: f"n{r}" for r in range(3)}, 3)
    found = [evidence(0), evidence(1, stack=READS, part="data"), evidence(2)]
    agents = [
        watch_of(
            tmp_path,
            node=n,
            collector=Looker(e),
            channel=driver,
            ended=ended,
            limits=Limits(step_s=0.3 if n == 1 else 60.0, long_s=60.0),
        )
        for n, e in enumerate(found)
    ]
    for n, agent in enumerate(agents):
        pulse_of(agent, n)
        agent.start()
    for agent in agents:
        agent.join(20)
    assert list(driver.alarms) == [1]
    assert sorted(ended) == [0, 1, 2]
    report = read_json(run.hang_report(1))
    assert ([f["rank"] for f in report["stalled"]], report["kind"]) == ([1], "dataloader_hang")
    assert (report["files"], report["missing_hosts"]) == (str(run.hang(1)), [])
    assert all(run.hang_node(1, n).exists() for n in range(3))
    assert driver.orders.end == "ranks made no progress"


def test_a_users_own_program_is_examined_once_both_nodes_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_watch, "LOOK_S", 0.02)
    monkeypatch.setattr(procfs, "work_of", lambda pid: procfs.ProcessWork())
    ended: list[int] = []
    run, limits = RunDir(tmp_path), Limits(step_s=0.3, long_s=60.0)
    driver = InProcessDriver(run, {r: f"n{r}" for r in range(2)}, 2)
    script = {"phase": "script", "step": None, "sequences": {"default_pg": 2}}
    found = [evidence(0, **script), evidence(1, stack=READS, **{**script, "sequences": {"default_pg": 1}})]
    agents = [
        watch_of(
            tmp_path,
            node=n,
            collector=Looker(e),
            channel=driver,
            ended=ended,
            limits=limits,
            script=ScriptSilence(limits, "cpu"),
        )
        for n, e in enumerate(found)
    ]
    for n, (agent, stack) in enumerate(
        zip(agents, ("/v/torch/distributed/distributed_c10d.py:barrier", "/u/rows.py:read"), strict=True)
    ):
        pulse_of(agent, n, phase="script").alive({"default_pg": 1}, [stack])
        agent.start()
    log = run.log_of(1, "n1", 1)
    for _ in range(15):  # it speaks for 1.5 s, longer than the limit
        time.sleep(0.1)
        with log.open("a") as file:
            file.write("a line\n")
    assert (ended, driver.sent, list(driver.alarms)) == ([], [], [0])
    for agent in agents:
        agent.join(20)
    assert sorted(ended) == [0, 1]
    report = read_json(run.hang_report(1))
    assert [f["rank"] for f in report["stalled"]] == [1]
    assert (
        "never joined collective 2 of group default_pg, in which rank 0 waits; its last one is 1" in report["sentence"]
    )


def test_a_record_that_is_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_hooks, "MAX_DUMP_BYTES", 10)
    for size, there in ((11, False), (10, True)):
        monkeypatch.setattr(rank_hooks, "_flight_recorder", lambda size=size: b"x" * size)
        rank_hooks._write_flight_record(tmp_path / "flight")
        assert (tmp_path / "flight").exists() == there


@pytest.mark.parametrize("fails", ["collector", "channel", "run folder"])
def test_ranks_that_hang_are_ended_whatever_fails_after_the_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    monkeypatch.setattr(hang_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(hang_watch, "VERDICT_S", 0.2)
    ended: list[int] = []
    channel = DeafChannel()
    if fails == "channel":
        monkeypatch.setattr(channel, "send_evidence", lambda found: (_ for _ in ()).throw(OSError(9, "closed")))
    if fails == "run folder":
        (tmp_path / "hang").write_text("a file is where the folder must be, as on a disk that takes nothing more")
    looker = Looker(None if fails == "collector" else evidence(0))
    watched = watch_of(
        tmp_path, collector=looker, channel=channel, ended=ended, limits=Limits(step_s=0.05, long_s=0.05)
    )
    pulse_of(watched)
    with caplog.at_level(logging.WARNING):
        watched.start()
        watched.join(20)
    assert not watched.is_alive()
    assert ended == [0]
    assert "the evidence of n0 is incomplete" in caplog.text
    if fails == "run folder":
        assert [e.node for e in channel.sent] == [0]  # the driver has it nevertheless


def test_a_look_that_fails_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hang_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(hang_watch, "VERDICT_S", 0.1)
    fails = [OSError(24, "Too many open files"), KeyError("phase"), RuntimeError("any other")]

    def has_ended(pid: int) -> bool:
        if fails:
            raise fails.pop(0)
        return False

    monkeypatch.setattr(procfs, "has_ended", has_ended)
    raised, ended = [], []
    watched = watch_of(
        tmp_path, collector=Looker(evidence(0)), raised=raised, ended=ended, limits=Limits(step_s=0.05, long_s=0.05)
    )
    pulse_of(watched)
    with caplog.at_level(logging.WARNING):
        watched.start()
        watched.join(20)
    assert caplog.text.count("hang monitor") == 3
    assert ([alarm.rank for alarm in raised], ended) == ([0], [0])


def test_a_watch_that_is_stopped_within_an_examination_waits_no_longer(tmp_path: Path) -> None:
    channel, ended = DeafChannel(), []
    channel.orders = Orders(collect=ALARM)
    watched = watch_of(tmp_path, collector=Looker(evidence(0)), channel=channel, ended=ended)
    watched.start()
    deadline = time.monotonic() + 20
    while not channel.sent and time.monotonic() < deadline:
        time.sleep(0.02)
    began = time.monotonic()
    watched.stop()
    assert time.monotonic() - began < hang_watch.VERDICT_S / 2
    assert not watched.is_alive()
    assert ended == [0]


def collector_of(folder: Path, meeting: tuple[str, int] | None = None) -> EvidenceCollector:
    return EvidenceCollector(RunDir(folder), 1, 0, "n0", meeting, "eth0")


def flight(folder: Path, count: int, own: str = "/home/u/train.py") -> None:
    frames = [{"name": "all_reduce", "filename": "/v/site-packages/torch/distributed/c10d.py", "line": 3}]
    frames.append({"name": "step", "filename": own, "line": 30})
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": i,
            "profiling_name": "gloo:all_reduce",
            "input_sizes": [[8]],
            "state": "completed" if i < count else "started",
            "frames": frames,
        }
        for i in range(1, count + 1)
    ]
    path = RunDir(folder).hang_flight(1, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pg_config": {}, "entries": entries}))


def test_the_last_calls_of_a_rank_with_its_own_line(tmp_path: Path) -> None:
    flight(tmp_path, collect.MAX_CALLS + 5)
    calls, why = collector_of(tmp_path)._calls(0, HeartbeatPage())
    assert (len(calls), why) == (collect.MAX_CALLS, "")
    assert (calls[-1].seq, calls[-1].done, calls[-2].done) == (collect.MAX_CALLS + 5, False, True)
    assert (calls[-1].op, calls[-1].sizes, calls[-1].group) == ("all_reduce", "[[8]]", "0")
    assert calls[-1].where == "/home/u/train.py:30:step"


def test_why_there_are_no_calls(tmp_path: Path) -> None:
    page, looks = HeartbeatPage(), collector_of(tmp_path)
    assert looks._calls(0, page) == ([], "the heartbeat thread did not answer, so no record was written")
    page._map[1024] = 2
    assert page.answered
    assert looks._calls(0, page) == ([], "the flight recorder is empty")
    flight(tmp_path, 2)
    path = RunDir(tmp_path).hang_flight(1, 0)
    path.write_text(path.read_text()[:50])
    calls, why = looks._calls(0, page)
    assert calls == []
    assert why.startswith("the flight recorder's dump cannot be read: looks like")


def test_whether_a_node_reaches_the_place_where_all_met(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert collector_of(tmp_path, ("127.0.0.1", port))._meets() is True
    assert collector_of(tmp_path, ("127.0.0.1", port))._meets() is False
    assert collector_of(tmp_path)._meets() is None


DUMP = """Thread 0x01 (most recent call first):
  File "{file}", line {line} in f
  File "/home/u/{secret}/train.py", line 1 in <module>
"""
SECRET = "hf_" + "0123456789abcdefghij"


def beat_of(pid: int, **more: Any) -> Heartbeat:
    now = time.monotonic()
    usual: dict[str, Any] = {"beats": 3, "at": now - 9.0, "step": 4, "longest_s": 0.1, "alive_at": now - 2.0}
    usual |= {"phase": "train", "part": "data", "sequences": {"default_pg": 4}}
    return Heartbeat(pid=pid, **(usual | more))


def test_what_is_taken_down_of_one_rank(tmp_path: Path) -> None:
    run, page = RunDir(tmp_path), HeartbeatPage()
    run.hang(1).mkdir(parents=True)
    earlier = DUMP.format(file="/home/u/before.py", line=3, secret=SECRET)
    os.write(page.stacks, earlier.encode())
    os.write(page.stacks, DUMP.format(file="/home/u/rows.py", line=12, secret=SECRET).encode())
    used = procfs.work_of(os.getpid()).cpu_s
    found = collector_of(tmp_path)._rank(
        0, page, beat_of(os.getpid()), len(earlier), used - 400.0, (time.monotonic(), 1000.0)
    )
    assert blocking_location(found.stack) == "/home/u/rows.py:12 in f"
    assert "before.py" not in run.hang_stack(1, "n0", 0).read_text()  # a dump of an earlier signal is none of now
    assert SECRET not in run.hang_stack(1, "n0", 0).read_text()
    assert found.cpu_share == pytest.approx(0.4, abs=0.05)  # of the time since it was looked at, not of all its life
    assert found.silent_s is not None
    assert found.python_silent_s is not None
    assert found.silent_s - found.python_silent_s == pytest.approx(7.0, abs=0.01)
    assert (found.phase, found.part, found.step, found.sequences) == ("train", "data", 4, {"default_pg": 4})
    mute = collector_of(tmp_path)._rank(1, HeartbeatPage(), beat_of(os.getpid(), alive_at=0.0), 0, used, (0.0, 1.0))
    assert (mute.python_silent_s, mute.stack) == (None, [])
    assert not run.hang_stack(1, "n0", 1).exists()
    leaves = collect._redacted(NodeEvidence(node=0, host="n0", time=1.0, ranks=[found]))  # for the file and the driver
    save_evidence(tmp_path / "node.json", leaves)
    text = (tmp_path / "node.json").read_text()
    assert SECRET not in text
    assert msgspec.json.decode(text, type=NodeEvidence).ranks[0].pid == os.getpid()


def test_a_rank_that_works_on_its_answer_is_given_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an overloaded node the flight recorder's dump takes longer than usual; a rank that is blocked uses no CPU
    time."""
    page = HeartbeatPage()
    os.write(page.stacks, b"in _run_module_as_main")
    monkeypatch.setattr(collect, "ANSWER_S", 0.1)
    monkeypatch.setattr(collect, "BUSY_ANSWER_S", 20.0)
    asleep = subprocess.Popen(
        [sys.executable, "-c", "import time; print('on', flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    busy = subprocess.Popen([sys.executable, "-c", "print('on', flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        for process in (asleep, busy):
            assert process.stdout is not None
            process.stdout.readline()
        began = time.monotonic()
        collect._wait_for_answers({0: page}, {0: 0}, {0: asleep.pid})
        assert time.monotonic() - began < 10.0
        thread = threading.Timer(3.0, page._map.__setitem__, (1024, 2))
        thread.start()
        collect._wait_for_answers({0: page}, {0: 0}, {0: busy.pid})
        assert page.answered
        thread.join()
    finally:
        asleep.kill()
        busy.kill()


def test_the_work_of_children_counts() -> None:
    """Of data workers, which a rank starts; bytes that they read count too."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    busy = "print('on', flush=True); open('/dev/zero', 'rb').read(1 << 26)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code, busy], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 30
        while (done := procfs.work_of(process.pid)).io_bytes < 1 << 26 or done.children_cpu_s < 0.5:
            assert time.monotonic() < deadline, done
            time.sleep(0.05)
    finally:
        for child in procfs.psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


def test_a_stopped_process_has_no_more_time_in_long_phases(tmp_path: Path) -> None:
    watched = watch_of(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        pulse = pulse_of(watched, phase="save")
        pulse._pid = process.pid
        pulse.beat()
        watched._floor -= 100.0
        assert alarm_at(watched, 5.0) is None
        assert alarm_at(watched, 20.0) is None
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while procfs.state_of(process.pid)[:1] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        alarm = alarm_at(watched, 40.0)
        assert alarm is not None and (alarm.phase, alarm.limit_s) == ("save", 10.0)
    finally:
        process.kill()
        process.wait(10)
