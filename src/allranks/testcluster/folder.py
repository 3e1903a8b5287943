"""Every path of a box's state, in one place. The folder is all that a box has outside its own namespaces."""

from __future__ import annotations

import os
from pathlib import Path


def root() -> Path:
    """Where this user's boxes keep their state: /run/allranks, or a folder of the user's own."""
    if os.geteuid() == 0:
        return Path("/run/allranks")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "allranks"
    return Path.home() / ".local" / "state" / "allranks"


class Folder:
    """The paths of one box."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = path / "id"
        self.plan = path / "plan.json"
        self.faults = path / "faults.json"
        self.etc = path / "etc"
        self.slurm_conf = self.etc / "slurm.conf"
        self.log = path / "log"
        self.munge = path / "munge"
        self.munge_socket = self.munge / "socket"
        self.controller = path / "slurmctld"
        self.database = path / "database"
        self.spool = path / "spool"
        """A tmpfs inside the box: /run may be mounted noexec, and slurmd runs batch scripts from its spool."""
        self.task_prolog = self.spool / "task-prolog"

    def node(self, name: str) -> Path:
        """What belongs to one node, or to the login side."""
        return self.path / "nodes" / name

    def hosts(self, name: str) -> Path:
        """A node's own /etc/hosts."""
        return self.node(name) / "hosts"

    def clock(self, name: str) -> Path:
        """Seconds by which a node's clock is said to be wrong; absent when it is right."""
        return self.node(name) / "clock_offset_s"

    def enter_script(self, name: str) -> Path:
        """The first program of a node: sets up its mounts, then waits."""
        return self.node(name) / "enter.sh"

    def enter_log(self, name: str) -> Path:
        """What the first program said."""
        return self.log / f"enter.{name}.log"

    def ready(self, name: str) -> Path:
        """Exists once the mounts are set up."""
        return self.node(name) / "ready"

    def directories(self, names: list[str]) -> list[Path]:
        """Every folder that must exist before the box starts."""
        fixed = [self.etc, self.log, self.munge, self.controller, self.database, self.spool]
        return [*fixed, *(self.node(name) for name in names)]
