"""Draw a topology as text for a terminal or as SVG, with devices grouped by NUMA node and PCIe switch. Pure."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from allranks.planning.records import LINK_TYPES, Topology, TopologyDevice, TopologyLink, link_distance

SWITCH, SWITCHES, BRIDGE = "one PCIe switch", "joined PCIe switches", "one host bridge"
_LEVELS = ((SWITCHES, ("PIX", "PXB")), (BRIDGE, ("PHB",)))


_Key = tuple[int | None, str | None]


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

    @property
    def title(self) -> str:
        """Return the title for display."""
        return "NUMA node unknown" if self.number is None else f"NUMA node {self.number}"


def numa_nodes(topology: Topology) -> list[NumaNode]:
    """Return NUMA nodes in order of their numbers; if older drivers report none, devices are grouped by their local cores.

    A card is assigned to the node of a GPU that it reaches without leaving the NUMA node: the matrix has no column for it.
    """
    place: dict[str, _Key] = {gpu.name: (gpu.numa, None if gpu.numa is not None else gpu.cpus) for gpu in topology.gpus}
    for nic in topology.nics:
        near = _gpu_near(topology, nic)
        place[nic.name] = place[near] if near else (None, None)
    nodes = []
    for key in sorted(set(place.values()), key=_order):
        gpus = [gpu for gpu in topology.gpus if place[gpu.name] == key]
        nics = [nic for nic in topology.nics if place[nic.name] == key]
        cpus = next((gpu.cpus for gpu in gpus if gpu.cpus), None)
        nodes.append(NumaNode(number=key[0], cpus=cpus, groups=_groups(topology, gpus, nics)))
    return nodes


def _order(key: _Key) -> tuple[int, int]:
    first = (key[1] or "").replace(",", "-").split("-")[0]
    return (key[0] if key[0] is not None else 10**9, int(first[:9]) if first.isdigit() else 10**9)


def _gpu_near(topology: Topology, nic: TopologyDevice) -> str | None:
    near = [
        (link_distance(link.type), gpu.name)
        for gpu in topology.gpus
        if (link := topology.between(gpu.name, nic.name)) and link.type in ("PIX", "PXB", "PHB", "NODE")
    ]
    return min(near, key=lambda pair: pair[0])[1] if near else None


def _groups(topology: Topology, gpus: Sequence[TopologyDevice], nics: Sequence[TopologyDevice]) -> list[DeviceGroup]:
    """Group devices connected by PIX or PXB as one switch, else by PHB as one host bridge."""
    names = [device.name for device in (*gpus, *nics)]
    left = set(names)
    found: list[tuple[str, set[str]]] = []
    for what, kinds in _LEVELS:
        links = [link for link in topology.links if link.type in kinds]
        for group in group_by_links([n for n in names if n in left], links):
            if len(group) > 1:
                members = set(group)
                found.append((_switch(what, members, topology.links), members))
                left -= members
    found += [("", {name}) for name in names if name in left]
    found.sort(key=lambda pair: min(names.index(name) for name in pair[1]))
    return [
        DeviceGroup(what=what, gpus=[g for g in gpus if g.name in members], nics=[n for n in nics if n.name in members])
        for what, members in found
    ]


def _switch(what: str, members: set[str], links: Sequence[TopologyLink]) -> str:
    """Return one switch if all its links are PIX."""
    inside = [link for link in links if link.a in members and link.b in members and not link.nvlinks]
    return SWITCH if what == SWITCHES and all(link.type == "PIX" for link in inside) else what


def group_by_links(names: Sequence[str], links: Sequence[TopologyLink]) -> list[list[str]]:
    """Return the groups of devices that the links connect, each in the order of the names."""
    near: dict[str, set[str]] = {name: set() for name in names}
    for link in links:
        if link.a in near and link.b in near:
            near[link.a].add(link.b)
            near[link.b].add(link.a)
    seen: set[str] = set()
    found = []
    for name in names:
        if name in seen:
            continue
        members, todo = set(), [name]
        while todo:
            one = todo.pop()
            if one not in members:
                members.add(one)
                todo += near[one] - members
        seen |= members
        found.append([n for n in names if n in members])
    return found


def nvlink_mesh(topology: Topology) -> int:
    """Return the number of links of each pair if NVLink connects every pair of GPUs equally, else 0."""
    pairs = topology.gpu_pairs()
    counts = {link.nvlinks for link in pairs}
    whole = len(topology.gpus) > 1 and len(pairs) == len(topology.gpus) * (len(topology.gpus) - 1) // 2
    return counts.pop() if whole and len(counts) == 1 else 0


STYLES = {"NV": "bold green", "C2C": "bold green", "PIX": "cyan", "PXB": "cyan", "PHB": "yellow", "NODE": "yellow"}
FAR_LINK_TYPES = "red"
MAX_SHOWN = 24


def draw_text(topology: Topology) -> Text:
    """Return the complete drawing; no line depends on the terminal's width."""
    text = Text(no_wrap=True)
    for node in numa_nodes(topology):
        cores = f"  cores {node.cpus}" if node.cpus else ""
        text.append(f"{node.title}{cores}\n", "bold")
        last = len(node.groups) - 1
        for place, group in enumerate(node.groups):
            text.append("  +- " if place == last else "  |- ", "dim")
            text.append(_group_text(group) + "\n")
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


