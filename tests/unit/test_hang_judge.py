"""Which rank a hang is attributed to, by each kind of evidence; and when it is better to name nobody."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.analysis.flight_recorder import CollectiveCall
from allranks.analysis.nccl_ras import RasFinding, RasRank
from allranks.analysis.stacks import StackFrame
from allranks.launch.monitor.evidence import save_evidence
from allranks.launch.monitor.hang_rules import HangAnalyzer, analyze_hang
from allranks.launch.monitor.records import HangAlarm, HangReport, NodeEvidence, RankEvidence
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir

PLACE: Any = {"node": 0, "host": "n1", "rank": 0, "phase": "train", "part": "backward", "step": 6}
ALARM = HangAlarm(**PLACE, since=100.0, time=104.0, limit_s=4.0)


def frames(*places: str) -> list[StackFrame]:
    parts = (place.rsplit(":", 2) for place in places)
    return [StackFrame(file=file, line=int(line), function=function) for file, line, function in parts]


def call(seq: int, op: str = "all_reduce", sizes: str = "[[8]]", **more: Any) -> CollectiveCall:
    return CollectiveCall(**{"group": "0", "seq": seq, "op": op, "sizes": sizes, "done": False, **more})


MAIN = "/home/u/train.py:80:<module>"
C10D = "/v/site-packages/torch/distributed/distributed_c10d.py:2900:all_reduce"
READS = frames("/home/u/rows.py:12:read", "/home/u/train.py:25:step", MAIN)
USUAL = RankEvidence(
    rank=0, pid=100, state="S sleeping", phase="train", part="backward", step=6, silent_s=6.0, python_silent_s=0.3,
    python_beats=40, stack=frames(C10D, "/home/u/train.py:30:step", MAIN),
)  # fmt: skip

# What differs from the usual evidence of a rank
Evidence = dict[str, Any]
DONE = call(1, done=True)
SECOND: Evidence = {"calls": [call(2)]}
INSIDE: Evidence = {"calls": [DONE, call(2)]}
BEHIND: Evidence = {"calls": [DONE], "stack": READS}
OTHER: Evidence = {"calls": [call(2, "all_gather")]}
DATA: Evidence = {"part": "data", "stack": READS}
SCRIPT: Evidence = {"phase": "script", "part": "", "step": None}
STATES = ("D in uninterruptible sleep", "Z a zombie")
ENDED: Evidence = {"state": STATES[1], "python_silent_s": 9.0}
HELD: Evidence = {"python_silent_s": 8.0, "silent_s": 8.0}


def rank(number: int, **more: Any) -> RankEvidence:
    return msgspec.structs.replace(USUAL, **{"rank": number, "pid": 100 + number, **more})


def on_node(node: int, *ranks: RankEvidence, **more: Any) -> NodeEvidence:
    return NodeEvidence(node=node, host=f"n{node + 1}", time=104.0, ranks=list(ranks), **more)


def verdict(*ranks: Evidence, nodes: list[NodeEvidence] | None = None, world: int | None = None) -> HangReport:
    nodes = nodes or [on_node(i, rank(i, **more)) for i, more in enumerate(ranks)]
    hosts = {i: f"n{i + 1}" for i in range(world or sum(len(n.ranks) for n in nodes))}
    return analyze_hang(nodes, hosts, ALARM, 1, 106.0)


def named(report: HangReport) -> list[int | None]:
    return [f.rank for f in report.stalled]


def test_a_rank_that_never_came_is_named_with_its_line() -> None:
    report = verdict(INSIDE, {**BEHIND, "part": "data"}, INSIDE)
    assert (named(report), report.kind, [w.rank for w in report.waiting]) == ([1], "dataloader_hang", [0, 2])
    assert (report.stalled[0].host, report.stalled[0].where) == ("n2", "/home/u/rows.py:12 in read")
    assert "never joined collective 2" in report.sentence
    assert report.waiting[0].call == "collective 2 of group 0: all_reduce [[8]]"
    assert "rank 0 in /home/u/train.py:30 in step" in report.sentence


def test_other_operations_and_other_sizes_are_a_mismatch() -> None:
    for odd in (call(2, "all_gather"), call(2, sizes="[[9]]")):
        report = verdict(SECOND, SECOND, {"calls": [odd]})
        assert (named(report), report.kind) == ([2], "collective_mismatch")
        assert odd.op in report.stalled[0].why
    two = verdict(SECOND, OTHER)
    assert named(two) == [0, 1] and "ranks 0, 1" in two.sentence  # which of two is wrong cannot be decided
    early = verdict(SECOND, {**OTHER, "part": "data"})  # but one that should be reading its data is
    assert (named(early), early.kind) == (
        [1],
        "collective_mismatch",
    )  # what it called is wrong, whatever it was to read


def test_the_first_collective_that_did_not_end_decides_in_each_group_by_itself() -> None:
    both = {"calls": [call(2), call(3)]}
    report = verdict(both, BEHIND, both)
    assert named(report) == [1] and "collective 2 of group 0" in report.sentence
    other = call(9, "broadcast", "[[2]]", group="1", done=True)
    report = verdict(*({**more, "calls": [other, more["calls"][0]]} for more in (SECOND, BEHIND, SECOND)))
    assert named(report) == [1]  # that it is far in another group does not help it
    assert "never joined collective 2 of group 0" in report.sentence
    report = verdict({"calls": [call(2, "broadcast", done=True)]}, BEHIND, {"calls": [call(2, "broadcast")]})
    assert named(report) == [1]  # one that sends need not wait for those that receive
    assert "in which rank 2 waits" in report.sentence


def test_what_the_lone_rank_does_gives_the_failure_its_name() -> None:
    def kind(**more: Any) -> str:
        return verdict({}, {"part": "forward", "stack": READS, **more}, {}).kind

    saves = frames("/home/u/train.py:5:f", "/v/torch/serialization.py:5:save")
    loads = frames("/home/u/train.py:5:f", "/v/torch/utils/data/dataloader.py:5:poll")
    assert kind() == "collective_mismatch"
    assert kind(part="data") == kind(stack=loads) == "dataloader_hang"
    assert kind(phase="save", part="") == kind(stack=saves) == "checkpoint_collective"
    many = verdict(DATA, DATA, {}, {})
    assert (named(many), many.kind) == ([0, 1], "collective_mismatch")


def test_how_far_a_rank_is_goes_by_phase_then_by_part() -> None:
    for earlier, part, later in (("train", "control", "evaluate"), ("evaluate", "", "save"), ("build", "", "train")):
        ahead = {"phase": later, "part": ""}
        assert named(verdict(ahead, ahead, {"phase": earlier, "part": part})) == [2], (earlier, later)
    ahead = {"phase": "evaluate", "part": ""}  # the other is in a step's beginning, or back from the evaluation
    assert named(verdict({"part": ""}, ahead, ahead)) == []
    for earlier, later in (("data", "forward"), ("forward", "backward"), ("backward", "optimizer")):
        assert named(verdict({"part": later}, {"part": later}, {"part": earlier})) == [2], earlier
    why = verdict({}, {}, {"part": "data"}).stalled[0].why
    assert why == "it is still in train, step 7, data, other ranks are ahead"


def test_processes_that_cannot_run() -> None:
    disk = {**SECOND, "state": "D in uninterruptible sleep (waits for a disk, a file system or a driver)"}
    report = verdict(SECOND, disk)
    assert (named(report), report.kind) == ([1], "collective_hang") and "waits for a disk" in report.sentence
    for share, state in ((0.97, "running at 97% of a core"), (0.3, "running")):
        assert verdict({}, {**DATA, "state": "R running", "cpu_share": share}, {}).stalled[0].state == state
    stopped = {"state": "T stopped by a signal (SIGSTOP or SIGTSTP)", "stack": [], "calls": [], "python_silent_s": 9.0}
    report = verdict(SECOND, stopped)  # it is named whatever the calls say
    assert named(report) == [1]
    assert report.stalled[0].why == "its process 101 is stopped by a signal (SIGSTOP or SIGTSTP)"
    assert report.stalled[0].why in report.sentence and ". Its position is unknown. " in report.sentence


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (({}, {"stack": []}, {}), []),  # nothing is known of it, so it is not held to be elsewhere
        (({}, {}, {}), []),
        (({}, {**DATA, "part": "backward", "step": 5}, {}), [1]),
        (({}, DATA, {}), [1]),
        (({"part": "", "phase": "save"}, {"part": "", "phase": "save", "stack": READS}), [1]),
        (({"step": 7}, {}, {}), []),  # one is ahead, nobody fell behind
        (({**SECOND, "state": STATES[0]}, {**SECOND, "state": STATES[0]}), []),  # the state tells them not apart
        (({**SECOND, "state": STATES[1]}, {**SECOND, "state": STATES[1]}), []),
        ((ENDED, DATA), [1]),  # its collective timed out while it was looked at
        ((SECOND, {**SECOND, **HELD}), []),  # it is in the collective
        (({}, HELD), []),
        (({**SCRIPT, "stack": []}, {**SCRIPT, "stack": READS}), []),  # the alarm's rank, which showed nothing
        (({}, {}, SCRIPT), []),  # its phase cannot be compared with theirs
        ((SECOND, {"calls": [call(2, sizes="")]}, SECOND), []),
        ((SECOND, {**SECOND, "stack": READS}, SECOND), []),  # the host goes on, the GPU waits
        (({**SCRIPT, "stack": READS}, {**SCRIPT, "stack": frames("/home/u/other.py:3:compute", MAIN)}), [0]),  # alarm's
    ],
)
def test_a_rank_is_named_only_by_what_sets_it_apart(ranks: tuple[Evidence, ...], names: list[int]) -> None:
    assert named(verdict(*ranks)) == names


def test_sentences_and_kinds_where_no_call_sets_a_rank_apart() -> None:
    splits = verdict(*({"calls": [call(2, "all_to_all", f"[[{i}]]")]} for i in range(3)))  # unequal, as they may be
    assert named(splits) == [] and "none stalled" in splits.sentence
    alike = verdict({**SCRIPT, "stack": READS}, {**SCRIPT, "stack": READS})
    assert named(alike) == [] and "none is in a collective" in alike.sentence
    left = verdict({}, {"phase": "done", "part": "", "stack": [], "state": "gone"})
    assert named(left) == [1] and "has exited, cleanly, while others continue" in left.sentence
    died = verdict(ENDED, {})
    assert (named(died), died.kind) == ([0], "rank_died")


def test_what_else_stands_out_on_a_node_is_noted() -> None:
    def notes(**more: Any) -> list[str]:
        usual = {"load1": 9.0, "cpus": 8, "memory_total_bytes": 100, "memory_available_bytes": 50}
        return verdict(nodes=[on_node(0, rank(0), **{**usual, **more})]).notes

    assert notes() == []
    assert notes(memory_available_bytes=2) == ["n1: only 2.0% of its memory is available"]
    assert notes(load1=17.0) == ["n1: load 17 on 8 cores"]
    assert notes(blocked=["41 cp nfs_wait"]) == ["n1: processes in uninterruptible sleep: 41 cp nfs_wait"]


def test_a_process_whose_interpreter_is_held_is_named() -> None:
    def why(**more: Any) -> str:
        report = verdict(SECOND, {**HELD, "stack": READS, **more})
        return report.stalled[0].why if report.stalled else ""

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


def test_ranks_and_nodes_that_show_nothing() -> None:
    report = analyze_hang([on_node(0, rank(0))], {0: "n1", 1: "n1"}, ALARM, 1, 106.0)
    assert (named(report), report.missing_hosts) == ([], [])
    assert report.notes == ["rank 1: no heartbeat was written, so its state is unknown"]
    report = verdict(SECOND, SECOND, world=3)
    assert (named(report), report.missing_hosts) == ([2], ["n3"]) and "n3" in report.sentence
    assert named(verdict(INSIDE, BEHIND, world=3)) == [1]  # what was seen comes before a node that does not answer


def test_a_node_whose_network_is_down_is_named_though_all_wait_alike() -> None:
    def node(number: int, *, up: bool = True, meets: bool | None = True) -> NodeEvidence:
        network = {"interface": "eth0", "interfaces": {"eth0": {"up": up}}, "meets": meets}
        return on_node(number, rank(number, **SECOND), **network)

    def of(*meets: bool) -> list[int | None]:
        return named(verdict(nodes=[node(i, meets=reached) for i, reached in enumerate(meets)]))

    assert named(verdict(nodes=[node(0), node(1, up=False, meets=False), node(2)])) == [1]
    assert (of(True, True, False), of(True, False, False), of(True, True, True)) == ([2], [0], [])
    assert of(False, False, True) == [0, 1]
    assert of(False, False, False) == []  # perhaps the one place is gone
    alone = msgspec.structs.replace(node(0, up=False), ranks=[rank(i, **SECOND) for i in (0, 1)])
    assert named(verdict(nodes=[alone])) == []  # ranks of one node need none


HOSTS = {0: "n1", 1: "n2", 2: "n3"}


def test_evidence_of_a_node_that_the_driver_does_not_reach_is_taken_from_the_run_folder(tmp_path: Path) -> None:
    """What came over the control channel counts before what lies there; what is damaged does not count."""
    run, alone = RunDir(tmp_path), RunDir(tmp_path / "b")
    stalled = {**BEHIND, "part": "data"}
    for folder in (run, alone):
        folder.events.mkdir(parents=True)
    for n in (0, 1):
        save_evidence(run.hang_node(1, n), on_node(n, rank(n, **stalled)))
    run.hang_node(1, 2).write_text('{"node": 2, "host"')
    sentence = HangAnalyzer(run, 1, HOSTS, 3)(ALARM, [on_node(0, rank(0, **INSIDE))])
    report = read_json(run.hang_report(1))
    assert (report["sentence"], report["files"]) == (sentence, str(run.hang(1)))
    assert [(w["rank"], w["host"]) for w in report["waiting"]] == [(0, "n1")]
    assert (report["missing_hosts"], [f["rank"] for f in report["stalled"]]) == (["n3"], [1])
    HangAnalyzer(alone, 1, HOSTS, 3)(ALARM, [on_node(0, rank(0, **INSIDE))])
    assert read_json(alone.hang_report(1))["missing_hosts"] == ["n2", "n3"]


@pytest.mark.parametrize(
    ("evidence", "findings", "expected"),
    [
        ({}, [("behind", 2, 102)], ([2], "NCCL RAS: text")),
        ({}, [("uneven", 0, 100), ("missing", 5, 101)], ([1], "NCCL RAS: text")),  # a rank of another communicator
        ({}, [("behind", 2, 992)], ([], None)),  # another job's
        ({}, [("uneven", 0, 100), ("missing", 1, 992)], ([], "NCCL RAS: text")),  # a process that is no rank
        ({}, [("behind", 0, 100), ("behind", 1, 101)], ([0], "NCCL RAS: text")),
        (BEHIND, [("missing", 1, 101)], ([1], "NCCL RAS names it, too")),
    ],
)
def test_ras_supports_the_verdict_or_decides_where_nothing_else_does(
    evidence: Evidence, findings: list[tuple[str, int, int]], expected: tuple[list[int], str | None]
) -> None:
    ras = [RasFinding(kind=kind, text="text", ranks=[RasRank(r, pid)]) for kind, r, pid in findings]
    inside = {"calls": []} if not evidence else INSIDE
    second = on_node(1, rank(1, **{**inside, **evidence}), rank(2, **inside))
    report = verdict(nodes=[on_node(0, rank(0, **inside), ras=ras), second])
    assert named(report) == expected[0]
    assert (expected[1] or "NCCL RAS") in f"{report.sentence} {report.notes}" or expected[1] is None
    assert bool(report.notes) == (expected[1] is not None)


@pytest.mark.parametrize("refused", ["hang", "events"])
def test_an_unwritable_verdict_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: str) -> None:
    run, evidence = RunDir(tmp_path), (INSIDE, {**BEHIND, "part": "data"}, INSIDE)
    (tmp_path / refused).write_text("a file is where the folder must be")
    with caplog.at_level(logging.WARNING):
        nodes = [on_node(i, rank(i, **more)) for i, more in enumerate(evidence)]
        sentence = HangAnalyzer(run, 1, HOSTS, 3)(ALARM, nodes)
    assert "rank 1 on n2" in sentence and "/home/u/rows.py:12 in read" in sentence
    assert "cannot be written" in caplog.text
    assert run.hang_report(1).exists() == (refused == "events")
