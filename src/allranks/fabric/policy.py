"""All rules over all nodes of a job. Pure: facts in, decisions with reasons out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from allranks.fabric import gpus, rdma, sockets
from allranks.fabric.decision import EnvVar, nccl
from allranks.fabric.facts import NodeFacts
from allranks.fabric.job import Expected, Job, NodePolicy, Policy

DEBUG_RISK = "some hundred lines at the start of each rank's log"


def before_nodes(job: Job) -> list[EnvVar]:
    """What can be said while nobody has asked the nodes: for ``plan``."""
    found = [sockets.gloo(job), *([sockets.nccl_interface(job)] if job.device == "cuda" else [])]
    if job.nodes > 1 and not job.interface:
        found = [later(item) for item in found]
    if not job.nccl:
        return found
    test = f"on evidence alone; {gpus.TEST}"
    found += _rdma_later() if job.nodes > 1 else []
    return [*found, later(nccl("NCCL_P2P_DISABLE", None, test, gpus.ON_RISK)), *gpus.alone(None), debug()]


def _rdma_later() -> list[EnvVar]:
    fall = "NCCL says nothing when it falls back to sockets; its log is compared afterwards"
    stale = "pinned by hand it goes stale: names and orders differ from node to node"
    rows = [
        nccl("NCCL_NET", None, "RDMA where all nodes have it, sockets where one lacks it", fall),
        nccl("NCCL_IB_HCA", None, "set only to leave out ports that lead elsewhere", stale),
        nccl("NCCL_IB_GID_INDEX", None, "NCCL chooses it since 2.21; older versions are told", stale),
    ]
    return [later(item) for item in rows]


def later(item: EnvVar) -> EnvVar:
    """The same, to be decided once the nodes have been asked."""
    return msgspec.structs.replace(item, source="nodes")


def decide(job: Job, nodes: Sequence[NodeFacts]) -> Policy:
    """Every node's variables, and what its ranks should get by them."""
    if not job.nccl:
        return Policy(nodes=[_gloo_only(job, node) for node in nodes])
    found = rdma.decide(job, nodes) if job.nodes > 1 else None
    policies = []
    for node in nodes:
        environment = [sockets.gloo(job, node), sockets.nccl_interface(job, node)]
        if found:
            environment += found.environment[node.host]
            environment.append(sockets.threads(node, found.family == "Socket"))
        if node.gpus > 1:
            environment.append(gpus.peer(node))
        environment += [*gpus.alone(node), debug()]
        expected = Expected(
            transport=found.family if found else "",
            interface=node.seat.interface if node.seat and "NCCL_SOCKET_IFNAME" not in job.user else "",
            devices=[port.name for port in found.ports.get(node.host, [])] if found else [],
            inside=gpus.inside(node),
            why=found.why if found else "one node",
        )
        decided = user_wins(environment, job.user)
        policies.append(NodePolicy(host=node.host, environment=decided, expected=expected, addresses=_addresses(node)))
    return Policy(nodes=policies, notes=found.notes if found else [])


def _gloo_only(job: Job, node: NodeFacts) -> NodePolicy:
    seat = sockets.gloo(job, node)
    environment = [seat, *([sockets.nccl_interface(job, node)] if job.device == "cuda" else [])]
    chosen = "" if "GLOO_SOCKET_IFNAME" in job.user else seat.value or ""
    return NodePolicy(
        host=node.host,
        environment=user_wins(environment, job.user),
        expected=Expected(transport="Socket", interface=chosen, why="Gloo speaks TCP"),
        addresses=_addresses(node),
    )


def _addresses(node: NodeFacts) -> list[str]:
    return [item.address for item in node.interfaces if item.address and not item.address.startswith("127.")]


def debug() -> EnvVar:
    """NCCL_DEBUG=INFO: without it nobody can tell afterwards what NCCL took."""
    why = "NCCL then says at its start which network and which way between GPUs it took, and allranks compares that with what it should be"
    return nccl("NCCL_DEBUG", "INFO", why, DEBUG_RISK)


def user_wins(decisions: Sequence[EnvVar], user: dict[str, str]) -> list[EnvVar]:
    """What ``cluster.env`` sets replaces the decision, and is shown with it."""
    kept = []
    for item in decisions:
        if item.name in user:
            would = "left it alone" if item.value is None else "set " + item.value
            why = f"cluster.env (the policy would have {would}: {item.reason})"
            kept.append(
                EnvVar(
                    name=item.name,
                    value=user[item.name],
                    reason=why,
                    source="user",
                    documentation=item.documentation,
                    risk=item.risk,
                )
            )
        else:
            kept.append(item)
    return kept