def _group_text(group: DeviceGroup) -> str:
    names = "  ".join(device_label(device) for device in (*group.gpus, *group.nics))
    return f"[{group.what}: {names}]" if group.what else names


def _summary(topology: Topology) -> Text:
    """Return a summary in sentences."""
    lines: list[str] = []
    mesh = nvlink_mesh(topology)
    pairs = topology.gpu_pairs()
    joined = [link for link in pairs if link.nvlinks]
    if mesh:
        lines.append(f"NVLink connects every pair of GPUs, {mesh} link{'s' * (mesh > 1)} each.")
    elif joined and len(joined) == len(pairs):
        counts = sorted({link.nvlinks for link in pairs})
        each = f"{counts[0]} to {counts[-1]} links" if len(counts) > 1 else f"{counts[0]} link{'s' * (counts[0] > 1)}"
        whole = "known " if topology.missing_pairs() else ""
        lines.append(f"NVLink connects every {whole}pair of GPUs, {each} each.")
    elif joined:
        lines.append(f"NVLink connects {len(joined)} of {len(pairs)} pairs of GPUs; the others use PCIe.")
    elif pairs:
        kinds = Counter(link.type for link in pairs)
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda p: link_distance(p[0])))
        lines.append(f"No NVLink: the pairs of GPUs use PCIe ({shown}).")
    missing = topology.missing_pairs()
    if missing:
        lines.append(f"Unknown: {len(missing)} pairs of GPUs, such as {missing[0][0]}-{missing[0][1]}.")
    for gpu in topology.gpus[:MAX_SHOWN] if topology.nics else []:
        kind, nics = topology.nearest_nics(gpu.name)
        if nics:
            lines.append(f"{gpu.name}: nearest card {', '.join(map(device_label, nics[:4]))} ({kind})")
    refused = [link for link in topology.p2p if link.type != "OK"]
    if topology.p2p:
        told = f"{len(topology.p2p) - len(refused)} of {len(topology.p2p)}"
        lines.append(f"Peer access as reported by the driver: {told} pairs OK.")
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
    if kind in (".", "?"):
        return "dim" if kind == "." else "bold magenta"
    return STYLES["NV"] if kind.startswith("NV") else STYLES.get(kind, FAR_LINK_TYPES)


def _text_legend(text: Text, topology: Topology) -> None:
    kinds = sorted({link.type for link in topology.links}, key=lambda k: (link_distance(k), k))
    if kinds:
        text.append("\n")
    seen_nvlink = False
    for kind in kinds:
        if kind.startswith("NV") and not seen_nvlink:
            text.append("  NV#   ", "bold green")
            text.append("# bonded NVLinks\n")
            seen_nvlink = True
        elif not kind.startswith("NV"):
            text.append(f"  {kind:<6}", style_of(kind))
            text.append(f"{LINK_TYPES.get(kind) or topology.meaning.get(kind, 'not explained')}\n")


_FONT_FACE = re.compile(r"@font-face\s*\{.*?\}", re.DOTALL)


def draw_svg(topology: Topology) -> str:
    """Return the drawing of `draw_text` as one SVG document in a monospace font; it loads nothing from the network."""
    text = draw_text(topology)
    width = max(len(line) for line in text.plain.splitlines()) + 1
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    console.print(text, soft_wrap=True)
    title = f"{len(topology.gpus)} GPU{'s' * (len(topology.gpus) != 1)}, {len(topology.nics)} network card{'s' * (len(topology.nics) != 1)}"
    return _FONT_FACE.sub("", console.export_svg(title=title, theme=DEFAULT_TERMINAL_THEME))
