"""Check the network of the nodes: a common one, connections, names, ports and clocks."""

from __future__ import annotations

import ipaddress
import statistics

from allranks.nodes.checks import ChecksByHost, NodeSurvey, each_node, failed_check, passed_check
from allranks.nodes.network.choose import CONTAINER_PREFIXES
from allranks.nodes.records import Check, Probe
from allranks.utils.machine import UNPRIVILEGED_PORT
from allranks.utils.text import format_list

CLOCK_LIMIT_S = 2.0


def net(survey: NodeSurvey) -> ChecksByHost:
    """Check that all nodes share a network; interface names may differ."""
    if not survey.several:
        return {}
    if survey.network is None:
        error = survey.network_error or "no network was chosen"
        blamed = [p for p in survey.probes if not _outside(p)] or [p for p in survey.probes if p.host in error]
        return {
            p.host: failed_check("net", f"NONE({_addresses(p)})", error)
            if p in blamed
            else passed_check("net", _addresses(p))
            for p in survey.probes
        }
    seats = survey.network.seats
    return {p.host: passed_check("net", f"{seats[p.host].interface}/{seats[p.host].address}") for p in survey.probes}


def _outside(probe: Probe) -> list[str]:
    return [
        f"{i.name}/{i.address}"
        for i in probe.interfaces
        if i.address and i.up and not i.loopback and not i.name.startswith(CONTAINER_PREFIXES)
    ]


def _addresses(probe: Probe) -> str:
    down = [f"{i.name}-down" for i in probe.interfaces if not i.up and not i.loopback]
    return ",".join(_outside(probe) or down) or "no-interface"


@each_node
def ifname(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check that an interface named by the user exists on every node: names often differ between nodes."""
    missing = [f"{n}={v}" for n, v in survey.need.named.items() if not _matches(n, v, probe)]
    if not missing:
        return passed_check("ifname", "ok") if survey.need.named else None
    cure = (
        f"{probe.host} has {_addresses(probe)}, but none matches {missing[0]}: remove it from cluster.env or "
        "cluster.rendezvous.interface, so that each node's interface is detected; or list all names, separated by "
        "commas"
    )
    return failed_check("ifname", f"MISSING({','.join(missing)})", cure)


def _matches(name: str, value: str, probe: Probe) -> bool:
    """Return whether an interface that is up matches. Gloo: exact names. NCCL: prefixes, `=` exact, `^` excludes."""
    up = [item.name for item in probe.interfaces if item.up and item.address]
    if name.startswith("GLOO"):
        return any(item in up for item in value.split(","))
    excludes = value.startswith("^")
    plain = value.removeprefix("^")
    exact = plain.startswith("=")
    words = [word for word in plain.removeprefix("=").split(",") if word]
    hits = [item for item in up if any(item == word if exact else item.startswith(word) for word in words)]
    return len(hits) < len(up) if excludes else bool(hits)


@each_node
def reach(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check connections between nodes. Failures are attributed to the faulty node, not to those trying to reach it."""
    if survey.reach is None:
        return None
    host, links = probe.host, survey.reach.get(probe.host)
    if links is None or not links.answered:
        return failed_check("reach", "NO-ANSWER", f"{host} did not answer the connection test; see the error of srun")
    if links.ok:
        return passed_check("reach", f"{links.reached}/{links.tried}")
    shown = "; ".join(links.errors) or (
        f"{links.tried - links.reached} of {links.tried} nodes not reached from {host}, "
        f"{links.tried_by - links.reached_by} of {links.tried_by} did not reach it: "
        f"{format_list([item.text() for item in links.failed], 3)}"
    )
    cure = (
        f"{host}: {shown}; a firewall, a broken link or the wrong network: choose another one in "
        f"cluster.rendezvous.interface, or exclude the node (--exclude-bad, cluster.slurm.exclude)"
    )
    return failed_check("reach", f"UNREACHABLE({','.join(links.peers[:4]) or host})", cure)


@each_node
def name(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check that the node's own name resolves to a reachable address; not blocking, as ranks get addresses."""
    if not survey.several:
        return None
    if loop := [a for a in probe.resolves or [] if ipaddress.ip_address(a).is_loopback]:
        word = f"LOOPBACK({loop[0]})"
        cure = (
            f"/etc/hosts of {probe.host} maps its own name {probe.own_name} to {loop[0]}: remove that line; "
            "until then programs that listen on their host name cannot be reached (allranks passes addresses)"
        )
    elif not probe.resolves:
        word, why = f"UNKNOWN({probe.own_name})", probe.resolve_error or "no address"
        cure = f"{probe.host} cannot resolve its own name ({why}): add it to /etc/hosts or to DNS"
    else:
        return passed_check("name", "ok")
    return failed_check("name", word, cure, blocks=survey.network is None)


def port(survey: NodeSurvey) -> ChecksByHost:
    """Check that the rendezvous port is free on the first node; the other nodes do not listen on it."""
    ports = survey.required.ports
    if not ports:
        return {}
    first = survey.first
    if first.free_ports:
        return {first.host: passed_check("port", str(first.free_ports[0]))}
    if survey.need.port is not None:
        reserved = "only root may listen, or " * (survey.need.port < UNPRIVILEGED_PORT)
        cure = (
            f"{reserved}another program listens on port {survey.need.port} of {first.host}: set "
            "cluster.rendezvous.port to null, so that a free port is chosen"
        )
        return {first.host: failed_check("port", f"TAKEN({survey.need.port})", cure)}
    cure = f"other programs listen on all these ports on {first.host}: set a free port in cluster.rendezvous.port"
    return {first.host: failed_check("port", f"TAKEN({','.join(map(str, ports))})", cure)}


def clock(survey: NodeSurvey) -> ChecksByHost:
    """Check that clocks agree: otherwise logs do not show the first failure, nor file times the newest file."""
    off = {p.host: p.clock - survey.received[p.host] for p in survey.probes if p.host in survey.received}
    if not off:
        return {}
    middle = statistics.median(off.values())
    if abs(middle) > CLOCK_LIMIT_S and len(off) > 2:  # then the launcher's own clock is wrong
        off = {host: seconds - middle for host, seconds in off.items()}
    return {
        host: passed_check("clock", f"{seconds:+.2f}s")
        if abs(seconds) <= CLOCK_LIMIT_S
        else failed_check(
            "clock", f"WRONG({seconds:+.1f}s)", f"set the clock of {host} (chronyc makestep, or ask its administrator)"
        )
        for host, seconds in off.items()
    }
