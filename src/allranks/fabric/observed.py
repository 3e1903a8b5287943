"""What the ranks really got: NCCL's own lines in a log, and the addresses of a process's connections. Pure.

Source of the lines: logs of NCCL 2.4 to 2.30 with NCCL_DEBUG=INFO; Gloo says only how many peers it reached
(GLOO_LOG_LEVEL=INFO), so its interface is read off its connections.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

_LINE = re.compile(r"(?:(?P<host>[\w.-]+):\d+:\d+ \[\d+\] )?NCCL (?:INFO|WARN) (?P<text>.*)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?(?P<name>[^\s:]+):(?P<address>\S*?)<\d+>")
_NETWORK = re.compile(r"(?:Using network|Assigned NET plugin|Initialized NET plugin) (?P<net>\S+(?: Libfabric)?)")
_SOCKET = re.compile(r"NET/Socket ?: Using (?P<list>.*)")
_IB = re.compile(r"NET/IB ?: Using (?P<list>.*)")
_ITEM = re.compile(r"\[\d+\](?P<name>[^\s:]+):(?P<rest>[^\s]*)")
_VIA = re.compile(r"\bvia (?P<way>P2P|SHM|NET)(?:/(?P<rest>[\w/.()-]+(?: Libfabric[\w/.-]*)?))?")
_REASONS = (
    (
        re.compile(r"Failed to open libibverbs"),
        "libibverbs is not installed where the ranks run (often a container without it)",
    ),
    (
        re.compile(r"NET/IB ?: No device found"),
        "NCCL found no RDMA device (in a container: /dev/infiniband is not passed on)",
    ),
    (re.compile(r"NCCL_IB_DISABLE set by environment to [1-9]"), "NCCL_IB_DISABLE is set"),
    (re.compile(r"NCCL_NET set by environment to Socket", re.IGNORECASE), "NCCL_NET is set to Socket"),
    (re.compile(r"ibv_\w+ failed|Call to ibv_\w+"), "a call of the RDMA library failed"),
    (re.compile(r"NET/OFI .*(?:No eligible providers|initialization failed)"), "the EFA plugin found no provider"),
)
_PEERS = re.compile(
    r"INFO Rank (?P<rank>\d+) is connected to (?P<got>\d+)\. Expected number of connected peers is: (?P<want>\d+)"
)
RDMA = ("IB", "IBext", "AWS", "OFI", "UCX", "SHARP", "COLLNET")


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """One node, over all its ranks. Sets as sorted lists; empty: nothing was said of it."""

    host: str
    networks: list[str] = []
    bootstrap: list[str] = []
    """Interfaces of the bootstrap."""
    sockets: list[str] = []
    """Interfaces that NCCL sends over when it uses sockets."""
    devices: list[str] = []
    """RDMA ports, ``mlx5_0:1``."""
    layers: list[str] = []
    """IB or RoCE, as NCCL tells it of the ports."""
    ways: dict[str, int] = {}
    """Channels by way: P2P, SHM, NET/IB, NET/IB/GDRDMA, NET/Socket, ..."""
    reasons: list[str] = []
    """What NCCL said that explains why it has no RDMA."""
    connections: dict[str, int] = {}
    """Connections of the ranks to other nodes by interface, without the store's."""
    lost_peers: list[str] = []
    """Ranks that Gloo connected to fewer peers than it should."""

    @property
    def rdma(self) -> bool | None:
        """Whether the data went by RDMA; None if NCCL said nothing."""
        if not self.networks:
            return None
        return all(net.startswith(RDMA) for net in self.networks)

    @property
    def known(self) -> bool:
        """Whether anything was seen at all."""
        return bool(self.networks or self.bootstrap or self.ways or self.connections)


class Collector:
    """Takes in the lines of one node's ranks."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._sets: dict[str, set[str]] = {
            key: set()
            for key in ("assigned", "networks", "bootstrap", "sockets", "devices", "layers", "reasons", "lost")
        }
        self._ways: dict[str, int] = {}

    def take(self, lines: Iterable[str]) -> None:
        """Lines of a log; those that are none of NCCL's or Gloo's are passed over."""
        for line in lines:
            if "NCCL" in line:
                found = _LINE.search(line)
                if found:
                    self._nccl(found["text"])
            elif (
                "connected peers" in line and (peers := _PEERS.search(line)) and int(peers["got"]) < int(peers["want"])
            ):
                self._sets["lost"].add(f"rank {peers['rank']} ({peers['got']} of {peers['want']})")

    def _nccl(self, text: str) -> None:
        if match := _BOOTSTRAP.search(text):
            self._sets["bootstrap"].add(match["name"])
        elif match := _NETWORK.search(text):
            self._sets["networks" if text.startswith("Initialized") else "assigned"].add(match["net"])
        elif match := _SOCKET.search(text):
            self._sets["sockets"] |= {item["name"] for item in _ITEM.finditer(match["list"])}
        elif match := _IB.search(text):
            self._ports(match["list"])
        elif match := _VIA.search(text):
            way = _way(match["way"], match["rest"] or "")
            self._ways[way] = self._ways.get(way, 0) + 1
        for pattern, why in _REASONS:
            if pattern.search(text):
                self._sets["reasons"].add(why)

    def _ports(self, listed: str) -> None:
        for item in _ITEM.finditer(listed):
            number, _, layer = item["rest"].partition("/")
            self._sets["devices"].add(f"{item['name']}:{number}")
            self._sets["layers"] |= {"RoCE" if "roce" in layer.lower() else "IB"} if layer else set()

    def observed(self, connections: dict[str, int] | None = None) -> Observed:
        """The sum. What was assigned to a communicator counts before what was merely initialised."""
        sets = self._sets
        return Observed(
            host=self._host,
            networks=sorted(sets["assigned"] or sets["networks"]),
            bootstrap=sorted(sets["bootstrap"]),
            sockets=sorted(sets["sockets"]),
            devices=sorted(sets["devices"]),
            layers=sorted(sets["layers"]),
            ways=dict(sorted(self._ways.items())),
            reasons=sorted(sets["reasons"]),
            connections=connections or {},
            lost_peers=sorted(sets["lost"]),
        )


def _way(kind: str, rest: str) -> str:
    """``NET/IB/0/GDRDMA`` -> ``NET/IB/GDRDMA``: the number of the device says nothing here."""
    if kind != "NET":
        return kind
    parts = [part for part in rest.split("/") if part]
    direct = [part for part in parts if part.startswith("GDRDMA")]
    name = parts[0].split("(")[0] if parts else "?"
    return "/".join(["NET", name, *(["GDRDMA"] if direct else [])])


def host_of(line: str) -> str | None:
    """The node that an NCCL line names, where several nodes write into one stream."""
    found = _LINE.search(line)
    return found["host"] if found else None
