"""Makes the login side and the nodes: a first process each, in namespaces of its own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable

from allranks.errors import EnvironmentNotAble
from allranks.testcluster import enter, network, procs
from allranks.testcluster.box import Box
from allranks.testcluster.command import SYSTEM_PATH, last_lines

READY_TIMEOUT_S = 30.0


def make_login(box: Box) -> int:
    """Creates the login side with its bridge; returns its first process."""
    login = box.plan.login
    _start(box, login, enter.new_login(box.plan))
    pid = _wait_ready(box, [login])[login]
    network.make_bridge(box, pid)
    return pid


def make_nodes(box: Box, login_pid: int, names: Iterable[str]) -> None:
    """Creates nodes and plugs them in."""
    wanted = list(names)
    for name in wanted:
        _start(box, name, enter.new_node(box.plan, login_pid))
    network.plug_in(box, login_pid, _wait_ready(box, wanted))


def _start(box: Box, name: str, prefix: list[str]) -> None:
    box.folder.ready(name).unlink(missing_ok=True)
    with box.folder.enter_log(name).open("wb") as log:
        subprocess.run(
            [*prefix, "/bin/sh", str(box.folder.enter_script(name))],
            env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", procs.INIT_MARK: f"{box.identity}:{name}"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=READY_TIMEOUT_S,
            check=False,
        )


def _wait_ready(box: Box, names: list[str]) -> dict[str, int]:
    """The first processes, once every one has set up its mounts."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    waiting = list(names)
    while waiting := [name for name in waiting if not box.folder.ready(name).exists()]:
        name = waiting[0]
        dead = not procs.starting(box.identity)
        if dead or time.monotonic() > deadline:
            log = box.folder.enter_log(name)
            said = last_lines(log.read_text(errors="replace"))
            raise EnvironmentNotAble(f"'{name}' of box '{box.name}' could not be set up on this machine: {said}.")
        time.sleep(0.02)
    # A process that is just calling exec shows no environment for a moment, and so no mark.
    while missing := [name for name in names if name not in (inits := box.inits())]:
        if time.monotonic() > deadline:
            raise EnvironmentNotAble(f"'{missing[0]}' of box '{box.name}' was set up, but its first process is gone.")
        time.sleep(0.02)
    return {name: inits[name] for name in names}
