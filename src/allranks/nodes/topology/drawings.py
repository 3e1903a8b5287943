"""Draw a topology as text for a terminal or as SVG, with devices grouped by NUMA node and PCIe switch. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

import msgspec
from rich.text import Text

from allranks.planning.records import LINK_TYPES, Topology, TopologyDevice, TopologyLink, link_distance
from allranks.utils.palette import stylesheet


class DeviceGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that share a switch or a host bridge; `what` is empty for a single device."""

    what: str
    gpus: list[TopologyDevice]
    nics: list[TopologyDevice]


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node and its devices; `number` None: not in the matrix."""

    number: int | None
    cpus: str | None
    groups: list[DeviceGroup]


def numa_nodes(topology: Topology) -> list[NumaNode]:
    """Return NUMA nodes in order of their numbers.

    A card is assigned to the node of a GPU that it reaches inside the NUMA node: the matrix has no column for it.
    """
    place = {gpu.name: gpu.numa for gpu in topology.gpus}
    for nic in topology.nics:
        links = [(topology.between(gpu.name, nic.name), gpu.name) for gpu in topology.gpus]
        near = [(link_distance(link.type), name) for link, name in links if link and link.type in _INSIDE_NUMA_NODE]
        place[nic.name] = place[min(near, key=lambda pair: pair[0])[1]] if near else None
    nodes = []
    for number in sorted(set(place.values()), key=lambda number: (number is None, number)):
        gpus, nics = ([d for d in devices if place[d.name] == number] for devices in (topology.gpus, topology.nics))
        cpus = next((gpu.cpus for gpu in gpus if gpu.cpus), None)
        nodes.append(NumaNode(number=number, cpus=cpus, groups=_groups(topology.links, gpus, nics)))
    return nodes


def _groups(
    links: Sequence[TopologyLink], gpus: Sequence[TopologyDevice], nics: Sequence[TopologyDevice]
) -> list[DeviceGroup]:
    """Group devices connected by PIX or PXB as one or several switches, else by PHB as one host bridge."""
    left = [device.name for device in (*gpus, *nics)]
    joined = []
    for what, kinds in (("PCIe switch", ("PIX", "PXB")), ("one host bridge", ("PHB",)), ("", ())):
        for members in group_by_links(left, [link for link in links if link.type in kinds]):
            if what and len(members) == 1:
                continue
            inside = {link.type for link in links if {link.a, link.b} <= set(members) and not link.nvlinks}
            number = "one PCIe switch" if inside == {"PIX"} else "joined PCIe switches"
            joined.append((number if what == "PCIe switch" else what, members))
        left = [name for name in left if not any(name in members for _, members in joined)]
    groups = [
        DeviceGroup(what=what, gpus=[g for g in gpus if g.name in members], nics=[n for n in nics if n.name in members])
        for what, members in joined
    ]
    order = [device.name for device in (*gpus, *nics)]
    return sorted(groups, key=lambda group: order.index([*group.gpus, *group.nics][0].name))


def group_by_links(names: Sequence[str], links: Sequence[TopologyLink]) -> list[list[str]]:
    """Return the groups of devices that the links connect, each in the order of the names."""
    group = {name: [name] for name in names}
    for link in links:
        a, b = group.get(link.a), group.get(link.b)
        if a and b and a is not b:
            a += b
            group.update(dict.fromkeys(b, a))
    return [sorted(members, key=names.index) for members in {id(g): g for g in group.values()}.values()]


_INSIDE_NUMA_NODE = ("PIX", "PXB", "PHB", "NODE")
STYLES = {
    **{".": "dim", "NV": "bold green", "C2C": "bold green", "PIX": "cyan", "PXB": "cyan"},
    **{"PHB": "yellow", "NODE": "yellow"},
}
MAX_SHOWN = 24


def draw_text(topology: Topology) -> Text:
    """Return the complete drawing; no line depends on the terminal's width."""
    text = Text(no_wrap=True)
    for node in numa_nodes(topology):
        cores = f"  cores {node.cpus}" if node.cpus else ""
        text.append(f"NUMA node {'unknown' if node.number is None else node.number}{cores}\n", "bold")
        last = len(node.groups) - 1
        for place, group in enumerate(node.groups):
            names = "  ".join(device_label(device) for device in (*group.gpus, *group.nics))
            text.append("  +- " if place == last else "  |- ", "dim")
            text.append(f"[{group.what}: {names}]\n" if group.what else f"{names}\n")
    text.append("\n")
    text.append_text(_summary(topology))
    if len(topology.gpus) > 1:
        _matrix(text, topology, "GPU to GPU", topology.gpus, topology.gpus)
    if topology.nics and topology.gpus:
        _matrix(text, topology, "GPU to network card", topology.gpus, topology.nics)
    _text_legend(text, topology)
    return text


