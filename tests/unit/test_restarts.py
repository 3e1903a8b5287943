"""What follows a failed attempt, by its cause."""

from pathlib import Path

import msgspec
import pytest

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.analysis.diagnose.run_outcome import failure_of
from allranks.errors import SpecError
from allranks.launch import restarts
from allranks.launch.restarts import CAUSES, FailedAttempt, Restart, cause_of, decide, decide_and_record, read_restarts
from allranks.launch.slurm.liveness import smaller_request
from allranks.nodes.preflight.runner import choose_nodes
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.spec.records import ClusterSpec, SlurmSpec
from tests.conftest import shared

NODE, KILLED, OWN = "node_unhealthy", "rank_died", "application_error"
TRAINING = {"model": {"name": "tiny:mistral"}, "data": {"source": "x"}}


def after(failure: str, *before: tuple[str, int | None], limit: int = 3, step: int | None = None) -> Restart:
    """The decision after `failure`, with a checkpoint of `step`, and earlier restarts (failure, step)."""
    earlier = [decide(FailedAttempt(attempt=i, failure=name, message="m", after_step=at), [], 9)
               for i, (name, at) in enumerate(before, 1)]  # fmt: skip
    failed = FailedAttempt(attempt=len(before) + 1, failure=failure, message="m", rank=1, host="n2", after_step=step)
    return decide(failed, earlier, limit)


def test_every_class_of_the_table_exists_once() -> None:
    named = [name for names in CAUSES.values() for name in names]
    assert len(named) == len(set(named)) and set(named) <= CATALOGUE.keys()
    assert cause_of("a_new_class") == cause_of("loss_not_finite") == cause_of("disk_full") == "deterministic"


@pytest.mark.parametrize(
    ("one", "action", "said"),
    [
        (after(NODE), "restart", "infrastructure"),
        (after("stale_file_handle"), "restart", "transient"),
        (after(KILLED), "restart", "cause unknown"),
        (after(OWN), "stop", "would end the same way"),
        (after("slurm_cancelled"), "stop", "ended from outside"),
        (after(NODE, limit=0), "stop", "max (0)"),
        (after(NODE, (NODE, 2), (NODE, 4), (NODE, 6), step=8), "stop", "max (3)"),
        (after(NODE, (NODE, 2), step=4), "restart", "infrastructure"),
        (after(NODE, (NODE, 2), step=2), "stop", "no checkpoint was written in between"),
        (after(NODE, (NODE, None)), "stop", "no checkpoint was written in between"),
        (after(NODE, (KILLED, None)), "restart", "infrastructure"),
        (after(KILLED, (KILLED, 2), step=4), "stop", "once for an unknown cause"),
        (after("collective_hang", (KILLED, 2), (NODE, 4), step=6), "stop", "once for an unknown cause"),
    ],
)
def test_the_cause_decides(one: Restart, action: str, said: str) -> None:
    assert one.action == action and said in one.reason
    assert (one.rank, one.host, one.message) == (1, "n2", "m")


@pytest.mark.parametrize(
    ("failure", "stalled", "spares", "left_out"),
    [
        (NODE, [], ["n4"], ["n2"]),
        ("gpu_hardware_fault", [], ["n4", "n5"], ["n2"]),
        (NODE, [], [], []),
        (KILLED, [], ["n4"], []),
        ("rdma_unreachable", [], ["n4"], []),
        ("collective_hang", ["n3", "n3"], ["n4"], ["n3"]),
        ("collective_hang", ["n2", "n3"], ["n4", "n5"], []),
        ("collective_mismatch", ["n3"], ["n4"], []),
    ],
)
def test_a_node_is_left_out_on_hard_evidence_if_a_spare_one_replaces_it(
    tmp_path: Path, failure: str, stalled: list[str], spares: list[str], left_out: list[str]
) -> None:
    run = RunDir(tmp_path)
    if stalled:
        run.hang_report(1).parent.mkdir(parents=True)
        run.hang_report(1).write_bytes(msgspec.json.encode({"stalled": [{"host": host} for host in stalled]}))
    metrics = {"failure": {"id": failure, "rank": 1, "host": "n2"}, "message": "m"}
    one = decide_and_record(run, parse_spec(TRAINING), 1, metrics, [], spares)
    assert one is not None and one.left_out == left_out and read_restarts(run) == [one]
    assert ("replaced by spare n4" in one.reason) == bool(left_out)
    metrics = {**metrics, "failure": {"id": NODE}}
    lost = decide_and_record(run, parse_spec(TRAINING), 2, metrics, [], spares, {"n1": "gone"})
    assert lost is not None and lost.left_out == (["n1"] if spares else [])


