"""Over which interfaces a process talks to others: its established TCP connections, read from /proc. Standard library."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_SOCKET = re.compile(r"socket:\[(\d+)\]")
ESTABLISHED = "01"


def of_processes(
    pids: Iterable[int], *, peers: Iterable[str] | None = None, without_ports: Iterable[int] = ()
) -> Counter[str]:
    """Local addresses of these processes' connections, counted.

    Left out are the store's ports, and with `peers` (addresses of the nodes) connections to anybody else. A connection
    between two processes of this node counts at both ends. Processes that are gone count nothing.
    """
    known = None if peers is None else set(peers)
    mine = {inode for pid in pids for inode in _inodes(pid)}
    skip = set(without_ports)
    found: Counter[str] = Counter()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            words = row.split()
            if len(words) < 10 or words[3] != ESTABLISHED or words[9] not in mine:
                continue
            local, own = _endpoint(words[1])
            remote, other = _endpoint(words[2])
            if known is not None and remote not in known and not remote.startswith("127."):
                continue
            if own not in skip and other not in skip:
                found[local] += 1
    return found


def _inodes(pid: int) -> list[str]:
    found = []
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            match = _SOCKET.match(os.readlink(entry))  # noqa: PTH115 - a pseudo link, not a path
            if match:
                found.append(match[1])
    except OSError:
        return found
    return found


def _endpoint(text: str) -> tuple[str, int]:
    """``0100007F:1F90`` -> ("127.0.0.1", 8080); the kernel writes addresses in the machine's byte order."""
    raw, _, port = text.partition(":")
    data = bytes.fromhex(raw)
    words = struct.unpack(f">{len(data) // 4}I", data)
    packed = b"".join(struct.pack("=I", word) for word in words)
    if len(packed) == 4:
        return socket.inet_ntop(socket.AF_INET, packed), int(port, 16)
    mapped = packed[:12] == b"\0" * 10 + b"\xff\xff"
    return (
        socket.inet_ntop(socket.AF_INET, packed[12:]) if mapped else socket.inet_ntop(socket.AF_INET6, packed),
        int(port, 16),
    )


def by_interface(addresses: Counter[str], names: dict[str, str]) -> dict[str, int]:
    """Counts by interface; an address that no interface has keeps its own name."""
    found: Counter[str] = Counter()
    for address, count in addresses.items():
        found["lo" if address.startswith("127.") or address == "::1" else names.get(address, address)] += count
    return dict(sorted(found.items()))
