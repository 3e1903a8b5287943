"""What counts as silence, what follows an alarm on each node, and what is recorded of a rank. Pages and clocks are set
by hand, except in the last tests, which watch real processes."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.analysis.stacks import StackFrame, blocking_location
from allranks.errors import SpecError
from allranks.launch.channel import AgentLink
from allranks.launch.channel_protocol import RUNNING, AgentReport, Orders
from allranks.launch.monitor import evidence as collect
from allranks.launch.monitor import hang_watch, procfs
from allranks.launch.monitor.evidence import EvidenceCollector, save_evidence
from allranks.launch.monitor.hang_rules import HangAnalyzer
from allranks.launch.monitor.hang_watch import HangMonitor, ScriptSilence, WatchedNode
from allranks.launch.monitor.records import HangAlarm, NodeEvidence, RankEvidence
from allranks.launch.supervisor import Supervisor
from allranks.planning.planner import limits_of
from allranks.planning.records import Limits
from allranks.rundir.files import read_json
from allranks.rundir.heartbeat import Heartbeat, HeartbeatPage, HeartbeatWriter, page_paths
from allranks.rundir.paths import RunDir
from allranks.spec.loader import parse_spec
from allranks.train import rank_hooks
from tests.dist.harness import until

BARRIER = ("/v/torch/distributed/distributed_c10d.py:barrier",)
WAITS = [StackFrame(file="/v/torch/distributed/distributed_c10d.py", line=9, function="all_reduce")]
READS = [StackFrame(file="/home/u/rows.py", line=12, function="read")]
ALARM = HangAlarm(node=0, host="n0", rank=0, phase="train", part="", step=3, since=1.0, time=11.0, limit_s=10.0)
SHORT = Limits(step_s=0.05, long_s=0.05)


class InProcessDriver:
    """A real supervisor and a real judge of the watches of some nodes, without sockets."""

    def __init__(self, run: RunDir, hosts: dict[int, str], nodes: int) -> None:
        self.supervisor = Supervisor(nodes, HangAnalyzer(run, 1, hosts, nodes))
        self.alarms: dict[int, HangAlarm] = {}
        self.sent: list[NodeEvidence] = []
        self._nodes, self._lock = nodes, threading.Lock()

    @property
    def orders(self) -> Orders:
        now, known = time.monotonic(), {"pid": 1, "state": RUNNING, "store": ("h", 1)}
        with self._lock:
            reports = [AgentReport(node=n, host=f"n{n}", alarm=self.alarms.get(n), **known) for n in range(self._nodes)]
            return self.supervisor.tick({r.node: AgentLink(report=r, heard_at=now) for r in reports}, now)

    def send_evidence(self, found: NodeEvidence) -> None:
        with self._lock:
            self.sent.append(found)
            self.supervisor.evidence(found)


class DeafChannel:
    """A driver that receives everything and never answers."""

    def __init__(self) -> None:
        self.orders = Orders()
        self.alarms: dict[int, HangAlarm] = {}
        self.sent: list[NodeEvidence] = []

    def send_evidence(self, found: NodeEvidence) -> None:
        self.sent.append(found)


class Looker:
    """In a collector's place."""

    def __init__(self, evidence: NodeEvidence | None = None) -> None:
        self._evidence = evidence

    def node(self, pages: Any, beats: Any) -> NodeEvidence:
        if self._evidence is None:
            raise OSError(28, "No space left on device")
        return self._evidence


