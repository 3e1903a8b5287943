"""Verify the network that the ranks used against the policy, by NCCL's log lines and the ranks' TCP connections.

The main failure to find is RDMA that silently fell back to sockets. Source of the log lines: NCCL 2.4 to 2.30 with
NCCL_DEBUG=INFO. Gloo logs only its number of peers (GLOO_LOG_LEVEL=INFO); connections in /proc show its interface.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from allranks.planning.network_policy import ExpectedNetwork, NetworkPolicy, load_policy
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from allranks.utils.inputs import open_regular

_LINE = re.compile(r"(?:(?P<host>[\w.-]+):\d+:\d+ \[\d+\] )?NCCL (?:INFO|WARN) (?P<text>.*)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?(?P<name>[^\s:]+):(?P<address>\S*?)<\d+>")
_NETWORK = re.compile(r"(?:Using network|Assigned NET plugin|Initialized NET plugin) (?P<net>\S+(?: Libfabric)?)")
_NET_SOCKET = re.compile(r"NET/Socket ?: Using (?P<list>.*)")
_NET_IB = re.compile(r"NET/IB ?: Using (?P<list>.*)")
_ITEM = re.compile(r"\[\d+\](?P<name>[^\s:]+):(?P<rest>[^\s]*)")
_CHANNEL = re.compile(r"\bvia (?P<way>P2P|SHM|NET)(?:/(?P<rest>[\w/.()-]+(?: Libfabric[\w/.-]*)?))?")
_REASONS = (
    (
        re.compile(r"Failed to open libibverbs"),
        "libibverbs is not installed where the ranks run (often a container without it)",
    ),
    (
        re.compile(r"NET/IB ?: No device found"),
        "NCCL found no RDMA device (in a container: /dev/infiniband is not passed on)",
    ),
    (re.compile(r"NCCL_IB_DISABLE set by environment to [1-9]"), "NCCL_IB_DISABLE is set"),
    (re.compile(r"NCCL_NET set by environment to Socket", re.IGNORECASE), "NCCL_NET is set to Socket"),
    (re.compile(r"ibv_\w+ failed|Call to ibv_\w+"), "a call of the RDMA library failed"),
    (re.compile(r"NET/OFI .*(?:No eligible providers|initialization failed)"), "the EFA plugin found no provider"),
)
_PEERS = re.compile(
    r"INFO Rank (?P<rank>\d+) is connected to (?P<got>\d+)\. Expected number of connected peers is: (?P<want>\d+)"
)
RDMA_PREFIXES = ("IB", "IBext", "AWS", "OFI", "UCX", "SHARP", "COLLNET")


class ObservedNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """Observations on one node, over all its ranks. Sets as sorted lists; empty: no information."""

    host: str
    networks: list[str] = []
    bootstrap: list[str] = []
    """Interfaces of the bootstrap."""
    sockets: list[str] = []
    """Interfaces that NCCL sends over when it uses sockets."""
    devices: list[str] = []
    """RDMA ports, ``mlx5_0:1``."""
    layers: list[str] = []
    """IB or RoCE, as NCCL reports it for the ports."""
    ways: dict[str, int] = {}
    """Channels by transport: P2P, SHM, NET/IB, NET/IB/GDRDMA, NET/Socket, ..."""
    reasons: list[str] = []
    """NCCL messages that explain why it has no RDMA."""
    connections: dict[str, int] = {}
    """Connections of the ranks to other nodes by interface, without the store's."""
    lost_peers: list[str] = []
    """Ranks that Gloo connected to fewer peers than expected."""

    @property
    def rdma(self) -> bool | None:
        """Return whether the data used RDMA; None if NCCL logged nothing."""
        if not self.networks:
            return None
        return all(net.startswith(RDMA_PREFIXES) for net in self.networks)

    @property
    def known(self) -> bool:
        """Return whether there is any observation."""
        return bool(self.networks or self.bootstrap or self.ways or self.connections)


