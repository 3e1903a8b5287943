"""Read and parse the output of `nvidia-smi topo -m` from a file, standard input, or the driver of this machine.

Supported are tables with tabs or spaces, with escape codes or table bars, with or without legend, NIC rows, affinity
columns and header; cards under their own names; the table of ``topo -p2p`` next to it; text that was copied with
escaped ``\\n`` and ``\\t``. Lines that cannot be parsed are reported, never guessed. Pure, except `read_matrix` and
`query_driver`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.nodes.probes.probe import smi
from allranks.planning.records import LINK_TYPES, Topology, TopologyDevice, TopologyLink, UnreadLine
from allranks.utils.inputs import FileTooLarge, StdinClosed, name_of, read_input

_ESCAPES = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|\^\[\[[0-9;]*m")
# Colours whose escape byte was spelt out, shown as a symbol, or lost when the text was copied: nvidia-smi underlines
# its header, ``[4m``.
_DAMAGED_ESCAPES = re.compile(
    r"(?:\\(?:033|0?33|x1[bB]|e|u001[bB])|[\u241b\u2190\ufffd])\[[0-9;]*m|\[(?:\d{1,3}(?:;\d{1,3})*)?m(?=\s|\[|[A-Za-z]|\Z)"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u200b\ufeff]")
_BARS = re.compile(r"[|\u2500-\u257f]")
_MARK = re.compile(r"^(\s*)([#*>]+|//+|;+)(?=\s)")
_SRUN_LABEL = re.compile(r"^\s*\d+: ")
GPU = re.compile(r"GPU\d+(?:[-/.:][A-Za-z0-9_.:/-]+)?", re.ASCII)
DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.:/-]*\d[A-Za-z0-9_.:/-]*", re.ASCII)
LINK = re.compile(r"X|NV\d{1,3}|C2C|PIX|PXB|PHB|NODE|SYS|SOC", re.ASCII)
P2P = re.compile(r"X|OK|CNS|GNS|TNS|NS|DR|U")
NO_VALUE = {"N/A", "NA", "-", "None", "[N/A]"}
_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)
"""Cores or NUMA nodes as printed, ``0-31,64-95``."""
_COLUMN = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID", re.IGNORECASE)
CPUS, NUMA = "cpu affinity", "numa affinity"
MAX_LINE_SHOWN = 160
MAX_UNREAD = 50
MAX_DEVICES = 512
NOT_IN_MATRIX = "not part of the matrix"
NO_HEADER = "a row without a header"
_LEGEND = re.compile(r"\s*([A-Z][A-Z0-9#]{0,9})\s+=\s+(\S.*)")
_NIC_LEGEND = re.compile(r"\s*(?:NIC\d+\s*:\s*\S+\s*)+", re.ASCII)
_NIC_NAMES = re.compile(r"(NIC\d+)\s*:\s*(\S+)", re.ASCII)
_TITLE = re.compile(r".*nvidia-smi.*|\s*(NIC )?Legend:?\s*")
AMD = "AMD's rocm-smi or amd-smi"
_OTHERS = {
    r"rocm|amd-smi|xgmi|(?:link type|hops|weight) between two gpus|^(?:access|weight|hops|link type) table\b": AMD,
    r"^GPU\d+\s+(?:\S+\s+)*PCIE\b": AMD,
    r"xpu-smi|xe link|\bXL\d*\b": "Intel's xpu-smi",
    r"\bNPU\d": "Ascend's npu-smi",
    r"mthreads|\bMTT\b": "Moore Threads' tool",
}


def parse_topology(text: str) -> Topology:
    """Return the topology that the text describes.

    Raises:
        RequestError: it contains no matrix; the message says what it seems to be instead.
    """
    parser = _Parser(text)
    if any(row.links for row in parser.rows.values()):
        return parser.topology()
    if "\\n" in text and "GPU0" in text and text.count("\\n") > text.count("\n"):
        return parse_topology(text.replace("\\n", "\n").replace("\\t", "\t"))
    raise RequestError(parser.why_no_matrix(text))


def strip_control_codes(line: str) -> str:
    """Return a line without escape codes, control characters, table bars, comment and quotation marks (``#``, ``*``,
    ``//``, ``>``) and the label that ``srun --label`` prints before it.
    """
    plain = _CONTROL.sub("", _DAMAGED_ESCAPES.sub("", _ESCAPES.sub("", line)))
    plain = _BARS.sub("\t", plain) if not plain.lstrip().startswith("$") else plain
    plain = _SRUN_LABEL.sub("", plain.replace("\xa0", " "))
    return _MARK.sub("", plain)


class Header(NamedTuple):
    """Names of the columns: devices, then the facts about each device (in lower case), with their positions in the
    line."""

    devices: list[str]
    named: list[str]
    starts: list[int]
    tabs: bool


class Row(NamedTuple):
    """A device's row. `links` has the type by column position; `values` the content of the named columns."""

    line: int
    links: dict[int, str]
    values: dict[str, str]


def read_header(line: str) -> Header | str | None:
    """Return the header that a line is: devices with at least one GPU, no link types, optional named columns.

    A word: the line names several GPUs and no link types, but this word is not a device. None: it is no header.
    """
    columns = list(_COLUMN.finditer(line))
    before = line[: columns[0].start()] if columns else line
    words = before.split()
    first = words[0] if words else ""
    # Text before a copied table is skipped (``stdout="""``, a prompt, a time), but never a damaged device.
    starts = (i for i, word in enumerate(words) if DEVICE.fullmatch(word) or word.startswith(("GPU", "NIC", "mlx")))
    words = words[next(starts, 0) :]
    gpus = [word for word in words if GPU.fullmatch(word)]
    if not gpus or any(LINK.fullmatch(word) or P2P.fullmatch(word) for word in words):
        return None
    if damaged := next((word for word in words if not DEVICE.fullmatch(word)), None):
        return damaged if len(gpus) > 1 and first == gpus[0] else None
    tabs = "\t" in before.strip(" ") or ("\t" in line and bool(columns))
    named = [" ".join(match.group().lower().split()) for match in columns]
    return Header(words, named, [match.start() for match in columns], tabs)


def _values(line: str, words: list[str], header: Header) -> dict[str, str]:
    """Return the values of the named columns, which are the last words of the line; some may be empty."""
    if len(words) < len(header.named):
        if header.tabs:  # newer drivers print one extra tab before the last column, so cells are counted from the left
            cells = [cell.strip() for cell in line.split("\t")][1 + len(header.devices) :]
            values = {name: cell for name, cell in zip(header.named, cells, strict=False) if cell}
        else:  # padded with spaces: a value belongs to the nearest column
            values, at = {}, len(line)
            for word in reversed(words):
                at = line.rindex(word, 0, at)
                values[min(zip(header.named, header.starts, strict=True), key=lambda c: abs(c[1] - at))[0]] = word
        if len(values) == len(words):
            return values
    return dict(zip(header.named, words, strict=False))


class _Parser:
    """Process the lines in order and collect their content; what cannot be parsed is listed."""

    def __init__(self, text: str) -> None:
        lines = [strip_control_codes(line) for line in text.splitlines()]
        explained = [match.groups() for line in lines if (match := _LEGEND.fullmatch(line))]
        known = {*LINK_TYPES, "X", "NV#", "NV"}
        self.legend = {k: v.strip() for k, v in explained[:MAX_DEVICES] if k not in known and not P2P.fullmatch(k)}
        self.header: Header | None = None
        self.rows: dict[str, Row] = {}
        self.p2p_header: Header | None = None
        self.p2p: list[tuple[str, list[str]]] = []
        self.cards: dict[str, str] = {}
        self.damaged = ""
        self.unread: list[UnreadLine] = []
        self.dropped = 0
        for number, line in enumerate(lines, 1):
            if any(c.isalnum() for c in line):
                self._line(number, line)

    def _report(self, number: int, text: str, why: str) -> None:
        """List a line that could not be parsed. Of each kind there is a limit, so that a long log does not hide
        damage."""
        alike = sum((item.why == NOT_IN_MATRIX) == (why == NOT_IN_MATRIX) for item in self.unread)
        if alike >= MAX_UNREAD:
            self.dropped += 1
            return
        flat = " ".join(text.split())
        shown = flat if len(flat) <= MAX_LINE_SHOWN else flat[: MAX_LINE_SHOWN - 3] + "..."
        self.unread.append(UnreadLine(line=number, text=shown, why=why))

    def _line(self, number: int, line: str) -> None:
        if _NIC_LEGEND.fullmatch(line):
            self.cards.update(_NIC_NAMES.findall(line))
        elif _TITLE.fullmatch(line) or _LEGEND.fullmatch(line):
            return
        elif isinstance(header := read_header(line), Header):
            self._take_header(number, line, header)
        elif header and self.header is None:
            self.damaged = self.damaged or f"line {number}, is damaged or was shortened: {header!r} is not a device"
            self._report(number, line, f"a header, but {header!r} is not a device")
        else:
            name, *cells = line.split()
            known = any(name in h.devices for h in (self.header, self.p2p_header) if h)
            device = DEVICE.fullmatch(name) and not name.endswith(":")
            if device and (known or name.startswith("NIC") or GPU.fullmatch(name)):
                self._row(number, line, name, cells)
            else:
                self._report(number, line, NOT_IN_MATRIX)

    def _take_header(self, number: int, line: str, header: Header) -> None:
        if len(header.devices) > MAX_DEVICES or len(set(header.devices)) < len(header.devices):
            self._report(number, line, "a header with the same device twice, or with more than any machine has")
        elif self.header is None and not self.rows:
            self.header = header
        elif self.header is not None and line.strip() in self.header.devices:
            self._report(number, line, "a row without cells")
        else:
            self.p2p_header = header

    def _row(self, number: int, line: str, name: str, words: list[str]) -> None:
        header = self.header
        states = [word for word in words if P2P.fullmatch(word) and word != "X"]
        if self.p2p_header or (states and not any(LINK.fullmatch(word) and word != "X" for word in words)):
            if all(map(P2P.fullmatch, words)) and (self.p2p_header or header):
                self.p2p.append((name, words))
            else:
                self._report(number, line, "a second matrix; only the first of a text is read")
            return
        if header is None or name in self.rows:
            self._report(number, line, "a duplicate row" if header else NO_HEADER)
            return
        wanted = len(header.devices)
        cells = words[:wanted]
        if header.named and len(words) < wanted + len(header.named):  # values may begin before the last cell
            cells = list(takewhile(lambda cell: not _RANGES.fullmatch(cell) and cell not in NO_VALUE, cells))
        rest = words[len(cells) :]
        unknown = [i for i, cell in enumerate(cells) if not LINK.fullmatch(cell) and cell not in self.legend]
        if unknown and len(words) < wanted:
            # Cells are missing, too: the columns of those after the first unknown one are not known.
            cells, rest, unknown = cells[: unknown[0] + 1], [], unknown[:1]
        links = {i: cell for i, cell in enumerate(cells) if i not in unknown}
        own = header.devices.index(name) if name in header.devices else None
        crosses = [i for i, cell in links.items() if cell == "X"]
        more = len(cells) == wanted and bool(rest) and LINK.fullmatch(rest[0])
        if more or (crosses and own not in crosses) or (own is not None and links.get(own, "X") != "X"):
            why = (
                "the X of the row is not in its own column, or there are more cells than columns: they do not fit the "
                "header"
            )
            self._report(number, line, why)
            return
        for i in unknown:
            self._report(number, line, f"{cells[i]!r} is not a link type (column {header.devices[i]})")
        if len(rest) > len(header.named) > 0:  # a list of cores with blanks
            rest = re.sub(r",\s+", ",", " ".join(rest)).split()
        self.rows[name] = Row(number, links, _values(line, rest, header))
        if extra := " ".join(rest[len(header.named) :]):
            self._report(number, line, f"{extra[:40]!r} belongs to no column")
        if len(cells) < wanted:
            self._report(number, line, f"the row ends after {len(cells)} of {wanted} columns")

    def topology(self) -> Topology:
        """Return the result of all lines."""
        assert self.header is not None
        columns = self.header.devices
        names = [*columns, *(name for name in self.rows if name not in columns)]
        links = self._links(columns)
        for missing, what in (
            ([name for name in names if name not in self.rows], "columns without a row of that name"),
            ([name for name in self.rows if name not in columns], "rows without a column of that name"),
        ):
            if missing:
                self.unread.append(UnreadLine(line=0, text=", ".join(missing[:32]), why=what))
        if self.dropped:
            self.unread.append(UnreadLine(line=0, text="", why=f"{self.dropped} more lines could not be parsed"))
        return Topology(
            gpus=[self._device(name) for name in names if GPU.fullmatch(name)],
            nics=[self._device(name) for name in names if not GPU.fullmatch(name)],
            links=links,
            unread=self.unread,
            p2p=self._p2p_links(),
            meaning={k: v for k, v in self.legend.items() if any(link.type == k for link in links)},
        )

    def _device(self, name: str) -> TopologyDevice:
        row = self.rows.get(name, Row(0, {}, {}))
        columns: dict[str, str | None] = {}
        for column in (CPUS, NUMA):
            value = row.values.get(column)
            columns[column] = value if value and _RANGES.fullmatch(value) else None
            if value and not columns[column] and value not in NO_VALUE:
                title = "CPU Affinity" if column == CPUS else "NUMA Affinity"
                self._report(row.line, value, f"{title} of {name} is not a list of numbers")
        numa = columns[NUMA]
        return TopologyDevice(
            name=name,
            numa=int(re.split("[,-]", numa)[0][:9]) if numa else None,  # of several, NVIDIA prints the nearest first
            cpus=columns[CPUS],
            device=self.cards.get(name) or (None if GPU.fullmatch(name) or re.fullmatch(r"NIC\d+", name) else name),
        )

    def _links(self, columns: list[str]) -> list[TopologyLink]:
        links: dict[frozenset[str], TopologyLink] = {}
        for name, row in self.rows.items():
            for place, kind in row.links.items():
                other, text = columns[place], f"{name} {columns[place]} {kind}"
                if (kind == "X") != (other == name):
                    self._report(row.line, text, "X is only valid for a device and itself")
                elif kind != "X":
                    first = links.setdefault(frozenset((name, other)), TopologyLink(a=name, b=other, type=kind))
                    if first.type != kind:
                        pair = f"{first.a}-{first.b} is {first.type} in one row and {kind} in the other"
                        self._report(row.line, text, f"{pair}; the first is used")
        return list(links.values())

    def _p2p_links(self) -> list[TopologyLink]:
        """Return the state of each pair; of two, the worse."""
        header, links = self.p2p_header or self.header, dict[frozenset[str], TopologyLink]()
        for name, states in self.p2p if header else ():
            for other, state in zip(header.devices if header else (), states, strict=False):
                pair = frozenset((name, other))
                if state != "X" and other != name and (pair not in links or links[pair].type == "OK"):
                    first = links.get(pair, TopologyLink(a=name, b=other, type=state))
                    links[pair] = TopologyLink(a=first.a, b=first.b, type=state)
        return list(links.values())

    def why_no_matrix(self, text: str) -> str:
        """Return what a text without a matrix seems to be instead."""
        flags = re.IGNORECASE | re.MULTILINE
        other = next((name for pattern, name in _OTHERS.items() if re.search(pattern, text, flags)), None)
        if other:
            more = "; RCCL, AMD's NCCL, chooses paths by itself, as NCCL does" if other == AMD else ""
            return f"this looks like the output of {other}; only the matrix of `nvidia-smi topo -m` is supported{more}"
        if self.damaged:
            return f"the header of the matrix, {self.damaged}; print it again with `nvidia-smi topo -m`"
        if self.p2p:
            said = "this is the table of `nvidia-smi topo -p2p` (OK, NS, ...), which has no link types"
            return f"{said}; give the output of `nvidia-smi topo -m`, alone or with it"
        if any(item.why == NO_HEADER for item in self.unread):
            return "the header of the matrix (GPU0 GPU1 ...) is missing; print it again with `nvidia-smi topo -m`"
        no_matrix = "it contains no matrix of `nvidia-smi topo -m`"
        if re.search(r"\bGPU\d", text):
            return f"{no_matrix}: GPUs are named, but no row has a link type (NV#, PIX, PHB, SYS, ...)"
        first = " ".join(strip_control_codes(text.strip().partition("\n")[0]).split())[:60]
        return f"{no_matrix}: no line with columns GPU0, GPU1, ... (it starts with {first!r})"


MAX_TOPOLOGY_BYTES = 4 * 2**20
"""A matrix of 16 GPUs and 20 cards has 6 kB; larger input is something else."""
_UNREADABLE = {
    IsADirectoryError: " is a folder",
    FileTooLarge: f" is larger than {MAX_TOPOLOGY_BYTES >> 20} MiB",
    StdinClosed: " is closed",
    FileNotFoundError: ": there is no such file",
}
_GIVE = "give a file with the output of `nvidia-smi topo -m`, or - and pass it on standard input"


def read_matrix(path: Path) -> str:
    """Return the text of a file; ``-`` is standard input.

    Raises:
        RequestError: it cannot be read, is empty, too large, binary or in an unknown encoding.
    """
    name = name_of(path)
    try:
        data = read_input(path, MAX_TOPOLOGY_BYTES)
    except (OSError, StdinClosed) as error:
        why = _UNREADABLE.get(type(error)) or f" cannot be read: {getattr(error, 'strerror', None) or error}"
        raise RequestError(f"{name}{why}; {_GIVE}") from None
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    if not data.strip(b" \t\r\n\0\xef\xbb\xbf\xff\xfe"):
        raise RequestError(f"{name} is empty; {_GIVE}")
    if encoding == "utf-8-sig" and b"\0" in data:
        raise RequestError(f"{name} is a binary file, not text (it has NUL bytes, the first at {data.index(0)})")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        shown = encoding.upper().removesuffix("-SIG")
        cure = "convert it, for example with `iconv -f latin1 -t utf8`"
        raise RequestError(f"{name} is not {shown} text (byte {error.start}); {cure}") from None


def query_driver() -> str:
    """Return the driver's output on this machine.

    Raises:
        EnvironmentNotAble: there is no driver, or it does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        amd = next((name for name in ("rocm-smi", "amd-smi") if shutil.which(name)), None)
        more = f" ({amd} is here, but topologies of AMD GPUs are not supported)" if amd else ""
        raise EnvironmentNotAble(f"there is no nvidia-smi on this machine{more}; give a file: allranks topo FILE")
    try:
        return smi("topo", "-m")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentNotAble(f"nvidia-smi topo -m does not answer: {error}") from None
