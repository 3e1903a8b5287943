"""What the ranks got, against what the policy expected: above all, RDMA that became sockets without a word. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from allranks.fabric.job import Expected
from allranks.fabric.observed import Observed

WIRELESS = ("Socket", "")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One difference. `bad`: speed or the run itself is lost by it; `note`: worth knowing."""

    host: str
    level: Literal["bad", "note"]
    text: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes: what was seen, and the differences."""

    observed: list[Observed]
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        return not any(item.level == "bad" for item in self.findings)

    def line(self) -> str:
        """One line for a summary; empty if nothing was seen."""
        seen = [item for item in self.observed if item.known]
        if not seen:
            return ""
        nets = sorted({net for item in seen for net in item.networks})
        ways = sorted({way for item in seen for way in item.ways})
        faces = sorted({name for item in seen for name in [*item.connections, *item.bootstrap]})
        parts = [
            f"NCCL over {', '.join(nets)}" if nets else "",
            f"ways {', '.join(ways)}" if ways else "",
            f"interface {', '.join(faces)}" if faces else "",
        ]
        return "; ".join(part for part in parts if part)


def judge(expected: dict[str, Expected], observed: Sequence[Observed]) -> Outcome:
    """Every node's differences; nodes of which nothing was seen have none."""
    findings: list[Finding] = []
    for item in observed:
        wanted = expected.get(item.host)
        if wanted is not None:
            findings += _node(wanted, item)
        findings += [
            Finding(host=item.host, level="bad", text=f"Gloo connected {peers} peers") for peers in item.lost_peers
        ]
    findings += _between(observed)
    return Outcome(observed=list(observed), findings=findings)


def _node(wanted: Expected, item: Observed) -> list[Finding]:
    return [*_transport(wanted, item), *_interface(wanted, item), *_inside(wanted, item)]


def _bad(item: Observed, text: str) -> Finding:
    return Finding(host=item.host, level="bad", text=text)


def _transport(wanted: Expected, item: Observed) -> list[Finding]:
    used = ", ".join(item.networks)
    if wanted.transport not in WIRELESS and item.rdma is False:
        why = "; ".join(item.reasons) or "NCCL does not say why: look for NET/IB or NET/OFI in the ranks' logs"
        what = ", ".join(wanted.devices) or wanted.transport
        return [
            _bad(item, f"{wanted.transport} became sockets: expected {what} ({wanted.why}), NCCL used {used}. {why}")
        ]
    if wanted.transport == "Socket" and item.rdma:
        text = f"RDMA is used ({used}), though sockets were expected: {wanted.why}"
        return [Finding(host=item.host, level="note", text=text)]
    missing = [device for device in wanted.devices if device not in item.devices]
    if item.rdma and item.devices and missing:
        verb = "is" if len(missing) == 1 else "are"
        using = ", ".join(item.devices)
        return [_bad(item, f"NCCL does not use {', '.join(missing)}, which {verb} up; it uses {using}")]
    return []


def _interface(wanted: Expected, item: Observed) -> list[Finding]:
    if not wanted.interface:
        return []
    found = []
    other = sorted({*item.bootstrap, *item.sockets} - {wanted.interface})
    if other:
        found.append(_bad(item, f"NCCL uses the interface {', '.join(other)}, expected {wanted.interface}"))
    strange = sorted(set(item.connections) - {wanted.interface, "lo"})
    if strange:
        shown = ", ".join(f"{name} ({item.connections[name]})" for name in strange)
        found.append(_bad(item, f"connections between ranks go over {shown}, expected {wanted.interface}"))
    return found


def _inside(wanted: Expected, item: Observed) -> list[Finding]:
    found = []
    if wanted.inside == "NVLink" and item.ways.get("SHM") and not item.ways.get("P2P"):
        text = "the GPUs are joined by NVLink, but NCCL goes through host memory (SHM): peer-to-peer is off or refused"
        found.append(_bad(item, text))
    rdma = [way for way in item.ways if way.startswith(("NET/IB", "NET/AWS"))]
    if rdma and not any(way.endswith("GDRDMA") for way in rdma):
        text = "RDMA goes through host memory, without GPUDirect (nvidia-peermem or DMA-BUF is missing, or the card is far)"
        found.append(Finding(host=item.host, level="note", text=text))
    return found


def _between(observed: Sequence[Observed]) -> list[Finding]:
    """Nodes that disagree: some by RDMA, some by sockets."""
    sockets = [item.host for item in observed if item.rdma is False]
    rdma = [item.host for item in observed if item.rdma is True]
    if not (sockets and rdma):
        return []
    text = f"{', '.join(sockets)} use sockets while {', '.join(rdma)} use RDMA"
    return [Finding(host=sockets[0], level="bad", text=text)]
