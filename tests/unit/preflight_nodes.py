"""Synthetic nodes for the tests of preflight: all well, until one is changed."""

from __future__ import annotations

import msgspec

from allranks.preflight.checks import Need, Survey, judge
from allranks.preflight.network import choose_network
from allranks.preflight.records import Check, Folder, FolderFacts, Interface, Package, Print, Probe, Reach, Wish

PYTHON = "/env/bin/python"
GIB = 2**30
PORTS = [21001, 21002]
FOLDERS = [
    Folder(role="project", path="/work/allranks", fingerprint=True),
    Folder(role="run", path="/work/runs", write=True, nonce=".nonce"),
    Folder(role="data", path="/work/rows.json", fingerprint=True),
]
WISH = Wish(python=PYTHON, packages=["torch", "peft"], folders=FOLDERS, ports=PORTS)


def interface(name: str, address: str | None, prefix: int = 24, **more: object) -> Interface:
    """An interface that is up."""
    return Interface(name=name, address=address, prefix=prefix, **more)  # type: ignore[arg-type]


def node(number: int, **changes: object) -> Probe:
    """Node n1, n2, ...; node 0 of the job is n1."""
    same = Print(files=3, bytes=300, digest="aaaa")
    probe = Probe(
        host=f"n{number}",
        node_id=number - 1,
        own_name=f"n{number}",
        python="3.11.7",
        executable=PYTHON,
        cpus=8,
        interfaces=[
            interface("lo", "127.0.0.1", 8, loopback=True),
            interface("docker0", "172.17.0.1", 16),
            interface("eth0", f"10.0.0.{number}"),
        ],
        resolves=[f"10.0.0.{number}"],
        free_ports=PORTS,
        unused_port=40000 + number,
        clock=1000.0,
        packages={
            "torch": Package(version="2.13.0", origin="/env/torch/__init__.py"),
            "peft": Package(version="0.19.0", origin="/env/peft/__init__.py"),
        },
        folders={
            "project": FolderFacts(exists=True, is_folder=True, fingerprint=same),
            "run": FolderFacts(exists=True, is_folder=True, free_bytes=12 * GIB, nonce="secret"),
            "data": FolderFacts(exists=True, fingerprint=same),
        },
        shm_bytes=8 * GIB,
        shm_free_bytes=8 * GIB,
        open_files=65536,
    )
    return msgspec.structs.replace(probe, **changes)


def in_folder(probe: Probe, role: str, **changes: object) -> Probe:
    """The same node with another view of a folder."""
    facts = msgspec.structs.replace(probe.folders[role], **changes)
    return msgspec.structs.replace(probe, folders={**probe.folders, role: facts})


def survey(*probes: Probe, **changes: object) -> Survey:
    """What is known of these nodes; every one reaches all others."""
    base = Survey(
        probes=list(probes),
        wish=WISH,
        need=Need(procs_per_node=2, threads=4),
        network=choose_network(probes) if len(probes) > 1 else None,
        reach={p.host: Reach(host=p.host, unreached=[]) for p in probes} if len(probes) > 1 else None,
        nonces={"run": "secret"},
        received={p.host: 1000.0 for p in probes},
    )
    return msgspec.structs.replace(base, **changes)


def failures(found: Survey) -> dict[str, Check]:
    """``host.check`` to the check, of all that failed."""
    return {f"{r.host}.{c.name}": c for r in judge(found) for c in r.checks if not c.ok}


def three(third: Probe) -> Survey:
    """Two nodes that are well, and this one."""
    return survey(node(1), node(2), third)
