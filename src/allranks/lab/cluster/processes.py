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
"""Environment variable of first processes: <identity of the box>:<node>."""
ID_VARIABLE = "ALLRANKS_BOX_ID"
"""Environment variable of every process that was sent into the box from outside."""
_PROC = Path("/proc")


def all_pids() -> list[int]:
    """Return every visible process."""
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process started; empty if it is gone or not readable."""
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in data.decode(errors="replace").split("\0") if "=" in entry)
    return {key: value for key, _, value in pairs}


def namespace(pid: int | str, kind: str) -> str | None:
    """Return the name of a process's namespace (``kind`` is net, mnt, pid ...); None if it is gone or not readable."""
    try:
        return str((_PROC / str(pid) / "ns" / kind).readlink())
    except OSError:
        return None


def status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty if the process is gone."""
    try:
        text = (_PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def init_processes(identity: str) -> dict[str, int]:
    """Return the first process of the login node and of each node, as pids of this process's namespace."""
    found: dict[str, int] = {}
    for pid in all_pids():
        mark = environment(pid).get(INIT_VARIABLE, "")
        box, _, name = mark.rpartition(":")
        if box == identity and _is_first(status(pid)):
            found[name] = pid
    return found


def _is_first(fields: dict[str, str]) -> bool:
    """Return whether a live process has pid 1 in a PID namespace below ours."""
    numbers = fields.get("NSpid", "").split()
    return len(numbers) > 1 and numbers[-1] == "1" and not fields.get("State", "Z").startswith(("Z", "X"))


class Mount(NamedTuple):
    """One line of a process's mount table."""

    device: str
    target: str
    kind: str


def mounts(pid: int | str) -> list[Mount]:
    """Return the mounts that a process sees, earliest first."""
    rows = []
    for line in (_PROC / str(pid) / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        target = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), left.split()[4])
        rows.append(Mount(left.split()[2], target, right.split()[0]))
    return rows


def in_namespaces(kind: str, wanted: Iterable[str]) -> list[int]:
    """Return every process whose namespace of that kind is one of ``wanted``."""
    names = set(wanted)
    return [pid for pid in all_pids() if namespace(pid, kind) in names]


def marked_processes(identity: str) -> list[int]:
    """Return every process with the box's marks outside of this process's network: marks alone may be inherited."""
    outside = namespace("self", "net")
    return [pid for pid in all_pids() if _carries_mark(pid, identity) and namespace(pid, "net") != outside]


def has_init(identity: str) -> bool:
    """Return whether any first process of the box is alive or about to enter its namespaces."""
    return any(environment(pid).get(INIT_VARIABLE, "").rpartition(":")[0] == identity for pid in all_pids())


def _carries_mark(pid: int, identity: str) -> bool:
    values = environment(pid)
    return values.get(ID_VARIABLE) == identity or values.get(INIT_VARIABLE, "").rpartition(":")[0] == identity


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes, some of which may be gone."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return status(pid).get("State", "Z")[:1] not in ("Z", "X")


def wait_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until the processes are gone; return those that are not."""
    deadline = time.monotonic() + timeout_s
    left = list(pids)
    while left := [pid for pid in left if alive(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left