class Watch(HangMonitor):
    """The watch of a node, which records its alarms and when it ended its ranks."""

    def __init__(
        self,
        folder: Path,
        ranks: int = 1,
        *,
        node: int = 0,
        collector: Any = None,
        channel: Any = None,
        limits: Limits = Limits(step_s=10.0, long_s=50.0),  # noqa: B008 - frozen
        **more: Any,
    ) -> None:
        run = RunDir(folder)
        for place in (run.events, run.logs_of(1)):
            place.mkdir(parents=True, exist_ok=True)
        self.raised: list[HangAlarm | None] = []
        self.ended: list[float] = []
        channel = channel or DeafChannel()

        def raise_alarm(alarm: HangAlarm | None) -> None:
            self.raised.append(alarm)
            channel.alarms[node] = alarm

        self.pages = {r: HeartbeatPage() for r in range(node * ranks, (node + 1) * ranks)}
        watched = WatchedNode(run, 1, node, f"n{node}", f"n{node}", self.pages)
        end = lambda: self.ended.append(time.time())  # noqa: E731
        super().__init__(watched, limits, collector or Looker(), channel, raise_alarm=raise_alarm, end=end, **more)

    def pulse(self, rank: int = 0, phase: str = "train") -> HeartbeatWriter:
        """Of a rank that has begun its second step."""
        pulse = HeartbeatWriter()
        pulse.open(page_paths([self.pages[rank]]).partition(":")[0])
        for step in (0, 1):
            pulse.step(step)
        pulse.phase(phase)
        return pulse

    def alarm_at(self, later_s: float) -> HangAlarm | None:
        return self.silence(time.monotonic() + later_s)

    def to_the_end(self) -> None:
        self.start()
        self.join(20)
        assert not self.is_alive()


def test_the_rank_that_is_silent_raises_the_alarm_with_its_place(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 2)
    watch.pulse()
    watch.pulse(1).part("forward")
    watch._floor -= 100.0
    assert watch.alarm_at(5.0) is None
    alarm = watch.alarm_at(20.0)
    assert alarm is not None
    assert (alarm.rank, alarm.host, alarm.phase, alarm.step, alarm.limit_s) == (0, "n0", "train", 1, 10.0)
    assert 20.0 <= alarm.time - alarm.since < 40.0  # the 20 s of this test's clock, and what it took
    assert watch.raised == [alarm]


def test_ranks_that_are_done_and_those_that_wait_for_one_that_died_raise_none(tmp_path: Path) -> None:
    watch, alone = Watch(tmp_path, 2), Watch(tmp_path / "alone")
    for done in (watch, alone):
        done.pulse(0, "done")
    dead = watch.pulse(1)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid, silent in ((gone.pid, None), (os.getpid(), 1)):
        dead._pid = pid
        dead.beat()
        alarm = watch.alarm_at(99.0)
        assert (alarm and alarm.rank) == silent
    assert [alone.alarm_at(later_s) for later_s in (99.0, 199.0)] == [None, None]


def test_a_program_raises_its_alarm_once_and_withdraws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "work_of", lambda pid: procfs.ProcessWork())
    watch, script = Watch(tmp_path, 2), ScriptSilence(Limits(step_s=10.0, long_s=40.0), "cpu")
    pulses = [watch.pulse(rank, phase="script") for rank in (0, 1)]
    pulses[0].alive({"default_pg": 1}, BARRIER)
    pulses[1].alive({"default_pg": 1}, ("/home/u/rows.py:read",))
    watch._floor -= 100.0
    for later_s in (0.0, 3.0, 14.0, 15.0):
        watch.suspect(script, time.monotonic() + later_s)
    (alarm,) = watch.raised
    assert alarm is not None
    assert (alarm.rank, alarm.phase, alarm.whole_job, alarm.stuck, alarm.waiting) == (1, "script", True, True, True)
    RunDir(tmp_path).log_of(1, "n0", 0).write_text("a line\n")  # of the other rank
    watch.suspect(script, time.monotonic() + 16.0)
    assert watch.raised == [alarm, None]
    pulses[1].beat()  # a call of allranks.report
    watch.suspect(script, time.monotonic() + 17.0)
    watch.suspect(script, time.monotonic() + 26.5)  # at work on this clock: it began anew
    assert watch.raised == [alarm, None]


