"""Read and parse the output of `nvidia-smi topo -m` from a file, standard input, or the driver of this machine.

Supported are tables with tabs or spaces, with or without colours, legend, NIC rows and affinity columns; cards under
their own names; the table of ``topo -p2p`` next to it. A damaged matrix is refused: nothing is guessed. Pure, except
`read_matrix` and `query_driver`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.nodes.probes.probe import smi
from allranks.planning.records import LINK_TYPES, Topology, TopologyDevice, TopologyLink, UnreadLine
from allranks.utils.inputs import FileTooLarge, StdinClosed, name_of, read_input

# nvidia-smi underlines its header also in a file; copied from a web page, the code has lost its escape byte.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\[\d+(?:;\d+)*m|\x1b[@-_]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u200b\ufeff]")
_GPU = re.compile(r"GPU\d+", re.ASCII)
_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.:/-]*\d[A-Za-z0-9_.:/-]*", re.ASCII)
_LINK = re.compile(r"[A-Z][A-Z0-9]*")
"""Any type: newer drivers may have others than those of `LINK_TYPES`."""
_KNOWN_LINK = re.compile(rf"X|NV\d+|{'|'.join(LINK_TYPES)}", re.ASCII)
_P2P = re.compile(r"OK|CNS|GNS|TNS|NS|DR|U")
_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)
"""Cores or NUMA nodes as printed, ``0-31,64-95``."""
_COLUMN = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID", re.IGNORECASE)
_CPUS, _NUMA = "cpu affinity", "numa affinity"
_NIC_NAMES = re.compile(r"(NIC\d+)\s*:\s*(\S+)", re.ASCII)
_ABOUT = re.compile(r".*nvidia-smi.*|\s*(NIC )?Legend:?\s*|\s*[A-Z][A-Z0-9#]*\s+=\s.*")
"""The command, titles, and the legend of link types."""
_AGAIN = "print it again with `nvidia-smi topo -m`"
MAX_LINE_SHOWN = 160
MAX_UNREAD = 50
MAX_DEVICES = 512


class _Table:
    """A matrix: the devices of its header and, by device, the types and the values of the other columns."""

    def __init__(self, number: int, devices: list[str], named: list[str]) -> None:
        self.number, self.devices, self.named = number, devices, named
        self.links: dict[str, list[str]] = {}
        self.values: dict[str, dict[str, str]] = {}

    def add(self, number: int, line: str) -> None:
        """Add a row.

        Raises:
            RequestError: it does not fit the header.
        """
        tabs = "\t" in line
        name, *cells = [cell.strip() for cell in line.strip(" ").split("\t")] if tabs else line.split()
        count = len(self.devices)
        links, values = cells[:count], cells[count:]
        problem = ""
        if name not in self.devices or name in self.links:
            problem = f"{name} is not a column of the header, or has a row already"
        elif len(links) < count or not links[-1]:
            problem = f"the row of {name} ends after {len(links)} of {count} columns"
        elif odd := [cell for cell in links if not _LINK.fullmatch(cell)]:
            problem = f"{odd[0]!r} is not a link type"
        elif [i for i, cell in enumerate(links) if cell == "X"] != [self.devices.index(name)]:
            problem = f"the X of {name} is not in its own column, so the row does not fit the header"
        elif values and _KNOWN_LINK.fullmatch(values[0]):
            problem = f"the row of {name} has more cells than the header has columns"
        for other, kind in zip(self.devices, links, strict=False):
            row = self.links.get(other)
            if row is not None and not problem and row[self.devices.index(name)] != kind:
                problem = f"{name}-{other} is {kind}, but {other}-{name} is {row[self.devices.index(name)]}"
        if problem:
            raise RequestError(f"the matrix is damaged in line {number}: {problem}; {_AGAIN}")
        self.links[name] = links
        if tabs or len(values) == len(self.named):  # without tabs an empty value cannot be located
            self.values[name] = {key: v for key, v in zip(self.named, values, strict=False) if _RANGES.fullmatch(v)}

    @property
    def is_p2p(self) -> bool:
        states = [kind for row in self.links.values() for kind in row if kind != "X"]
        return bool(states) and all(map(_P2P.fullmatch, states))

    def pairs(self) -> list[TopologyLink]:
        """Return each pair of devices with its type, once."""
        pairs: dict[frozenset[str], TopologyLink] = {}
        for name, row in self.links.items():
            for other, kind in zip(self.devices, row, strict=True):
                if kind != "X":
                    pairs.setdefault(frozenset((name, other)), TopologyLink(a=name, b=other, type=kind))
        return list(pairs.values())


def parse_topology(text: str) -> Topology:
    """Return the topology that the text describes.

    Raises:
        RequestError: it contains no matrix, several, or a damaged one; the message names the line.
    """
    tables: list[_Table] = []
    cards: dict[str, str] = {}
    unread: list[UnreadLine] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = _CONTROL.sub("", _ESCAPES.sub("", raw)).replace("\xa0", " ")
        if header := _header(number, line):
            tables.append(header)
        elif _is_row(line, tables):
            if not tables:
                raise RequestError(f"the header of the matrix (GPU0 GPU1 ...) is missing above line {number}; {_AGAIN}")
            tables[-1].add(number, line)
        elif names := _NIC_NAMES.findall(line):
            cards.update(names)
        elif any(c.isalnum() for c in line) and not _ABOUT.fullmatch(line) and len(unread) < MAX_UNREAD:
            shown = " ".join(line.split())[:MAX_LINE_SHOWN]
            unread.append(UnreadLine(line=number, text=shown, why="not part of the matrix"))
    p2p = [table for table in tables if table.is_p2p]
    matrices = [table for table in tables if table.links and not table.is_p2p]
    if not matrices:
        only = "only the table of `nvidia-smi topo -p2p`" if p2p else "no header GPU0 GPU1 ... with rows below it"
        raise RequestError(f"there is no matrix of `nvidia-smi topo -m` in this text: {only}")
    if len(matrices) > 1:
        raise RequestError(f"a second matrix begins in line {matrices[1].number}; give one machine's at a time")
    matrix = matrices[0]
    if missing := [name for name in matrix.devices if _GPU.match(name) and name not in matrix.links]:
        raise RequestError(f"the matrix that begins in line {matrix.number} has no row of {missing[0]}; {_AGAIN}")
    devices = [_device(name, matrix.values.get(name, {}), cards) for name in matrix.devices]
    return Topology(
        gpus=[device for device in devices if _GPU.match(device.name)],
        nics=[device for device in devices if not _GPU.match(device.name)],
        links=matrix.pairs(),
        unread=unread,
        p2p=p2p[0].pairs() if p2p else [],
    )


def _header(number: int, line: str) -> _Table | None:
    """Return the table that begins with this line: devices, the first a GPU, and named columns; None if none does."""
    before, *_ = _COLUMN.split(line)
    words = before.split()
    first = next((i for i, word in enumerate(words) if _GPU.match(word)), len(words))
    devices = words[first:]  # after a prompt, or ``stdout="""``
    if not devices or any(map(_KNOWN_LINK.fullmatch, devices)):
        return None
    if not all(map(_DEVICE.fullmatch, devices)) or devices[0].endswith(":"):
        return None
    if len(set(devices)) < len(devices) or len(devices) > MAX_DEVICES:
        raise RequestError(f"line {number}: a header with the same device twice, or with more than any machine has")
    return _Table(number, devices, [" ".join(name.lower().split()) for name in _COLUMN.findall(line)])