class NetworkLogParser:
    """Parse the log lines of one node's ranks."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._sets: defaultdict[str, set[str]] = defaultdict(set)
        self._ways: Counter[str] = Counter()

    def take(self, lines: Iterable[str]) -> None:
        """Parse lines of a log; lines of other programs are skipped."""
        for line in lines:
            if "NCCL" in line:
                match = _LINE.search(line)
                if match:
                    self._nccl(match["text"])
            elif (
                "connected peers" in line and (peers := _PEERS.search(line)) and int(peers["got"]) < int(peers["want"])
            ):
                self._sets["lost_peers"].add(f"rank {peers['rank']} ({peers['got']} of {peers['want']})")

    def _nccl(self, text: str) -> None:
        if match := _BOOTSTRAP.search(text):
            self._sets["bootstrap"].add(match["name"])
        elif match := _NETWORK.search(text):
            self._sets["networks" if text.startswith("Initialized") else "assigned"].add(match["net"])
        elif match := _NET_SOCKET.search(text):
            self._sets["sockets"] |= {item["name"] for item in _ITEM.finditer(match["list"])}
        elif match := _NET_IB.search(text):
            for item in _ITEM.finditer(match["list"]):
                number, _, layer = item["rest"].partition("/")
                self._sets["devices"].add(f"{item['name']}:{number}")
                self._sets["layers"] |= {"RoCE" if "roce" in layer.lower() else "IB"} if layer else set()
        elif match := _CHANNEL.search(text):
            self._ways[_transport_name(match["way"], match["rest"] or "")] += 1
        for pattern, why in _REASONS:
            if pattern.search(text):
                self._sets["reasons"].add(why)

    def observed(self, connections: dict[str, int] | None = None) -> ObservedNetwork:
        """Return the result. Assignments to a communicator take precedence over mere initialisation."""
        sets = self._sets
        plain = ("bootstrap", "sockets", "devices", "layers", "reasons", "lost_peers")
        return ObservedNetwork(
            host=self._host,
            networks=sorted(sets["assigned"] or sets["networks"]),
            ways=dict(sorted(self._ways.items())),
            connections=connections or {},
            **{name: sorted(sets[name]) for name in plain},
        )


def _transport_name(kind: str, rest: str) -> str:
    """Convert ``NET/IB/0/GDRDMA`` to ``NET/IB/GDRDMA``: the device number is not needed."""
    if kind != "NET":
        return kind
    parts = [part for part in rest.split("/") if part]
    direct = [part for part in parts if part.startswith("GDRDMA")]
    name = parts[0].split("(")[0] if parts else "?"
    return "/".join(["NET", name, *(["GDRDMA"] if direct else [])])


def host_of_line(line: str) -> str | None:
    """Return the node in an NCCL line, if several nodes write to one stream."""
    match = _LINE.search(line)
    return match["host"] if match else None


NON_RDMA = ("Socket", "")


class NetworkFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One difference. `bad`: it costs speed or breaks the run; `note`: additional information."""

    host: str
    level: Literal["bad", "note"]
    text: str


class NetworkOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes: observations and differences."""

    observed: list[ObservedNetwork]
    findings: list[NetworkFinding]

    @property
    def ok(self) -> bool:
        return not any(item.level == "bad" for item in self.findings)

    def line(self) -> str:
        """Return one line for a summary; empty without observations."""
        seen = [item for item in self.observed if item.known]
        if not seen:
            return ""
        nets = sorted({net for item in seen for net in item.networks})
        ways = sorted({way for item in seen for way in item.ways})
        faces = sorted({name for item in seen for name in [*item.connections, *item.bootstrap]})
        parts = [
            f"NCCL over {', '.join(nets)}" if nets else "",
            f"transports {', '.join(ways)}" if ways else "",
            f"interface {', '.join(faces)}" if faces else "",
        ]
        return "; ".join(part for part in parts if part)


def compare_with_policy(expected: dict[str, ExpectedNetwork], observed: Sequence[ObservedNetwork]) -> NetworkOutcome:
    """Return every node's differences; nodes without observations have none."""
    findings: list[NetworkFinding] = []
    for item in observed:
        wanted = expected.get(item.host)
        if wanted is not None:
            findings += [*_transport(wanted, item), *_interface(wanted, item), *_gpu_findings(wanted, item)]
        findings += [
            NetworkFinding(host=item.host, level="bad", text=f"Gloo connected {peers} peers")
            for peers in item.lost_peers
        ]
    return NetworkOutcome(observed=list(observed), findings=findings)


def _bad_finding(item: ObservedNetwork, text: str) -> NetworkFinding:
    return NetworkFinding(host=item.host, level="bad", text=text)


