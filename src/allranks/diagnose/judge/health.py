"""What a log tells of a job that runs: ranks, transports, versions, and whether the path is the one it should be."""

from __future__ import annotations

from allranks.diagnose.judge.case import Case
from allranks.diagnose.records import Health


def describe(case: Case, connections: dict[str, int] | None = None) -> Health:
    """The facts of a job, from NCCL's and the program's own lines, and the connections that a run of allranks noted."""
    transports = dict(connections or {})
    for scan in case.scans:
        for via, count in scan.transports.items():
            transports[via] = transports.get(via, 0) + count
    ranks = {r for scan in case.scans for r in scan.ranks}
    network = _distinct(s.groups["net"] for s in (*case.facts("network"), *case.facts("net_device")))
    channels = [int(s.groups["channels"]) for s in case.facts("channels")]
    health = Health(
        world_size=case.world_size,
        ranks_seen=sorted(ranks)[:4096],
        hosts=sorted(case.hosts)[:4096],
        transports=dict(sorted(transports.items(), key=lambda pair: -pair[1])),
        network=network,
        channels=max(channels, default=None),
        interfaces=_distinct(s.groups["interface"] for s in case.facts("bootstrap")),
        versions={
            name: found
            for name in ("nccl", "torch", "driver")
            if (found := _distinct(s.groups["version"] for s in case.facts(f"{name}_version")))
        },
        communicators_ready=sum(scan.ready for scan in case.scans),
        progressed=any(scan.last_progress is not None for scan in case.scans),
        advice=_advice(case, transports, network),
    )
    return health


def _distinct(values: object) -> list[str]:
    return list(dict.fromkeys(values))  # type: ignore[call-overload]


def _advice(case: Case, transports: dict[str, int], network: list[str]) -> list[str]:
    """Sentences on the path: what it is, and when that is not as it should be."""
    said: list[str] = []
    kinds = {name.split("/")[0].upper(): count for name, count in transports.items()}
    for name in ("nccl", "torch", "driver"):
        versions = _distinct(s.groups["version"] for s in case.facts(f"{name}_version"))
        if len(versions) > 1:
            said.append(
                f"{name} has several versions among the ranks ({', '.join(versions[:4])}); they should be equal"
            )
    if "SHM" in kinds and "P2P" not in kinds:
        said.append(
            "GPUs of one node exchange data through host memory (SHM); with NVLink or PCIe peer access it would be P2P"
        )
    if any(name.upper().startswith("NET/SOCKET") for name in transports) or [n.lower() for n in network] == ["socket"]:
        said.append(
            "data between nodes goes over TCP sockets; right for plain Ethernet, ten times too slow where there is InfiniBand or RoCE"
        )
    if len(case.hosts) == 1 and any(n.startswith("NET") for n in kinds) and "P2P" not in kinds:
        said.append("data within one node goes through the network; P2P or SHM is the usual path there")
    return said