ABORTED = "rank 0 on n1 failed after step 12: ended by SIGABRT: watchdog. Log: /r"
NCCL = "rank 0 on n1 failed after step 12: DistBackendError: NCCL error in: p.cpp:2452, unhandled system error"
REMOTE = f"{NCCL}; last error: socketProgress: Connection closed by remote peer n3<40002>"
PORT = "n3:7:9 [0] transport/net_ib.cc:139 NCCL WARN NET/IB : mlx5_0:1 Got async event : port error"
PEER = "{0}:7:9 [0] transport/net_ib.cc:13 NCCL WARN NET/IB : Got completion from peer 10.0.0.{1}<47011> with error 12"
BUS = "[ 7211.44] NVRM: Xid (PCI:0000:c1:00): 79, pid=2201, name=python, GPU has fallen off the bus."
WENT_ON = "".join(f"step {i} loss 0.5\n" for i in range(13, 30))


@pytest.mark.parametrize(
    ("message", "logs", "failure", "left_out"),
    [
        (ABORTED, {"n3": "dev016.log"}, "gpu_hardware_fault", ["n3"]),
        (REMOTE, {"n3": BUS}, "gpu_hardware_fault", ["n3"]),
        (REMOTE, {"n2": BUS, "n3": BUS}, "peer_died_first", []),
        (REMOTE, {"n3": f"{BUS}\n{WENT_ON}"}, "peer_died_first", []),
        (REMOTE, {"n3": PORT}, "broken_node_network", ["n3"]),
        (NCCL, {"n3": PORT, "n1": PEER.format("n1", 3)}, "broken_node_network", ["n3"]),
        (NCCL, {"n1": PEER.format("n1", 3), "n2": PEER.format("n2", 3), "n3": PEER.format("n3", 1)},
         "broken_node_network", ["n3"]),
        (NCCL, {"n1": PEER.format("n1", 3), "n3": PEER.format("n3", 1)}, "application_error", []),  # one of the two
        (f"{NCCL}; last error: Call to ibv_modify_qp failed with 110 Connection timed out", {}, "rdma_unreachable", []),
        (f"{NCCL}; last error: Connect to 10.0.0.3<41234> failed : No route to host", {}, "peer_died_first", []),
        (NCCL, {}, "application_error", []),
        ("rank 0 on n1 failed after step 12: ValueError: x", {"n3": BUS}, "application_error", None),
        ("rank 0 on n1 failed after step 12: ended with exit code 0 before it had finished its work", {},
         "application_error", None),
    ],
)  # fmt: skip
def test_an_error_of_nccl_leaves_the_node_out_whose_log_shows_the_fault(
    tmp_path: Path, message: str, logs: dict[str, str], failure: str, left_out: list[str] | None
) -> None:
    """Recorded texts; not run on GPUs."""
    run = RunDir(tmp_path)
    run.logs_of(1).mkdir(parents=True)
    places = [{"address": f"10.0.0.{i}", "host": f"n{i}"} for i in (1, 2, 3)]
    run.rendezvous(1).write_bytes(msgspec.json.encode({"places": places}))
    for host, text in logs.items():
        real = shared("logs", text).read_text() if text.endswith(".log") else ""
        (run.logs_of(1) / f"{host}.rank{int(host[1]) - 1}.log").write_text(real or f"{text}\n")
    metrics = {"failure": msgspec.to_builtins(failure_of(run, message)), "message": message}
    one = decide_and_record(run, parse_spec(TRAINING), 1, metrics, [], ["n4"])
    assert one is not None and one.failure == failure and one.left_out == (left_out or [])
    assert one.action == ("stop" if left_out is None else "restart")
    assert not left_out or (f"{left_out[0]} (" in one.reason and one.host == left_out[0])