def _transport(wanted: ExpectedNetwork, item: ObservedNetwork) -> list[NetworkFinding]:
    used = ", ".join(item.networks)
    if wanted.transport not in NON_RDMA and item.rdma is False:
        why = "; ".join(item.reasons) or "NCCL does not log the reason: search for NET/IB or NET/OFI in the ranks' logs"
        what = ", ".join(wanted.devices) or wanted.transport
        return [
            _bad_finding(
                item,
                f"{wanted.transport} was replaced by sockets: expected {what} ({wanted.why}), NCCL used {used}. {why}",
            )
        ]
    if wanted.transport == "Socket" and item.rdma:
        text = f"RDMA is used ({used}), although sockets were expected: {wanted.why}"
        return [NetworkFinding(host=item.host, level="note", text=text)]
    missing = [device for device in wanted.devices if device not in item.devices]
    if item.rdma and item.devices and missing:
        verb = "is" if len(missing) == 1 else "are"
        using = ", ".join(item.devices)
        return [_bad_finding(item, f"NCCL does not use {', '.join(missing)}, which {verb} up; it uses {using}")]
    return []


def _interface(wanted: ExpectedNetwork, item: ObservedNetwork) -> list[NetworkFinding]:
    if not wanted.interface:
        return []
    findings = []
    other = sorted({*item.bootstrap, *item.sockets} - {wanted.interface})
    if other:
        findings.append(_bad_finding(item, f"NCCL uses the interface {', '.join(other)}, expected {wanted.interface}"))
    strange = sorted(set(item.connections) - {wanted.interface, "lo"})
    if strange:
        shown = ", ".join(f"{name} ({item.connections[name]})" for name in strange)
        findings.append(_bad_finding(item, f"connections between ranks go over {shown}, expected {wanted.interface}"))
    return findings


def _gpu_findings(wanted: ExpectedNetwork, item: ObservedNetwork) -> list[NetworkFinding]:
    if wanted.inside == "NVLink" and item.ways.get("SHM") and not item.ways.get("P2P"):
        text = "the GPUs are connected by NVLink, but NCCL uses host memory (SHM): peer-to-peer is disabled or refused"
        return [_bad_finding(item, text)]
    return []


MAX_LOG_BYTES = 8 * 2**20
"""NCCL logs its choices at the start; of a long log only the beginning is read."""


def verify_network(run: RunDir, attempt: int) -> NetworkOutcome | None:
    """Compare a run with its policy; None without a policy: older versions, or a run that ended earlier."""
    policy = load_policy(run.network(attempt))
    if policy is None:
        return None
    seen = _recorded_connections(run, attempt, policy)
    collectors: dict[str, NetworkLogParser] = {}
    for path in run.rank_logs(attempt).values():
        host = path.name.rsplit(".rank", 1)[0]
        node = next((name for name, facts in seen.items() if host in facts["names"]), host)
        collectors.setdefault(node, NetworkLogParser(node)).take(_nccl_lines(path))
    observed = [c.observed(seen.get(host, {}).get("interfaces")) for host, c in sorted(collectors.items())]
    return compare_with_policy({node.host: node.expected for node in policy.nodes}, observed)


def outcome_metrics(outcome: NetworkOutcome | None) -> dict[str, Any] | None:
    """Return the part of ``metrics.json``."""
    if outcome is None:
        return None
    return {"line": outcome.line(), "ok": outcome.ok, **msgspec.to_builtins(outcome)}


def _recorded_connections(run: RunDir, attempt: int, policy: NetworkPolicy) -> dict[str, dict[str, Any]]:
    """Return the connections that each node's agent recorded, by the policy's name of the node."""
    connections: dict[str, dict[str, Any]] = {}
    for path in run.logs_of(attempt).glob("*.connections.json"):
        facts = read_json(path)
        if not isinstance(facts, dict) or not isinstance(facts.get("names"), list):
            continue
        known = next((name for name in facts["names"] if policy.of(name)), None)
        connections[known or path.name.removesuffix(".connections.json")] = facts
    return connections


def _nccl_lines(path: Path) -> Iterator[str]:
    try:
        with open_regular(path) as file:
            text = file.read(MAX_LOG_BYTES)
    except OSError:
        return
    for line in text.splitlines():
        if b"NCCL" in line or b"connected peers" in line:
            yield line.decode(errors="replace")
