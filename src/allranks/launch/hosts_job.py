"""Wait for agents that users start manually, one per node; supervise a run's, or examine their hosts for ``doctor``."""

from __future__ import annotations

import secrets
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.launch.channel import AgentLink, ChannelServer
from allranks.launch.channel_protocol import ENDED, Orders
from allranks.launch.host_agent import HostNodes, one_per_machine
from allranks.launch.rendezvous import NodeAddress, Rendezvous, control_port, host_labels, own_address_towards
from allranks.launch.supervisor import SupervisedJob, Supervisor
from allranks.nodes.preflight.requirements import existing_folder
from allranks.nodes.preflight.runner import (
    TargetNodes,
    failure_lines,
    require_usable_nodes,
    run_preflight,
    unusable_nodes,
    write_preflight,
)
from allranks.nodes.slurm.srun import NodeAnswers
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import write_json
from allranks.rundir.paths import RunDir
from allranks.spec.records import RunSpec
from allranks.spec.validation import is_container

POLL_S = 0.05
KEEP_S = 120.0  # how long agents keep their ranks without this process
END_S = 20.0  # for agents to end their ranks
EXAMINED_END_S = 3.0


class HostsJob(SupervisedJob):
    """Agents started manually, one per node. Their hosts are examined once all have joined, then the ranks start."""

    interrupt_grace_s = 15.0  # other machines, some of which may be slow

    def __init__(
        self, run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int, meeting: Rendezvous, commands: str
    ) -> None:
        examine = not is_container(spec.cluster.python)  # whose paths are not those of the hosts
        address, port = own_address(meeting.address), control_port(meeting.port)
        super().__init__(
            run,
            plan,
            attempt,
            meeting,
            "localhost",
            address=address,
            port=port,
            keep_s=KEEP_S,
            join_s=None,
            hold=examine,
        )
        self._spec = spec
        self._news = [commands]
        self._joined = 0
        self._killed_at: float | None = None
        self.label = f"{len(plan.nodes)} hand-started nodes"
        if examine:
            threading.Thread(target=self._examine, name="preflight", daemon=True).start()

    def _examine(self) -> None:
        """Examine the hosts as ``doctor`` does, once all have joined; then start the ranks, or end the agents."""
        while not self._supervisor.all_joined:
            if self._supervisor.orders.stopping:
                return
            time.sleep(POLL_S)
        problem = "the examination of the hosts failed"
        try:
            problem = self._problem_of_hosts()
        finally:
            if problem:
                self._supervisor.refuse(problem)
            else:
                self._supervisor.release()

    def _problem_of_hosts(self) -> str:
        """Return why ranks must not start; empty if they may.

        Imports are not tested: the ranks import at once anyway. Nor is the store's port: node 0 already listens on it.
        """
        labels = host_labels(self._spec.cluster.hosts)
        hosts, _ = one_per_machine(self._hub.links, labels)
        node_of = {label: node for node, label in enumerate(labels)}
        where = HostNodes(
            hosts=hosts, job_id=secrets.token_hex(8), channel=self._hub, ask=self._supervisor.ask, node_of=node_of
        )
        cluster = self._spec.cluster
        rendezvous = msgspec.structs.replace(cluster.rendezvous, port=None)
        spec = msgspec.structs.replace(self._spec, cluster=msgspec.structs.replace(cluster, rendezvous=rendezvous))
        try:
            preflight = run_preflight(where, spec, self._plan, self._run.root, imports=False)
            write_preflight(self._run, preflight)
            self._news += [
                f"note     {line}" for line in failure_lines([one for one in preflight.reports if one.may_run])
            ]
            require_usable_nodes(unusable_nodes(spec, preflight.reports))
        except OSError as error:
            return f"the preflight cannot be written: {error}"
        except EnvironmentNotAble as error:
            return str(error)
        return ""

    def poll(self) -> int | None:
        links = self._hub.links
        nobody = not links and self._supervisor.orders.stopping
        late = self._killed_at is not None and time.monotonic() - self._killed_at > END_S
        if not (nobody or late or (links and self._supervisor.all_ended)):
            return None
        self._close()
        end = self.end()
        return 1 if end.failed or end.refused or end.lost or nobody or late else 0

    def news(self) -> str | None:
        """Return the commands first, then which nodes have joined and what the preflight noted."""
        if not self._news and len(links := self._hub.links) != self._joined:
            self._joined = len(links)
            self._news = [joined_text(links, [f"node {node.node}" for node in self._plan.nodes])]
        return self._news.pop(0) if self._news else None

    def kill(self) -> None:
        self._killed_at = self._killed_at or time.monotonic()
        super().kill()


def joined_text(links: Mapping[int, AgentLink], labels: Sequence[str]) -> str:
    """Return how many agents have joined, and which are missing."""
    missing = ", ".join(label for node, label in enumerate(labels) if node not in links)
    return f"{len(links)} of {len(labels)} nodes have joined" + (f"; waiting for {missing}" if missing else "")


def commands_text(place: str, commands: Sequence[str], first: Sequence[str] = ()) -> str:
    """Return what users are to start, a line for each command; `first` are commands to run before on each node."""
    several = f"start these {len(commands)} commands, one on each {place}, in any order:"
    lines = [several if len(commands) > 1 else f"start this command on the {place}:"]
    lines += [f"  before, on each node:  {text}" for text in first]
    return "\n".join([*lines, *(f"  node {i}:  {command}" for i, command in enumerate(commands))])


