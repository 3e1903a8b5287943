"""Options and plan of a box: names, addresses, interfaces, as frozen records in its folder; every path of its state."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import msgspec

from allranks.errors import EnvironmentNotAble, RequestError
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
    """Folders in this machine's /tmp that nodes with their own /tmp see too: the running Python and this package."""
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

    def enter_log(self, name: str) -> Path:
        """Return the log of a node's first program, ``enter.sh``."""
        return self.log / f"enter.{name}.log"

    def ready(self, name: str) -> Path:
        """Return the file that exists once the mounts are set up."""
        return self.node(name) / "ready"


Value = TypeVar("Value", int, str)
Network = ipaddress.IPv4Network

LOGIN = "login"
FIRST_HOST = 11
"""The last octet of the first node; the login node has 1."""
CANDIDATES = tuple(
    [f"10.{block}.0.0/24" for block in range(77, 100)]
    + [f"172.{block}.77.0/24" for block in range(20, 32)]
    + [f"192.168.{block}.0/24" for block in range(77, 100)]
)
# Folders that a node needs to start or to be entered, or that are its own.
NEVER_HIDDEN = ("/", "/proc", "/sys", "/dev", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/run")
_NAME = re.compile(r"[a-z][a-z0-9-]{0,19}")
_PARTITION = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")


class Machine(NamedTuple):
    """Facts about this machine that a plan needs."""

    user: str
    uid: int
    gid: int
    cpus: int
    memory_mb: int
    python_folders: tuple[str, ...] = ()
    """Folders inside /tmp in which the running Python and this package are."""


def node_names(count: int) -> tuple[str, ...]:
    """Return n1, n2, ...: unpadded, as on many clusters, so that n10 sorts before n2."""
    if not 1 <= count <= MAX_NODES:
        raise RequestError(f"--nodes {count}: a box has 1 to {MAX_NODES} nodes.")
    return tuple(f"n{number}" for number in range(1, count + 1))


def require_node(name: str, names: Iterable[str], where: str) -> str:
    """Return ``name`` if the box has such a node; otherwise raise an error that lists them."""
    known = list(names)
    if name not in known:
        raise RequestError(f"{where}: no node '{name}'; the nodes are {', '.join(known)}.")
    return name


def free_network(used: Iterable[Network], requested: str | None = None) -> Network:
    """Return the requested range, or the first candidate that no address and no route of this machine overlaps."""
    taken = [network for network in used if network.prefixlen > 0]
    if requested is not None:
        return _requested_network(requested, taken)
    for text in CANDIDATES:
        network = Network(text)
        if not any(network.overlaps(other) for other in taken):
            return network
    raise EnvironmentNotAble(
        "No private range is free for the box: this machine's addresses and routes overlap all candidates "
        f"({CANDIDATES[0]} to {CANDIDATES[-1]}). Give a free range: --network 10.200.0.0/24."
    )


def _requested_network(requested: str, taken: list[Network]) -> Network:
    try:
        network = Network(requested)
    except ValueError as error:
        raise RequestError(f"--network {requested}: {error}. Give a range such as 10.77.0.0/24.") from None
    if not network.is_private or network.prefixlen > 27:
        raise RequestError(f"--network {requested}: give a private range of /27 or larger, such as 10.77.0.0/24.")
    clash = next((other for other in taken if network.overlaps(other)), None)
    if clash is not None:
        raise RequestError(f"--network {requested}: this machine already uses {clash}. Omit it to find a free range.")
    return network


def make_box_plan(
    options: BoxOptions, *, folder: str, network: Network, machine: Machine, slurm_version: tuple[int, int]
) -> BoxPlan:
    """Return the plan of a box; wrong options raise `RequestError` with the option and the nearest valid value."""
    names = node_names(options.nodes)
    check_name(options.name)
    _check_texts(options)
    hidden = _hidden(options, names, folder)
    cpu_map = _per_node("--cpus", options.cpus, names, max(4, machine.cpus))
    memory_map = _per_node("--memory", options.memory_mb, names, max(4096, machine.memory_mb // len(names)))
    gpu_map = _per_node("--gpus", options.gpus, names, 0)
    interface_map = _per_node("--interface", options.interfaces, names, DEFAULT_INTERFACE)
    _check_numbers(cpu_map, memory_map, gpu_map, options.tmp_mb)
    for interface in interface_map.values():
        if not _INTERFACE.fullmatch(interface) or interface == "lo":
            raise RequestError(f"--interface {interface}: not a valid interface name (1 to 15 letters, digits, . _ -).")
    nodes = tuple(
        NodePlan(
            name=name,
            address=str(network.network_address + offset),
            interface=interface_map[name],
            port=f"port-{name}",
            cpus=cpu_map[name],
            memory_mb=memory_map[name],
            gpus=gpu_map[name],
            hidden=hidden[name],
        )
        for offset, name in enumerate(names, FIRST_HOST)
    )
    return BoxPlan(
        name=options.name,
        folder=folder,
        user=machine.user,
        uid=machine.uid,
        gid=machine.gid,
        network=str(network),
        login=LOGIN,
        login_address=str(network.network_address + 1),
        nodes=nodes,
        shared_tmp=options.shared_tmp,
        tmp_mb=options.tmp_mb,
        python_folders=machine.python_folders,
        partitions=options.partitions,
        accounting=options.accounting,
        conf=options.conf,
        slurm_version=slurm_version,
    )


def check_name(name: str) -> str:
    """Return the name of a box, if it is valid (it becomes a folder)."""
    if not _NAME.fullmatch(name):
        raise RequestError(f"--name {name}: use 1 to 20 lower-case letters, digits and dashes, starting with a letter.")
    return name


def _check_texts(options: BoxOptions) -> None:
    if not options.partitions:
        raise RequestError("--partition: a box has at least one partition.")
    for partition in options.partitions:
        if not _PARTITION.fullmatch(partition) or partition.upper() == "DEFAULT":
            raise RequestError(f"--partition {partition}: use letters, digits, _ and -, starting with a letter.")
    for line in options.conf:
        if "\n" in line or not re.fullmatch(r"\s*[A-Za-z]+\s*=.*", line):
            raise RequestError(f"--conf {line!r}: give one line of slurm.conf, such as 'KillWait=30'.")


def _check_numbers(cpus: Mapping[str, int], memory: Mapping[str, int], gpus: Mapping[str, int], tmp_mb: int) -> None:
    for option, values, low, high in (
        ("--cpus", cpus, 1, 1024),
        ("--memory", memory, 64, 1 << 24),
        ("--gpus", gpus, 0, 64),
        ("--tmp-mb", {"": tmp_mb}, 1, 1 << 24),
    ):
        wrong = next((value for value in values.values() if not low <= value <= high), None)
        if wrong is not None:
            raise RequestError(f"{option} {wrong}: give a number from {low} to {high}.")


def _per_node(option: str, given: Mapping[str, Value], names: tuple[str, ...], default: Value) -> dict[str, Value]:
    for name in given:
        if name:
            require_node(name, names, option)
    common = given.get("", default)
    return {name: given.get(name, common) for name in names}


def _hidden(options: BoxOptions, names: tuple[str, ...], folder: str) -> dict[str, tuple[str, ...]]:
    hidden: dict[str, list[str]] = {name: [] for name in names}
    for entry in options.hidden:
        path = checked_hidden_path(entry.path, folder, "--hide")
        for name in entry.nodes or names:
            hidden[require_node(name, names, f"--hide {entry.path}")].append(path)
    if not options.shared_tmp and PurePosixPath(folder).is_relative_to("/tmp"):  # noqa: S108 - that of nodes
        raise RequestError(
            f"The box would keep its state in {folder}, which the nodes' private /tmp hides. "
            "Set XDG_RUNTIME_DIR to a folder outside /tmp, or use --shared-tmp."
        )
    return {name: tuple(paths) for name, paths in hidden.items()}


def checked_hidden_path(text: str, folder: str, where: str) -> str:
    """Return an absolute path that a node does not need itself; otherwise raise an error."""
    path = PurePosixPath(text)
    if not path.is_absolute() or ".." in path.parts or re.search(r"[^\x20-\x7e]|['\\]", text):
        raise RequestError(f"{where} {text}: give an absolute path (plain characters, no '..' and no quotes).")
    if str(path) in NEVER_HIDDEN or PurePosixPath(folder).is_relative_to(path):
        raise RequestError(f"{where} {text}: the node itself needs this folder. Hide the data folder instead.")
    return str(path)
