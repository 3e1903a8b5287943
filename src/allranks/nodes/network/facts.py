"""Convert the nodes' probes to facts for the network rules, and compute the policy of a run."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import RequestError
from allranks.nodes.network.choose import ChosenNetwork, NodeInterface
from allranks.nodes.network.copy_tests import load_copy_tests
from allranks.nodes.probes import probe as prober
from allranks.nodes.records import Probe
from allranks.nodes.topology.nvidia_smi import parse_topology
from allranks.planning.env_vars import env_warnings
from allranks.planning.network_policy import NetworkJob, NetworkPolicy, decide_network_policy
from allranks.planning.records import NetworkInterface, NodeAddress, NodeFacts, RdmaGid, RdmaPort, Topology
from allranks.utils.redaction import holds_secret


def node_facts(
    probe: Probe, seat: NodeInterface | None = None, copies: str = "", failed_pairs: Sequence[str] = ()
) -> NodeFacts:
    """Return the facts from a node's probe."""
    known = [item for item in probe.gpu_pci if item.get("iommu") is not None]
    bridges = [item["acs"] for item in probe.gpu_pci if item.get("acs") is not None]
    return NodeFacts(
        host=probe.host,
        interfaces=[
            NetworkInterface(name=i.name, address=i.address, prefix=i.prefix, speed_mbit=i.speed_mbit)
            for i in probe.interfaces
        ],
        ports=[_port(item) for item in probe.infiniband],
        gpus=len(probe.gpus),
        topology=_topology(probe.topo),
        seat=NodeAddress(interface=seat.interface, address=seat.address) if seat else None,
        iommu=any(str(item["iommu"]).startswith("DMA") for item in known) if known else None,
        acs=sorted({name for names in bridges for name in names}) if bridges else None,
        copies=copies,
        failed_pairs=list(failed_pairs),
        nccl=parse_version(probe.nccl),
        conf=probe.nccl_conf,
    )


def policy_for_nodes(
    job: NetworkJob,
    probes: Sequence[Probe],
    network: ChosenNetwork | None,
    run_root: Path,
    planned: Collection[str],
) -> NetworkPolicy:
    """Return the policy for the probed nodes. Variables for NCCL and Gloo in this process's environment take precedence, with a note.

    `planned`: variables that the plan has set, which are not inherited.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("NCCL_", "GLOO_")) and name not in planned and name not in job.user
    }
    asked = msgspec.structs.replace(job, nodes=len(probes) or 1, user={**inherited, **job.user})
    facts = facts_of_nodes(probes, network, load_copy_tests(run_root, probes))
    policy = decide_network_policy(asked, facts)
    shown = {name: "..." if holds_secret(name, value) else value for name, value in inherited.items()}
    notes = [
        f"{name}={value} comes from the environment of the starting process; it takes precedence over the policy"
        for name, value in shown.items()
    ]
    return msgspec.structs.replace(
        policy, notes=[*policy.notes, *notes, *env_warnings(inherited, "the environment's ")]
    )


def policy_for_this_machine(job: NetworkJob, host: str, run_root: Path) -> NetworkPolicy:
    """Return the policy of a run on this machine alone. Without GPUs nothing is queried."""
    return decide_network_policy(job, [this_machine_facts(host, run_root) if job.nccl else NodeFacts(host=host)])


def this_machine_facts(host: str, run_root: Path, topology: Topology | None = None) -> NodeFacts:
    """Return facts of this machine's GPUs, with the result of an earlier copy test. `topology` avoids a query of the driver."""
    asked = prober.Later(3 * prober.DRIVER_LIMIT_S, prober.graphics).get()[0] or {}
    raw = {"host": host, "nccl": prober.nccl_version(), "nccl_conf": prober.nccl_conf(), "gpu_pci": prober.gpu_pci()}
    probe = msgspec.convert({**asked, **raw}, Probe)
    failed = load_copy_tests(run_root, [probe]).get(host)
    state = "" if failed is None else "failed" if failed else "ok"
    found = node_facts(probe, None, state, failed or ())
    return found if topology is None else msgspec.structs.replace(found, topology=topology, gpus=len(topology.gpus))


def facts_of_nodes(
    probes: Sequence[Probe], network: ChosenNetwork | None, copies: dict[str, list[str]] | None = None
) -> list[NodeFacts]:
    """Return facts of every node, in the order of the nodes. `copies`: pairs with a failed copy, by tested host."""
    seats, tested = network.seats if network else {}, copies or {}
    found = []
    for probe in sorted(probes, key=lambda probe: probe.node_id):
        failed = tested.get(probe.host)
        state = "" if failed is None else "failed" if failed else "ok"
        found.append(node_facts(probe, seats.get(probe.host), state, failed or ()))
    return found


def parse_version(text: str | None) -> tuple[int, ...]:
    """Return ``2.21.5`` as numbers; empty without a version."""
    return tuple(int(part) for part in (text or "").split(".") if part.isdigit())


def _topology(text: str | None) -> Topology | None:
    try:
        return parse_topology(text) if text else None
    except RequestError:
        return None


def _port(item: dict[str, Any]) -> RdmaPort:
    device, _, number = str(item.get("port", "")).partition(":")
    rate = str(item.get("rate", "")).split()
    gids = [
        RdmaGid(index=row[0], gid=row[1], type=row[2], interface=row[3])
        for row in item.get("gids", [])
        if len(row) == 4
    ]
    numa = item.get("numa")
    return RdmaPort(
        device=device,
        port=int(number) if number.isdigit() else 0,
        active="ACTIVE" in str(item.get("state", "")),
        layer=str(item.get("link_layer", "")),
        gbit=float(rate[0]) if rate and rate[0].replace(".", "", 1).isdigit() else 0.0,
        numa=numa if isinstance(numa, int) and numa >= 0 else None,
        interfaces=list(item.get("interfaces", [])),
        gids=gids,
    )
