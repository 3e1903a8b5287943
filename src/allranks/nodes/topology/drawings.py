"""Draw a topology as text for a terminal or as SVG, with devices grouped by NUMA node and PCIe switch. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

import msgspec
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


WIDTH, HEIGHT, GAP, PAD = 104, 40, 12, 14
ARC_STEP = 13
NVLINK = "#2e7d32"
COLOURS = {
    "C2C": NVLINK,
    "PIX": "#00838f",
    "PXB": "#0277bd",
    "PHB": "#b26a00",
    "NODE": "#c75b12",
    "SYS": "#c62828",
    "SOC": "#c62828",
}
GROUP_LINKS = {SWITCH: "PIX", SWITCHES: "PXB", BRIDGE: "PHB"}
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#555}.title{font-weight:600}"
    ".numa{fill:#f6f7f9;stroke:#9aa3ad}.switch{fill-opacity:.1;stroke-dasharray:4 3}"
    ".halo{paint-order:stroke;stroke:#fff;stroke-width:4px}.gpu{fill:#e8f5e9;stroke:#2e7d32}.nic{fill:#e3f2fd;stroke:#1565c0}"
)


class _Place(msgspec.Struct, frozen=True):
    """Position of a device's box."""

    x: float
    y: float

    @property
    def middle(self) -> float:
        return self.x + WIDTH / 2


def draw_svg(topology: Topology) -> str:
    """Return the drawing as one SVG document; every device shows its links as a tooltip."""
    nodes = numa_nodes(topology)
    top = 54 + _nvlink_height(topology)
    body: list[str] = []
    places: dict[str, _Place] = {}
    x = float(PAD)
    heights = [_node_height(node) for node in nodes]
    tall = max(heights, default=0.0)
    edges = []
    for node in nodes:
        width = _svg_node(body, places, topology, node, x, top, tall)
        edges.append((x, x + width))
        x += width + 3 * GAP
    width = max(x - 3 * GAP + PAD, 560.0)
    body += _nvlinks(topology, places, top)
    below = top + tall
    if len(edges) > 1:
        body.append(_between_nodes(edges, below, topology))
        below += 34
    body += _svg_legend(topology, below + 30)
    height = below + 44 + 18 * len(_kinds(topology))
    title = f"{len(topology.gpus)} GPU{'s' * (len(topology.gpus) != 1)}, {len(topology.nics)} network card{'s' * (len(topology.nics) != 1)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{title}"><style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{PAD}" y="26" class="title">{title}</text>{"".join(body)}</svg>\n'
    )


def _group_width(group: DeviceGroup) -> float:
    across = max(len(group.gpus), len(group.nics), 1)
    return across * (WIDTH + GAP) - GAP + (2 * PAD if group.what else 0)


def _group_height(group: DeviceGroup) -> float:
    rows = (1 if group.gpus else 0) + (1 if group.nics else 0)
    return rows * (HEIGHT + GAP) - GAP + (2 * PAD + 10 if group.what else 0)


def _node_height(node: NumaNode) -> float:
    return max((_group_height(g) for g in node.groups), default=0.0) + PAD + 50


def _svg_node(
    body: list[str], places: dict[str, _Place], topology: Topology, node: NumaNode, x: float, y: float, tall: float
) -> float:
    """Draw one NUMA node at x, y; return its width."""
    width = sum(_group_width(g) + GAP for g in node.groups) - GAP + 2 * PAD
    width = max(width, 210.0)
    body.append(f'<rect x="{x}" y="{y}" width="{width}" height="{tall}" rx="8" class="numa"/>')
    cores = f"cores {node.cpus}" if node.cpus else ""
    body.append(f'<text x="{x + PAD}" y="{y + tall - 24}" class="title">{escape(node.title)}</text>')
    body.append(f'<text x="{x + PAD}" y="{y + tall - 9}" class="small">{escape(cores)}</text>')
    at = x + PAD
    for group in node.groups:
        _svg_group(body, places, topology, group, at, y + PAD)
        at += _group_width(group) + GAP
    return width


def _svg_group(
    body: list[str], places: dict[str, _Place], topology: Topology, group: DeviceGroup, x: float, y: float
) -> None:
    inner = PAD if group.what else 0
    if group.what:
        wide, high = _group_width(group), _group_height(group)
        paint = COLOURS[GROUP_LINKS[group.what]]  # the same as in the legend
        body.append(
            f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="6" class="switch" style="stroke:{paint};fill:{paint}"/>'
        )
        body.append(f'<text x="{x + PAD}" y="{y + high - 8}" class="small">{escape(group.what)}</text>')
    rows = [row for row in (group.gpus, group.nics) if row]
    for number, row in enumerate(rows):
        for place, device in enumerate(row):
            left, above = x + inner + place * (WIDTH + GAP), y + inner + number * (HEIGHT + GAP)
            places[device.name] = _Place(left, above)
            body.append(_svg_device(topology, device, left, above, "gpu" if row is group.gpus else "nic"))


