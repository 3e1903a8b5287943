"""A machine as a picture in a terminal: NUMA nodes with what is on them, then who reaches whom over what."""

from __future__ import annotations

from collections import Counter

from rich.text import Text

from allranks.topo.groups import Group, numa_nodes, nvlink_mesh
from allranks.topo.records import MEANING, Device, Topology, distance

STYLES = {"NV": "bold green", "C2C": "bold green", "PIX": "cyan", "PXB": "cyan", "PHB": "yellow", "NODE": "yellow"}
FAR = "red"
MAX_SHOWN = 24


def draw(topology: Topology) -> Text:
    """The whole picture; no line depends on the terminal's width."""
    text = Text(no_wrap=True)
    for node in numa_nodes(topology):
        cores = f"  cores {node.cpus}" if node.cpus else ""
        text.append(f"{node.title}{cores}\n", "bold")
        last = len(node.groups) - 1
        for place, group in enumerate(node.groups):
            text.append("  +- " if place == last else "  |- ", "dim")
            text.append(_group(group) + "\n")
    text.append("\n")
    text.append_text(_sentences(topology))
    if len(topology.gpus) > 1:
        _matrix(text, topology, "GPU to GPU", topology.gpus, topology.gpus)
    if topology.nics and topology.gpus:
        _matrix(text, topology, "GPU to network card", topology.gpus, topology.nics)
    _legend(text, topology)
    return text


def label(device: Device) -> str:
    """``NIC2=mlx5_bond_0`` or ``GPU0``."""
    return f"{device.name}={device.device}" if device.device and device.device != device.name else device.name


def _group(group: Group) -> str:
    names = "  ".join(label(device) for device in (*group.gpus, *group.nics))
    return f"[{group.what}: {names}]" if group.what else names


def _sentences(topology: Topology) -> Text:
    """What to see in it, in words."""
    lines: list[str] = []
    mesh = nvlink_mesh(topology)
    pairs = topology.gpu_pairs()
    joined = [link for link in pairs if link.nvlinks]
    if mesh:
        lines.append(f"NVLink joins every pair of GPUs, {mesh} link{'s' * (mesh > 1)} each.")
    elif joined and len(joined) == len(pairs):
        counts = sorted({link.nvlinks for link in pairs})
        each = f"{counts[0]} to {counts[-1]} links" if len(counts) > 1 else f"{counts[0]} link{'s' * (counts[0] > 1)}"
        whole = "known " if topology.missing_pairs() else ""
        lines.append(f"NVLink joins every {whole}pair of GPUs, {each} each.")
    elif joined:
        lines.append(f"NVLink joins {len(joined)} of {len(pairs)} pairs of GPUs; the others go over PCIe.")
    elif pairs:
        kinds = Counter(link.type for link in pairs)
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda p: distance(p[0])))
        lines.append(f"No NVLink: the pairs of GPUs go over PCIe ({shown}).")
    missing = topology.missing_pairs()
    if missing:
        lines.append(f"Not known: {len(missing)} pairs of GPUs, such as {missing[0][0]}-{missing[0][1]}.")
    for gpu in topology.gpus[:MAX_SHOWN] if topology.nics else []:
        kind, nics = topology.nearest_nics(gpu.name)
        if nics:
            lines.append(f"{gpu.name}: nearest card {', '.join(map(label, nics[:4]))} ({kind})")
    refused = [link for link in topology.p2p if link.type != "OK"]
    if topology.p2p:
        told = f"{len(topology.p2p) - len(refused)} of {len(topology.p2p)}"
        lines.append(f"Peer access as the driver tells it: {told} pairs OK.")
    return Text("".join(line + "\n" for line in lines))


def _matrix(text: Text, topology: Topology, title: str, rows: list[Device], columns: list[Device]) -> None:
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
    """The colour of a type of link."""
    if kind in (".", "?"):
        return "dim" if kind == "." else "bold magenta"
    return STYLES["NV"] if kind.startswith("NV") else STYLES.get(kind, FAR)


def _legend(text: Text, topology: Topology) -> None:
    kinds = sorted({link.type for link in topology.links}, key=lambda k: (distance(k), k))
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
            text.append(f"{MEANING.get(kind) or topology.meaning.get(kind, 'not explained')}\n")
