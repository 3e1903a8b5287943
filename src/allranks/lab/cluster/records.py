"""Options and plan of a box, as frozen records saved in its folder, and every path of its state."""

from __future__ import annotations

from pathlib import Path

import msgspec

from allranks.nodes.slurm.endpoints import CLIENT_FILE, DEFAULT_NAME

DEFAULT_INTERFACE = "eth0"
MAX_NODES = 16


class HiddenFolder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A folder that some nodes do not share: they see their own empty folder instead."""

    path: str
    nodes: tuple[str, ...] = ()
    """Names of the nodes from which it is hidden; empty means all nodes."""


class BoxOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of ``cluster up``. The maps go from a node's name to its value; "" is every other node."""

    name: str = DEFAULT_NAME
    nodes: int = 3
    cpus: dict[str, int] = {}
    """CPUs reported to Slurm, independent of the machine."""
    memory_mb: dict[str, int] = {}
    """MiB of memory reported to Slurm."""
    gpus: dict[str, int] = {}
    """GPUs reported to Slurm; they need not exist."""
    interfaces: dict[str, str] = {}
    shared_tmp: bool = False
    """Nodes use this machine's /tmp instead of their own."""
    tmp_mb: int = 4096
    """Size in MiB of a node's private /tmp, and of each folder hidden from it."""
    hidden: tuple[HiddenFolder, ...] = ()
    network: str | None = None
    """IPv4 range of the box; None finds one that this machine does not use."""
    partitions: tuple[str, ...] = ("main",)
    accounting: bool = False
    conf: tuple[str, ...] = ()
    """Extra lines of slurm.conf; they come last and take precedence."""


class NodePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The plan of one node."""

    name: str
    address: str
    interface: str
    port: str
    """The bridge's end of the node's link."""
    cpus: int
    memory_mb: int
    gpus: int
    hidden: tuple[str, ...]


class BoxPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The plan of a box: everything that the templates and the launcher need."""

    name: str
    folder: str
    user: str
    uid: int
    gid: int
    network: str
    login: str
    login_address: str
    nodes: tuple[NodePlan, ...]
    shared_tmp: bool
    tmp_mb: int
    python_folders: tuple[str, ...]
    """Folders inside this machine's /tmp that nodes with a /tmp of their own see there, too: the running Python and this package."""
    partitions: tuple[str, ...]
    accounting: bool
    conf: tuple[str, ...]
    slurm_version: tuple[int, int]

    @property
    def rootless(self) -> bool:
        """Return whether the box is inside a user namespace of an ordinary user."""
        return self.uid != 0

    def node(self, name: str) -> NodePlan | None:
        """Return the node of that name, if it exists."""
        return next((node for node in self.nodes if node.name == name), None)


class FaultRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An active fault, with the data needed for healing."""

    kind: str
    node: str
    detail: dict[str, str] = {}


def save(record: msgspec.Struct | list[FaultRecord], path: Path, mode: int = 0o666) -> None:
    """Write a record as JSON by an atomic rename. The umask is applied to `mode`."""
    draft = path.with_name(path.name + ".draft")
    draft.touch(mode)
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    draft.replace(path)


class BoxPaths:
    """The paths of one box."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = path / "id"
        self.plan = path / "plan.json"
        self.client = path / CLIENT_FILE
        """Exists while the box is running: what Slurm's clients need to enter it."""
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
        """Return the folder of one node, or of the login node."""
        return self.path / "nodes" / name

    def hosts(self, name: str) -> Path:
        """Return a node's own /etc/hosts."""
        return self.node(name) / "hosts"

    def clock(self, name: str) -> Path:
        """Return the file with the reported offset of a node's clock in seconds; absent if there is none."""
        return self.node(name) / "clock_offset_s"

    def enter_script(self, name: str) -> Path:
        """Return the first program of a node: it sets up its mounts, then waits."""
        return self.node(name) / "enter.sh"

    def enter_log(self, name: str) -> Path:
        """Return the log of the first program."""
        return self.log / f"enter.{name}.log"

    def ready(self, name: str) -> Path:
        """Return the file that exists once the mounts are set up."""
        return self.node(name) / "ready"

    def directories(self, names: list[str]) -> list[Path]:
        """Return every folder that must exist before the box starts."""
        fixed = [self.etc, self.log, self.munge, self.controller, self.database, self.spool]
        return [*fixed, *(self.node(name) for name in names)]