def device_label(device: TopologyDevice) -> str:
    """Return ``NIC2=mlx5_bond_0`` or ``GPU0``."""
    return f"{device.name}={device.device}" if device.device and device.device != device.name else device.name


def _summary(topology: Topology) -> Text:
    """Return a summary in sentences."""
    lines: list[str] = []
    pairs = topology.gpu_pairs()
    joined = [link for link in pairs if link.nvlinks]
    if joined and len(joined) == len(pairs):
        counts = sorted({link.nvlinks for link in pairs})
        each = f"{counts[0]} to {counts[-1]} links" if len(counts) > 1 else f"{counts[0]} link{'s' * (counts[0] > 1)}"
        lines.append(f"NVLink connects every pair of GPUs, {each} each.")
    elif joined:
        lines.append(f"NVLink connects {len(joined)} of {len(pairs)} pairs of GPUs; the others use PCIe.")
    elif pairs:
        kinds = Counter(link.type for link in pairs)
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda p: link_distance(p[0])))
        lines.append(f"No NVLink: the pairs of GPUs use PCIe ({shown}).")
    for gpu in topology.gpus[:MAX_SHOWN] if topology.nics else []:
        kind, nics = topology.nearest_nics(gpu.name)
        if nics:
            lines.append(f"{gpu.name}: nearest card {', '.join(map(device_label, nics[:4]))} ({kind})")
    refused = [link for link in topology.p2p if link.type != "OK"]
    if topology.p2p:
        allowed = f"{len(topology.p2p) - len(refused)} of {len(topology.p2p)}"
        lines.append(f"Peer access as reported by the driver: {allowed} pairs OK.")
    return Text("".join(line + "\n" for line in lines))


def _matrix(
    text: Text, topology: Topology, title: str, rows: list[TopologyDevice], columns: list[TopologyDevice]
) -> None:
    width = max([len(d.name) for d in (*rows, *columns)] + [4]) + 1
    text.append(f"\n{title}\n", "bold")
    text.append(" " * width + "".join(f"{d.name:>{width}}" for d in columns) + "\n", "dim")
    for row in rows:
        text.append(f"{row.name:<{width}}", "dim")
        for column in columns:
            link = topology.between(row.name, column.name)
            kind = "." if row.name == column.name else link.type if link else "?"
            text.append(f"{kind:>{width}}", style_of(kind))
        text.append("\n")


def style_of(kind: str) -> str:
    """Return the colour of a link type."""
    return STYLES["NV"] if kind.startswith("NV") else STYLES.get(kind, "red")


def _text_legend(text: Text, topology: Topology) -> None:
    kinds = {link.type for link in topology.links}
    if kinds:
        text.append("\n")
    if any(kind.startswith("NV") for kind in kinds):
        text.append("  NV#   ", STYLES["NV"])
        text.append("# bonded NVLinks\n")
    for kind in sorted((k for k in kinds if not k.startswith("NV")), key=lambda k: (link_distance(k), k)):
        text.append(f"  {kind:<6}", style_of(kind))
        text.append(f"{LINK_TYPES.get(kind, 'an unknown type')}\n")


_SVG_CLASSES = {"dim": "--muted", "green": "--good", "cyan": "--info", "yellow": "--warn", "red": "--bad"}


def draw_svg(topology: Topology) -> str:
    """Return the drawing of `draw_text` as SVG in the colours of all pages; it loads nothing from the network."""
    lines = draw_text(topology).split("\n")
    width, height = 40 + 8.5 * max(len(line) for line in lines), 40 + 20 * len(lines)
    fills = " ".join(f".{name} {{ fill: var({paint}) }}" for name, paint in _SVG_CLASSES.items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" role="img">',
        "<title>Topology of GPUs and network cards</title>",
        f"<style>{stylesheet()} text {{ font: 14px ui-monospace, Menlo, Consolas, monospace; fill: var(--ink);"
        f" white-space: pre }} .bold {{ font-weight: 700 }} {fills}</style>",
        f'<rect width="{width:.0f}" height="{height}" rx="12" fill="var(--card)" stroke="var(--line)"/>',
    ]
    for number, line in enumerate(lines):
        pieces, end = [], 0
        for span in line.spans:
            pieces += [escape(line.plain[end : span.start]), f'<tspan class="{span.style}">']
            pieces += [escape(line.plain[span.start : span.end]), "</tspan>"]
            end = span.end
        parts.append(f'<text x="20" y="{34 + 20 * number}">{"".join(pieces)}{escape(line.plain[end:])}</text>')
    return "\n".join([*parts, "</svg>\n"])
