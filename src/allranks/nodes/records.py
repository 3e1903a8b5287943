"""Frozen records of a node's facts, its requirements, and the verdicts."""

from __future__ import annotations

from typing import Any

import msgspec

from allranks.errors import EnvironmentNotAble
from allranks.planning.records import NetworkInterface, RdmaPort

CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
"""PyPI's torch for Linux brings several GB of CUDA libraries."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One fact about one node, and whether it is acceptable."""

    name: str
    ok: bool
    found: str
    cure: str = ""
    stageable: bool = True
    """Whether a bundle can provide what is missing, if that applies; False: the launcher's machine lacks it too."""
    blocks: bool = True
    """Whether a run must not start with this failure; False: a problem that allranks' settings for the ranks avoid."""


class PreflightReport(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of one node."""

    host: str
    checks: list[Check]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def may_run(self) -> bool:
        """Return whether no check failed that blocks a run."""
        return all(check.ok or not check.blocks for check in self.checks)

    def line(self) -> str:
        """``n1 proj=ok pkgs=ok py=3.11.7 ... OK``; a failing item is in capitals: ``pkgs=MISSING(torch)``."""
        items = " ".join(f"{check.name}={check.found}" for check in self.checks)
        return f"{self.host} {items} {'OK' if self.ok else 'FAIL'}"


def require_ready(report: PreflightReport) -> None:
    """Refuse to continue after a failed check.

    Raises:
        EnvironmentNotAble: the message has every failure with its fix.
    """
    bad = [c for c in report.checks if not c.ok]
    if bad:
        raise EnvironmentNotAble(
            f"{report.host} is not ready: " + "; ".join(f"{c.name}: {c.found}; {c.cure}" for c in bad)
        )


class Interface(NetworkInterface, frozen=True, kw_only=True):
    """One network interface of a node."""

    up: bool = True
    loopback: bool = False
    numa: int | None = None
    driver: str = ""


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A package in the node's interpreter."""

    version: str | None = None
    origin: str | None = None


class ImportResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of importing a package."""

    seconds: float | None = None
    error: str | None = None


class ContentDigest(msgspec.Struct, frozen=True, kw_only=True):
    """A digest of the content of a folder or file."""

    files: int
    bytes: int
    digest: str


class FolderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A path as the node sees it."""

    exists: bool = False
    free_bytes: int | None = None
    nonce: str | None = None
    write_error: str | None = None
    fingerprint: ContentDigest | None = None
    error: str | None = None


class HubFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has in its cache of the hub, and whether it reaches the hub; None: not tried, or not known."""

    cached: dict[str, bool] = {}
    reached: bool | None = None
    error: str = ""


class BuildLock(msgspec.Struct, frozen=True, kw_only=True):
    """The lock of a C++ extension's build. `held`: a process of the node has it open, as the one that builds has."""

    path: str
    age_s: float
    held: bool


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One node's answer to ``probe.py``."""

    host: str
    node_id: int = 0
    own_name: str = ""
    python: str = ""
    executable: str = ""
    cpus: int = 1
    memory_bytes: int = 0
    interfaces: list[Interface] = []
    resolves: list[str] | None = None
    resolve_error: str | None = None
    free_ports: list[int] = []
    unused_port: int = 0
    clock: float = 0.0
    packages: dict[str, Package] = {}
    imports: dict[str, ImportResult] | None = None
    program: dict[str, bool] = {}
    hub: HubFacts | None = None
    build_locks: list[BuildLock] = []
    folders: dict[str, FolderFacts] = {}
    shm_free_bytes: int = 0
    memlock_bytes: int | None = None
    open_files: int | None = None
    gpus: list[dict[str, Any]] = []
    gpu_error: str | None = None
    p2p: str | None = None
    infiniband: list[RdmaPort] = []
    topo: str | None = None
    gpu_pci: list[dict[str, Any]] = []
    nccl: str | None = None
    nccl_conf: dict[str, str] = {}
    probe_s: float = 0.0


class UnreachedPort(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's port that a node did not reach in any attempt, and the error of the last one."""

    peer: str
    port: int
    why: str
    address: str = ""
    tries: int = 1
    source: str = ""
    """The node that tried; not in its own answer."""

    def text(self) -> str:
        """Return direction, address, port, and how often it failed: ``n1 -> n2 10.0.0.2:21000 timed out (4 of 4)``."""
        place = f" {self.address}" if self.address else ""
        return (
            f"{self.source} -> {self.peer}{place}:{self.port} {self.why} ({self.tries} of {self.tries} attempts failed)"
        )


class ConnectionResults(msgspec.Struct, frozen=True, kw_only=True):
    """One node's answer to ``connectivity_probe.py``."""

    host: str
    unreached: list[UnreachedPort]
    errors: list[str] = []
    seconds: float = 0.0


class RequiredFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A path that the ranks will use. `nonce`: the name of the file that shows that it is the launcher's own folder."""

    role: str
    path: str
    write: bool = False
    fingerprint: bool = False
    nonce: str | None = None


class HubItem(msgspec.Struct, frozen=True, kw_only=True):
    """A model or data set of the hub, and where it would be in the cache. `here`: it is in the launcher's cache."""

    key: str
    name: str
    folders: list[str]
    here: bool = False


class NodeRequirements(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The request to every node: the argument of ``probe.py``, as JSON."""

    python: str
    packages: list[str] = []
    imports: list[str] = []
    import_limit_s: float = 90.0
    folders: list[RequiredFolder] = []
    ports: list[int] = []
    program: dict[str, str] = {}
    """Packages that the user's own program imports, each with the place."""
    program_unknown: str = ""
    """The key of the spec that may add packages in a way that only the job shows."""
    extensions: str = ""
    """The folder of the C++ extensions that torch builds; empty: not to be read."""
    hub: list[HubItem] = []
    hub_offline: str = ""
    """The variable that disables access to the hub."""
    hub_address: str = ""
    """Host and port of the hub, or of the proxy on the way; empty: not to be tried."""