def own_address(first_node: str) -> str:
    """Return this machine's address on the route to the first node.

    Raises:
        EnvironmentNotAble: there is no route.
    """
    try:
        return own_address_towards(first_node)
    except OSError as error:
        raise EnvironmentNotAble(
            f"this machine has no route to {first_node}, the first of cluster.hosts: {error.strerror or error}; the "
            "agents on the nodes report to this machine over the network"
        ) from None


def start_on_hosts(run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int, commands: str) -> HostsJob:
    """Record the rendezvous, and listen for the agents.

    Args:
        commands: the text of `commands_text`, which users follow.

    Raises:
        SpecError: no hosts are given, or the first one does not resolve to an address that others can reach.
    """
    address = address_of_first(spec)
    places = [
        NodeAddress(node=i, host=h, address="", interface=spec.cluster.rendezvous.interface or "")
        for i, h in enumerate(spec.cluster.hosts)
    ]
    port = spec.cluster.rendezvous.port or 0
    meeting = Rendezvous(
        address=address, port=port, port_fixed=port > 0, network="", reason="cluster.hosts", places=places
    )
    write_json(run.rendezvous(attempt), msgspec.to_builtins(meeting))
    return HostsJob(run, spec, plan, attempt, meeting, commands)


def address_of_first(spec: RunSpec) -> str:
    """Return the address at which the others reach the first host.

    Raises:
        SpecError: no hosts are given, or the first one does not resolve to such an address.
    """
    hosts = spec.cluster.hosts
    if not hosts:
        raise SpecError(
            "cluster.launcher is hosts, but cluster.hosts is empty; list the nodes; the first one hosts the rendezvous"
        )
    return spec.cluster.rendezvous.address or _address_of(hosts[0])


def _address_of(host: str) -> str:
    try:
        address = socket.gethostbyname(host)
    except OSError:
        raise SpecError(
            f"cluster.hosts: {host!r} does not resolve on this machine; use its address, or set "
            "cluster.rendezvous.address"
        ) from None
    if address.startswith("127.") and len(host.split(".")) != 4:
        raise SpecError(
            f"cluster.hosts: {host!r} resolves to {address}, which other nodes cannot reach; set "
            "cluster.rendezvous.address to its address on the network"
        )
    return address


class _DoctorOrders(Supervisor):
    """Sends requests to agents without ranks: none of them has to join, and none is missed."""

    def tick(self, links: Mapping[int, AgentLink], now: float) -> Orders:
        return self.orders


class DoctorHosts(HostNodes, frozen=True, kw_only=True):
    """Hosts for each of which a command was printed; not all of them may have been started."""

    commands: dict[str, str]
    waited_s: float

    def silence_cure(self, host: str, answers: NodeAnswers, why: str) -> str:
        if self.node_of[host] in self.channel.links:
            return super().silence_cure(host, answers, why)
        where = f"{self.channel.endpoint.address}:{self.channel.endpoint.port}"
        return (
            f"no agent on {host} reported within {self.waited_s:.0f} s: start its command there; if it was started, "
            f"see what it printed: run_root must be shared, and {where} reachable from {host}: {self.commands[host]}"
        )


@contextmanager
def examine_hosts(
    spec: RunSpec, *, wait_s: float, say: Callable[[str], None]
) -> Iterator[tuple[TargetNodes, list[str]]]:
    """Print the commands, wait until all agents have joined or `wait_s` has passed, and give the hosts.

    Raises:
        SpecError: no hosts are given, or the first one does not resolve to an address that others can reach.
        EnvironmentNotAble: the control channel cannot be opened.
    """
    labels = host_labels(spec.cluster.hosts)
    orders = _DoctorOrders(len(labels))
    address = own_address(address_of_first(spec))
    hub = ChannelServer(orders, len(labels), address, control_port(spec.cluster.rendezvous.port or 0), keep_s=KEEP_S)
    with tempfile.TemporaryDirectory(prefix=".allranks-doctor-", dir=existing_folder(Path(spec.run_root))) as folder:
        file = Path(folder) / "channel.json"
        write_json(file, msgspec.to_builtins(hub.endpoint), private=True)
        commands = {label: _command(file, node, label) for node, label in enumerate(labels)}
        hub.start()
        try:
            say(commands_text("host", list(commands.values())))
            waited_s = _wait(hub, labels, wait_s, say)
            hosts, notes = one_per_machine(hub.links, labels)
            node_of = {label: node for node, label in enumerate(labels)}
            yield (
                DoctorHosts(
                    hosts=hosts, job_id=secrets.token_hex(8), channel=hub, ask=orders.ask, node_of=node_of,
                    commands=commands, waited_s=waited_s,
                ),
                notes,
            )  # fmt: skip
        finally:
            orders.kill("the doctor has finished")
            _wait_for_ends(hub)
            hub.close()


def _command(file: Path, node: int, label: str) -> str:
    words = [sys.executable, "-m", "allranks.launch.host_agent", str(file), "--node", str(node), "--name", label]
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"


def _wait(hub: ChannelServer, labels: Sequence[str], wait_s: float, say: Callable[[str], None]) -> float:
    """Wait for all agents, and say who is missing whenever one has come."""
    began, count = time.monotonic(), 0
    while len(links := hub.links) < len(labels) and time.monotonic() - began < wait_s:
        if len(links) != count:
            count = len(links)
            say(joined_text(links, labels))
        time.sleep(POLL_S)
    return time.monotonic() - began


def _wait_for_ends(hub: ChannelServer) -> None:
    deadline = time.monotonic() + EXAMINED_END_S
    while time.monotonic() < deadline and any(not k.closed and k.report.state != ENDED for k in hub.links.values()):
        time.sleep(POLL_S)
