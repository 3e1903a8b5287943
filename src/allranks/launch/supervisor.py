"""Decide for a run, from its agents' reports, when to start, stop, end and examine ranks. Pure except for clock and
hang analyzer.

A failed rank ends the run, and its error is the result. An agent that disappears ends the run too; whether its *node*
is lost is decided separately, from evidence about the node.
"""

from __future__ import annotations

import secrets
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from allranks.launch.channel import CLOSED, UNREACHABLE, AgentLink, ChannelServer
from allranks.launch.channel_protocol import ENDED, AgentReport, Orders, StartOrder
from allranks.launch.failure_attribution import RankEnd
from allranks.launch.monitor.hang_rules import HangAnalyzer, due_alarm, list_ranks
from allranks.launch.monitor.records import HangAlarm, NodeEvidence
from allranks.launch.rendezvous import LOOPBACK, Rendezvous, hosts_of_ranks
from allranks.launch.stop_limit import StopLimit
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import write_json
from allranks.rundir.paths import RunDir

if TYPE_CHECKING:
    from allranks.nodes.preflight.runner import NodeProgram

JOIN_S = 300.0  # from the first start of an agent until all have joined
RECONNECT_S = 6.0  # an agent whose connection was closed comes back within this time, or is gone
PAUSED_S = 5.0  # between two ticks: this process itself was stopped, so no silence counts
SILENT_S = 60.0  # an agent that is connected but reports nothing: it is stopped, or its node is overloaded
FAILURE_GRACE_S = 3.0  # for other ranks to record the errors that follow from a failure
STOP_GRACE_S = 30.0  # for the checkpoint of the other ranks once an agent is gone: at least
ALL_ANSWER_S = 15.0  # for the evidence of all nodes
BUSY_REPORTS_PER_S = 100.0  # what the driver receives at most, so that its load does not grow with the number of nodes
SHORTEST_S, LONGEST_S = 1.0, 10.0


class LostAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that no longer answers. Its node may be alive: see `slurm.liveness.examine_node`."""

    node: int
    host: str
    why: str


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt's agents ended, as the driver saw it. ``hang``: one-sentence verdict on ranks without progress."""

    nodes: int = 0
    ended_nodes: int = 0
    ends: list[RankEnd] = []
    refused: str = ""
    lost: list[LostAgent] = []
    not_joined: list[int] = []
    reasons: list[str] = []
    stopped: str = ""
    ended: str = ""
    hang: str = ""
    requested: bool = False  # a user asked for the end

    @property
    def failed(self) -> list[RankEnd]:
        """Return the ranks that failed by themselves."""
        return [end for end in self.ends if end.failed]

    @property
    def terminated(self) -> bool:
        """Return whether ranks died of an external SIGTERM or never started, as when Slurm ends the job step."""
        if self.refused or self.lost or self.ended_nodes < self.nodes:
            return False
        return not self.ends or any(end.exitcode == -signal.SIGTERM and not end.ended_by_agent for end in self.ends)

    def all_ended_well(self, world_size: int) -> bool:
        """Return whether every rank finished its work and exited with 0."""
        good = [end for end in self.ends if end.succeeded]
        return len(good) >= world_size and self.ended_nodes == self.nodes


class LaunchedJob(ABC):
    """A job that runs ranks. ``interrupt_grace_s``: from Ctrl-C until ranks that have nothing to save are killed."""

    label: str
    interrupt_grace_s: float

    @abstractmethod
    def poll(self) -> int | None:
        """Return None until the job has ended, then its exit code."""

    @abstractmethod
    def request_stop(self, reason: str) -> None:
        """Stop the ranks after a checkpoint."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all ranks."""

    @abstractmethod
    def end(self) -> JobEnd | None:
        """Return how agents and ranks ended; None if no driver recorded it."""

    def news(self) -> str | None:
        """Return what has changed since the last call, as a message; by default nothing: there is no queue."""
        return None

    def kill_all_processes(self) -> None:  # noqa: B027 - by default `kill` is all that can be done
        """Kill what is left after `kill`."""

    def end_reason(self) -> str:
        """Return how the job ended according to a scheduler."""
        return "unknown"


