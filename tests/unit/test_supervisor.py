"""What a run's supervisor decides from the reports of its agents. Pure: a clock of its own, no sockets."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from allranks.launch import supervisor
from allranks.launch.channel import CLOSED, UNREACHABLE, AgentLink
from allranks.launch.channel_protocol import ENDED, RUNNING, AgentReport, Orders
from allranks.launch.failure_attribution import RankEnd
from allranks.launch.monitor.records import HangAlarm, NodeEvidence

ALARM = HangAlarm(node=1, host="n1", rank=1, phase="train", part="", step=4, since=1.0, time=2.0, limit_s=5.0)


class Cluster:
    def __init__(self, nodes: int = 2, **options: object) -> None:
        self.judged: list[set[int]] = []
        self.now = 100.0
        self.supervisor = supervisor.Supervisor(nodes, self._judge, **options)  # type: ignore[arg-type]
        self.links: dict[int, AgentLink] = {}
        self.judge_fails = False

    def _judge(self, alarm: HangAlarm, evidence: Sequence[NodeEvidence]) -> None:
        self.judged.append({e.node for e in evidence})
        if self.judge_fails:
            raise OSError(28, "No space left on device")

    def report(self, node: int, **values: object) -> None:
        known: Any = {"state": RUNNING, "store": ("10.0.0.1", 5) if node == 0 else None, **values}
        report = AgentReport(node=node, host=f"n{node}", pid=10 + node, **known)
        self.links[node] = AgentLink(report=report, heard_at=self.now)

    def close(self, node: int, how: str) -> None:
        link = self.links[node]
        self.links[node] = AgentLink(report=link.report, heard_at=link.heard_at, closed=how, closed_at=self.now)

    def tick(self, seconds: float = 0.0, *, heard: Sequence[int] = (), paused: bool = False) -> Orders:
        while seconds > 4 and not paused:
            seconds -= 4
            self.tick(4, heard=heard)
        self.now += seconds
        for node in heard:
            self.links[node] = AgentLink(report=self.links[node].report, heard_at=self.now)
        return self.supervisor.tick(self.links, self.now)


def failed(rank: int, code: int = 1, **more: object) -> RankEnd:
    return RankEnd(rank=rank, host=f"n{rank}", pid=5, exitcode=code, time=50.0 + rank, **more)  # type: ignore[arg-type]


@pytest.fixture
def two() -> Cluster:
    cluster = Cluster(2)
    cluster.report(0)
    cluster.report(1)
    assert cluster.tick().start is not None
    return cluster


def test_ranks_start_only_when_every_node_has_joined_and_the_store_is_open() -> None:
    cluster = Cluster(2)
    cluster.report(0, store=None)
    assert cluster.tick().start is None
    cluster.report(1)
    assert cluster.tick().start is None
    cluster.report(0)
    start = cluster.tick().start
    assert start is not None
    assert (start.address, start.port) == ("10.0.0.1", 5)
    assert len(start.nonce) == 32


def test_a_node_that_never_joins_ends_the_run() -> None:
    cluster = Cluster(3)
    cluster.report(0)
    cluster.tick()
    assert "node 1, 2 did not join" in cluster.tick(supervisor.JOIN_S + 1, heard=[0]).end
    assert cluster.supervisor.result().not_joined == [1, 2]


def test_a_failed_rank_ends_all_agents_and_none_is_lost(two: Cluster) -> None:
    two.report(1, ends=[failed(1)])
    orders = two.tick()
    assert orders.end == "rank 1 on n1 ended with exit code 1"
    assert orders.end_grace_s == supervisor.FAILURE_GRACE_S
    two.report(1, ends=[failed(1)], state=ENDED)
    two.tick(1, heard=[0])
    assert not two.supervisor.lost
    two.report(0, state=ENDED, ends=[failed(0, -9, ended_by_agent=True)])
    two.tick()
    assert two.supervisor.all_ended
    assert [e.rank for e in two.supervisor.result().failed] == [1]


def test_ranks_that_end_well_or_were_ended_by_their_agent_are_no_failure(two: Cluster) -> None:
    two.report(0, ends=[failed(0, 0)])
    two.report(1, ends=[failed(1, -9, ended_by_agent=True)])
    assert not two.tick().end


@pytest.mark.parametrize("how", [CLOSED, UNREACHABLE])
def test_an_agent_whose_connection_stays_closed_is_gone(two: Cluster, how: str) -> None:
    two.close(1, how)
    assert not two.tick(supervisor.RECONNECT_S - 1, heard=[0]).stop
    orders = two.tick(2, heard=[0])
    assert "the agent of n1 is gone" in orders.stop
    assert not orders.end
    (lost,) = two.supervisor.lost
    assert (lost.node, lost.host) == (1, "n1")
    assert two.tick(supervisor.STOP_GRACE_S + 1, heard=[0]).end


def test_an_agent_that_comes_back_was_never_lost(two: Cluster) -> None:
    two.close(1, CLOSED)
    two.tick(supervisor.RECONNECT_S - 1, heard=[0])
    two.report(1)
    assert not two.tick(1, heard=[0, 1]).stop
    assert not two.supervisor.lost


def test_a_connected_agent_that_reports_nothing_is_stopped_and_its_node_is_not_lost(two: Cluster) -> None:
    assert not two.tick(supervisor.SILENT_S - 1, heard=[0]).stop
    assert two.tick(2, heard=[0]).stop
    assert two.supervisor.lost[0].node == 1


def test_an_alarm_is_examined_on_all_nodes_and_judged_once(two: Cluster) -> None:
    two.report(1, alarm=ALARM)
    assert two.tick().collect == ALARM
    two.supervisor.evidence(NodeEvidence(node=1, host="n1", time=1, ranks=[]))
    assert not two.tick(1, heard=[0, 1]).end
    two.supervisor.evidence(NodeEvidence(node=0, host="n0", time=1, ranks=[]))
    orders = two.tick(1, heard=[0, 1])
    assert (orders.end, orders.end_grace_s) == ("ranks made no progress", 0.0)
    two.tick(1, heard=[0, 1])
    assert two.judged == [{0, 1}]


def test_a_node_without_evidence_is_not_waited_for_forever(two: Cluster) -> None:
    two.report(1, alarm=ALARM)
    two.tick()
    two.supervisor.evidence(NodeEvidence(node=1, host="n1", time=1, ranks=[]))
    assert two.tick(supervisor.ALL_ANSWER_S + 1, heard=[0, 1]).end
    assert two.judged == [{1}]


def test_ranks_without_progress_are_ended_even_if_the_report_cannot_be_written(two: Cluster) -> None:
    two.judge_fails = True
    two.report(1, alarm=ALARM)
    two.tick()
    for node in (0, 1):
        two.supervisor.evidence(NodeEvidence(node=node, host=f"n{node}", time=1, ranks=[]))
    with pytest.raises(OSError, match="No space"):
        two.tick(1, heard=[0, 1])
    assert two.tick(0.1, heard=[0, 1]).end


def test_a_refusal_of_one_agent_ends_the_run(two: Cluster) -> None:
    two.report(0, refused="port 5 is in use")
    assert "port 5 is in use" in two.tick().end
    assert two.supervisor.result().refused == "n0: port 5 is in use"


def test_a_request_to_kill_shortens_the_grace_of_an_end(two: Cluster) -> None:
    two.report(1, ends=[failed(1)])
    assert two.tick().end_grace_s == supervisor.FAILURE_GRACE_S
    two.supervisor.request("kill", "allranks cancel --now")
    assert two.tick().end_grace_s == 0.0


def test_a_stop_before_the_start_starts_nothing() -> None:
    cluster = Cluster(1)
    cluster.supervisor.stop("the job was cancelled")
    cluster.report(0)
    assert cluster.tick().start is None


def test_a_pause_of_the_driver_itself_is_no_silence_of_the_agents(two: Cluster) -> None:
    """As after SIGSTOP and SIGCONT, or a suspended job."""
    assert not two.tick(10 * supervisor.SILENT_S, paused=True).stop
    assert not two.supervisor.lost
    for _ in range(int(supervisor.SILENT_S) - 1):
        assert not two.tick(1.0).stop
    assert two.tick(2.0).stop


def test_an_agent_that_was_killed_just_before_the_end_counts_as_lost(two: Cluster) -> None:
    two.report(0, state=ENDED)
    two.close(1, CLOSED)
    two.tick(1.0)
    assert not two.supervisor.lost
    assert [lost.host for lost in two.supervisor.result().lost] == ["n1"]


@pytest.mark.parametrize(
    ("exits", "by_agent", "expected"),
    [((-15, 0), False, True), ((-15, -15), True, False), ((1, 0), False, False), ((0, 0), False, False)],
)
def test_a_sigterm_from_outside_is_told_from_the_agents(exits: tuple[int, ...], by_agent: bool, expected: bool) -> None:
    end = partial(RankEnd, host="n0", time=1.0, ended_by_agent=by_agent)
    ends = [end(rank=r, pid=r, exitcode=code) for r, code in enumerate(exits)]
    assert supervisor.JobEnd(nodes=2, ended_nodes=2, ends=ends).terminated is expected


def test_a_step_that_was_ended_before_its_ranks_began_was_terminated() -> None:
    assert supervisor.JobEnd(nodes=2, ended_nodes=2).terminated
    assert not supervisor.JobEnd(nodes=2, ended_nodes=2, refused="n0: no port").terminated
    assert not supervisor.JobEnd(nodes=2, ended_nodes=1, not_joined=[1]).terminated
