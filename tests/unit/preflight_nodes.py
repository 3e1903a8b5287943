"""Synthetic nodes for the tests of preflight: all well, until one is changed."""

import msgspec

from allranks.nodes.checks import NodeSurvey, PlanRequirements
from allranks.nodes.network.choose import choose_network
from allranks.nodes.network.links import NodeLinks, judge_links, sampled_links
from allranks.nodes.preflight.runner import run_checks
from allranks.nodes.records import (
    Check,
    ConnectionResults,
    ContentDigest,
    FolderFacts,
    Interface,
    NodeRequirements,
    Package,
    Probe,
    RequiredFolder,
    UnreachedPort,
)

PYTHON = "/env/bin/python"
GIB = 2**30
PORTS = [21001, 21002]
FOLDERS = [
    RequiredFolder(role="project", path="/work/allranks", fingerprint=True),
    RequiredFolder(role="run", path="/work/runs", write=True, nonce=".nonce"),
    RequiredFolder(role="data", path="/work/rows.json", fingerprint=True),
]
REQUIRED = NodeRequirements(python=PYTHON, packages=["torch", "peft"], folders=FOLDERS, ports=PORTS)


def interface(name: str, address: str | None, prefix: int = 24, **more: object) -> Interface:
    """An interface that is up."""
    return Interface(name=name, address=address, prefix=prefix, **more)  # type: ignore[arg-type]


def node(number: int, **changes: object) -> Probe:
    """Node n1, n2, ...; node 0 of the job is n1."""
    same = ContentDigest(files=3, bytes=300, digest="aaaa")
    probe = Probe(
        host=f"n{number}", node_id=number - 1, own_name=f"n{number}", python="3.11.7", executable=PYTHON, cpus=8,
        interfaces=[
            interface("lo", "127.0.0.1", 8, loopback=True),
            interface("docker0", "172.17.0.1", 16),
            interface("eth0", f"10.0.0.{number}"),
        ],
        resolves=[f"10.0.0.{number}"], free_ports=PORTS, unused_port=40000 + number, clock=1000.0,
        packages={
            "torch": Package(version="2.13.0", origin="/env/torch/__init__.py"),
            "peft": Package(version="0.19.0", origin="/env/peft/__init__.py"),
        },
        folders={
            "project": FolderFacts(exists=True, fingerprint=same),
            "run": FolderFacts(exists=True, free_bytes=12 * GIB, nonce="secret"),
            "data": FolderFacts(exists=True, fingerprint=same),
        },
        shm_free_bytes=8 * GIB, open_files=65536,
    )  # fmt: skip
    return msgspec.structs.replace(probe, **changes)


def in_folder(probe: Probe, role: str, **changes: object) -> Probe:
    """The same node with another view of a folder."""
    facts = msgspec.structs.replace(probe.folders[role], **changes)
    return msgspec.structs.replace(probe, folders={**probe.folders, role: facts})


def cut(host: str, *peers: str) -> ConnectionResults:
    """What a node says that could not connect to these peers."""
    failed = [UnreachedPort(peer=p, port=21001, why="timed out", address=f"10.0.0.{p[1:]}", tries=4) for p in peers]
    return ConnectionResults(host=host, unreached=failed)


def connected(hosts: list[str], answers: dict[str, ConnectionResults] | None = None) -> dict[str, NodeLinks]:
    """Verdicts on connections after one round; without `answers` every node reaches its targets."""
    given = {host: cut(host) for host in hosts} if answers is None else answers
    return judge_links(sampled_links(hosts, "seed"), given)


def survey(*probes: Probe, **changes: object) -> NodeSurvey:
    """What is known of these nodes; every one reaches all others."""
    base = NodeSurvey(
        probes=list(probes), required=REQUIRED, need=PlanRequirements(procs_per_node=2, threads=4),
        network=choose_network(probes) if len(probes) > 1 else None,
        reach=connected([p.host for p in probes]) if len(probes) > 1 else None,
        nonces={"run": "secret"}, received={p.host: 1000.0 for p in probes},
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def failures(found: NodeSurvey) -> dict[str, Check]:
    """``host.check`` to the check, of all that failed."""
    return {f"{r.host}.{c.name}": c for r in run_checks(found) for c in r.checks if not c.ok}