def _svg_device(topology: Topology, device: TopologyDevice, x: float, y: float, kind: str) -> str:
    links = [link for link in topology.links if device.name in (link.a, link.b)]
    told = "; ".join(f"{link.b if link.a == device.name else link.a} {link.type}" for link in links)
    extra = device.device if device.device and device.device != device.name else ""
    second = f'<text x="{x + WIDTH / 2}" y="{y + 32}" text-anchor="middle" class="small">{escape(extra[:16])}</text>'
    return (
        f'<g><title>{escape(device_label(device))}: {escape(told)}</title><rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" class="{kind}"/>'
        f'<text x="{x + WIDTH / 2}" y="{y + (17 if extra else 25)}" text-anchor="middle">{escape(device.name[:14])}</text>'
        f"{second if extra else ''}</g>"
    )


def _arcs(topology: Topology) -> list[tuple[str, str, int]]:
    return [(link.a, link.b, link.nvlinks) for link in topology.gpu_pairs() if link.nvlinks]


def _nvlink_height(topology: Topology) -> float:
    if nvlink_mesh(topology):
        return 34.0
    order = [gpu.name for gpu in topology.gpus]
    spans = [abs(order.index(a) - order.index(b)) for a, b, _ in _arcs(topology)]
    return max(spans) * ARC_STEP + 26 if spans else 0.0


def _nvlinks(topology: Topology, places: dict[str, _Place], top: float) -> list[str]:
    """Return one bar if all pairs are connected equally; else one arc per pair, higher for a larger distance."""
    mesh = nvlink_mesh(topology)
    if mesh:
        return _bar(topology, places, top - 20, mesh)
    order = sorted((gpu.name for gpu in topology.gpus), key=lambda name: places[name].x)
    drawn = []
    for a, b, count in _arcs(topology):
        left, right = sorted((places[a], places[b]), key=lambda p: p.x)
        high = top - 8 - ARC_STEP * abs(order.index(a) - order.index(b))
        path = f"M{left.middle + 5} {left.y} C{left.middle + 5} {high},{right.middle - 5} {high},{right.middle - 5} {right.y}"
        width = min(1 + count * 0.7, 6)
        drawn.append(
            f'<path d="{path}" fill="none" stroke="{NVLINK}" stroke-width="{width:.1f}" opacity=".75">'
            f"<title>{escape(a)} - {escape(b)}: NV{count}</title></path>"
        )
        peak = left.y * 0.25 + high * 0.75
        drawn.append(
            f'<text x="{(left.middle + right.middle) / 2}" y="{peak - 3:.0f}" text-anchor="middle" class="small halo">NV{count}</text>'
        )
    return drawn


def _bar(topology: Topology, places: dict[str, _Place], y: float, count: int) -> list[str]:
    spots = [places[gpu.name] for gpu in topology.gpus]
    left, right = min(p.middle for p in spots) - 30, max(p.middle for p in spots) + 30
    lines = "".join(
        f'<line x1="{p.middle}" y1="{y + 6}" x2="{p.middle}" y2="{p.y}" stroke="{NVLINK}" stroke-width="3" opacity=".6"/>'
        for p in spots
    )
    said = f"NVLink: every pair of GPUs, {count} link{'s' * (count > 1)} each (NV{count})"
    return [
        f'{lines}<rect x="{left}" y="{y - 6}" width="{right - left}" height="12" rx="6" fill="{NVLINK}"/>'
        f'<text x="{(left + right) / 2}" y="{y - 12}" text-anchor="middle" class="small">{said}</text>'
    ]


def _between_nodes(edges: list[tuple[float, float]], y: float, topology: Topology) -> str:
    kinds = [link.type for link in topology.links if link.type in ("SYS", "SOC")]
    if not kinds:
        return ""
    first, last = sum(edges[0]) / 2, sum(edges[-1]) / 2
    legs = "".join(
        f'<line x1="{(a + b) / 2}" y1="{y}" x2="{(a + b) / 2}" y2="{y + 18}" stroke="{COLOURS["SYS"]}" stroke-width="2"/>'
        for a, b in edges
    )
    return (
        f'{legs}<line x1="{first}" y1="{y + 18}" x2="{last}" y2="{y + 18}" stroke="{COLOURS["SYS"]}" stroke-width="2"/>'
        f'<text x="{(first + last) / 2}" y="{y + 33}" text-anchor="middle" class="small">{kinds[0]}: between the NUMA nodes</text>'
    )


def _kinds(topology: Topology) -> list[str]:
    found = {"NV#" if link.nvlinks else link.type for link in topology.links}
    return sorted(found, key=lambda k: (link_distance(k), k))


def _svg_legend(topology: Topology, y: float) -> list[str]:
    rows = []
    for place, kind in enumerate(_kinds(topology)):
        at = y + 18 * place
        colour = NVLINK if kind == "NV#" else COLOURS.get(kind, "#555")
        meaning = (
            "# bonded NVLinks" if kind == "NV#" else LINK_TYPES.get(kind) or topology.meaning.get(kind, "not explained")
        )
        count = sum(1 for link in topology.links if link.type == kind or (kind == "NV#" and link.nvlinks))
        rows.append(
            f'<rect x="{PAD}" y="{at - 9}" width="12" height="10" fill="{colour}"/><text x="{PAD + 20}" y="{at}" class="small">'
            f"{escape(kind)}: {escape(meaning)} ({count} pair{'s' * (count != 1)})</text>"
        )
    return rows
