"""Starts, stops and waits for the daemons of a box."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from allranks.errors import RunFailed
from allranks.testcluster import enter, procs
from allranks.testcluster.box import Box
from allranks.testcluster.command import SYSTEM_PATH, attempt, last_lines, program, run

POLL_S = 0.05
START_TIMEOUT_S = 30.0


def daemon_prefix(box: Box, name: str) -> list[str]:
    """Words before a daemon's command: enters its place with a clean environment."""
    kinds = enter.DAEMON_KINDS if name == box.plan.login else enter.NODE_KINDS
    values = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "HOME": "/", "SLURM_CONF": str(box.folder.slurm_conf)}
    return [
        *enter.as_user(box.plan, box.init(name), kinds),
        *enter.with_environment(values, cwd="/", clean=True),
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
    run([*daemon_prefix(box, box.plan.login), program("munged"), "--force", *words], what="munged")
    wait_until(folder.munge_socket.exists, "munged", folder.log / "munged.log")


def start_slurmctld(box: Box) -> None:
    """The controller, on the login side; returns once it answers."""
    run([*daemon_prefix(box, box.plan.login), program("slurmctld")], what="slurmctld")
    ping = [*box.command_prefix("/"), "scontrol", "ping"]
    wait_until(lambda: " is UP" in attempt(ping).stdout, "slurmctld", box.folder.log / "slurmctld.log")


def start_slurmd(box: Box, name: str) -> None:
    """The slurmd of a node; Slurm hears of it a moment later."""
    run([*daemon_prefix(box, name), program("slurmd")], what=f"slurmd of {name}")


def start_slurmd_and_wait(box: Box, name: str) -> None:
    """The slurmd of a node that Slurm knew before; returns once Slurm has heard of it again."""
    since = datetime.now()
    start_slurmd(box, name)
    wait_registered(box, name, since)


def daemon_pids(box: Box, name: str, command: str) -> list[int]:
    """The processes of that name in the PID namespace of a node or of the login side."""
    space = procs.namespace(box.init(name), "pid")
    return [
        pid for pid in procs.in_namespaces("pid", [space] if space else []) if procs.status(pid).get("Name") == command
    ]


def stop_daemon(box: Box, name: str, command: str) -> None:
    """Ends a daemon and waits until it is gone."""
    pids = daemon_pids(box, name, command)
    procs.kill(pids, signal.SIGTERM)
    left = procs.wait_gone(pids, 10)
    procs.kill(left)
    if procs.wait_gone(left, 5):
        raise RunFailed(f"{command} on '{name}' cannot be stopped.")


def node_states(box: Box) -> dict[str, str]:
    """What Slurm says of each node, such as idle, mixed, down* (the star: it does not answer)."""
    done = attempt([*box.command_prefix("/"), "sinfo", "--noheader", "--Node", "--format=%N %t"])
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
        shown = attempt([*box.command_prefix("/"), "scontrol", "--oneliner", "show", "node", name]).stdout
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
