"""Read the kernel's counters of this process's TCP connections by peer address: what gloo, and NCCL over sockets, send on.

Standard library only. Connections within one host are left out. What cannot be read is left out.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import msgspec

MAX_LINKS = 64
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class LinkCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of all connections to one address since they were opened.

    ``segments`` and ``resent`` count segments with data that were sent, and sent again. ``acked_bytes`` arrived. ``busy_s`` is the
    time in which data was on its way, ``receiver_s`` the part of it in which the receiver's window was full: the receiver did
    not read. ``rtt_s`` is the largest smoothed round-trip time, ``min_rtt_s`` the smallest one ever seen.
    """

    peer: str
    connections: int
    segments: int
    resent: int
    acked_bytes: int
    busy_s: float
    receiver_s: float
    rtt_s: float
    min_rtt_s: float


def read_tcp_info(peer: str, data: bytes) -> LinkCounters | None:
    """Return the counters of one connection from a struct tcp_info (linux/tcp.h); None if the kernel (before 4.10) reports fewer fields."""
    if len(data) < 192:
        return None
    (rtt_us,) = struct.unpack_from("=I", data, 68)
    (resent,) = struct.unpack_from("=I", data, 100)
    (acked,) = struct.unpack_from("=Q", data, 120)
    (min_rtt_us,) = struct.unpack_from("=I", data, 148)
    (segments,) = struct.unpack_from("=I", data, 156)
    busy_us, receiver_us = struct.unpack_from("=QQ", data, 168)
    return LinkCounters(
        peer=peer,
        connections=1,
        segments=segments,
        resent=resent,
        acked_bytes=acked,
        busy_s=busy_us * 1e-6,
        receiver_s=receiver_us * 1e-6,
        rtt_s=rtt_us * 1e-6,
        min_rtt_s=min_rtt_us * 1e-6,
    )


def tcp_links() -> tuple[list[str], list[LinkCounters]]:
    """Return this process's own addresses and its links to other hosts, those with most data first."""
    if socket.getdefaulttimeout() is not None:  # Python would change the connections to non-blocking
        return [], []
    own: set[str] = set()
    found: dict[str, list[LinkCounters]] = {}
    for local, one in _connections():
        own.add(local)
        found.setdefault(one.peer, []).append(one)
    links = [_sum(peer, connections) for peer, connections in found.items()]
    return sorted(own), sorted(links, key=lambda link: (-link.acked_bytes, link.peer))[:MAX_LINKS]


def _connections() -> list[tuple[str, LinkCounters]]:
    found: list[tuple[str, LinkCounters]] = []
    try:
        files = list(Path("/proc/self/fd").iterdir())
    except OSError:
        return found
    for file in files:
        with suppress(OSError, ValueError):  # closed meanwhile, not connected, or no TCP
            if str(file.readlink()).startswith("socket:") and (one := _connection(int(file.name))):
                found.append(one)
    return found


def _connection(fd: int) -> tuple[str, LinkCounters] | None:
    own = os.dup(fd)  # so that another thread that closes it does not pull it away
    try:
        connection = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        return None
    with connection:
        if connection.family not in _FAMILIES or connection.type != socket.SOCK_STREAM:
            return None
        local, peer = _address(connection.getsockname()), _address(connection.getpeername())
        if _is_local(local, peer):
            return None
        counters = read_tcp_info(peer, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
    return (local, counters) if counters else None


def _is_local(local: str, peer: str) -> bool:
    return local == peer or peer.startswith("127.") or peer == "::1"


def _address(name: tuple[object, ...]) -> str:
    return str(name[0]).removeprefix("::ffff:").partition("%")[0]


def _sum(peer: str, connections: list[LinkCounters]) -> LinkCounters:
    return LinkCounters(
        peer=peer,
        connections=len(connections),
        segments=sum(c.segments for c in connections),
        resent=sum(c.resent for c in connections),
        acked_bytes=sum(c.acked_bytes for c in connections),
        busy_s=round(sum(c.busy_s for c in connections), 6),
        receiver_s=round(sum(c.receiver_s for c in connections), 6),
        rtt_s=round(max(c.rtt_s for c in connections), 6),
        min_rtt_s=round(min(c.min_rtt_s for c in connections), 6),
    )
