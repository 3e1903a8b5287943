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
    """Words before a daemon's command: enters its place with a clean environment."""
    kinds = commands.DAEMON_KINDS if name == box.plan.login else commands.NODE_KINDS
    values = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "HOME": "/", "SLURM_CONF": str(box.folder.slurm_conf)}
    return [
        *commands.enter_as_user(box.plan, box.init(name), kinds),
        *commands.set_environment(values, cwd="/", clean=True),
    ]


def start_munged(box: Box) -> None:
    """One munged for the whole box: its socket is a path, which every node sees."""
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
    """The controller, on the login side; returns once it answers."""
    check_output([*daemon_prefix(box, box.plan.login), find_program("slurmctld")], what="slurmctld")
    ping = [*box.command_prefix("/"), "scontrol", "ping"]
    wait_until(lambda: " is UP" in run_command(ping).stdout, "slurmctld", box.folder.log / "slurmctld.log")


def start_slurmd(box: Box, name: str) -> None:
    """The slurmd of a node; Slurm hears of it a moment later."""
    check_output([*daemon_prefix(box, name), find_program("slurmd")], what=f"slurmd of {name}")


def start_slurmd_and_wait(box: Box, name: str) -> None:
    """The slurmd of a node that Slurm knew before; returns once Slurm has heard of it again."""
    since = datetime.now()
    start_slurmd(box, name)
    wait_registered(box, name, since)


def daemon_pids(box: Box, name: str, command: str) -> list[int]:
    """The processes of that name in the PID namespace of a node or of the login side."""
    space = processes.namespace(box.init(name), "pid")
    return [
        pid
        for pid in processes.in_namespaces("pid", [space] if space else [])
        if processes.status(pid).get("Name") == command
    ]


def stop_daemon(box: Box, name: str, command: str) -> None:
    """Ends a daemon and waits until it is gone."""
    pids = daemon_pids(box, name, command)
    processes.kill(pids, signal.SIGTERM)
    left = processes.wait_gone(pids, 10)
    processes.kill(left)
    if processes.wait_gone(left, 5):
        raise RunFailed(f"{command} on '{name}' cannot be stopped.")


def node_states(box: Box) -> dict[str, str]:
    """What Slurm says of each node, such as idle, mixed, down* (the star: it does not answer)."""
    done = run_command([*box.command_prefix("/"), "sinfo", "--noheader", "--Node", "--format=%N %t"])
    if done.returncode != 0:
        return {}
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)


def wait_idle(box: Box, names: Iterable[str], timeout_s: float = 60.0) -> None:
    """Waits until Slurm calls these nodes idle."""
    wanted = list(names)

    def all_idle() -> bool:
        states = node_states(box)
        return all(states.get(name) == "idle" for name in wanted)

    try:
        wait_until(all_idle, "slurmd", box.folder.log / f"slurmd.{wanted[0]}.log", timeout_s)
    except RunFailed as error:
        raise RunFailed(f"{error} Slurm's view of the nodes: {node_states(box)}.") from None


def wait_registered(box: Box, name: str, since: datetime, timeout_s: float = 60.0) -> None:
    """Waits until Slurm has heard of a slurmd that was started after ``since``, and does not call the node down."""

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
    """Waits for a daemon to be of use; the error quotes the end of its log."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            said = last_lines(log.read_text(errors="replace")) if log.exists() else "there is no log"
            raise RunFailed(f"{what} is of no use after {timeout_s:g} s. The end of {log}: {said}")
        time.sleep(POLL_S)


HEALTHY_STATES = ("idle", "mix", "alloc", "comp")
"""States of a node that works; a trailing * (it does not answer) or ``drain`` and ``down`` are not."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as planned and as it is."""

    name: str
    address: str
    interface: str
    cpus: int
    memory_mb: int
    gpus: int
    hidden: tuple[str, ...]
    running: bool
    """Whether the node itself is alive; its slurmd may not be."""
    state: str
    """Slurm's word for it, empty if Slurm does not answer."""
    faults: tuple[str, ...]


class BoxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A box, or that there is none."""

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
    """The state of a box now."""
    if box is None:
        return BoxStatus(up=False)
    plan = box.plan
    controller = " is UP" in run_command([*box.command_prefix("/"), "scontrol", "ping"]).stdout
    states = node_states(box) if controller else {}
    # Without root, the login side itself may not look at the first processes.
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
