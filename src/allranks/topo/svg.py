"""A machine as SVG: NUMA nodes as boxes, switches in them, NVLink above, what joins the nodes below. Pure text."""

from __future__ import annotations

from html import escape

import msgspec

from allranks.topo.draw import label
from allranks.topo.groups import BRIDGE, SWITCH, SWITCHES, Group, Node, numa_nodes, nvlink_mesh
from allranks.topo.records import MEANING, Device, Topology, distance

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
    """Where a device's box stands."""

    x: float
    y: float

    @property
    def middle(self) -> float:
        return self.x + WIDTH / 2


def svg(topology: Topology) -> str:
    """The picture as one SVG document; every device tells its links when pointed at."""
    nodes = numa_nodes(topology)
    top = 54 + _nvlink_height(topology)
    body: list[str] = []
    places: dict[str, _Place] = {}
    x = float(PAD)
    heights = [_node_height(node) for node in nodes]
    tall = max(heights, default=0.0)
    edges = []
    for node in nodes:
        width = _node(body, places, topology, node, x, top, tall)
        edges.append((x, x + width))
        x += width + 3 * GAP
    width = max(x - 3 * GAP + PAD, 560.0)
    body += _nvlinks(topology, places, top)
    below = top + tall
    if len(edges) > 1:
        body.append(_between_nodes(edges, below, topology))
        below += 34
    body += _legend(topology, below + 30)
    height = below + 44 + 18 * len(_kinds(topology))
    title = f"{len(topology.gpus)} GPU{'s' * (len(topology.gpus) != 1)}, {len(topology.nics)} network card{'s' * (len(topology.nics) != 1)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{title}"><style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{PAD}" y="26" class="title">{title}</text>{"".join(body)}</svg>\n'
    )


def _group_width(group: Group) -> float:
    across = max(len(group.gpus), len(group.nics), 1)
    return across * (WIDTH + GAP) - GAP + (2 * PAD if group.what else 0)


def _group_height(group: Group) -> float:
    rows = (1 if group.gpus else 0) + (1 if group.nics else 0)
    return rows * (HEIGHT + GAP) - GAP + (2 * PAD + 10 if group.what else 0)


def _node_height(node: Node) -> float:
    return max((_group_height(g) for g in node.groups), default=0.0) + PAD + 50


def _node(
    body: list[str], places: dict[str, _Place], topology: Topology, node: Node, x: float, y: float, tall: float
) -> float:
    """Draws one NUMA node at x, y; gives its width."""
    width = sum(_group_width(g) + GAP for g in node.groups) - GAP + 2 * PAD
    width = max(width, 210.0)
    body.append(f'<rect x="{x}" y="{y}" width="{width}" height="{tall}" rx="8" class="numa"/>')
    cores = f"cores {node.cpus}" if node.cpus else ""
    body.append(f'<text x="{x + PAD}" y="{y + tall - 24}" class="title">{escape(node.title)}</text>')
    body.append(f'<text x="{x + PAD}" y="{y + tall - 9}" class="small">{escape(cores)}</text>')
    at = x + PAD
    for group in node.groups:
        _group(body, places, topology, group, at, y + PAD)
        at += _group_width(group) + GAP
    return width


def _group(body: list[str], places: dict[str, _Place], topology: Topology, group: Group, x: float, y: float) -> None:
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
            body.append(_device(topology, device, left, above, "gpu" if row is group.gpus else "nic"))


def _device(topology: Topology, device: Device, x: float, y: float, kind: str) -> str:
    links = [link for link in topology.links if device.name in (link.a, link.b)]
    told = "; ".join(f"{link.b if link.a == device.name else link.a} {link.type}" for link in links)
    extra = device.device if device.device and device.device != device.name else ""
    second = f'<text x="{x + WIDTH / 2}" y="{y + 32}" text-anchor="middle" class="small">{escape(extra[:16])}</text>'
    return (
        f'<g><title>{escape(label(device))}: {escape(told)}</title><rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" class="{kind}"/>'
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
    """One bar where all pairs are joined alike; else an arc a pair, the higher the farther apart."""
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
    return sorted(found, key=lambda k: (distance(k), k))


def _legend(topology: Topology, y: float) -> list[str]:
    rows = []
    for place, kind in enumerate(_kinds(topology)):
        at = y + 18 * place
        colour = NVLINK if kind == "NV#" else COLOURS.get(kind, "#555")
        meaning = (
            "# bonded NVLinks" if kind == "NV#" else MEANING.get(kind) or topology.meaning.get(kind, "not explained")
        )
        count = sum(1 for link in topology.links if link.type == kind or (kind == "NV#" and link.nvlinks))
        rows.append(
            f'<rect x="{PAD}" y="{at - 9}" width="12" height="10" fill="{colour}"/><text x="{PAD + 20}" y="{at}" class="small">'
            f"{escape(kind)}: {escape(meaning)} ({count} pair{'s' * (count != 1)})</text>"
        )
    return rows
