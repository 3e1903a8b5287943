"""Start, stop and query the Slurm daemons of a box, and report its status."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

import msgspec

from allranks.errors import RunFailed
from allranks.lab.cluster import commands, processes
from allranks.lab.cluster.box import Box
from allranks.lab.cluster.commands import SYSTEM_PATH, check_output, find_program, last_lines, run_command

POLL_S = 0.05
START_TIMEOUT_S = 30.0


def daemon_prefix(box: Box, name: str) -> list[str]:
    """Return the prefix of a daemon's command: it enters its node with a clean environment."""
    kinds = commands.DAEMON_KINDS if name == box.plan.login else commands.NODE_KINDS
    values = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "HOME": "/", "SLURM_CONF": str(box.folder.slurm_conf)}
    return [
        *commands.enter_as_user(box.plan, box.init(name), kinds),
        *commands.set_environment(values, cwd="/", clean=True),
    ]


def start_munged(box: Box) -> None:
    """Start one munged for the whole box: its socket is a path, which every node sees."""
    folder = box.folder
    options = {
        "key-file": folder.munge / "key",
        "socket": folder.munge_socket,
        "pid-file": folder.munge / "pid",
        "log-file": folder.log / "munged.log",
        "seed-file": folder.munge / "seed",
        "origin": box.plan.login_address,
    }
    words = [f"--{key}={value}" for key, value in options.items()]
    check_output([*daemon_prefix(box, box.plan.login), find_program("munged"), "--force", *words], what="munged")
    wait_until(folder.munge_socket.exists, "munged", folder.log / "munged.log")


def start_slurmctld(box: Box) -> None:
    """Start the controller on the login node; return once it answers."""
    check_output([*daemon_prefix(box, box.plan.login), find_program("slurmctld")], what="slurmctld")
    ping = [*box.command_prefix("/"), "scontrol", "ping"]
    wait_until(lambda: " is UP" in run_command(ping).stdout, "slurmctld", box.folder.log / "slurmctld.log")


def start_slurmd(box: Box, name: str) -> None:
    """Start the slurmd of a node; Slurm registers it a moment later."""
    check_output([*daemon_prefix(box, name), find_program("slurmd")], what=f"slurmd of {name}")


def start_slurmd_and_wait(box: Box, name: str) -> None:
    """Start the slurmd of a known node; return once Slurm has registered it again."""
    since = datetime.now()
    start_slurmd(box, name)
    wait_registered(box, name, since)


def daemon_pids(box: Box, name: str, command: str) -> list[int]:
    """Return the processes of that name in the PID namespace of a node or of the login node."""
    space = processes.namespace(box.init(name), "pid")
    return [
        pid
        for pid in processes.in_namespaces("pid", [space] if space else [])
        if processes.status(pid).get("Name") == command
    ]


def stop_daemon(box: Box, name: str, command: str) -> None:
    """Stop a daemon and wait until it has ended."""
    pids = daemon_pids(box, name, command)
    processes.kill(pids, signal.SIGTERM)
    left = processes.wait_gone(pids, 10)
    processes.kill(left)
    if processes.wait_gone(left, 5):
        raise RunFailed(f"{command} on '{name}' cannot be stopped.")


def node_states(box: Box) -> dict[str, str]:
    """Return Slurm's state of each node, such as idle, mixed, down* (the star: it does not answer)."""
    done = run_command([*box.command_prefix("/"), "sinfo", "--noheader", "--Node", "--format=%N %t"])
    if done.returncode != 0:
        return {}
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)


def wait_idle(box: Box, names: Iterable[str], timeout_s: float = 60.0) -> None:
    """Wait until Slurm reports these nodes as idle."""
    wanted = list(names)

    def all_idle() -> bool:
        states = node_states(box)
        return all(states.get(name) == "idle" for name in wanted)

    try:
        wait_until(all_idle, "slurmd", box.folder.log / f"slurmd.{wanted[0]}.log", timeout_s)
    except RunFailed as error:
        raise RunFailed(f"{error} Slurm's node states: {node_states(box)}.") from None


def wait_registered(box: Box, name: str, since: datetime, timeout_s: float = 60.0) -> None:
    """Wait until a slurmd started after ``since`` is registered, and its node is not down."""

    def registered() -> bool:
        shown = run_command([*box.command_prefix("/"), "scontrol", "--oneliner", "show", "node", name]).stdout
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        try:
            started = datetime.fromisoformat(fields.get("SlurmdStartTime", ""))
        except ValueError:
            return False
        return started >= since.replace(microsecond=0) and not re.search(r"DOWN|[*]", fields.get("State", "DOWN"))

    wait_until(registered, "slurmd", box.folder.log / f"slurmd.{name}.log", timeout_s)


def wait_until(condition: Callable[[], bool], what: str, log: Path, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait for a daemon to be ready; the error contains the end of its log."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            said = last_lines(log.read_text(errors="replace")) if log.exists() else "there is no log"
            raise RunFailed(f"{what} is not ready after {timeout_s:g} s. The end of {log}: {said}")
        time.sleep(POLL_S)


HEALTHY_STATES = ("idle", "mix", "alloc", "comp")
"""States of a working node; a trailing * (it does not answer), ``drain`` and ``down`` are not among them."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its plan and its state."""

    name: str
    address: str
    interface: str
    cpus: int
    memory_mb: int
    gpus: int
    hidden: tuple[str, ...]
    running: bool
    """Whether the node itself is running; its slurmd may not be."""
    state: str
    """Slurm's state of the node, empty if Slurm does not answer."""
    faults: tuple[str, ...]


class BoxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a box, or that there is none."""

    up: bool
    healthy: bool = False
    """The controller answers, and every node works."""
    name: str = ""
    folder: str = ""
    slurm_conf: str = ""
    network: str = ""
    login: str = ""
    login_address: str = ""
    partitions: tuple[str, ...] = ()
    rootless: bool = False
    shared_tmp: bool = False
    accounting: bool = False
    controller: bool = False
    nodes: tuple[NodeStatus, ...] = ()


def box_status(box: Box | None) -> BoxStatus:
    """Return the current state of a box."""
    if box is None:
        return BoxStatus(up=False)
    plan = box.plan
    controller = " is UP" in run_command([*box.command_prefix("/"), "scontrol", "ping"]).stdout
    states = node_states(box) if controller else {}
    # Without root, the login node has no permission to inspect the first processes.
    alive = set(box.inits() or box.node_names)
    faults = box.faults()
    nodes = tuple(
        NodeStatus(
            name=node.name,
            address=node.address,
            interface=node.interface,
            cpus=node.cpus,
            memory_mb=node.memory_mb,
            gpus=node.gpus,
            hidden=node.hidden,
            running=node.name in alive,
            state=states.get(node.name, ""),
            faults=tuple(fault.kind for fault in faults if fault.node == node.name),
        )
        for node in plan.nodes
    )
    return BoxStatus(
        up=True,
        healthy=controller and all(node.running and node.state in HEALTHY_STATES for node in nodes),
        name=plan.name,
        folder=plan.folder,
        slurm_conf=str(box.folder.slurm_conf),
        network=plan.network,
        login=plan.login,
        login_address=plan.login_address,
        partitions=plan.partitions,
        rootless=plan.rootless,
        shared_tmp=plan.shared_tmp,
        accounting=plan.accounting,
        controller=controller,
        nodes=nodes,
    )
