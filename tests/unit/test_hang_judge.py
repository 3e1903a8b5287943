"""Who fell out, by each kind of evidence; and when it is better to name nobody."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.analysis.flight_recorder import CollectiveCall
from allranks.analysis.stacks import StackFrame
from allranks.launch.monitor.evidence import save_evidence
from allranks.launch.monitor.hang_rules import HangAnalyzer, analyze_hang
from allranks.launch.monitor.records import HangAlarm, HangReport, NodeEvidence, RankEvidence
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir

ALARM = HangAlarm(
    node=0, host="n1", rank=0, phase="train", part="backward", step=6, since=100.0, time=104.0, limit_s=4.0
)
WAITS = [
    StackFrame(file="/v/site-packages/torch/distributed/distributed_c10d.py", line=2900, function="all_reduce"),
    StackFrame(file="/home/u/train.py", line=30, function="step"),
    StackFrame(file="/home/u/train.py", line=80, function="<module>"),
]
READS = [
    StackFrame(file="/home/u/rows.py", line=12, function="read"),
    StackFrame(file="/home/u/train.py", line=25, function="step"),
    StackFrame(file="/home/u/train.py", line=80, function="<module>"),
]


def call(seq: int, op: str = "all_reduce", sizes: str = "[[8]]", *, done: bool = False) -> CollectiveCall:
    return CollectiveCall(group="0", seq=seq, op=op, sizes=sizes, done=done)


def rank(number: int, **more: Any) -> RankEvidence:
    usual: dict[str, Any] = {
        "pid": 100 + number,
        "state": "S sleeping",
        "phase": "train",
        "part": "backward",
        "step": 6,
    }
    usual |= {"stack": WAITS, "silent_s": 6.0, "python_silent_s": 0.3, "python_beats": 40}
    return RankEvidence(rank=number, **(usual | more))


def verdict(*ranks: RankEvidence, nodes: list[NodeEvidence] | None = None, world: int | None = None) -> HangReport:
    found = nodes or [NodeEvidence(node=i, host=f"n{i + 1}", time=104.0, ranks=[r]) for i, r in enumerate(ranks)]
    hosts = {i: f"n{i + 1}" for i in range(world or sum(len(n.ranks) for n in found))}
    return analyze_hang(found, hosts, ALARM, 1, 106.0)


def named(report: HangReport) -> list[int | None]:
    return [f.rank for f in report.stalled]


def test_a_rank_that_never_came_is_named_with_its_line() -> None:
    found = verdict(
        rank(0, calls=[call(1, done=True), call(2)]),
        rank(1, calls=[call(1, done=True)], stack=READS, part="data"),
        rank(2, calls=[call(1, done=True), call(2)]),
    )
    assert named(found) == [1]
    assert (found.stalled[0].host, found.stalled[0].where) == ("n2", "/home/u/rows.py:12 in read")
    assert found.kind == "dataloader_hang"
    assert "never joined collective 2" in found.sentence
    assert found.waiting[0].call == "collective 2 of group 0: all_reduce [[8]]"
    assert "rank 0 in /home/u/train.py:30 in step" in found.sentence
    assert [w.rank for w in found.waiting] == [0, 2]


def test_other_operations_and_other_sizes_are_a_mismatch() -> None:
    for odd in (call(2, "all_gather"), call(2, sizes="[[9]]")):
        found = verdict(rank(0, calls=[call(2)]), rank(1, calls=[call(2)]), rank(2, calls=[odd]))
        assert (named(found), found.kind) == ([2], "collective_mismatch")
        assert odd.op in found.stalled[0].why
    two = verdict(rank(0, calls=[call(2)]), rank(1, calls=[call(2, "all_gather")]))
    assert named(two) == [0, 1]  # one against one: which of them is wrong cannot be told
    assert "ranks 0, 1" in two.sentence
    early = verdict(rank(0, calls=[call(2)]), rank(1, calls=[call(2, "all_gather")], part="data"))
    assert named(early) == [1]  # but one that should be reading its data is
    assert early.kind == "collective_mismatch"  # whatever it was to read: what it called is what is wrong


def test_the_first_collective_that_did_not_end_decides_in_each_group_by_itself() -> None:
    both = [call(2), call(3)]
    found = verdict(rank(0, calls=both), rank(1, calls=[call(1, done=True)], stack=READS), rank(2, calls=both))
    assert named(found) == [1]
    assert "collective 2 of group 0" in found.sentence
    other = CollectiveCall(group="1", seq=9, op="broadcast", sizes="[[2]]", done=True)
    found = verdict(
        rank(0, calls=[other, call(2)]),
        rank(1, calls=[other, call(1, done=True)], stack=READS),
        rank(2, calls=[other, call(2)]),
    )
    assert named(found) == [1]  # that it is far in another group does not help it
    assert "never joined collective 2 of group 0" in found.sentence
    broadcast = [call(2, "broadcast", done=True)]
    found = verdict(
        rank(0, calls=broadcast),
        rank(1, calls=[call(1, done=True)], stack=READS),
        rank(2, calls=[call(2, "broadcast")]),
    )
    assert named(found) == [1]  # one that sends need not wait for those that receive
    assert "in which rank 2 waits" in found.sentence


def test_what_the_lone_rank_does_gives_the_failure_its_name() -> None:
    def kind(**more: Any) -> str:
        return verdict(rank(0), rank(1, **{"part": "forward", "stack": READS, **more}), rank(2)).kind

    own = StackFrame(file="/home/u/train.py", line=5, function="f")
    saves = [own, StackFrame(file="/v/torch/serialization.py", line=5, function="save")]
    loads = [own, StackFrame(file="/v/torch/utils/data/dataloader.py", line=5, function="poll")]
    assert kind() == "collective_mismatch"
    assert kind(part="data") == kind(stack=loads) == "dataloader_hang"
    assert kind(phase="save", part="") == kind(stack=saves) == "checkpoint_collective"
    many = verdict(rank(0, part="data", stack=READS), rank(1, part="data", stack=READS), *map(rank, (2, 3)))
    assert (named(many), many.kind) == ([0, 1], "collective_mismatch")


def test_how_far_a_rank_is_goes_by_phase_then_by_part() -> None:
    for earlier, part, later in (("train", "control", "evaluate"), ("evaluate", "", "save"), ("build", "", "train")):
        places = [{"phase": later, "part": ""}] * 2 + [{"phase": earlier, "part": part}]
        assert named(verdict(*(rank(i, **p) for i, p in enumerate(places)))) == [2], (earlier, later)
    back = {"phase": "train", "part": ""}  # in a step's beginning, or back from the evaluation that the others are in
    assert named(verdict(rank(0, **back), *(rank(i, phase="evaluate", part="") for i in (1, 2)))) == []
    for earlier, later in (("data", "forward"), ("forward", "backward"), ("backward", "optimizer")):
        assert named(verdict(rank(0, part=later), rank(1, part=later), rank(2, part=earlier))) == [2], earlier
    found = verdict(rank(0), rank(1), rank(2, part="data"))
    assert found.stalled[0].why == "it is still in train, step 7, data, other ranks are ahead"


def test_processes_that_cannot_run() -> None:
    disk = rank(1, state="D in uninterruptible sleep (waits for a disk, a file system or a driver)", calls=[call(2)])
    found = verdict(rank(0, calls=[call(2)]), disk)
    assert (named(found), found.kind) == ([1], "collective_hang")
    assert "waits for a disk" in found.sentence
    for state in ("D in uninterruptible sleep", "Z a zombie"):
        assert named(verdict(*(rank(i, state=state, calls=[call(2)]) for i in (0, 1)))) == []  # it tells them not apart
    spins = rank(1, state="R running", cpu_share=0.97, stack=READS, part="data")
    assert verdict(rank(0), spins, rank(2)).stalled[0].state == "running at 97% of a core"
    idles = rank(1, state="R running", cpu_share=0.3, stack=READS, part="data")
    assert verdict(rank(0), idles, rank(2)).stalled[0].state == "running"


def test_a_rank_of_which_nothing_is_known_is_not_held_to_be_elsewhere() -> None:
    assert named(verdict(rank(0), rank(1, stack=[]), rank(2))) == []


def test_what_else_stands_out_on_a_node_is_noted() -> None:
    def notes(**more: Any) -> list[str]:
        usual = {"node": 0, "host": "n1", "time": 104.0, "ranks": [rank(0)], "load1": 9.0, "cpus": 8}
        usual |= {"memory_total_bytes": 100, "memory_available_bytes": 50}
        return verdict(nodes=[NodeEvidence(**{**usual, **more})]).notes

    assert notes() == []
    assert notes(memory_available_bytes=2) == ["n1: only 2.0% of its memory is available"]
    assert notes(load1=17.0) == ["n1: load 17 on 8 cores"]
    assert notes(blocked=["41 cp nfs_wait"]) == ["n1: processes in uninterruptible sleep: 41 cp nfs_wait"]


def test_unequal_splits_of_an_all_to_all_are_no_mismatch() -> None:
    found = verdict(*(rank(i, calls=[call(2, "all_to_all", f"[[{i}]]")]) for i in range(3)))
    assert named(found) == []
    assert "none stalled" in found.sentence


def test_a_stopped_process_is_named_whatever_the_calls_say() -> None:
    stopped = rank(1, state="T stopped by a signal (SIGSTOP or SIGTSTP)", stack=[], calls=[], python_silent_s=9.0)
    found = verdict(rank(0, calls=[call(2)]), stopped)
    assert named(found) == [1]
    assert found.stalled[0].why == "its process 101 is stopped by a signal (SIGSTOP or SIGTSTP)"
    assert found.stalled[0].why in found.sentence
    assert ". Its position is unknown. " in found.sentence


def test_a_process_whose_interpreter_is_held_is_named() -> None:
    def why(**more: Any) -> str:
        held = {"stack": READS, "silent_s": 8.0, "python_silent_s": 8.0, **more}
        found = verdict(rank(0, calls=[call(2)]), rank(1, **held))
        return found.stalled[0].why if found.stalled else ""

    assert "holds the interpreter" in why()
    for more in (
        {"python_silent_s": 4.0},  # too short
        {"python_silent_s": None},  # the heartbeat thread never ran
        {"python_beats": 2},  # it has hardly run
        {"monitor_error": "AttributeError: x"},  # it has failed by itself
        {"silent_s": 1.0},  # the main thread ran Python after it: the thread is gone, the interpreter is free
        {"stack": []},  # where it stands is not known
    ):
        assert "holds the interpreter" not in why(**more), more
    waiting = rank(1, calls=[call(2)], python_silent_s=8.0, silent_s=8.0)
    assert named(verdict(rank(0, calls=[call(2)]), waiting)) == []
    assert named(verdict(rank(0), rank(1, python_silent_s=8.0, silent_s=8.0))) == []  # it is in the collective


def test_what_is_missing_of_a_rank_is_no_evidence_against_it() -> None:
    unseen = [NodeEvidence(node=0, host="n1", time=104.0, ranks=[rank(0)])]
    found = analyze_hang(unseen, {0: "n1", 1: "n1"}, ALARM, 1, 106.0)
    assert (named(found), found.missing_hosts) == ([], [])
    assert found.notes == ["rank 1: no heartbeat was written, so its state is unknown"]
    silent = rank(0, stack=[], phase="script", part="", step=None)  # the alarm's rank, which showed nothing
    assert named(verdict(silent, rank(1, stack=READS, phase="script", part="", step=None))) == []
    unknown = rank(2, phase="script", part="", step=None)  # its phase cannot be compared with theirs
    assert named(verdict(rank(0), rank(1), unknown)) == []
    sizeless = verdict(rank(0, calls=[call(2)]), rank(1, calls=[call(2, sizes="")]), rank(2, calls=[call(2)]))
    assert named(sizeless) == []
    on_the_device = rank(1, stack=READS, part="backward", calls=[call(2)])  # the host goes on, the GPU waits
    assert named(verdict(rank(0, calls=[call(2)]), on_the_device, rank(2, calls=[call(2)]))) == []


def test_what_was_seen_comes_before_a_node_that_does_not_answer() -> None:
    late = rank(1, calls=[call(1, done=True)], stack=READS)
    assert named(verdict(rank(0, calls=[call(1, done=True), call(2)]), late, world=3)) == [1]


def test_a_rank_that_ended_cleanly_while_others_wait() -> None:
    found = verdict(rank(0), rank(1, phase="done", part="", stack=[], state="gone"))
    assert named(found) == [1]
    assert "has exited, cleanly, while others continue" in found.sentence


def test_without_records_of_calls_the_step_and_the_stack_tell() -> None:
    assert named(verdict(rank(0), rank(1, step=5, stack=READS), rank(2))) == [1]
    assert named(verdict(rank(0), rank(1, part="data", stack=READS), rank(2))) == [1]
    assert named(verdict(rank(0, part="", phase="save"), rank(1, part="", phase="save", stack=READS))) == [1]
    assert named(verdict(rank(0), rank(1), rank(2))) == []
    assert named(verdict(rank(0, step=7), rank(1), rank(2))) == []  # one is ahead, nobody fell behind


def test_a_node_whose_network_is_down_is_named_though_all_wait_alike() -> None:
    def node(number: int, *, up: bool = True, meets: bool | None = True) -> NodeEvidence:
        own = rank(number, calls=[call(2)])
        return NodeEvidence(
            node=number,
            host=f"n{number + 1}",
            time=104.0,
            ranks=[own],
            interface="eth0",
            interfaces={"eth0": {"up": up}},
            meets=meets,
        )

    assert named(verdict(nodes=[node(0), node(1, up=False, meets=False), node(2)])) == [1]
    assert named(verdict(nodes=[node(0), node(1), node(2, meets=False)])) == [2]
    assert named(verdict(nodes=[node(0), node(1, meets=False), node(2, meets=False)])) == [0]
    assert named(verdict(nodes=[node(0), node(1), node(2)])) == []
    assert named(verdict(nodes=[node(0, meets=False), node(1, meets=False), node(2)])) == [0, 1]
    assert named(verdict(nodes=[node(i, meets=False) for i in range(3)])) == []  # perhaps the one place is gone
    alone = msgspec.structs.replace(node(0, up=False), ranks=[rank(i, calls=[call(2)]) for i in (0, 1)])
    assert named(verdict(nodes=[alone])) == []  # ranks of one node need none


def test_a_node_that_does_not_answer_is_named() -> None:
    found = verdict(rank(0, calls=[call(2)]), rank(1, calls=[call(2)]), world=3)
    assert named(found) == [2]
    assert found.missing_hosts == ["n3"]
    assert "n3" in found.sentence


def test_ranks_that_are_in_no_collective() -> None:
    elsewhere = [StackFrame(file="/home/u/other.py", line=3, function="compute"), READS[-1]]
    same = {"step": None, "part": "", "phase": "script"}
    found = verdict(rank(0, stack=READS, **same), rank(1, stack=elsewhere, **same))
    assert named(found) == [0]  # the alarm's
    alike = verdict(rank(0, stack=READS, **same), rank(1, stack=READS, **same))
    assert named(alike) == []
    assert "none is in a collective" in alike.sentence


def test_a_process_that_has_ended_is_named_only_if_nobody_else_is() -> None:
    ended = rank(0, state="Z a zombie", python_silent_s=9.0)
    assert named(verdict(ended, rank(1, part="data", stack=READS))) == [
        1
    ]  # its collective timed out while it was looked at
    found = verdict(ended, rank(1))
    assert (named(found), found.kind) == ([0], "rank_died")


def on_node(node: int, found: RankEvidence) -> NodeEvidence:
    return NodeEvidence(node=node, host=f"n{node + 1}", time=104.0, ranks=[found])


HOSTS = {0: "n1", 1: "n2", 2: "n3"}


def test_evidence_of_a_node_that_the_driver_does_not_reach_is_taken_from_the_run_folder(tmp_path: Path) -> None:
    """What came over the control channel counts before what lies there; what is damaged does not count."""
    run = RunDir(tmp_path)
    run.events.mkdir()
    stalled = on_node(1, rank(1, calls=[call(1, done=True)], stack=READS, part="data"))
    save_evidence(run.hang_node(1, 1), stalled)
    save_evidence(run.hang_node(1, 0), on_node(0, rank(0, stack=READS, part="data", calls=[call(1, done=True)])))
    run.hang_node(1, 2).write_text('{"node": 2, "host"')
    sentence = HangAnalyzer(run, 1, HOSTS, 3)(ALARM, [on_node(0, rank(0, calls=[call(1, done=True), call(2)]))])
    report = read_json(run.hang_report(1))
    assert report["sentence"] == sentence
    assert [(w["rank"], w["host"]) for w in report["waiting"]] == [(0, "n1")]
    assert report["missing_hosts"] == ["n3"]
    assert [f["rank"] for f in report["stalled"]] == [1]
    assert report["files"] == str(run.hang(1))
    alone = RunDir(tmp_path / "b")
    alone.events.mkdir(parents=True)
    HangAnalyzer(alone, 1, HOSTS, 3)(ALARM, [on_node(0, rank(0, calls=[call(1, done=True), call(2)]))])
    assert read_json(alone.hang_report(1))["missing_hosts"] == ["n2", "n3"]


@pytest.mark.parametrize("refused", ["hang", "events"])
def test_the_verdict_is_kept_where_it_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    run = RunDir(tmp_path)
    (tmp_path / refused).write_text("a file is where the folder must be")
    with caplog.at_level(logging.WARNING):
        sentence = HangAnalyzer(run, 1, HOSTS, 3)(
            ALARM,
            [
                on_node(0, rank(0, calls=[call(1, done=True), call(2)])),
                on_node(1, rank(1, calls=[call(1, done=True)], stack=READS, part="data")),
                on_node(2, rank(2, calls=[call(1, done=True), call(2)])),
            ],
        )
    assert "rank 1 on n2" in sentence and "/home/u/rows.py:12 in read" in sentence
    assert "cannot be written" in caplog.text
    assert run.hang_report(1).exists() == (refused == "events")


def in_function(name: str, line: int) -> list[StackFrame]:
    c10d = "/v/site-packages/torch/distributed/distributed_c10d.py"
    return [
        StackFrame(file=c10d, line=2900, function=name),
        StackFrame(file="/home/u/p.py", line=line, function="<module>"),
    ]


SCRIPT: dict[str, Any] = {"phase": "script", "part": "", "step": None, "sequences": {"default_pg": 7}}