def test_suspects_are_used_last_and_ranks_keep_the_order_of_the_nodes() -> None:
    names = ["n1", "n2", "n3", "n4"]
    assert choose_nodes(names, 3, set()) == (["n1", "n2", "n3"], ["n4"])
    assert choose_nodes(names, 3, {"n2"}) == (["n1", "n3", "n4"], ["n2"])
    assert choose_nodes(names[:3], 3, {"n2"}) == (names[:3], [])


@pytest.mark.parametrize(("usable", "nodes"), [(4, None), (3, 3), (2, 2), (1, None)])
def test_a_job_is_requeued_with_fewer_spare_nodes_where_no_more_are_left(usable: int, nodes: int | None) -> None:
    cluster = ClusterSpec(launcher="slurm", nodes=2, spares=2, slurm=SlurmSpec(cpus_per_task=8))
    wanted = [f"NumNodes={nodes}", f"NumTasks={nodes}", f"NumCPUs={8 * nodes}"] if nodes else []
    assert smaller_request(cluster, usable) == wanted


def test_an_own_program_makes_progress_by_the_steps_that_it_reports(tmp_path: Path) -> None:
    spec = parse_spec({"script": {"path": "p.py"}, "cluster": {"restarts": {"max": 3}}})
    before: list[Restart] = []
    for steps, action in ((4, "restart"), (9, "restart"), (9, "stop")):
        metrics = {"failure": {"id": NODE}, "message": "m", "steps": steps}
        one = decide_and_record(RunDir(tmp_path), spec, 1, metrics, before)
        assert one is not None and (one.action, one.reached_step, one.after_step) == (action, steps, None)
        assert "the program's own checkpoints" in one.lines[1] if action == "restart" else "no later step" in one.reason
        before.append(one)


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        (TRAINING, 3),
        ({**TRAINING, "cluster": {"restarts": {"max": 0}}}, 0),
        ({"script": {"path": "p.py"}}, 0),
        ({"script": {"path": "p.py"}, "cluster": {"restarts": {"max": 2}}}, 2),
    ],
)
def test_own_programs_are_not_started_again_unless_asked(spec: dict[str, object], limit: int) -> None:
    parsed = parse_spec(spec)
    assert restarts.restart_limit(parsed) == limit and ("none" in restarts.restart_line(parsed)) == (not limit)


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"restarts": {"max": -1}}, r"cluster\.restarts\.max: expected int >= 0"),
        ({"launcher": "slurm", "spares": -1}, r"cluster\.spares: expected int >= 0"),
        ({"spares": 1}, r"cluster\.spares is 1, but launcher local has no spare nodes"),
    ],
)
def test_negative_numbers_and_spares_without_slurm_are_refused(cluster: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_spec({"script": {"path": "p.py"}, "cluster": cluster})


def test_a_record_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    gone = RunDir(tmp_path / "gone")
    decided = decide_and_record(gone, parse_spec(TRAINING), 1, {"failure": {"id": NODE}, "message": "m"}, [])
    assert decided is not None and decided.action == "restart" and read_restarts(gone) == []


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for text in ("", "[1]", "{}", "["):
        run.restarts.write_text(text)
        assert read_restarts(run) == []
    run.restarts.write_bytes(msgspec.json.encode([after(NODE)]))
    assert [one.failure for one in read_restarts(run)] == [NODE]
