"""Create the login node and the nodes in separate namespaces, and connect them with a bridge."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable

from allranks.errors import EnvironmentNotAble
from allranks.lab.cluster import commands, config_files, processes
from allranks.lab.cluster import commands as enter
from allranks.lab.cluster.box import Box
from allranks.lab.cluster.commands import SYSTEM_PATH, check_output, find_program, last_lines


def make_bridge(box: Box, login_pid: int) -> None:
    """Create the bridge on the login node; it is also the login node's own interface."""
    run_ip_batch(box, login_pid, config_files.bridge_batch(box.plan))


def connect_nodes(box: Box, login_pid: int, pids: dict[str, int]) -> None:
    """Connect each node in ``pids`` with a link, and set its address."""
    run_ip_batch(box, login_pid, config_files.cable_batch(box.plan, pids))
    for name, pid in pids.items():
        run_ip_batch(box, pid, config_files.node_batch(box.plan, name))


def run_ip_batch(box: Box, pid: int, commands: str) -> None:
    """Run ``ip`` commands in the network namespace of ``pid``. Their process IDs are outside IDs, so no PID namespace is entered."""
    check_output([*enter.enter_for_setup(box.plan, pid, ("net",)), find_program("ip"), "-batch", "-"], text=commands)


READY_TIMEOUT_S = 30.0


def make_login(box: Box) -> int:
    """Create the login node with its bridge; return its first process."""
    login = box.plan.login
    _start_init(box, login, commands.create_login(box.plan))
    pid = _wait_ready(box, [login])[login]
    make_bridge(box, pid)
    return pid


def make_nodes(box: Box, login_pid: int, names: Iterable[str]) -> None:
    """Create nodes and connect them."""
    wanted = list(names)
    for name in wanted:
        _start_init(box, name, commands.create_node(box.plan, login_pid))
    connect_nodes(box, login_pid, _wait_ready(box, wanted))


def _start_init(box: Box, name: str, prefix: list[str]) -> None:
    box.folder.ready(name).unlink(missing_ok=True)
    with box.folder.enter_log(name).open("wb") as log:
        subprocess.run(
            [*prefix, "/bin/sh", str(box.folder.enter_script(name))],
            env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", processes.INIT_VARIABLE: f"{box.identity}:{name}"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=READY_TIMEOUT_S,
            check=False,
        )


def _wait_ready(box: Box, names: list[str]) -> dict[str, int]:
    """Return the first processes, once each has set up its mounts."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    waiting = list(names)
    while waiting := [name for name in waiting if not box.folder.ready(name).exists()]:
        name = waiting[0]
        dead = not processes.has_init(box.identity)
        if dead or time.monotonic() > deadline:
            log = box.folder.enter_log(name)
            said = last_lines(log.read_text(errors="replace"))
            raise EnvironmentNotAble(f"'{name}' of box '{box.name}' could not be set up on this machine: {said}.")
        time.sleep(0.02)
    # A process that is calling exec shows no environment for a moment, and therefore no mark.
    while missing := [name for name in names if name not in (inits := box.inits())]:
        if time.monotonic() > deadline:
            raise EnvironmentNotAble(f"'{missing[0]}' of box '{box.name}' was set up, but its first process is gone.")
        time.sleep(0.02)
    return {name: inits[name] for name in names}
