"""Runs once on each node before the ranks: ``python -m allranks.launch.ask RUN PORT``. One JSON line says who it is."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import msgspec
import psutil

from allranks.facts import host_name, usable_cpus


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """An IPv4 address of a node. ``speed_mbit`` is 0 where the driver does not say."""

    name: str
    address: str
    netmask: str
    up: bool
    speed_mbit: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself."""

    node: int
    host: str
    interfaces: list[Interface]
    port_free: bool
    sees_run: bool
    cpus: int


def answer(run: Path, port: int) -> Answer:
    """This node's answer."""
    stats = psutil.net_if_stats()
    found = [
        Interface(
            name=name,
            address=a.address,
            netmask=a.netmask or "255.255.255.255",
            up=name in stats and stats[name].isup,
            speed_mbit=stats[name].speed if name in stats else 0,
        )
        for name, addresses in psutil.net_if_addrs().items()
        for a in addresses
        if a.family == socket.AF_INET
    ]
    return Answer(
        node=int(os.environ.get("SLURM_NODEID", "0")),
        host=host_name(),
        interfaces=found,
        port_free=port_is_free(port),
        sees_run=(run / "spec.yaml").is_file(),
        cpus=usable_cpus(),
    )


def port_is_free(port: int) -> bool:
    """True if the port can be bound on all addresses, as the store will do."""
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - a probe, closed at once
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(answer(Path(sys.argv[1]), int(sys.argv[2]))).decode() + "\n")