def _is_row(line: str, tables: list[_Table]) -> bool:
    name, *words = line.split() or [""]
    known = _GPU.fullmatch(name) or (tables and name in tables[-1].devices)
    return bool(known) and any(_KNOWN_LINK.fullmatch(word) or _P2P.fullmatch(word) for word in words)


def _device(name: str, values: dict[str, str], cards: dict[str, str]) -> TopologyDevice:
    numa = values.get(_NUMA)
    return TopologyDevice(
        name=name,
        numa=int(re.split("[,-]", numa)[0][:9]) if numa else None,  # of several, NVIDIA prints the nearest first
        cpus=values.get(_CPUS),
        device=cards.get(name) or (None if re.match(r"(GPU|NIC)\d", name) else name),
    )


MAX_TOPOLOGY_BYTES = 4 * 2**20
"""A matrix of 16 GPUs and 20 cards has 6 kB; larger input is something else."""


def read_matrix(path: Path) -> str:
    """Return the text of a file; ``-`` is standard input.

    Raises:
        RequestError: it cannot be read, or is too large or not UTF-8 text.
    """
    try:
        return read_input(path, MAX_TOPOLOGY_BYTES).decode("utf-8-sig")
    except FileTooLarge:
        why = f"is larger than {MAX_TOPOLOGY_BYTES >> 20} MiB"
    except StdinClosed:
        why = "is closed"
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 text (byte {error.start})"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    raise RequestError(
        f"{name_of(path)} {why}; give a file with the output of `nvidia-smi topo -m`, or - and pass it on "
        "standard input"
    )


def query_driver() -> str:
    """Return the driver's output on this machine.

    Raises:
        EnvironmentNotAble: there is no driver, or it does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        raise EnvironmentNotAble("there is no nvidia-smi on this machine; give a file: allranks topo FILE")
    try:
        return smi("topo", "-m")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentNotAble(f"nvidia-smi topo -m does not answer: {error}") from None
