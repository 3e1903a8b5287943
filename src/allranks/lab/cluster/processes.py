"""Find the processes of a box in /proc, and kill them.

Processes are identified by their own state, never by a stored pid: the first process of the login node and of each node has a
mark in its environment, and all others share their namespaces. So a box can be found and stopped after a crash, and a reused
pid is never killed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

INIT_VARIABLE = "ALLRANKS_BOX_INIT"
"""Environment of first processes: <identity of the box>:<node>."""
ID_VARIABLE = "ALLRANKS_BOX_ID"
"""Environment of everything that was sent into the box from outside."""
_PROC = Path("/proc")


def all_pids() -> list[int]:
    """Every process that this one can see."""
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def environment(pid: int) -> dict[str, str]:
    """The environment a process started with; empty if it is gone or not ours to read."""
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in data.decode(errors="replace").split("\0") if "=" in entry)
    return {key: value for key, _, value in pairs}


def namespace(pid: int | str, kind: str) -> str | None:
    """Name of a process's namespace (``kind`` is net, mnt, pid ...); None if it is gone or not ours to read."""
    try:
        return str((_PROC / str(pid) / "ns" / kind).readlink())
    except OSError:
        return None


def status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status; empty if the process is gone."""
    try:
        text = (_PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def init_processes(identity: str) -> dict[str, int]:
    """The first process of the login side and of each node, as this process's pids."""
    found: dict[str, int] = {}
    for pid in all_pids():
        mark = environment(pid).get(INIT_VARIABLE, "")
        box, _, name = mark.rpartition(":")
        if box == identity and _is_first(status(pid)):
            found[name] = pid
    return found


def _is_first(fields: dict[str, str]) -> bool:
    """Whether a live process has pid 1 in a PID namespace below ours."""
    numbers = fields.get("NSpid", "").split()
    return len(numbers) > 1 and numbers[-1] == "1" and not fields.get("State", "Z").startswith(("Z", "X"))


class Mount(NamedTuple):
    """One line of a process's table of mounts."""

    device: str
    target: str
    kind: str


def mounts(pid: int | str) -> list[Mount]:
    """What a process sees mounted, the earliest first."""
    rows = []
    for line in (_PROC / str(pid) / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        target = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), left.split()[4])
        rows.append(Mount(left.split()[2], target, right.split()[0]))
    return rows


def in_namespaces(kind: str, wanted: Iterable[str]) -> list[int]:
    """Every process whose namespace of that kind is one of ``wanted``."""
    names = set(wanted)
    return [pid for pid in all_pids() if namespace(pid, kind) in names]


def marked_processes(identity: str) -> list[int]:
    """Every process that carries the box's marks and is not in this process's network: marks alone may be borrowed."""
    outside = namespace("self", "net")
    return [pid for pid in all_pids() if _carries_mark(pid, identity) and namespace(pid, "net") != outside]


def has_init(identity: str) -> bool:
    """Whether any first process of the box lives, or is on its way into its namespaces."""
    return any(environment(pid).get(INIT_VARIABLE, "").rpartition(":")[0] == identity for pid in all_pids())


def _carries_mark(pid: int, identity: str) -> bool:
    values = environment(pid)
    return values.get(ID_VARIABLE) == identity or values.get(INIT_VARIABLE, "").rpartition(":")[0] == identity


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Sends a signal to processes, some of which may be gone."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def alive(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    return status(pid).get("State", "Z")[:1] not in ("Z", "X")


def wait_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Waits until the processes are gone; returns those that are not."""
    deadline = time.monotonic() + timeout_s
    left = list(pids)
    while left := [pid for pid in left if alive(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left
