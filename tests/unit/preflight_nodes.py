"""Synthetic nodes for the tests of preflight: all well, until one is changed."""

from functools import partial

import msgspec

from allranks.nodes import records
from allranks.nodes.checks import NodeSurvey, PlanRequirements
from allranks.nodes.network.choose import choose_network
from allranks.nodes.network.links import NodeLinks, judge_links, sampled_links
from allranks.nodes.preflight.runner import run_checks

PYTHON = "/env/bin/python"
GIB = 2**30
PORTS = [21001, 21002]
FOLDERS = [
    records.RequiredFolder(role="project", path="/work/allranks", fingerprint=True),
    records.RequiredFolder(role="run", path="/work/runs", write=True, nonce=".nonce"),
    records.RequiredFolder(role="data", path="/work/rows.json", fingerprint=True),
]
REQUIRED = records.NodeRequirements(python=PYTHON, packages=["torch", "peft"], folders=FOLDERS, ports=PORTS)


def interface(name: str, address: str | None, prefix: int = 24, **more: object) -> records.Interface:
    return records.Interface(name=name, address=address, prefix=prefix, **more)  # type: ignore[arg-type]


def node(number: int, **changes: object) -> records.Probe:
    """Node n1, n2, ...; node 0 of the job is n1."""
    same = records.ContentDigest(files=3, bytes=300, digest="aaaa")
    probe = records.Probe(
        host=f"n{number}", node_id=number - 1, own_name=f"n{number}", python="3.11.7", executable=PYTHON, cpus=8,
        interfaces=[
            interface("lo", "127.0.0.1", 8, loopback=True),
            interface("docker0", "172.17.0.1", 16),
            interface("eth0", f"10.0.0.{number}"),
        ],
        resolves=[f"10.0.0.{number}"], free_ports=PORTS, unused_port=40000 + number, clock=1000.0,
        packages={
            "torch": records.Package(version="2.13.0", origin="/env/torch/__init__.py"),
            "peft": records.Package(version="0.19.0", origin="/env/peft/__init__.py"),
        },
        folders={
            "project": records.FolderFacts(exists=True, fingerprint=same),
            "run": records.FolderFacts(exists=True, free_bytes=12 * GIB, nonce="secret"),
            "data": records.FolderFacts(exists=True, fingerprint=same),
        },
        shm_free_bytes=8 * GIB, open_files=65536,
    )  # fmt: skip
    return msgspec.structs.replace(probe, **changes)


def in_folder(probe: records.Probe, role: str, **changes: object) -> records.Probe:
    """The same node with another view of a folder."""
    facts = msgspec.structs.replace(probe.folders[role], **changes)
    return msgspec.structs.replace(probe, folders={**probe.folders, role: facts})


def cut(host: str, *peers: str) -> records.ConnectionResults:
    """What a node says that could not connect to these peers."""
    lost = partial(records.UnreachedPort, port=21001, why="timed out", tries=4)
    return records.ConnectionResults(host=host, unreached=[lost(peer=p, address=f"10.0.0.{p[1:]}") for p in peers])


def connected(hosts: list[str], answers: dict[str, records.ConnectionResults] | None = None) -> dict[str, NodeLinks]:
    """Verdicts on connections after one round; without `answers` every node reaches its targets."""
    given = {host: cut(host) for host in hosts} if answers is None else answers
    return judge_links(sampled_links(hosts, "seed"), given)


def survey(*probes: records.Probe, **changes: object) -> NodeSurvey:
    """What is known of these nodes; every one reaches all others."""
    base = NodeSurvey(
        probes=list(probes), required=REQUIRED, need=PlanRequirements(procs_per_node=2, threads=4),
        network=choose_network(probes) if len(probes) > 1 else None,
        reach=connected([p.host for p in probes]) if len(probes) > 1 else None,
        nonces={"run": "secret"}, received={p.host: 1000.0 for p in probes},
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def failures(found: NodeSurvey) -> dict[str, records.Check]:
    return {f"{r.host}.{c.name}": c for r in run_checks(found) for c in r.checks if not c.ok}