def job_end_of(driver: object) -> JobEnd | None:
    """Return the `JobEnd` in the content of ``driver.json``; None if there is none yet."""
    end = driver.get("end") if isinstance(driver, dict) else None
    try:
        return msgspec.convert(end, JobEnd, strict=False, str_keys=True) if end else None
    except msgspec.ValidationError:
        return None


class SupervisedJob(LaunchedJob):
    """A job whose agents report to this process; arguments as for `supervise`."""

    def __init__(
        self, run: RunDir, plan: LaunchPlan, attempt: int, meeting: Rendezvous | None, host: str, **options: Any
    ) -> None:
        self._run, self._plan, self._channel_file = run, plan, run.channel(attempt)
        self._supervisor, self._hub = supervise(run, plan, attempt, meeting, host, **options)
        write_json(self._channel_file, msgspec.to_builtins(self._hub.endpoint), private=True)

    def _close(self) -> None:
        self._hub.close()
        self._channel_file.unlink(missing_ok=True)

    def end(self) -> JobEnd:
        return self._supervisor.result()

    def request_stop(self, reason: str) -> None:
        self._supervisor.stop(reason)

    def kill(self) -> None:
        self._supervisor.kill("the launcher stopped the ranks")


def supervise(
    run: RunDir,
    plan: LaunchPlan,
    attempt: int,
    meeting: Rendezvous | None,
    host: str,
    *,
    address: str = LOOPBACK,
    port: int = 0,
    keep_s: float | None = None,
    **options: Any,
) -> tuple[Supervisor, ChannelServer]:
    """Start a `Supervisor` with `options` and listen for its agents; `host`: of ranks whose host is not in the plan."""
    nodes = len(plan.nodes)
    judge = HangAnalyzer(run, attempt, hosts_of_ranks(plan, meeting, host), nodes)
    limit = partial(StopLimit, run, plan)
    supervisor = Supervisor(nodes, judge, needs_store=plan.needs_store, limit=limit, **options)
    hub = ChannelServer(supervisor, nodes, address, port, keep_s=keep_s)
    hub.start()
    return supervisor, hub


