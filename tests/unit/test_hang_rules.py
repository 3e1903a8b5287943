"""Rules of hangs: which rank is named by each kind of evidence, and when nobody is; which sizes of a collective must
agree between ranks; and when a user's own program hangs, with a clock set by hand."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.analysis.diagnose import diagnose
from allranks.analysis.flight_recorder import (
    CollectiveCall,
    OpenCollective,
    RecordedCall,
    open_collectives,
    read_flight_record,
)
from allranks.analysis.stacks import StackFrame
from allranks.launch.monitor.evidence import save_evidence
from allranks.launch.monitor.hang_rules import HangAnalyzer, analyze_hang, due_alarm
from allranks.launch.monitor.hang_watch import RankSample, ScriptSilence, Silence
from allranks.launch.monitor.procfs import ProcessWork
from allranks.launch.monitor.records import HangAlarm, HangReport, NodeEvidence, RankEvidence
from allranks.planning.records import Limits
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from allranks.utils.collectives import size_rule

ALARM = HangAlarm(
    node=0, host="n1", rank=0, phase="train", part="backward", step=6, since=100.0, time=104.0, limit_s=4.0
)


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
    # what it called is wrong, whatever it was to read
    assert (named(early), early.kind) == ([1], "collective_mismatch")


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
        spins = {**DATA, "state": "R running", "cpu_share": share}
        assert verdict({}, spins, {}).stalled[0].state == state
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


@pytest.mark.parametrize("refused", ["hang", "events"])
def test_verdicts_that_cannot_be_written_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: str) -> None:
    run, evidence = RunDir(tmp_path), (INSIDE, {**BEHIND, "part": "data"}, INSIDE)
    (tmp_path / refused).write_text("a file is where the folder must be")
    with caplog.at_level(logging.WARNING):
        nodes = [on_node(i, rank(i, **more)) for i, more in enumerate(evidence)]
        sentence = HangAnalyzer(run, 1, HOSTS, 3)(ALARM, nodes)
    assert "rank 1 on n2" in sentence and "/home/u/rows.py:12 in read" in sentence
    assert "cannot be written" in caplog.text
    assert run.hang_report(1).exists() == (refused == "events")


# name, (input sizes, output sizes) of rank 0 and of rank 1. Those of gloo as torch 2.13 records them; those of nccl as
# in torch's own tests of its flight-recorder analyzer
Sizes = tuple[list[list[int]], list[list[int]]]
ALLOWED: dict[str, tuple[str, Sizes, Sizes]] = {
    "gather": ("gloo:gather", ([[3]], [[2, 3]]), ([[3]], [])),
    "scatter": ("gloo:scatter", ([[2, 3]], [[3]]), ([], [[3]])),
    "uneven splits": ("nccl:all_to_all", ([[7]], [[5]]), ([[4]], [[6]])),
    "uneven list": ("nccl:ALLGATHER_coalesced", ([], []), ([], [])),
    "coalesced": ("nccl:coalesced", ([[2]], [[2]]), ([[3]], [[3]])),
    "barrier": ("gloo:barrier", ([], []), ([], [])),
    "unknown": ("other:fused_op", ([[2]], [[2]]), ([[3]], [[3]])),
}
FORBIDDEN: dict[str, tuple[str, Sizes, Sizes]] = {
    "FSDP gathers": ("nccl:_all_gather_base", ([[512]], [[1024]]), ([[480]], [[960]])),
    "FSDP2 gathers": ("nccl:all_gather_into_tensor", ([[512]], [[1024]]), ([[480]], [[960]])),
    "FSDP reduces": ("nccl:_reduce_scatter_base", ([[1024]], [[512]]), ([[960]], [[480]])),
    "ZeRO": ("nccl:reduce_scatter_tensor_coalesced", ([[8], [8]], [[4], [4]]), ([[8], [6]], [[4], [3]])),
    "list": ("gloo:all_gather", ([[3]], [[2, 3]]), ([[4]], [[2, 4]])),
    "all-reduce": ("gloo:all_reduce", ([[6]], [[6]]), ([[8]], [[8]])),
    "broadcast": ("gloo:broadcast", ([[6]], [[6]]), ([[8]], [[8]])),
    "gather": ("gloo:gather", ([[3]], [[2, 3]]), ([[4]], [])),
    "scatter": ("gloo:scatter", ([[2, 3]], [[3]]), ([], [[4]])),
}


def _records(folder: Path, name: str, *ranks: Sizes) -> list[list[RecordedCall]]:
    """Write the dumps of ranks whose second call has these sizes; return the calls that are read from them."""
    usual: dict[str, Any] = {"process_group": ["0", "default_pg"], "is_p2p": False}
    usual["frames"] = [{"name": "step", "filename": "/home/u/train.py", "line": 30}]
    done = usual | {"collective_seq_id": 1, "profiling_name": "gloo:barrier", "retired": True, "state": "scheduled"}
    second = usual | {"collective_seq_id": 2, "profiling_name": name, "state": "started"}
    paths = [folder / f"trace_rank_{rank}.json" for rank in range(len(ranks))]
    for path, (inputs, outputs) in zip(paths, ranks, strict=True):
        entries = [done, {**second, "input_sizes": inputs, "output_sizes": outputs}]
        path.write_text(json.dumps({"pg_config": {}, "entries": entries}))
    return [read_flight_record(path).calls for path in paths]


def _compare(ranks: list[list[RecordedCall]]) -> OpenCollective[RecordedCall]:
    (opened,) = open_collectives(dict(enumerate(ranks)))
    return opened


CASES = [(rule, name) for rule, cases in (("hang", ALLOWED), ("mismatch", FORBIDDEN)) for name in cases]


@pytest.mark.parametrize(("rule", "name"), CASES)
def test_only_sizes_that_must_be_equal_are_a_mismatch(tmp_path: Path, rule: str, name: str) -> None:
    ranks = _records(tmp_path, *(ALLOWED if rule == "hang" else FORBIDDEN)[name])
    assert _compare(ranks).differs == (rule == "mismatch")
    assert [f.id for f in diagnose([tmp_path]).findings] == [f"collective_{rule}"]
    watched = verdict(*({"stack": [], "calls": [c.without_stack() for c in calls]} for calls in ranks))
    assert watched.kind == f"collective_{rule}"


def test_the_rank_with_the_other_size_is_named_with_both_sizes(tmp_path: Path) -> None:
    name, even, odd = FORBIDDEN["FSDP gathers"]
    opened = _compare(_records(tmp_path, name, even, odd, even))
    assert opened.rarest == [1]
    assert opened.describe(opened.calls[1]) == "_all_gather_base [[480]]"
    assert opened.describe(opened.contrast(1)) == "_all_gather_base [[512]]"
    finding = diagnose([tmp_path]).findings[0]
    assert finding.rank == 1 and "rank 1: _all_gather_base [[480]] in /home/u/train.py:30:step" in finding.cause


def test_sizes_that_were_not_recorded_are_no_mismatch(tmp_path: Path) -> None:
    call = _compare(_records(tmp_path, *FORBIDDEN["all-reduce"])).calls[0]
    calls = {0: [call], 1: [RecordedCall(group="0", seq=2, op="all_reduce", sizes="", done=False, state="", frames=[])]}
    assert not next(open_collectives(calls)).differs


def test_all_spellings_of_a_name_have_one_rule() -> None:
    spellings = "nccl:_all_gather_base _ALLGATHER_BASE c10d::_allgather_base_ _c10d_functional::all_gather_into_tensor"
    for name in spellings.split():
        rule = size_rule(name)
        assert rule is not None and rule.inputs and rule.outputs and rule.even_calls, name


IN_BARRIER = ("/v/torch/distributed/distributed_c10d.py:barrier", "/u/train.py:main")
ASLEEP = ("/u/rows.py:read", "/u/train.py:main")
SPINNING = ("/u/train.py:spin",)
BUILDING = ("/usr/lib/python3.11/subprocess.py:wait", "/v/torch/utils/cpp_extension.py:_run_ninja_build")
AWAITS_BUILD = ("/v/site-packages/torch/utils/file_baton.py:wait", "/v/torch/utils/cpp_extension.py:_jit_compile")
LIMITS = Limits(step_s=20.0, long_s=60.0)
Ranks = tuple[int, ...]


def silence(
    *stacks: tuple[str, ...], working: Ranks = (), speaking: Ranks = (), until_s: int = 100, device: str = "cpu",
    collectives: bool = True, changing: Ranks = (), compiling: Ranks = (),
) -> tuple[float, Silence] | None:  # fmt: skip
    """Return the first silence and its time: one look a second at ranks that stop making progress at 3 s."""
    script = ScriptSilence(LIMITS, device)
    for second in range(until_s):
        samples = {
            rank: RankSample(
                progress=second if rank in speaking else min(second, 3),
                work=ProcessWork(second * (rank in working), second * (rank in compiling), 0),
                stack=(f"/u/part{second}.py:f", *stack) if rank in changing else stack,
                others_needed=collectives,
            )
            for rank, stack in enumerate(stacks)
        }
        if reported := script.look(float(second), 0.0, samples):
            return float(second), reported
    return None


def test_the_shorter_limit_is_for_ranks_that_are_stuck_and_the_longer_one_for_the_others() -> None:
    stuck: dict[str, Any] = {"since": 3.0, "limit_s": 20.0, "stuck": True}
    other: dict[str, Any] = {"since": 3.0, "limit_s": 60.0, "stuck": False}
    assert silence(IN_BARRIER, ASLEEP) == (24.0, Silence(rank=1, waiting=True, **stuck))
    assert silence(IN_BARRIER, SPINNING, working=(1,)) == (64.0, Silence(rank=1, waiting=True, **other))
    # a build may be that of another job; a lock that nobody holds is reported all the same
    assert silence(AWAITS_BUILD, AWAITS_BUILD) == (64.0, Silence(rank=0, waiting=True, **other))
    changing = silence(ASLEEP, ASLEEP, changing=(0,))  # idle ranks, of which one has another stack each time
    assert changing is not None and not changing[1].stuck


LOGS = ("/u/train.py:log",)


@pytest.mark.parametrize(
    ("stacks", "more"),
    [
        ((IN_BARRIER, ASLEEP), {"speaking": (1,)}),  # a line or report of any rank is progress of all
        ((ASLEEP, IN_BARRIER), {"speaking": (0,)}),
        ((ASLEEP, ASLEEP), {"collectives": False}),
        ((LOGS, LOGS), {"working": (0, 1), "until_s": 30}),
        ((LOGS, LOGS), {"working": (0, 1), "changing": (0,), "device": "cuda", "until_s": 30}),
        *(
            ((BUILDING, other), {"compiling": (0,), "device": device, "until_s": 60})  # it builds an extension
            for other in (AWAITS_BUILD, IN_BARRIER)
            for device in ("cpu", "cuda")
        ),
    ],
)
def test_a_program_that_makes_progress_or_calls_no_collectives_is_not_silent(
    stacks: tuple[tuple[str, ...], ...], more: dict[str, Any]
) -> None:
    assert silence(*stacks, **more) is None


def test_on_a_gpu_a_thread_that_waits_for_it_is_not_at_work() -> None:
    assert silence(LOGS, LOGS, working=(0, 1), device="cuda", until_s=30) is not None


def test_the_limit_is_10_times_the_median_interval_of_progress() -> None:
    script = ScriptSilence(LIMITS, "cpu")
    for second in range(0, 60, 5):
        sample = RankSample(progress=second, work=ProcessWork(), stack=IN_BARRIER, others_needed=True)
        script.look(float(second), 0.0, {0: sample})
    assert script.limit_s == 50.0


@pytest.mark.parametrize(
    ("alarms", "whole_job", "due"),
    [
        # stuck, waiting of each node
        ([(True, True)], True, False),  # the other node makes progress
        ([(True, True), (True, False)], True, True),
        ([(True, True), (False, False)], True, True),  # one waits for another that loops
        ([(False, False), (False, False)], True, False),  # all compute, nobody waits
        ([(True, False)], False, True),  # allranks' own training
    ],
)
def test_a_program_hangs_if_all_nodes_are_silent(alarms: list[tuple[bool, bool]], whole_job: bool, due: bool) -> None:
    of_node = [{"stuck": stuck, "waiting": waiting, "whole_job": whole_job} for stuck, waiting in alarms]
    assert (due_alarm([msgspec.structs.replace(ALARM, **more) for more in of_node], 2) is not None) == due
