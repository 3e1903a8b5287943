"""Who fell out, by each kind of evidence; and when it is better to name nobody."""

from __future__ import annotations

from typing import Any

from allranks.hang.judge import judge
from allranks.hang.records import Alarm, Call, Frame, HangReport, NodeEvidence, RankEvidence

ALARM = Alarm(node=0, host="n1", rank=0, phase="train", part="backward", step=6, since=100.0, time=104.0, limit_s=4.0)
WAITS = [
    Frame(file="/v/site-packages/torch/distributed/distributed_c10d.py", line=2900, function="all_reduce"),
    Frame(file="/home/u/train.py", line=30, function="step"),
    Frame(file="/home/u/train.py", line=80, function="<module>"),
]
READS = [
    Frame(file="/home/u/rows.py", line=12, function="read"),
    Frame(file="/home/u/train.py", line=25, function="step"),
    Frame(file="/home/u/train.py", line=80, function="<module>"),
]


def call(seq: int, op: str = "all_reduce", sizes: str = "[[8]]", *, done: bool = False) -> Call:
    return Call(group="0", seq=seq, op=op, sizes=sizes, done=done)


def rank(number: int, **more: Any) -> RankEvidence:
    usual: dict[str, Any] = {
        "pid": 100 + number,
        "state": "S sleeping",
        "phase": "train",
        "part": "backward",
        "step": 6,
    }
    usual |= {"stack": WAITS, "python_silent_s": 0.3}
    return RankEvidence(rank=number, **(usual | more))


def verdict(*ranks: RankEvidence, nodes: list[NodeEvidence] | None = None, world: int | None = None) -> HangReport:
    found = nodes or [NodeEvidence(node=i, host=f"n{i + 1}", time=104.0, ranks=[r]) for i, r in enumerate(ranks)]
    hosts = {i: f"n{i + 1}" for i in range(world or sum(len(n.ranks) for n in found))}
    return judge(found, hosts, ALARM, 1, 106.0)


def named(report: HangReport) -> list[int | None]:
    return [f.rank for f in report.fallen]


def test_a_rank_that_never_came_is_named_with_its_line() -> None:
    found = verdict(
        rank(0, calls=[call(1, done=True), call(2)]),
        rank(1, calls=[call(1, done=True)], stack=READS, part="data"),
        rank(2, calls=[call(1, done=True), call(2)]),
    )
    assert named(found) == [1]
    assert (found.fallen[0].host, found.fallen[0].where) == ("n2", "/home/u/rows.py:12 in read")
    assert found.kind == "dataloader_hang"
    assert "never came to collective 2" in found.sentence
    assert "rank 0 in /home/u/train.py:30 in step" in found.sentence
    assert [w.rank for w in found.waiting] == [0, 2]


def test_other_operations_and_other_sizes_are_a_mismatch() -> None:
    for odd in (call(2, "all_gather"), call(2, sizes="[[9]]")):
        found = verdict(rank(0, calls=[call(2)]), rank(1, calls=[call(2)]), rank(2, calls=[odd]))
        assert (named(found), found.kind) == ([2], "collective_mismatch")
        assert odd.op in found.fallen[0].why
    two = verdict(rank(0, calls=[call(2)]), rank(1, calls=[call(2, "all_gather")]))
    assert named(two) == [0, 1]  # one against one: which of them is wrong cannot be told
    assert "ranks 0, 1" in two.sentence
    early = verdict(rank(0, calls=[call(2)]), rank(1, calls=[call(2, "all_gather")], part="data"))
    assert named(early) == [1]  # but one that should be reading its data is


def test_a_gather_of_unequal_parts_is_none() -> None:
    found = verdict(*(rank(i, calls=[call(2, "all_gather", f"[[{i}]]")]) for i in range(3)))
    assert named(found) == []
    assert "none fell out" in found.sentence


def test_a_stopped_process_is_named_whatever_the_calls_say() -> None:
    stopped = rank(
        1,
        state="T stopped by a signal (SIGSTOP or SIGTSTP)",
        stack=[],
        no_stack="the process did not answer",
        calls=[],
        python_silent_s=9.0,
    )
    found = verdict(rank(0, calls=[call(2)]), stopped)
    assert named(found) == [1]
    assert found.fallen[0].why == "its process 101 is stopped by a signal (SIGSTOP or SIGTSTP)"
    assert found.fallen[0].why in found.sentence
    assert "did not show where it stands" in found.sentence


def test_a_process_whose_interpreter_is_held_is_named() -> None:
    held = rank(1, stack=READS, calls=[], python_silent_s=8.0)
    assert named(verdict(rank(0, calls=[call(2)]), held)) == [1]
    waiting = rank(1, calls=[call(2)], python_silent_s=8.0)
    assert named(verdict(rank(0, calls=[call(2)]), waiting)) == []


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


def test_a_node_that_does_not_answer_is_named() -> None:
    found = verdict(rank(0, calls=[call(2)]), rank(1, calls=[call(2)]), world=3)
    assert named(found) == [2]
    assert found.missing_hosts == ["n3"]
    assert "n3" in found.sentence


def test_ranks_that_are_in_no_collective() -> None:
    elsewhere = [Frame(file="/home/u/other.py", line=3, function="compute"), READS[-1]]
    same = {"step": None, "part": "", "phase": "script"}
    found = verdict(rank(0, stack=READS, **same), rank(1, stack=elsewhere, **same))
    assert named(found) == [0]  # the alarm's
    alike = verdict(rank(0, stack=READS, **same), rank(1, stack=READS, **same))
    assert named(alike) == []
    assert "none is in a collective" in alike.sentence


def test_where_the_lone_rank_stands_is_told() -> None:
    found = verdict(rank(0, stack=READS))
    assert named(found) == []
    assert "/home/u/rows.py:12 in read" in found.sentence


def test_a_process_that_has_ended_is_named_only_if_nobody_else_is() -> None:
    ended = rank(0, state="Z a zombie", python_silent_s=9.0)
    assert named(verdict(ended, rank(1, part="data", stack=READS))) == [
        1
    ]  # its collective timed out while it was looked at
    found = verdict(ended, rank(1))
    assert (named(found), found.kind) == ([0], "rank_died")
