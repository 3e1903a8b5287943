"""Read and parse the output of `nvidia-smi topo -m` from a file, standard input, or the driver of this machine.

Supported are tables with tabs or spaces, with escape codes or table bars, with or without legend, NIC rows, affinity columns
and header; cards under their own names; the table of ``topo -p2p`` next to it; text that was copied with escaped ``\\n`` and
``\\t``. Lines that cannot be parsed are reported, never guessed. Pure, except `read_matrix` and `query_driver`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import msgspec

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.planning.records import LINK_TYPES, Topology, TopologyDevice, TopologyLink, UnreadLine
from allranks.utils.inputs import FileTooLarge, NotRegularFile, StdinClosed, name_of, read_input

_ESCAPES = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|\^\[\[[0-9;]*m")
# Colours whose escape byte was spelt out, shown as a symbol, or lost when the text was copied: nvidia-smi underlines its header, ``[4m``.
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


def strip_control_codes(line: str) -> str:
    """Return a line without escape codes, control characters, table bars, comment and quotation marks (``#``, ``*``,
    ``//``, ``>``) and the label that ``srun --label`` prints before it.
    """
    plain = _CONTROL.sub("", _DAMAGED_ESCAPES.sub("", _ESCAPES.sub("", line)))
    plain = _BARS.sub("\t", plain) if _BARS.search(plain) and not plain.lstrip().startswith("$") else plain
    plain = _SRUN_LABEL.sub("", plain.replace("\xa0", " "))
    return _MARK.sub("", plain)


def parse_ranges(text: str) -> str | None:
    """Return cores or NUMA nodes as printed, ``0-31,64-95``; None for N/A or anything else."""
    return text if _RANGES.fullmatch(text) else None


def first_number(text: str | None) -> int | None:
    """Return the NUMA node, if it is a number; the first of several (``0-1``), because NVIDIA prints the nearest first."""
    if text is None or _RANGES.fullmatch(text) is None:
        return None
    return int(re.split(r"[,-]", text)[0][:9])


AFFINITY_COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_COLUMN = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID", re.IGNORECASE)
MAX_LINE_SHOWN = 160


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Column names: devices, then the facts about each device, with their positions in the line."""

    devices: list[str]
    named: list[str]
    starts: list[int]
    tabs: bool


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A device's cells. `links` has the type by column position; `values` the content of the named columns."""

    name: str
    links: dict[int, str]
    values: dict[str, str]
    unread: list[str]
    cells: int
    more: bool
    """Whether more link types follow the last column."""


def find_header(line: str) -> Header | None:
    """Return the header, if the line is one: devices with at least one GPU, no link types, optional named columns."""
    first = _COLUMN.search(line)
    before = line[: first.start()] if first else line
    words = before.split()
    while words and not DEVICE.fullmatch(words[0]) and not words[0].startswith(("GPU", "NIC", "mlx")):
        words = words[1:]  # text before a copied table: ``stdout="""``, a prompt, a time; never a damaged device
    if not any(GPU.fullmatch(word) for word in words) or not all(DEVICE.fullmatch(word) for word in words):
        return None
    if any(LINK.fullmatch(word) or P2P.fullmatch(word) for word in words):
        return None
    found = list(_COLUMN.finditer(line))
    named = [" ".join(match.group().split()) for match in found]
    canonical = [next(c for c in AFFINITY_COLUMNS if c.lower() == name.lower()) for name in named]
    tabs = "\t" in before.strip(" ") or ("\t" in line and bool(found))
    return Header(devices=words, named=canonical, starts=[m.start() for m in found], tabs=tabs)


def damaged_header(line: str) -> str | None:
    """Return the word because of which a line is not a header although it names several GPUs and no link types."""
    first = _COLUMN.search(line)
    words = (line[: first.start()] if first else line).split()
    gpus = [word for word in words if GPU.fullmatch(word)]
    if len(gpus) < 2 or words[0] != gpus[0] or any(LINK.fullmatch(word) or P2P.fullmatch(word) for word in words):
        return None
    return next((word for word in words if not DEVICE.fullmatch(word)), None)


def is_row(line: str, known: set[str]) -> bool:
    """Return whether a line starts with a device's name and continues with cells."""
    words = line.split()
    if not words or words[0].endswith(":") or not DEVICE.fullmatch(words[0]):
        return False
    return words[0] in known or GPU.fullmatch(words[0]) is not None or words[0].startswith("NIC")


def read_row(line: str, header: Header, legend: dict[str, str]) -> Row:
    """Return the cells of one row. A type that only the file's own legend explains is accepted unchanged."""
    words = line.split()
    wanted = len(header.devices)
    links: dict[int, str] = {}
    unread: list[str] = []
    place = 0
    rest = words[1:]
    whole = len(rest) >= wanted
    while place < wanted and rest:
        word = rest[0]
        if not (LINK.fullmatch(word) or word in legend):
            if _looks_like_affinity(word, rest, wanted - place, header):
                break
            unread.append(f"{word!r} is not a link type (column {header.devices[place]})")
            if not whole:  # cells are missing too: the column of the next one is unknown
                place, rest = place + 1, []
                break
        else:
            links[place] = word
        place, rest = place + 1, rest[1:]
    values, more = _values(line, rest, header)
    beyond = place == wanted and bool(rest) and LINK.fullmatch(rest[0]) is not None
    return Row(name=words[0], links=links, values=values, unread=unread + more, cells=place, more=beyond)


def _looks_like_affinity(word: str, rest: list[str], left: int, header: Header) -> bool:
    """Return whether the link cells ended early, so that the following text belongs to the named columns."""
    if not header.named or len(rest) >= left + len(header.named):
        return False
    return parse_ranges(word) is not None or word in NO_VALUE


def _values(line: str, rest: list[str], header: Header) -> tuple[dict[str, str], list[str]]:
    if not header.named or not rest:
        return {}, [f"{' '.join(rest)[:40]!r} belongs to no column"] if rest else []
    if len(rest) > len(header.named):
        joined = re.sub(r",\s+", ",", " ".join(rest)).split()
        if len(joined) > len(header.named):
            extra = " ".join(joined[len(header.named) :])
            return dict(zip(header.named, joined, strict=False)), [f"{extra[:40]!r} belongs to no column"]
        rest = joined
    if len(rest) < len(header.named) and not header.tabs:
        return _aligned(line, rest, header), []
    if len(rest) < len(header.named):
        return _by_tabs(line, rest, header), []
    return dict(zip(header.named, rest, strict=True)), []


def _by_tabs(line: str, rest: list[str], header: Header) -> dict[str, str]:
    """Read empty cells between tabs. Newer drivers print one extra tab before the last, so columns are counted from the left."""
    cells = [cell.strip() for cell in line.strip("\r\n").split("\t")][1 + len(header.devices) :]
    found = dict(zip(header.named, cells, strict=False))
    kept = {name: value for name, value in found.items() if value}
    return kept if len(kept) == len(rest) else dict(zip(header.named, rest, strict=False))


def _aligned(line: str, rest: list[str], header: Header) -> dict[str, str]:
    """Read columns padded with spaces: a value belongs to the column above it."""
    found: dict[str, str] = {}
    at = len(line)
    for word in reversed(rest):
        at = line.rindex(word, 0, at)
        near = min(range(len(header.named)), key=lambda i: abs(header.starts[i] - at))
        found.setdefault(header.named[near], word)
    return found if len(found) == len(rest) else dict(zip(header.named, rest, strict=False))


def unread_line(number: int, text: str, why: str) -> UnreadLine:
    """Return a line that could not be parsed, shortened for display."""
    flat = " ".join(text.split())
    return UnreadLine(
        line=number, text=flat if len(flat) <= MAX_LINE_SHOWN else flat[: MAX_LINE_SHOWN - 3] + "...", why=why
    )


MAX_UNREAD = 50
NOT_IN_MATRIX = "not part of the matrix"
NO_HEADER = "a row without a header"
MAX_DEVICES = 512
_LEGEND = re.compile(r"\s*([A-Z][A-Z0-9#]{0,9})\s+=\s+(\S.*)")
_NIC_LEGEND = re.compile(r"\s*(?:NIC\d+\s*:\s*\S+\s*)+", re.ASCII)
_NIC_NAMES = re.compile(r"(NIC\d+)\s*:\s*(\S+)", re.ASCII)
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
    reader = _Reader(_legend(text))
    for number, line in enumerate(text.splitlines(), 1):
        reader.line(number, strip_control_codes(line))
    if any(row.links for _, row in reader.rows.values()):
        return reader.topology()
    if "\\n" in text and "GPU0" in text and text.count("\\n") > text.count("\n"):
        return parse_topology(text.replace("\\n", "\n").replace("\\t", "\t"))
    raise RequestError(_no_matrix(text, reader))


def _no_matrix(text: str, reader: _Reader) -> str:
    flags = re.IGNORECASE | re.MULTILINE
    other = next((name for pattern, name in _OTHERS.items() if re.search(pattern, text, flags)), None)
    if other:
        more = "; RCCL, AMD's NCCL, chooses paths by itself, as NCCL does" if other == AMD else ""
        return f"this looks like the output of {other}; only the matrix of `nvidia-smi topo -m` is supported{more}"
    if reader.damaged:
        number, word = reader.damaged
        return f"the header of the matrix, line {number}, is damaged or was shortened: {word!r} is not a device; print it again with `nvidia-smi topo -m`"
    if reader.p2p:
        return "this is the table of `nvidia-smi topo -p2p` (OK, NS, ...), which has no link types; give the output of `nvidia-smi topo -m`, alone or with it"
    if any(item.why == NO_HEADER for item in reader.unread):
        return "the header of the matrix (GPU0 GPU1 ...) is missing; print it again with `nvidia-smi topo -m`"
    if re.search(r"\bGPU\d", text):
        return "it contains no matrix of `nvidia-smi topo -m`: GPUs are named, but no row has a link type (NV#, PIX, PHB, SYS, ...)"
    first = next((flat for line in text.splitlines() if (flat := " ".join(strip_control_codes(line).split()))), "")
    return f"it contains no matrix of `nvidia-smi topo -m`: no line with columns GPU0, GPU1, ... (it starts with {first[:60]!r})"


def _legend(text: str) -> dict[str, str]:
    """Return link types that the text itself explains and that are unknown here."""
    found = {}
    for line in text.splitlines():
        match = _LEGEND.fullmatch(strip_control_codes(line))
        if match and match[1] not in LINK_TYPES and match[1] not in ("X", "NV#", "NV") and len(found) < MAX_UNREAD:
            found[match[1]] = match[2].strip()
    return {k: v for k, v in found.items() if not P2P.fullmatch(k)}


def _shifted(row: Row, header: Header) -> bool:
    """Return whether the cells belong to other columns than in the header: the X of a device is at another position."""
    own = header.devices.index(row.name) if row.name in header.devices else None
    crosses = [place for place, kind in row.links.items() if kind == "X"]
    return row.more or (bool(crosses) and own not in crosses) or (own is not None and row.links.get(own, "X") != "X")


class _Reader:
    """Process the lines in order and collect their content."""

    def __init__(self, legend: dict[str, str]) -> None:
        self.legend = legend
        self.header: Header | None = None
        self.rows: dict[str, tuple[int, Row]] = {}
        self.p2p_header: Header | None = None
        self.p2p: list[tuple[str, list[str]]] = []
        self.cards: dict[str, str] = {}
        self.damaged: tuple[int, str] | None = None
        self.unread: list[UnreadLine] = []
        self.dropped = 0
        self._in_p2p = False

    def line(self, number: int, text: str) -> None:
        """Process one line without escape codes."""
        if not any(c.isalnum() for c in text):
            return
        if _NIC_LEGEND.fullmatch(text):
            self.cards.update(_NIC_NAMES.findall(text))
        elif "nvidia-smi" in text or _LEGEND.fullmatch(text) or re.fullmatch(r"\s*(NIC )?Legend:?\s*", text):
            return
        elif header := find_header(text):
            self._header(number, text, header)
        elif (word := damaged_header(text)) and self.header is None:
            self.damaged = self.damaged or (number, word)
            self._say(number, text, f"a header, but {word!r} is not a device")
        elif is_row(text, {name for h in (self.header, self.p2p_header) if h for name in h.devices}):
            self._row(number, text)
        else:
            self._say(number, text, NOT_IN_MATRIX)

    def _header(self, number: int, text: str, header: Header) -> None:
        if len(header.devices) > MAX_DEVICES or len(set(header.devices)) < len(header.devices):
            self._say(number, text, "a header with the same device twice, or with more than any machine has")
        elif self.header is None and not self.rows:
            self.header = header
        elif self.header is not None and text.strip() in self.header.devices:
            self._say(number, text, "a row without cells")
        else:
            self.p2p_header, self._in_p2p = header, True

    def _row(self, number: int, text: str) -> None:
        words = text.split()
        states = [w for w in words[1:] if P2P.fullmatch(w) and w != "X"]
        if self._in_p2p or (states and not self._links(words)):
            if all(P2P.fullmatch(w) for w in words[1:]) and self._p2p_columns():
                self.p2p.append((words[0], words[1:]))
            else:
                self._say(number, text, "a second matrix; only the first of a text is read")
            return
        if self.header is None or words[0] in self.rows:
            self._say(number, text, "a duplicate row" if self.header else NO_HEADER)
            return
        row = read_row(text, self.header, self.legend)
        if _shifted(row, self.header):
            self._say(
                number,
                text,
                "the X of the row is not in its own column, or there are more cells than columns: they do not fit the header",
            )
            return
        self.rows[words[0]] = (number, row)
        for why in row.unread:
            self._say(number, text, why)
        if row.cells < len(self.header.devices):
            self._say(number, text, f"the row ends after {row.cells} of {len(self.header.devices)} columns")

    def _p2p_columns(self) -> list[str]:
        header = self.p2p_header or self.header
        return header.devices if header else []

    @staticmethod
    def _links(words: list[str]) -> bool:
        return any(LINK.fullmatch(word) and word != "X" for word in words[1:])

    def _say(self, number: int, text: str, why: str) -> None:
        alike = sum(
            (item.why == NOT_IN_MATRIX) == (why == NOT_IN_MATRIX) for item in self.unread
        )  # a long log must not hide damage
        if alike < MAX_UNREAD:
            self.unread.append(unread_line(number, text, why))
        else:
            self.dropped += 1

    def topology(self) -> Topology:
        """Return the result of all lines."""
        header = self.header
        assert header is not None
        names = [*header.devices, *(n for n in self.rows if n not in header.devices and DEVICE.fullmatch(n))]
        links = self._links_of(header)
        self._missing(header, names)
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
        values = self.rows[name][1].values if name in self.rows else {}
        for column in ("CPU Affinity", "NUMA Affinity"):
            value = values.get(column)
            if value and parse_ranges(value) is None and value not in NO_VALUE:
                self._say(self.rows[name][0], value, f"{column} of {name} is not a list of numbers")
        return TopologyDevice(
            name=name,
            numa=first_number(values.get("NUMA Affinity")),
            cpus=parse_ranges(values.get("CPU Affinity", "")),
            device=self.cards.get(name) or (None if GPU.fullmatch(name) or re.fullmatch(r"NIC\d+", name) else name),
        )

    def _links_of(self, header: Header) -> list[TopologyLink]:
        found: dict[frozenset[str], TopologyLink] = {}
        for name, (number, row) in self.rows.items():
            for place, kind in row.links.items():
                other = header.devices[place]
                if (kind == "X") != (other == name):
                    self._say(number, f"{name} {other} {kind}", "X is only valid for a device and itself")
                if kind == "X" or other == name:
                    continue
                pair = frozenset((name, other))
                before = found.setdefault(pair, TopologyLink(a=name, b=other, type=kind))
                if before.type != kind:
                    said = (
                        f"{before.a}-{before.b} is {before.type} in one row and {kind} in the other; the first is used"
                    )
                    self._say(number, f"{name} {other} {kind}", said)
        return list(found.values())

    def _missing(self, header: Header, names: list[str]) -> None:
        gone = [name for name in names if name not in self.rows]
        if gone:
            self.unread.append(UnreadLine(line=0, text=", ".join(gone[:32]), why="columns without a row of that name"))
        extra = [name for name in self.rows if name not in header.devices]
        if extra:
            self.unread.append(UnreadLine(line=0, text=", ".join(extra[:32]), why="rows without a column of that name"))

    def _p2p_links(self) -> list[TopologyLink]:
        columns, found = self._p2p_columns(), {}
        for name, states in self.p2p:
            for other, state in zip(columns, states, strict=False):
                if other != name and state != "X":
                    worst = found.setdefault(frozenset((name, other)), TopologyLink(a=name, b=other, type=state))
                    if worst.type == "OK" and state != "OK":
                        found[frozenset((name, other))] = TopologyLink(a=worst.a, b=worst.b, type=state)
        return list(found.values())


MAX_TOPOLOGY_BYTES = 4 * 2**20
"""A matrix of 16 GPUs and 20 cards has 6 kB; larger input is something else."""
DRIVER_LIMIT_S = 30.0
_BOMS = ((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"), (b"\xef\xbb\xbf", "utf-8-sig"))


def read_matrix(path: Path) -> str:
    """Return the text of a file; ``-`` is standard input.

    Raises:
        RequestError: it cannot be read, is empty, too large, binary or in an unknown encoding.
    """
    name = name_of(path)
    try:
        return _decode(read_input(path, MAX_TOPOLOGY_BYTES), name)
    except IsADirectoryError:
        raise RequestError(f"{name} is a folder; give a file with the output of `nvidia-smi topo -m`") from None
    except FileTooLarge:
        raise RequestError(
            f"{name} is larger than {MAX_TOPOLOGY_BYTES >> 20} MiB; the output of `nvidia-smi topo -m` has a few kB"
        ) from None
    except NotRegularFile as error:
        raise RequestError(
            f"{name} cannot be read: {error.strerror}; pass its content on standard input and name it -"
        ) from None
    except StdinClosed:
        raise RequestError(f"{name} is closed; give a file with the output of `nvidia-smi topo -m`") from None
    except FileNotFoundError:
        raise RequestError(f"{name}: there is no such file") from None
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror or error}") from None


def _decode(data: bytes, name: str) -> str:
    if not data.strip(b" \t\r\n\0\xef\xbb\xbf\xff\xfe"):
        raise RequestError(f"{name} is empty; it should contain the output of `nvidia-smi topo -m`")
    encoding = next((code for bom, code in _BOMS if data.startswith(bom)), "utf-8")
    if encoding == "utf-8" and b"\0" in data:
        raise RequestError(f"{name} is a binary file, not text (it has NUL bytes, the first at {data.index(0)})")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not {encoding.upper().removesuffix('-SIG')} text (byte {error.start}); "
            f"convert it, for example with `iconv -f latin1 -t utf8`"
        ) from None


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
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DRIVER_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentNotAble(f"nvidia-smi topo -m does not answer: {error}") from None
    if done.returncode:
        raise EnvironmentNotAble(
            f"nvidia-smi topo -m ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}"
        )
    return done.stdout
