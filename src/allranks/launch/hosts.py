"""The launcher by hand: no scheduler and no SSH. It prints one command per node and waits until all have done their part.

The run folder must be on a file system that all nodes share: through it the agents say that they have come, and hear
when they are to stop.
"""

from __future__ import annotations

import shlex
import socket
import sys
import time
from pathlib import Path

import msgspec

from allranks.envpolicy import secrets, without_secrets
from allranks.errors import SpecError
from allranks.launch.rendezvous import Place, Rendezvous
from allranks.planning import LaunchPlan
from allranks.preflight.port import rendezvous_port
from allranks.rundir import RunDir, read_json, write_json, write_text_atomic
from allranks.spec.records import RunSpec

REMIND_S = 30.0


class HostsJob:
    """Agents that people start, one a node."""

    def __init__(self, run: RunDir, plan: LaunchPlan, attempt: int, commands: list[str], first: list[str]) -> None:
        self._run, self._plan, self._attempt, self._commands, self._first = run, plan, attempt, commands, first
        self._told: set[int] | None = None
        self._told_at = 0.0
        self.label = f"{len(commands)} hand-started nodes"

    def poll(self) -> int | None:
        """None until every node's agent has ended; then 0 if none of their ranks failed."""
        ends = [read_json(p) or {} for p in self._run.logs_of(self._attempt).glob("*.exit.json")]
        if len({e.get("node") for e in ends}) < len(self._plan.nodes):
            return None
        return 1 if any(e.get("failed") or e.get("refused") for e in ends) else 0

    def news(self) -> str | None:
        """First the commands; then who is still awaited."""
        came = {int(p.name.split(".")[1]) for p in self._run.logs_of(self._attempt).glob("node.*.joined")}
        if self._told is None:
            self._told, self._told_at = set(), time.monotonic()
            lines = [f"start these {len(self._commands)} commands, one on each node, in any order:"]
            lines += [f"  before, on each node:  {text}" for text in self._first]
            return "\n".join([*lines, *(f"  node {i}:  {command}" for i, command in enumerate(self._commands))])
        late = time.monotonic() - self._told_at > REMIND_S and len(came) < len(self._commands)
        if came == self._told and not late:
            return None
        self._told, self._told_at = came, time.monotonic()
        missing = [str(i) for i in range(len(self._commands)) if i not in came]
        return f"{len(came)} of {len(self._commands)} nodes have come" + (
            f"; awaited: node {', '.join(missing)}" if missing else ""
        )

    def ask_stop(self) -> None:
        """Ask all ranks for a clean stop."""
        write_text_atomic(self._run.control(self._attempt), "stop")

    def kill(self) -> None:
        """End all ranks."""
        write_text_atomic(self._run.control(self._attempt), "kill")
        if not list(self._run.logs_of(self._attempt).glob("node.*.joined")):
            for node in self._plan.nodes:  # nobody has come, and nobody shall
                write_json(self._run.agent_exit(self._attempt, f"node{node.node}"), {"node": node.node, "failed": []})

    def kill_agent(self) -> None:
        """Nothing more than `kill` can be done from here."""

    def end_reason(self) -> str:
        """There is no scheduler to ask."""
        return "unknown"


def start(run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int) -> HostsJob:
    """Write down where the ranks meet, and make the commands.

    Raises:
        SpecError: no hosts are named, or the first does not resolve to an address that others can reach.
    """
    hosts = spec.cluster.hosts
    if not hosts:
        raise SpecError(
            "cluster.launcher is hosts, but cluster.hosts is empty; name the nodes, the first one is where the ranks meet"
        )
    address = spec.cluster.rendezvous.address or _address_of(hosts[0])
    key = f"{run.name}.{attempt}"
    places = [
        Place(node=i, host=h, address="", interface=spec.cluster.rendezvous.interface or "")
        for i, h in enumerate(hosts)
    ]
    port = spec.cluster.rendezvous.port or rendezvous_port(key)
    meeting = Rendezvous(address=address, port=port, key=key, network="", reason="cluster.hosts", places=places)
    write_json(run.rendezvous(attempt), msgspec.to_builtins(meeting))
    return HostsJob(run, plan, attempt, commands(run, plan, attempt), _left_to_people(spec, plan))


def _left_to_people(spec: RunSpec, plan: LaunchPlan) -> list[str]:
    """What the commands cannot hold: secrets, and what a shell must do before."""
    said = [f"export {name}=...  (a secret stands in no command)" for name in sorted(secrets(plan.environment))]
    said += [f"module load {shlex.quote(name)}" for name in spec.cluster.modules]
    return said + spec.cluster.setup


def commands(
    run: RunDir, plan: LaunchPlan, attempt: int = 1, *, python: str = sys.executable, folder: Path | None = None
) -> list[str]:
    """The command of each node, in the order of the nodes.

    Args:
        python: the interpreter, which every node must have under this name.
        folder: where they are to be started; this one if not given.
    """
    return [_command(run, plan, attempt, n.node, python, folder or Path.cwd()) for n in plan.nodes]


def _address_of(host: str) -> str:
    try:
        address = socket.gethostbyname(host)
    except OSError:
        raise SpecError(
            f"cluster.hosts: {host!r} does not resolve here; give its address, or set cluster.rendezvous.address"
        ) from None
    if address.startswith("127.") and len(host.split(".")) != 4:
        raise SpecError(
            f"cluster.hosts: {host!r} resolves to {address}, which other nodes cannot reach; set cluster.rendezvous.address to its address on the network"
        )
    return address


def _command(run: RunDir, plan: LaunchPlan, attempt: int, node: int, python: str, folder: Path) -> str:
    exports = [f"{name}={shlex.quote(value)}" for name, value in without_secrets(plan.environment).items()]
    words = [
        python,
        "-m",
        "allranks.launch.agent",
        str(run.root),
        "--attempt",
        str(attempt),
        "--node",
        str(node),
    ]
    return f"cd {shlex.quote(str(folder))} && {' '.join([*exports, *map(shlex.quote, words)])}"
