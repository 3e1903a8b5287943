"""What follows a failed attempt, by its cause."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.errors import SpecError
from allranks.launch.restarts import (
    CAUSES,
    Restart,
    cause_of,
    decide,
    decide_and_record,
    read_restarts,
    restart_limit,
    restart_line,
)
from allranks.launch.slurm.liveness import smaller_request
from allranks.nodes.preflight.runner import choose_nodes
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.spec.records import ClusterSpec, SlurmSpec

NODE, KILLED, OWN = "node_unhealthy", "rank_died", "application_error"
TRAINING = {"model": {"name": "tiny:mistral"}, "data": {"source": "x"}}


def after(failure: str, *before: tuple[str, int | None], limit: int = 3, step: int | None = None) -> Restart:
    """The decision after `failure`, with a checkpoint of `step`, and earlier restarts (failure, step)."""
    earlier = [decide(i, {"id": name}, "m", [], 9, at) for i, (name, at) in enumerate(before, 1)]
    return decide(len(before) + 1, {"id": failure, "rank": 1, "host": "n2"}, "rank 1 failed.", earlier, limit, step)


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
    assert (one.rank, one.host, one.message) == (1, "n2", "rank 1 failed")


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
    assert restart_limit(parsed) == limit and ("none" in restart_line(parsed)) == (not limit)


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
    metrics = {"failure": {"id": NODE}, "message": "m"}
    decided = decide_and_record(gone, parse_spec(TRAINING), 1, metrics, [])
    assert decided is not None and decided.action == "restart" and read_restarts(gone) == []


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for text in ("", "[1]", "{}", "["):
        run.restarts.write_text(text)
        assert read_restarts(run) == []
    run.restarts.write_bytes(msgspec.json.encode([after(NODE)]))
    assert [one.failure for one in read_restarts(run)] == [NODE]
