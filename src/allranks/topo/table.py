"""One table of the text: its header, its rows, cell by cell. Pure."""

from __future__ import annotations

import re

import msgspec

from allranks.topo.cells import DEVICE, GPU, LINK, P2P, is_no_value, parted, ranges
from allranks.topo.records import Unread

COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_COLUMN = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID", re.IGNORECASE)
MAX_SHOWN = 160


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the columns: devices, then what is known of each device, with the place in the line where they begin."""

    devices: list[str]
    named: list[str]
    starts: list[int]
    tabs: bool


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A device's cells. `links` holds the type by the column's place; `values` what the named columns say."""

    name: str
    links: dict[int, str]
    values: dict[str, str]
    unread: list[str]
    cells: int
    more: bool
    """Whether further types of links stand behind the last column."""


def find_header(line: str) -> Header | None:
    """The header, if the line is one: devices with at least one GPU, no types of links, maybe named columns."""
    first = _COLUMN.search(line)
    before = line[: first.start()] if first else line
    words = before.split()
    while words and not DEVICE.fullmatch(words[0]) and not words[0].startswith(("GPU", "NIC", "mlx")):
        words = words[1:]  # what stands before a copied table: ``stdout="""``, a prompt, a time; never a damaged device
    if not any(GPU.fullmatch(word) for word in words) or not all(DEVICE.fullmatch(word) for word in words):
        return None
    if any(LINK.fullmatch(word) or P2P.fullmatch(word) for word in words):
        return None
    found = list(_COLUMN.finditer(line))
    named = [" ".join(match.group().split()) for match in found]
    canonical = [next(c for c in COLUMNS if c.lower() == name.lower()) for name in named]
    tabs = "\t" in before.strip(" ") or ("\t" in line and bool(found))
    return Header(devices=words, named=canonical, starts=[m.start() for m in found], tabs=tabs)


def damaged_header(line: str) -> str | None:
    """The word that makes a line no header although it names several GPUs and no types of links."""
    first = _COLUMN.search(line)
    words = (line[: first.start()] if first else line).split()
    gpus = [word for word in words if GPU.fullmatch(word)]
    if len(gpus) < 2 or words[0] != gpus[0] or any(LINK.fullmatch(word) or P2P.fullmatch(word) for word in words):
        return None
    return next((word for word in words if not DEVICE.fullmatch(word)), None)


def is_row(line: str, known: set[str]) -> bool:
    """Whether a line begins with a device's name and goes on with cells."""
    words = line.split()
    if not words or words[0].endswith(":") or not DEVICE.fullmatch(words[0]):
        return False
    return words[0] in known or GPU.fullmatch(words[0]) is not None or words[0].startswith("NIC")


def read_row(line: str, header: Header, legend: dict[str, str]) -> Row:
    """Cells of one row. A type that only the file's own legend knows is taken as it is."""
    words = line.split()
    wanted = len(header.devices)
    links: dict[int, str] = {}
    unread: list[str] = []
    place = 0
    rest = [kind for word in words[1:] for kind in parted(word)]
    whole = len(rest) >= wanted
    while place < wanted and rest:
        word = rest[0]
        if not (LINK.fullmatch(word) or word in legend):
            if _looks_like_affinity(word, rest, wanted - place, header):
                break
            unread.append(f"{word!r} is no type of link (column {header.devices[place]})")
            if not whole:  # cells are missing too: which column the next one belongs to is open
                place, rest = place + 1, []
                break
        else:
            links[place] = word
        place, rest = place + 1, rest[1:]
    values, more = _values(line, rest, header)
    beyond = place == wanted and bool(rest) and LINK.fullmatch(rest[0]) is not None
    return Row(name=words[0], links=links, values=values, unread=unread + more, cells=place, more=beyond)


def _looks_like_affinity(word: str, rest: list[str], left: int, header: Header) -> bool:
    """Cells of links ended early: what follows belongs to the named columns."""
    if not header.named or len(rest) >= left + len(header.named):
        return False
    return ranges(word) is not None or is_no_value(word)


def _values(line: str, rest: list[str], header: Header) -> tuple[dict[str, str], list[str]]:
    if not header.named or not rest:
        return {}, [f"{' '.join(rest)[:40]!r} stands in no column"] if rest else []
    if len(rest) > len(header.named):
        joined = re.sub(r",\s+", ",", " ".join(rest)).split()
        if len(joined) > len(header.named):
            extra = " ".join(joined[len(header.named) :])
            return dict(zip(header.named, joined, strict=False)), [f"{extra[:40]!r} stands in no column"]
        rest = joined
    if len(rest) < len(header.named) and not header.tabs:
        return _aligned(line, rest, header), []
    if len(rest) < len(header.named):
        return _by_tabs(line, rest, header), []
    return dict(zip(header.named, rest, strict=True)), []


def _by_tabs(line: str, rest: list[str], header: Header) -> dict[str, str]:
    """Empty cells stand between tabs. Newer drivers print one tab too many before the last, so counting from the left."""
    cells = [cell.strip() for cell in line.strip("\r\n").split("\t")][1 + len(header.devices) :]
    found = dict(zip(header.named, cells, strict=False))
    kept = {name: value for name, value in found.items() if value}
    return kept if len(kept) == len(rest) else dict(zip(header.named, rest, strict=False))


def _aligned(line: str, rest: list[str], header: Header) -> dict[str, str]:
    """Columns padded with spaces: a value belongs to the column above it."""
    found: dict[str, str] = {}
    at = len(line)
    for word in reversed(rest):
        at = line.rindex(word, 0, at)
        near = min(range(len(header.named)), key=lambda i: abs(header.starts[i] - at))
        found.setdefault(header.named[near], word)
    return found if len(found) == len(rest) else dict(zip(header.named, rest, strict=False))


def shown(number: int, text: str, why: str) -> Unread:
    """A line that was not understood, cut to a length for people."""
    flat = " ".join(text.split())
    return Unread(line=number, text=flat if len(flat) <= MAX_SHOWN else flat[: MAX_SHOWN - 3] + "...", why=why)
