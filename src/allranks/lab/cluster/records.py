"""Options and plan of a box, as frozen records saved in its folder, and every path of its state."""

from __future__ import annotations

from pathlib import Path

import msgspec

from allranks.nodes.slurm.endpoints import CLIENT_FILE, DEFAULT_NAME

DEFAULT_INTERFACE = "eth0"
MAX_NODES = 16


class HiddenFolder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A folder that some nodes do not share: they see an empty folder of their own in its place."""

    path: str
    nodes: tuple[str, ...] = ()
    """Names of the nodes it is hidden from; none means from every node."""


class BoxOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the user asks of ``cluster up``. The maps go from a node's name to its value; "" is every other node."""

    name: str = DEFAULT_NAME
    nodes: int = 3
    cpus: dict[str, int] = {}
    """CPUs announced to Slurm, whatever the machine has."""
    memory_mb: dict[str, int] = {}
    """MiB of memory announced to Slurm."""
    gpus: dict[str, int] = {}
    """GPUs announced to Slurm; there need be none."""
    interfaces: dict[str, str] = {}
    shared_tmp: bool = False
    """Nodes use this machine's /tmp instead of one of their own."""
    tmp_mb: int = 4096
    """Size in MiB of a node's private /tmp, and of each folder hidden from it."""
    hidden: tuple[HiddenFolder, ...] = ()
    network: str | None = None
    """IPv4 range of the box; None finds one that this machine does not use."""
    partitions: tuple[str, ...] = ("main",)
    accounting: bool = False
    conf: tuple[str, ...] = ()
    """Extra lines of slurm.conf; they come last, so they win."""


class NodePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One node as it will be."""

    name: str
    address: str
    interface: str
    port: str
    """The bridge's end of the node's cable."""
    cpus: int
    memory_mb: int
    gpus: int
    hidden: tuple[str, ...]


class BoxPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A box as it will be: everything that the templates and the launcher need, and nothing found out later."""

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
    partitions: tuple[str, ...]
    accounting: bool
    conf: tuple[str, ...]
    slurm_version: tuple[int, int]

    @property
    def rootless(self) -> bool:
        """Whether the box lives inside a user namespace of an ordinary user."""
        return self.uid != 0

    def node(self, name: str) -> NodePlan | None:
        """The node of that name, if there is one."""
        return next((node for node in self.nodes if node.name == name), None)


class FaultRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault that is in force, with what healing it needs."""

    kind: str
    node: str
    detail: dict[str, str] = {}


def save(record: msgspec.Struct | list[FaultRecord], path: Path, mode: int = 0o666) -> None:
    """Writes a record as JSON by one rename, so that a reader never sees half of it. The umask is taken off `mode`."""
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
        """Exists while the box is up: what Slurm's clients need to enter it."""
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
