"""The network on which the ranks of several nodes meet, and the store through which they exchange addresses.

Also its derived addresses and ports: this node's own on the route to another, and that of the control channel.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from allranks.launch import store_server
from allranks.planning.records import LaunchPlan
from allranks.rundir.heartbeat import STORE_VARIABLE
from allranks.utils.machine import UNPRIVILEGED_PORT

LOOPBACK = "127.0.0.1"
BACKLOG = 4096
END_ITS_PROGRAM = "end the program that uses it (ss -ltnp shows it)"


class NodeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """One node on the chosen network. The node itself determines an empty address or interface."""

    node: int
    host: str
    address: str
    interface: str


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Node 0 opens the store at ``address``:``port``, or at any free port if the port is 0, or taken and not
    ``port_fixed`` (by the spec); the other nodes learn the port over the control channel."""

    address: str
    port: int
    port_fixed: bool = False
    network: str
    reason: str
    places: list[NodeAddress]


def hosts_of_ranks(plan: LaunchPlan, meeting: Rendezvous | None, own: str) -> dict[int, str]:
    """Return the host of each rank of a run, as shown in messages."""
    named = {p.node: p.host for p in meeting.places} if meeting else {}
    return {r: named.get(n.node) or n.host or own for n in plan.nodes for r in n.ranks}


def interface_towards(address: str) -> str:
    """Return the interface that the kernel's routes use for an address; nothing is sent."""
    own = own_address_towards(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == own for a in addresses):
            return name
    return "lo"


def own_address_towards(address: str) -> str:
    """Return this node's own address on the route to another one; nothing is sent.

    Raises:
        OSError: there is no route, or the name does not resolve.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def control_port(rendezvous_port: int) -> int:
    """Return the control channel's port for a given store port; 0 (any free port) if none is given."""
    return rendezvous_port + 1 if rendezvous_port else 0


def host_labels(hosts: Sequence[str]) -> list[str]:
    """Return a name for each of ``cluster.hosts``; a host that is named again gets a number."""
    return [name if name not in hosts[:i] else f"{name}#{i}" for i, name in enumerate(hosts)]


def free_port() -> int:
    """Return a port that was free a moment ago, for a store that a rank opens itself."""
    with _bind("", 0) as bound:
        return bound.getsockname()[1]


class FileStoreFolder:
    """Folder of mode 0700 on this node for torch's FileStore."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix=_prefix(os.getpid()))

    @property
    def environment(self) -> dict[str, str]:
        return {STORE_VARIABLE: f"file:{self._folder}/store"}

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _prefix(agent_pid: int) -> str:
    return f"allranks-{os.getuid()}-store-{agent_pid}-"


def remove_leftover_stores(agent_pid: int) -> None:
    """Remove stores that a killed agent has left; its ranks must have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix(agent_pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


class TcpStoreServer:
    """Process that serves a TCPStore on a socket bound by this process, so that no other program can take the port.

    Args:
        address: the address to listen on, empty for all; if this node lacks it (a forwarded address), the store listens
            on all.
        port: 0 for any free one.
        python: the Python that serves it, which needs torch.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, address: str, port: int, python: str = sys.executable) -> None:
        self.note = ""
        try:
            bound = _bind(address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            bound = _bind("", port)
            self.note = f"{address} is not an address of this node, so the store listens on all addresses"
            address = ""
        # the server inherits the socket: between two binds another program could take the port
        with bound:
            self.port: int = bound.getsockname()[1]
            words = [str(bound.fileno()), address or LOOPBACK, str(self.port), str(os.getpid())]
            self._process = subprocess.Popen(
                [python, store_server.__file__, *words], stdin=subprocess.DEVNULL, pass_fds=[bound.fileno()]
            )

    def exit_code(self) -> int | None:
        """Return the process's exit code; None while it serves."""
        return self._process.poll()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)


def bind_problem(error: OSError, port: int, cure: str) -> str:
    """Return why nothing can listen on a port, and the cure; ports that are reserved for root have their own."""
    if error.errno == errno.EACCES and port < UNPRIVILEGED_PORT:
        return f"only root may listen on a port below {UNPRIVILEGED_PORT}; choose a higher one"
    return f"{os.strerror(error.errno or 0)}; {cure}"


def _bind(address: str, port: int) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound
