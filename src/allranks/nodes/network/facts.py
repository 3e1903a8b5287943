"""Convert the nodes' probes to facts for the network rules, and compute the policy of a run."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from allranks.errors import RequestError
from allranks.nodes.network.choose import ChosenNetwork
from allranks.nodes.network.copy_results import load_copy_tests
from allranks.nodes.probes import probe as prober
from allranks.nodes.records import Probe
from allranks.nodes.topology.nvidia_smi import parse_topology
from allranks.planning.env_vars import env_warnings
from allranks.planning.network_policy import NetworkJob, NetworkPolicy, decide_network_policy
from allranks.planning.records import NodeAddress, NodeFacts, Topology
from allranks.utils.redaction import holds_secret


def node_facts(probe: Probe, seat: NodeAddress | None = None, failed_pairs: list[str] | None = None) -> NodeFacts:
    """Return the facts from a node's probe. `failed_pairs`: of an earlier copy test; None: copies were not tested."""
    iommus = [item["iommu"] for item in probe.gpu_pci if item.get("iommu") is not None]
    bridges = [item["acs"] for item in probe.gpu_pci if item.get("acs") is not None]
    try:
        topology = parse_topology(probe.topo) if probe.topo else None
    except RequestError:
        topology = None
    return NodeFacts(
        host=probe.host,
        interfaces=[*probe.interfaces],
        ports=probe.infiniband,
        gpus=len(probe.gpus),
        topology=topology,
        seat=seat,
        iommu=any(str(kind).startswith("DMA") for kind in iommus) if iommus else None,
        acs=sorted({name for names in bridges for name in names}) if bridges else None,
        copies="" if failed_pairs is None else "failed" if failed_pairs else "ok",
        failed_pairs=failed_pairs or [],
        nccl=tuple(int(part) for part in (probe.nccl or "").split(".") if part.isdigit()),
        conf=probe.nccl_conf,
    )


def policy_for_nodes(
    job: NetworkJob, probes: Sequence[Probe], network: ChosenNetwork | None, run_root: Path, planned: Collection[str]
) -> NetworkPolicy:
    """Return the policy for the probed nodes. Variables for NCCL and Gloo in this process's environment take
    precedence, with a note.

    `planned`: variables that the plan has set, which are not inherited.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("NCCL_", "GLOO_")) and name not in planned and name not in job.user
    }
    network_job = msgspec.structs.replace(job, nodes=len(probes) or 1, user={**inherited, **job.user})
    facts = facts_of_nodes(probes, network, load_copy_tests(run_root, probes))
    policy = decide_network_policy(network_job, facts)
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
    """Return facts of this machine's GPUs, with an earlier copy test's result. `topology` avoids a driver query."""
    graphics = prober.Later(3 * prober.DRIVER_LIMIT_S, prober.graphics).get()[0] or {}
    raw = {"host": host, "nccl": prober.nccl_version(), "nccl_conf": prober.nccl_conf(), "gpu_pci": prober.gpu_pci()}
    probe = msgspec.convert({**graphics, **raw}, Probe)
    node = node_facts(probe, None, load_copy_tests(run_root, [probe]).get(host))
    return node if topology is None else msgspec.structs.replace(node, topology=topology, gpus=len(topology.gpus))


def facts_of_nodes(
    probes: Sequence[Probe], network: ChosenNetwork | None, copies: dict[str, list[str]] | None = None
) -> list[NodeFacts]:
    """Return facts of every node, in the order of the nodes. `copies`: pairs with a failed copy, by tested host."""
    seats, tested = network.seats if network else {}, copies or {}
    ordered = sorted(probes, key=lambda probe: probe.node_id)
    return [node_facts(probe, seats.get(probe.host), tested.get(probe.host)) for probe in ordered]