@pytest.mark.parametrize(
    ("device", "phase", "does", "silent"),
    [
        ("cuda", "build", "waits for the GPU", True), ("cuda", "first step", "waits for the GPU", True),
        ("cuda", "prepare", "tokenizes", False), ("cuda", "first step", "compiles in a child", False),
        ("cuda", "build", "calls collectives", False), ("cuda", "evaluate", "writes lines", False),
        ("cuda", "save", "reads", False), ("cpu", "prepare", "computes", False), ("cpu", "prepare", "reads", False),
        ("cpu", "prepare", "does next to nothing", True),
    ],
)  # fmt: skip
def test_in_long_phases_a_process_that_works_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, phase: str, does: str, silent: bool
) -> None:
    """A core that waits for the GPU is busy, and shows no progress."""
    own, children, io = 0.0, 0.0, 0
    monkeypatch.setattr(procfs, "work_of", lambda pid: procfs.ProcessWork(own, children, io))
    watch = Watch(tmp_path, device=device)
    pulse, now, alarms = watch.pulse(phase=phase), time.monotonic(), []
    for later in range(0, 120, 10):
        alarms.append(watch.silence(now + later))
        own += {"cuda": 10.0, "cpu": {"computes": 0.5, "reads": 0.0}.get(does, 0.1)}[device]
        children += 9.0 * (does == "compiles in a child")
        io += (1 << 20) if does == "reads" else 1000 * (does == "does next to nothing")
        pulse.alive({"default_pg": later if does == "calls collectives" else 1})
        if does == "writes lines":
            RunDir(tmp_path).log_of(1, "n0", 0).write_text("x" * (later + 1))
    assert any(alarms) is silent


def evidence(node: int, **more: Any) -> NodeEvidence:
    usual = {"pid": 7, "state": "S sleeping", "phase": "train", "step": 3, "stack": WAITS, **more}
    return NodeEvidence(node=node, host=f"n{node}", time=1.0, ranks=[RankEvidence(rank=node, **usual)])