class Supervisor:
    """State of one attempt. `tick` is called several times per second with the state of the agents.

    Args:
        nodes: number of agents.
        judge: called once after an alarm with the nodes' evidence; writes the report and returns a one-sentence
            verdict.
        join_s: time limit for all agents to join; None if users start them by hand.
        needs_store: whether node 0 opens a store for the rendezvous.
        hold: whether the ranks start only after `release`, once all nodes have joined and have been examined.
        limit: begins the time limit for the checkpoint of the other ranks once an agent is gone, of at least so many
            seconds; `STOP_GRACE_S` if None.
    """

    def __init__(
        self,
        nodes: int,
        judge: Callable[[HangAlarm, Sequence[NodeEvidence]], str | None] | None = None,
        *,
        join_s: float | None = JOIN_S,
        needs_store: bool = True,
        hold: bool = False,
        limit: Callable[[float], StopLimit] | None = None,
    ) -> None:
        self._hold, self._lock, self._refusal = hold, threading.Lock(), ""
        self._nodes, self._judge, self._join_s, self._needs_store = nodes, judge, join_s, needs_store
        self._orders = Orders(interval_s=report_interval_s(nodes))
        self._began: float | None = None
        self._lost: dict[int, LostAgent] = {}
        self._evidence: dict[int, NodeEvidence] = {}
        self._judged = False
        self._hang = ""
        self._ticked = self._floor = 0.0
        self._alarm_at = 0.0
        self._limit = limit
        self._expired: Callable[[float], bool] | None = None
        self._end_reason = ""
        self._requested = False
        self._links: dict[int, AgentLink] = {}

    def evidence(self, evidence: NodeEvidence) -> None:
        """Receive evidence that an agent collected about its ranks."""
        self._evidence[evidence.node] = evidence

    def request(self, order: str, reason: str) -> None:
        """Receive a user's request: ``stop`` or ``kill``."""
        self._requested = True
        if order == "kill":
            self.kill(reason)
        else:
            self.stop(reason)

    def request_checkpoint(self) -> None:
        """Have the ranks save a checkpoint and go on."""
        self._change(checkpoints=self._orders.checkpoints + 1)

    def stop(self, reason: str) -> None:
        """Stop all ranks after a checkpoint."""
        if not self._orders.stop:
            self._change(stop=reason)

    def kill(self, reason: str) -> None:
        """Kill all ranks now."""
        self._end(reason, 0.0)

    def release(self) -> None:
        """Let the ranks start."""
        self._hold = False

    def refuse(self, reason: str) -> None:
        """End the agents before any rank has started; the reason is the result."""
        self._refusal = reason
        self._end(reason, 0.0)

    def ask(self, nodes: Sequence[int], program: NodeProgram, limit_s: float) -> int:
        """Have the agents of some nodes run a program of the preflight; return the number of the request."""
        from allranks.launch.host_agent import next_probe  # only agents that users started are queried

        request = next_probe(self._orders.probe, nodes, program, limit_s)
        self._change(probe=request)
        return request.number

    def tick(self, links: Mapping[int, AgentLink], now: float) -> Orders:
        """Decide the orders to agents; `links`: state of each that has joined, `now`: by `time.monotonic`."""
        self._links = dict(links)
        self._began = self._began if self._began is not None else now
        if now - self._ticked > PAUSED_S:
            self._floor = now
        self._ticked = now
        self._start(now)
        self._failures()
        self._disappeared(now)
        self._examine(now)
        if self._expired is not None and self._expired(now):
            self._end(self._end_reason, 0.0)
        return self._orders

    @property
    def all_ended(self) -> bool:
        """Return whether every agent that is still reachable has reported the end of its ranks."""
        return all(
            n in self._lost or (n in self._links and self._links[n].report.state == ENDED) for n in range(self._nodes)
        )

    @property
    def all_joined(self) -> bool:
        """Return whether every agent has joined."""
        return not self._missing

    @property
    def _missing(self) -> list[int]:
        return [n for n in range(self._nodes) if n not in self._links]

    @property
    def orders(self) -> Orders:
        """Return the newest orders."""
        return self._orders

    @property
    def lost(self) -> list[LostAgent]:
        """Return agents that no longer answer."""
        return list(self._lost.values())

    def result(self) -> JobEnd:
        """Return how the agents have ended so far; one whose connection closed without a final report is lost."""
        reports = [self._links[n].report for n in sorted(self._links)]
        lost = {
            n: loss
            for n, link in self._links.items()
            if (loss := find_lost_agent(n, link, float("inf"))) and link.closed
        }
        return JobEnd(
            nodes=self._nodes,
            ended_nodes=sum(r.state == ENDED for r in reports),
            ends=[end for r in reports for end in r.ends],
            refused=self._refusal or next((f"{r.host}: {r.refused}" for r in reports if r.refused), ""),
            lost=list({**lost, **self._lost}.values()),
            not_joined=self._missing,
            reasons=[f"{r.host}: {r.reason}" for r in reports if r.reason],
            stopped=self._orders.stop,
            ended=self._orders.end,
            hang=self._hang,
            requested=self._requested,
        )

    def _start(self, now: float) -> None:
        if self._orders.start is not None or self._orders.stopping:
            return
        if missing := self._missing:
            if self._join_s is not None and self._began is not None and now - self._began > self._join_s:
                self._end(f"node {list_ranks(missing)} did not join within {self._join_s:.0f} s", 0.0)
            return
        store = self._links[0].report.store
        if self._hold or (store is None and self._needs_store):
            return
        address, port = store or ("", 0)
        self._change(start=StartOrder(address=address, port=port, nonce=secrets.token_hex(16)))

    def _failures(self) -> None:
        if self._orders.end:
            return
        for link in self._links.values():
            report = link.report
            if report.refused:
                self._end(f"{report.host}: {report.refused}", 0.0)
                return
            if report.failed:
                self._end(_failure_text(report), FAILURE_GRACE_S)
                return

    def _disappeared(self, now: float) -> None:
        for node, link in self._links.items():
            loss = find_lost_agent(node, link, now, self._floor)
            if loss is None:
                self._lost.pop(node, None)
            elif node not in self._lost:
                self._lost[node] = loss
                reason = f"the agent of {loss.host} is gone: {loss.why}"
                self.stop(reason)
                if self._expired is None:
                    self._end_reason = reason
                    self._expired = self._limit(STOP_GRACE_S).expired if self._limit else (now + STOP_GRACE_S).__le__

    def _examine(self, now: float) -> None:
        if self._orders.end or self._judge is None:
            return
        if self._orders.collect is None:
            running = [
                link.report for n, link in self._links.items() if n not in self._lost and link.report.state != ENDED
            ]
            alarm = due_alarm([report.alarm for report in running if report.alarm], len(running))
            if alarm is None:
                return
            self._alarm_at = now
            self._change(collect=alarm)
        waited, alarm = now - self._alarm_at, self._orders.collect
        expected = set(range(self._nodes)) - {n for n, lost in self._lost.items()}
        if alarm is not None and not self._judged and (expected <= set(self._evidence) or waited > ALL_ANSWER_S):
            self._judged = True
            try:
                self._hang = self._judge(alarm, list(self._evidence.values())) or ""
            finally:  # ranks that hang are ended, whatever becomes of the report
                self._end("ranks made no progress", 0.0)

    def _end(self, reason: str, grace_s: float) -> None:
        if not self._orders.end:
            self._change(end=reason, end_grace_s=grace_s)
        elif grace_s < self._orders.end_grace_s:
            self._change(end_grace_s=grace_s)

    def _change(self, **values: object) -> None:
        with self._lock:
            self._orders = msgspec.structs.replace(self._orders, **values)  # type: ignore[arg-type]


