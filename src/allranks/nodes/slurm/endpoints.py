"""Find a Slurm cluster in namespaces of this machine, by the file that it publishes while it is running.

``cluster up`` writes the file ``client.json`` into the folder of a box as its last step, and ``cluster down`` removes
it first. The file contains the prefix that enters the cluster, and the process that must be alive for it to be valid.
Slurm clients read only this file.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from allranks.errors import RequestError
from allranks.utils.inputs import open_regular

NAME_VARIABLE = "ALLRANKS_BOX"
"""Environment variable with the box to use if several are running; set for every process inside a box."""
DEFAULT_NAME = "box"
CLIENT_FILE = "client.json"
VERSION = 1
MAX_BYTES = 1 << 20
WRITABLE_BY_OTHERS = 0o022


class SlurmEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How to enter a running cluster."""

    version: int
    name: str
    boot_id: str
    """Boot ID: the file may be in a home folder, and then survives a reboot."""
    pid: int
    """First process of the login node; the cluster is running as long as it lives."""
    start_ticks: int
    """Start time of that process. Another process with the same pid has another value."""
    enter: list[str]
    """Prefix of a command that enters the login node from outside."""
    inside: str
    """A mount point that exists only inside: there, a command needs no `enter` prefix."""
    environment: dict[str, str]

    def is_alive(self) -> bool:
        """Return whether the login node is the published process. On a node the pid is another process's, or unused."""
        return (boot_id(), start_ticks(self.pid)) == (self.boot_id, self.start_ticks)

    def command_prefix(self, cwd: Path | str) -> list[str]:
        """Return the prefix with which a command runs on the login node, in the folder `cwd`."""
        enter = [] if self.inside in _mount_points() else self.enter
        env = shutil.which("env") or "/usr/bin/env"  # it changes the folder after entering the namespaces
        return [*enter, env, f"--chdir={cwd}", *(f"{key}={value}" for key, value in self.environment.items())]


def state_root() -> Path:
    """Return the state folder of this user's boxes: /run/allranks, or a folder of the user."""
    if os.geteuid() == 0:
        return Path("/run/allranks")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # After `su` and `sudo`, XDG_RUNTIME_DIR may be another user's.
    if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.geteuid():  # noqa: PTH112, PTH116
        return Path(runtime) / "allranks"
    return Path.home() / ".local" / "state" / "allranks"


def boot_id() -> str:
    """Return the kernel's boot ID."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is gone, or a zombie.

    Unlike environment and namespaces, this is readable for every user and process.
    """
    try:
        # The name of the program, in brackets, may contain blanks and brackets.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _mount_points() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    return {re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), line.split()[4]) for line in lines}


def read_endpoint(folder: Path) -> SlurmEndpoint | None:
    """Return the cluster with its state in this folder; None if not running, or if others may have written its file."""
    try:
        with open_regular(folder / CLIENT_FILE) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS:  # its content is executed
                return None
            endpoint = msgspec.json.decode(file.read(MAX_BYTES), type=SlurmEndpoint)
    except (OSError, msgspec.MsgspecError):
        return None
    return endpoint if endpoint.version == VERSION and endpoint.is_alive() else None


def select(names: Sequence[str], wanted: str | None) -> str | None:
    """Return the selected running cluster; without a selection the only one, or the one with the default name.

    Raises:
        RequestError: several are running, and none is selected.
    """
    if wanted is not None:
        return wanted if wanted in names else None
    if len(names) <= 1:
        return names[0] if names else None
    if DEFAULT_NAME not in names:
        raise RequestError(
            f"Several boxes are running: {', '.join(names)}. Select one with --name, or set {NAME_VARIABLE}."
        )
    return DEFAULT_NAME


def find_endpoint(name: str | None = None) -> SlurmEndpoint | None:
    """Return the running cluster, or None.

    Without a name: the one in ``ALLRANKS_BOX``; else the only one; else the one with the default name.

    Raises:
        RequestError: several are running, and none is selected.
    """
    folders = (path.parent for path in sorted(state_root().glob(f"*/{CLIENT_FILE}")))
    endpoints = {endpoint.name: endpoint for folder in folders if (endpoint := read_endpoint(folder))}
    chosen = select(list(endpoints), name or os.environ.get(NAME_VARIABLE) or None)
    return endpoints[chosen] if chosen is not None else None