def test_on_an_alarm_all_are_examined_judged_once_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only node 1 notices the silence. The others examine their ranks because the driver asks for it."""
    monkeypatch.setattr(hang_watch, "LOOK_S", 0.02)
    monkeypatch.setattr("allranks.launch.supervisor.ALL_ANSWER_S", 1000.0)  # complete evidence is judged at once
    run = RunDir(tmp_path)
    driver = InProcessDriver(run, {r: f"n{r}" for r in range(3)}, 3)
    nodes = [evidence(0), evidence(1, stack=READS, part="data"), evidence(2)]
    limits = [Limits(step_s=0.3 if n == 1 else 60.0, long_s=60.0) for n in range(3)]
    watches = [Watch(tmp_path, node=n, collector=Looker(nodes[n]), channel=driver, limits=limits[n]) for n in range(3)]
    for n, watch in enumerate(watches):
        watch.pulse(n)
        watch.start()
    for watch in watches:
        watch.join(20)
    assert list(driver.alarms) == [1]
    assert [len(watch.ended) for watch in watches] == [1, 1, 1]
    report = read_json(run.hang_report(1))
    assert ([f["rank"] for f in report["stalled"]], report["kind"]) == ([1], "dataloader_hang")
    assert (report["files"], report["missing_hosts"]) == (str(run.hang(1)), [])
    assert all(run.hang_node(1, n).exists() for n in range(3))
    assert driver.orders.end == "ranks made no progress"


def test_a_program_is_examined_once_both_nodes_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "LOOK_S", 0.02)
    monkeypatch.setattr(procfs, "work_of", lambda pid: procfs.ProcessWork())
    run, limits, watches = RunDir(tmp_path), Limits(step_s=0.3, long_s=60.0), []
    driver = InProcessDriver(run, {r: f"n{r}" for r in range(2)}, 2)
    for n, (last, stack) in enumerate(((2, BARRIER), (1, ("/u/rows.py:read",)))):
        seen = {"phase": "script", "step": None, "sequences": {"default_pg": last}, "stack": READS if n else WAITS}
        more: dict[str, Any] = {"limits": limits, "script": ScriptSilence(limits, "cpu")}
        watches.append(Watch(tmp_path, node=n, collector=Looker(evidence(n, **seen)), channel=driver, **more))
        watches[-1].pulse(n, phase="script").alive({"default_pg": 1}, stack)
        watches[-1].start()
    for _ in range(15):  # it speaks for 1.5 s, longer than the limit
        time.sleep(0.1)
        with run.log_of(1, "n1", 1).open("a") as file:
            file.write("a line\n")
    assert ([watch.ended for watch in watches], driver.sent, list(driver.alarms)) == ([[], []], [], [0])
    for watch in watches:
        watch.join(20)
    assert [len(watch.ended) for watch in watches] == [1, 1]
    report = read_json(run.hang_report(1))
    assert [f["rank"] for f in report["stalled"]] == [1]
    why = "never joined collective 2 of group default_pg, in which rank 0 waits; its last one is 1"
    assert why in report["sentence"]


@pytest.mark.parametrize("fails", ["collector", "channel", "run folder"])
def test_ranks_that_hang_are_ended_whatever_fails_after_the_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    monkeypatch.setattr(hang_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(hang_watch, "VERDICT_S", 0.2)
    channel = DeafChannel()
    if fails == "channel":
        monkeypatch.setattr(channel, "send_evidence", lambda found: (_ for _ in ()).throw(OSError(9, "closed")))
    if fails == "run folder":
        (tmp_path / "hang").write_text("a file is where the folder must be, as on a disk that takes nothing more")
    looker = Looker(None if fails == "collector" else evidence(0))
    watch = Watch(tmp_path, collector=looker, channel=channel, limits=SHORT)
    watch.pulse()
    with caplog.at_level(logging.WARNING):
        watch.to_the_end()
    assert len(watch.ended) == 1
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
    watch = Watch(tmp_path, collector=Looker(evidence(0)), limits=SHORT)
    watch.pulse()
    with caplog.at_level(logging.WARNING):
        watch.to_the_end()
    assert caplog.text.count("hang monitor") == 3
    assert ([alarm and alarm.rank for alarm in watch.raised], len(watch.ended)) == ([0], 1)


def test_a_watch_that_is_stopped_within_an_examination_waits_no_longer(tmp_path: Path) -> None:
    channel = DeafChannel()
    channel.orders = Orders(collect=ALARM)
    watch = Watch(tmp_path, collector=Looker(evidence(0)), channel=channel)
    watch.start()
    until(lambda: channel.sent)
    began = time.monotonic()
    watch.stop()
    assert time.monotonic() - began < hang_watch.VERDICT_S / 2
    assert not watch.is_alive() and len(watch.ended) == 1


def test_a_record_that_is_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_hooks, "MAX_DUMP_BYTES", 10)
    for size, there in ((11, False), (10, True)):
        monkeypatch.setattr(rank_hooks, "_flight_recorder", lambda size=size: b"x" * size)
        rank_hooks._write_flight_record(tmp_path / "flight")
        assert (tmp_path / "flight").exists() == there


def collector_of(folder: Path, meeting: tuple[str, int] | None = None) -> EvidenceCollector:
    return EvidenceCollector(RunDir(folder), 1, 0, "n0", meeting, "eth0")


def flight(folder: Path, count: int) -> Path:
    """Write the dump of a flight recorder with so many calls, of which the last has not ended."""
    places = (("all_reduce", "/v/site-packages/torch/distributed/c10d.py", 3), ("step", "/home/u/train.py", 30))
    entry = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "input_sizes": [[8]]}
    entry["frames"] = [dict(zip(("name", "filename", "line"), place, strict=True)) for place in places]
    states = [{"collective_seq_id": i, "state": "completed" if i < count else "started"} for i in range(1, count + 1)]
    path = RunDir(folder).hang_flight(1, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pg_config": {}, "entries": [entry | state for state in states]}))
    return path


def test_the_last_calls_of_a_rank_with_its_own_line_or_why_there_are_none(tmp_path: Path) -> None:
    page, looks = HeartbeatPage(), collector_of(tmp_path)
    assert looks._calls(0, page) == ([], "the heartbeat thread did not answer, so no record was written")
    page._map[1024] = 2
    assert page.answered
    assert looks._calls(0, page) == ([], "the flight recorder is empty")
    path = flight(tmp_path, collect.MAX_CALLS + 5)
    calls, why = looks._calls(0, HeartbeatPage())
    assert (len(calls), why) == (collect.MAX_CALLS, "")
    assert (calls[-1].seq, calls[-1].done, calls[-2].done) == (collect.MAX_CALLS + 5, False, True)
    assert (calls[-1].op, calls[-1].sizes, calls[-1].group) == ("all_reduce", "[[8]]", "0")
    assert calls[-1].where == "/home/u/train.py:30:step"
    path.write_text(path.read_text()[:50])
    calls, why = looks._calls(0, page)
    assert calls == [] and why.startswith("the flight recorder's dump cannot be read: looks like")


def test_whether_a_node_reaches_the_place_where_all_met(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        assert collector_of(tmp_path, place)._meets() is True
    assert collector_of(tmp_path, place)._meets() is False
    assert collector_of(tmp_path)._meets() is None


def test_limits() -> None:
    def of(timeout: int, hang: object = "auto", **more: object) -> Limits | None:
        spec = {"model": {"name": "tiny:llama"}, "data": {"source": "x"}, "cluster": {"timeout_s": timeout}}
        return limits_of(parse_spec({**spec, "observe": {"hang_s": hang}, **more}))

    assert of(600) == Limits(step_s=300, long_s=540)
    assert of(60) == Limits(step_s=30, long_s=52)
    assert of(7200) == Limits(step_s=300, long_s=6480)
    assert of(10) is of(600, None) is None
    assert of(600, 20) == Limits(step_s=20, long_s=540)
    for late in (600, 700):
        with pytest.raises(SpecError, match=rf"hang_s is {late}.*timeout_s"):
            of(600, late)
    assert of(600, 590) == Limits(step_s=590, long_s=590)
    script = {"script": {"path": "x.py"}, "model": None, "data": None}  # it sets the timeout of its collectives itself
    assert of(600, **script) == of(10, **script) == Limits(step_s=120, long_s=1200)
    assert of(600, 700, **script) == Limits(step_s=700, long_s=2800)
    assert of(600, None, **script) is None


DUMP = 'Thread 0x01 (most recent call first):\n  File "{}", line {} in f\n'
DUMP += '  File "/home/u/{}/train.py", line 1 in <module>\n'
SECRET = "hf_" + "0123456789abcdefghij"  # a token stands in a path, and so in every frame


def beat_of(pid: int, **more: Any) -> Heartbeat:
    now = time.monotonic()
    usual: dict[str, Any] = {"beats": 3, "at": now - 9.0, "step": 4, "longest_s": 0.1, "alive_at": now - 2.0}
    usual |= {"phase": "train", "part": "data", "sequences": {"default_pg": 4}}
    return Heartbeat(pid=pid, **(usual | more))


def test_what_is_taken_down_of_one_rank(tmp_path: Path) -> None:
    run, page = RunDir(tmp_path), HeartbeatPage()
    run.hang(1).mkdir(parents=True)
    earlier = DUMP.format("/home/u/before.py", 3, SECRET)
    os.write(page.stacks, (earlier + DUMP.format("/home/u/rows.py", 12, SECRET)).encode())
    used, asked = procfs.work_of(os.getpid()).cpu_s, (time.monotonic(), 1000.0)
    rank = collector_of(tmp_path)._rank(0, page, beat_of(os.getpid()), len(earlier), used - 400.0, asked)
    assert blocking_location(rank.stack) == "/home/u/rows.py:12 in f"
    kept = run.hang_stack(1, "n0", 0).read_text()
    assert "before.py" not in kept and SECRET not in kept  # a dump of an earlier signal is none of now
    assert rank.cpu_share == pytest.approx(0.4, abs=0.05)  # of the time since it was looked at, not of all its life
    assert rank.silent_s is not None and rank.python_silent_s is not None
    assert rank.silent_s - rank.python_silent_s == pytest.approx(7.0, abs=0.01)
    assert (rank.phase, rank.part, rank.step, rank.sequences) == ("train", "data", 4, {"default_pg": 4})
    mute = collector_of(tmp_path)._rank(1, HeartbeatPage(), beat_of(os.getpid(), alive_at=0.0), 0, used, (0.0, 1.0))
    assert (mute.python_silent_s, mute.stack) == (None, [])
    assert not run.hang_stack(1, "n0", 1).exists()
    leaves = collect._redacted(NodeEvidence(node=0, host="n0", time=1.0, ranks=[rank]))  # for the file and the driver
    save_evidence(tmp_path / "node.json", leaves)
    text = (tmp_path / "node.json").read_text()
    assert SECRET not in text
    assert msgspec.json.decode(text, type=NodeEvidence).ranks[0].pid == os.getpid()


@contextmanager
def started(*code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has begun to run this, which prints a line first; it and its children are killed."""
    process = subprocess.Popen([sys.executable, "-c", *code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        for child in procfs.psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait(10)


SLEEPS, SPINS = "import time; print('on', flush=True); time.sleep(60)", "print('on', flush=True)\nwhile True: pass"


def test_a_rank_that_works_on_its_answer_is_given_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an overloaded node the flight recorder's dump takes longer; a rank that is blocked uses no CPU time."""
    page = HeartbeatPage()
    os.write(page.stacks, b"in _run_module_as_main")
    monkeypatch.setattr(collect, "ANSWER_S", 0.1)
    monkeypatch.setattr(collect, "BUSY_ANSWER_S", 20.0)
    with started(SLEEPS) as asleep, started(SPINS) as busy:
        began = time.monotonic()
        collect._wait_for_answers({0: page}, {0: 0}, {0: asleep.pid})
        assert time.monotonic() - began < 10.0
        thread = threading.Timer(3.0, page._map.__setitem__, (1024, 2))
        thread.start()
        collect._wait_for_answers({0: page}, {0: 0}, {0: busy.pid})
        assert page.answered
        thread.join()


def test_the_work_of_children_counts() -> None:
    """Of data workers, which a rank starts; bytes that they read count too."""
    busy = "print('on', flush=True); open('/dev/zero', 'rb').read(1 << 26)\nwhile True: pass"
    with started("import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])", busy) as process:

        def counted() -> bool:
            work = procfs.work_of(process.pid)
            return work.io_bytes >= 1 << 26 and work.children_cpu_s >= 0.5

        until(counted)


def test_a_process_that_waits_for_a_core_is_at_work() -> None:
    core = min(os.sched_getaffinity(0))
    with started(SPINS) as first, started(SPINS) as last:
        for process in (first, last):
            os.sched_setaffinity(process.pid, {core})
        os.setpriority(os.PRIO_PROCESS, last.pid, 19)
        before, began = procfs.work_of(last.pid), time.monotonic()
        time.sleep(1.0)
        # the last wait counts only once it is over
        assert procfs.work_of(last.pid).own_cpu_s - before.own_cpu_s > 0.4 * (time.monotonic() - began)


def test_a_stopped_process_has_no_more_time_in_long_phases(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    with started(SLEEPS) as process:
        pulse = watch.pulse(phase="save")
        pulse._pid = process.pid
        pulse.beat()
        watch._floor -= 100.0
        assert watch.alarm_at(5.0) is watch.alarm_at(20.0) is None
        process.send_signal(signal.SIGSTOP)
        until(lambda: procfs.state_of(process.pid)[:1] == "T")
        alarm = watch.alarm_at(40.0)
        assert alarm is not None and (alarm.phase, alarm.limit_s) == ("save", 10.0)