def find_lost_agent(node: int, link: AgentLink, now: float, floor: float = 0.0) -> LostAgent | None:
    """Return why an agent is considered lost; None while it answers, may still reconnect, or has ended normally.

    Args:
        floor: times before this one do not count.
    """
    report = link.report
    since, limit_s = (link.closed_at, RECONNECT_S) if link.closed else (link.heard_at, SILENT_S)
    if report.state == ENDED or now - max(since, floor) <= limit_s:
        return None
    why = (
        f"process {report.pid} has reported nothing for {SILENT_S:.0f} s, although its node keeps the connection: it "
        "is stopped or gets no CPU time"
    )
    if link.closed == UNREACHABLE:
        why = "the node is not reachable over the network"
    elif link.closed == CLOSED:
        why = (
            f"its connection was closed by {report.host}, and it did not reconnect within {RECONNECT_S:.0f} s: process "
            f"{report.pid} was killed"
        )
    return LostAgent(node=node, host=report.host, why=why)


def report_interval_s(nodes: int) -> float:
    """Return the seconds between reports of an agent, chosen to limit the driver's load."""
    return min(max(SHORTEST_S, nodes / BUSY_REPORTS_PER_S), LONGEST_S)


def _failure_text(report: AgentReport) -> str:
    first = min(report.failed, key=lambda end: end.time)
    ending = f"signal {-first.exitcode}" if first.exitcode < 0 else f"exit code {first.exitcode}"
    return f"rank {first.rank} on {report.host} ended with {ending}"
