"""``doctor`` with ``launcher: hosts``: print one command per host, and examine every host on which it was started."""

from __future__ import annotations

import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from allranks.launch.channel.protocol import ENDED, Orders
from allranks.launch.channel.server import AgentLink, ChannelServer
from allranks.launch.host_nodes import HostNodes, next_probe, one_per_machine
from allranks.launch.hosts_job import KEEP_S, address_of_first, own_address
from allranks.launch.rendezvous import control_port, host_labels
from allranks.nodes.preflight.requirements import existing_folder
from allranks.nodes.preflight.runner import NodeProgram, TargetNodes
from allranks.nodes.srun import NodeAnswers
from allranks.rundir.files import write_json
from allranks.spec.records import RunSpec

POLL_S = 0.05
END_S = 3.0


class DoctorOrders:
    """What the agents are to do: the newest request, then the end. An `OrderSource` of the control channel."""

    def __init__(self) -> None:
        self._orders = Orders()

    def tick(self, links: Mapping[int, AgentLink], now: float) -> Orders:
        """Return the orders."""
        return self._orders

    def evidence(self, found: object) -> None:
        """Ignore it: there are no ranks."""

    def request(self, order: str, reason: str) -> None:
        """Ignore it: there is nothing to stop."""

    def ask(self, nodes: Sequence[int], program: NodeProgram, limit_s: float) -> int:
        """Have some nodes run a program; return the number of the request."""
        request = next_probe(self._orders.probe, nodes, program, limit_s)
        self._orders = msgspec.structs.replace(self._orders, probe=request)
        return request.number

    def end(self) -> None:
        """End the agents."""
        self._orders = msgspec.structs.replace(self._orders, end="the doctor has finished")


class DoctorHosts(HostNodes, frozen=True, kw_only=True):
    """Hosts for each of which a command was printed; not all of them may have been started."""

    commands: dict[str, str]
    waited_s: float

    def silence_cure(self, host: str, answers: NodeAnswers, why: str) -> str:
        """Return what to do about a host without an answer."""
        if self.node_of[host] in self.channel.links:
            return super().silence_cure(host, answers, why)
        where = f"{self.channel.endpoint.address}:{self.channel.endpoint.port}"
        return (
            f"no agent on {host} reported within {self.waited_s:.0f} s: start its command there; if it was started, see what it printed: "
            f"run_root must be shared, and {where} reachable from {host}: {self.commands[host]}"
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
    orders = DoctorOrders()
    address = own_address(address_of_first(spec))
    hub = ChannelServer(orders, len(labels), address, control_port(spec.cluster.rendezvous.port or 0), keep_s=KEEP_S)
    with tempfile.TemporaryDirectory(prefix=".allranks-doctor-", dir=existing_folder(Path(spec.run_root))) as folder:
        file = Path(folder) / "channel.json"
        write_json(file, msgspec.to_builtins(hub.endpoint), private=True)
        commands = {label: _command(file, node, label) for node, label in enumerate(labels)}
        hub.start()
        try:
            say(
                "\n".join(
                    [
                        f"start these {len(labels)} commands, one on each host, in any order:"
                        if len(labels) > 1
                        else "start this command on the host:",
                        *map(_line, enumerate(commands.values())),
                    ]
                )
            )
            waited_s = _wait(hub, labels, wait_s, say)
            hosts, notes = one_per_machine(hub.links, labels)
            node_of = {label: node for node, label in enumerate(labels)}
            yield (
                DoctorHosts(
                    hosts=hosts, job_id=secrets.token_hex(8), channel=hub, ask=orders.ask, node_of=node_of, commands=commands,
                    waited_s=waited_s,
                ),
                notes,
            )  # fmt: skip
        finally:
            orders.end()
            _wait_for_ends(hub)
            hub.close()


def _command(file: Path, node: int, label: str) -> str:
    words = [sys.executable, "-m", "allranks.launch.host_agent", str(file), "--node", str(node), "--name", label]
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"


def _line(numbered: tuple[int, str]) -> str:
    return f"  node {numbered[0]}:  {numbered[1]}"


def _wait(hub: ChannelServer, labels: Sequence[str], wait_s: float, say: Callable[[str], None]) -> float:
    """Wait for all agents, and say who is missing whenever one has come."""
    began, told = time.monotonic(), 0
    while len(hub.links) < len(labels) and time.monotonic() - began < wait_s:
        if len(hub.links) != told:
            told = len(hub.links)
            missing = ", ".join(label for node, label in enumerate(labels) if node not in hub.links)
            say(f"{told} of {len(labels)} hosts have joined; waiting for {missing}")
        time.sleep(POLL_S)
    return time.monotonic() - began


def _wait_for_ends(hub: ChannelServer) -> None:
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline and any(not k.closed and k.report.state != ENDED for k in hub.links.values()):
        time.sleep(POLL_S)
