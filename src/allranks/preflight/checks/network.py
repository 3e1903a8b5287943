"""Names, addresses, ports and clocks: whether the nodes can find and reach each other."""

from __future__ import annotations

import ipaddress
import statistics

from allranks.preflight.checks.survey import Survey, Verdicts, bad, good, several_names
from allranks.preflight.network import CONTAINER_PREFIXES
from allranks.preflight.records import Probe

CLOCK_LIMIT_S = 2.0


def net(survey: Survey) -> Verdicts:
    """A network that all nodes are on; interface names may differ."""
    if not survey.several:
        return {}
    if survey.network is None:
        error = survey.network_error or "no network was chosen"
        blamed = [p for p in survey.probes if not _outside(p)] or [p for p in survey.probes if p.host in error]
        return {
            p.host: bad("net", f"NONE({_addresses(p)})", error) if p in blamed else good("net", _addresses(p))
            for p in survey.probes
        }
    seats = survey.network.seats
    return {p.host: good("net", f"{seats[p.host].interface}/{seats[p.host].address}") for p in survey.probes}


def _outside(probe: Probe) -> list[str]:
    return [
        f"{i.name}/{i.address}"
        for i in probe.interfaces
        if i.address and i.up and not i.loopback and not i.name.startswith(CONTAINER_PREFIXES)
    ]


def _addresses(probe: Probe) -> str:
    down = [f"{i.name}-down" for i in probe.interfaces if not i.up and not i.loopback]
    return ",".join(_outside(probe) or down) or "no-interface"


def ifname(survey: Survey) -> Verdicts:
    """An interface that the user names is there on every node: a name from one node is often wrong on the next."""
    verdicts: Verdicts = {}
    for probe in survey.probes if survey.need.named else []:
        missing = [f"{n}={v}" for n, v in survey.need.named.items() if not _matches(n, v, probe)]
        if missing:
            cure = (
                f"{probe.host} has {_addresses(probe)}, none that {missing[0]} means: take it out of cluster.env or "
                "cluster.rendezvous.interface, then each node's own name is found; or list all names, joined by commas"
            )
            verdicts[probe.host] = bad("ifname", f"MISSING({','.join(missing)})", cure)
        else:
            verdicts[probe.host] = good("ifname", "ok")
    return verdicts


def _matches(name: str, value: str, probe: Probe) -> bool:
    """Whether some interface that is up is meant. Gloo: exact names. NCCL: prefixes, `=` exact, `^` excludes."""
    up = [item.name for item in probe.interfaces if item.up and item.address]
    if name.startswith("GLOO"):
        return any(item in up for item in value.split(","))
    excludes = value.startswith("^")
    plain = value.removeprefix("^")
    exact = plain.startswith("=")
    words = [word for word in plain.removeprefix("=").split(",") if word]
    hits = [item for item in up if any(item == word if exact else item.startswith(word) for word in words)]
    return len(hits) < len(up) if excludes else bool(hits)


def reach(survey: Survey) -> Verdicts:
    """Every node reaches every other. A node that none reaches is blamed, not those that tried."""
    if survey.reach is None:
        return {}
    failures = {host: answer.unreached for host, answer in survey.reach.items()}
    total = len(survey.probes) - 1
    blocked_by = {
        p.host: {h for h, items in failures.items() if any(i.peer == p.host for i in items)} for p in survey.probes
    }
    alone = {
        host for host, hosts in blocked_by.items() if host not in survey.reach or (len(hosts) == total and total > 1)
    }
    verdicts: Verdicts = {}
    for probe in survey.probes:
        host, answer = probe.host, survey.reach.get(probe.host)
        if answer is None:
            cure = f"{host} did not say whom it reaches; see the error of srun"
            verdicts[host] = bad("reach", "NO-ANSWER", cure)
            continue
        peers = {item.peer: item for item in answer.unreached if item.peer not in alone or host in alone}
        if answer.errors or host in alone or peers:
            shown = several_names([f"{i.peer}:{i.port} {i.why}" for i in peers.values()], 3) or "; ".join(answer.errors)
            verdicts[host] = bad("reach", f"UNREACHABLE({','.join(list(peers)[:4]) or host})", _reach_cure(host, shown))
        else:
            verdicts[host] = good("reach", f"{total - len({i.peer for i in answer.unreached})}/{total}")
    return verdicts


def _reach_cure(host: str, shown: str) -> str:
    return (
        f"{host}: {shown}; a firewall, a cut cable or the wrong network: name another in "
        f"cluster.rendezvous.interface, or leave the node out (--exclude-bad, cluster.slurm.exclude)"
    )


def name(survey: Survey) -> Verdicts:
    """The node's own name means an address that others can reach. The ranks get addresses, so it does not block."""
    verdicts: Verdicts = {}
    for probe in survey.probes if survey.several else []:
        loop = [a for a in probe.resolves or [] if ipaddress.ip_address(a).is_loopback]
        if loop:
            cure = (
                f"/etc/hosts of {probe.host} gives its own name {probe.own_name} the address {loop[0]}: take that line "
                "out; until then programs that listen at their own name cannot be reached (allranks passes addresses)"
            )
            verdicts[probe.host] = bad("name", f"LOOPBACK({loop[0]})", cure, blocks=survey.network is None)
        elif not probe.resolves:
            why = probe.resolve_error or "no address"
            cure = f"{probe.host} does not know its own name ({why}): add it to /etc/hosts or to DNS"
            verdicts[probe.host] = bad("name", f"UNKNOWN({probe.own_name})", cure, blocks=survey.network is None)
        else:
            verdicts[probe.host] = good("name", "ok")
    return verdicts


def port(survey: Survey) -> Verdicts:
    """The rendezvous port is free on the first node; elsewhere nobody listens."""
    asked = survey.wish.ports
    if not asked:
        return {}
    first = survey.first
    if first.free_ports:
        return {first.host: good("port", str(first.free_ports[0]))}
    if survey.need.port is not None:
        cure = (
            f"something listens there on {first.host}: leave cluster.rendezvous.port null, so that a free one is taken"
        )
        return {first.host: bad("port", f"TAKEN({survey.need.port})", cure)}
    cure = f"something listens on each of them on {first.host}: name a free one in cluster.rendezvous.port"
    return {first.host: bad("port", f"TAKEN({','.join(map(str, asked))})", cure)}


def clock(survey: Survey) -> Verdicts:
    """Clocks agree: otherwise the first failure cannot be told from the logs, nor which file is newer."""
    off = {p.host: p.clock - survey.received[p.host] for p in survey.probes if p.host in survey.received}
    if not off:
        return {}
    middle = statistics.median(off.values())
    if abs(middle) > CLOCK_LIMIT_S and len(off) > 2:  # then it is the launcher's own clock that is wrong
        off = {host: seconds - middle for host, seconds in off.items()}
    return {
        host: good("clock", f"{seconds:+.2f}s")
        if abs(seconds) <= CLOCK_LIMIT_S
        else bad(
            "clock", f"WRONG({seconds:+.1f}s)", f"set the clock of {host} (chronyc makestep, or its administrator)"
        )
        for host, seconds in off.items()
    }
