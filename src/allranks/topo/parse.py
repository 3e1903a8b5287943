"""Text of ``nvidia-smi topo -m`` -> Topology. Pure; what was not understood is said, never guessed.

Read are tables with tabs or spaces, with escape codes or table bars, with or without legend, NIC rows, affinity columns
and header; cards under their own names; the table of ``topo -p2p`` beside it; text that was copied with ``\\n`` and
``\\t`` spelt out.
"""

from __future__ import annotations

import re
from itertools import count

from allranks.errors import RequestError
from allranks.topo.cells import DEVICE, GPU, LINK, P2P, clean, first_number, ranges
from allranks.topo.records import MEANING, Device, Link, Topology, Unread
from allranks.topo.table import Header, Row, damaged_header, find_header, is_row, read_row, shown

MAX_UNREAD = 50
OTHER = "no part of the matrix"
MAX_DEVICES = 512
_LEGEND = re.compile(r"\s*([A-Z][A-Z0-9#]{0,9})\s+=\s+(\S.*)")
_NIC_LEGEND = re.compile(r"\s*(?:NIC\d+\s*:\s*\S+\s*)+", re.ASCII)
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_NIC_NAMES = re.compile(r"(NIC\d+)\s*:\s*(\S+)", re.ASCII)
_OTHERS = {
    r"rocm|amd-smi|xgmi|(?:link type|hops|weight) between two gpus": "AMD's rocm-smi",
    r"xpu-smi|xe link|\bXL\d*\b": "Intel's xpu-smi",
    r"\bNPU\d": "Ascend's npu-smi",
    r"mthreads|\bMTT\b": "Moore Threads' tool",
}


def parse(text: str) -> Topology:
    """The machine that the text describes.

    Raises:
        RequestError: there is no matrix in it; the message says what it seems to be instead.
    """
    lines = [clean(raw) for raw in text.splitlines()]
    reader = _Reader(_legend(text), _own_columns(lines))
    for number, line in enumerate(lines, 1):
        reader.line(number, line)
    if any(row.links for _, row in reader.rows.values()):
        return reader.topology()
    if "\\n" in text and "GPU0" in text and text.count("\\n") > text.count("\n"):
        return parse(text.replace("\\n", "\n").replace("\\t", "\t"))
    if "GPU0" in text and _BREAK.search(text):
        return parse(_BREAK.sub("\n", text))
    raise RequestError(_no_matrix(text, reader))


def _no_matrix(text: str, reader: _Reader) -> str:
    other = next((name for pattern, name in _OTHERS.items() if re.search(pattern, text, re.IGNORECASE)), None)
    if other:
        return f"this looks like the output of {other}; only the matrix of `nvidia-smi topo -m` is understood"
    if reader.damaged:
        number, word = reader.damaged
        return f"the header of the matrix, line {number}, is damaged or was shortened: {word!r} is no device; print it again with `nvidia-smi topo -m`"
    if reader.p2p:
        return "this is the table of `nvidia-smi topo -p2p` (OK, NS, ...), which tells no types of links; give that of `nvidia-smi topo -m`, alone or with it"
    if re.search(r"\bGPU\d", text):
        return "there is no matrix of `nvidia-smi topo -m` in it: GPUs are named, but no row has a type of link (NV#, PIX, PHB, SYS, ...)"
    first = next((flat for line in text.splitlines() if (flat := " ".join(clean(line).split()))), "")
    return f"there is no matrix of `nvidia-smi topo -m` in it: no line with columns GPU0, GPU1, ... (it begins with {first[:60]!r})"


def _legend(text: str) -> dict[str, str]:
    """Types that the text itself explains, and that are not known here."""
    found = {}
    for line in text.splitlines():
        match = _LEGEND.fullmatch(clean(line))
        if match and match[1] not in MEANING and match[1] not in ("X", "NV#", "NV") and len(found) < MAX_UNREAD:
            found[match[1]] = match[2].strip()
    return {k: v for k, v in found.items() if not P2P.fullmatch(k)}


def _own_columns(lines: list[str]) -> dict[int, str]:
    """Columns of a table whose header was lost: each row has its X in its own."""
    found: dict[int, str] = {}
    for words in (line.split() for line in lines):
        if words and DEVICE.fullmatch(words[0]) and "X" in words and words[0] not in found.values():
            found.setdefault(words.index("X") - 1, words[0])
    return found


def _shifted(row: Row, header: Header) -> bool:
    """Whether the cells belong to other columns than the header says: a device and itself meet at another place."""
    own = header.devices.index(row.name) if row.name in header.devices else None
    crosses = [place for place, kind in row.links.items() if kind == "X"]
    return row.more or (bool(crosses) and own not in crosses) or (own is not None and row.links.get(own, "X") != "X")


class _Reader:
    """Takes the lines in turn and keeps what they say."""

    def __init__(self, legend: dict[str, str], own: dict[int, str]) -> None:
        self.legend = legend
        self.own = own
        self.header: Header | None = None
        self.rows: dict[str, tuple[int, Row]] = {}
        self.p2p_header: Header | None = None
        self.p2p: list[tuple[str, list[str]]] = []
        self.cards: dict[str, str] = {}
        self.damaged: tuple[int, str] | None = None
        self.unread: list[Unread] = []
        self.dropped = 0
        self._in_p2p = False

    def line(self, number: int, text: str) -> None:
        """One line, without escape codes."""
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
            self._say(number, text, f"a header, but {word!r} is no device")
        elif is_row(text, {name for h in (self.header, self.p2p_header) if h for name in h.devices}):
            self._row(number, text)
        else:
            self._say(number, text, OTHER)

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
        if self.header is None:
            self.header = self._without_header(number, words)
        if self.header is None or words[0] in self.rows:
            self._say(number, text, "a row of this name was there already" if self.header else "a row without a header")
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

    def _without_header(self, number: int, words: list[str]) -> Header | None:
        """The first row of a table whose header was lost: as many columns as it has cells, named in the rows' order."""
        cells = 0
        for word in words[1:]:
            if not LINK.fullmatch(word):
                break
            cells += 1
        if words[0] != "GPU0" or not 0 < cells <= MAX_DEVICES or words[1] != "X" or self.damaged:
            return None
        others = (name for i in count() if (name := f"GPU{i}") not in self.own.values())
        devices = [self.own.get(place) or next(others) for place in range(cells)]
        self._say(
            number, " ".join(words), f"the header is missing; columns are taken to be {', '.join(devices[:4])}, ..."
        )
        names = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"][: len(words) - 1 - cells]
        return Header(devices=devices, named=names, starts=[0] * len(names), tabs=True)

    def _say(self, number: int, text: str, why: str) -> None:
        alike = sum((item.why == OTHER) == (why == OTHER) for item in self.unread)  # a long log hides no damage
        if alike < MAX_UNREAD:
            self.unread.append(shown(number, text, why))
        else:
            self.dropped += 1

    def topology(self) -> Topology:
        """What all lines said together."""
        header = self.header
        assert header is not None
        names = [*header.devices, *(n for n in self.rows if n not in header.devices and DEVICE.fullmatch(n))]
        links = self._links_of(header)
        self._missing(header, names)
        if self.dropped:
            self.unread.append(Unread(line=0, text="", why=f"{self.dropped} more lines were not understood"))
        return Topology(
            gpus=[self._device(name) for name in names if GPU.fullmatch(name)],
            nics=[self._device(name) for name in names if not GPU.fullmatch(name)],
            links=links,
            unread=self.unread,
            p2p=self._p2p_links(),
            meaning={k: v for k, v in self.legend.items() if any(link.type == k for link in links)},
        )

    def _device(self, name: str) -> Device:
        values = self.rows[name][1].values if name in self.rows else {}
        for column in ("CPU Affinity", "NUMA Affinity"):
            value = values.get(column)
            if value and ranges(value) is None and value not in ("N/A", "-", "None", "NA"):
                self._say(self.rows[name][0], value, f"{column} of {name} is no list of numbers")
        return Device(
            name=name,
            numa=first_number(values.get("NUMA Affinity")),
            cpus=ranges(values.get("CPU Affinity", "")),
            device=self.cards.get(name) or (None if GPU.fullmatch(name) or re.fullmatch(r"NIC\d+", name) else name),
        )

    def _links_of(self, header: Header) -> list[Link]:
        found: dict[frozenset[str], Link] = {}
        for name, (number, row) in self.rows.items():
            for place, kind in row.links.items():
                other = header.devices[place]
                if (kind == "X") != (other == name):
                    self._say(number, f"{name} {other} {kind}", "X stands for a device and itself only")
                if kind == "X" or other == name:
                    continue
                pair = frozenset((name, other))
                before = found.setdefault(pair, Link(a=name, b=other, type=kind))
                if before.type != kind:
                    said = (
                        f"{before.a}-{before.b} is {before.type} in one row and {kind} in the other; the first is taken"
                    )
                    self._say(number, f"{name} {other} {kind}", said)
        return list(found.values())

    def _missing(self, header: Header, names: list[str]) -> None:
        gone = [name for name in names if name not in self.rows]
        if gone:
            self.unread.append(Unread(line=0, text=", ".join(gone[:32]), why="columns without a row of that name"))
        extra = [name for name in self.rows if name not in header.devices]
        if extra:
            self.unread.append(Unread(line=0, text=", ".join(extra[:32]), why="rows without a column of that name"))

    def _p2p_links(self) -> list[Link]:
        columns, found = self._p2p_columns(), {}
        for name, states in self.p2p:
            for other, state in zip(columns, states, strict=False):
                if other != name and state != "X":
                    worst = found.setdefault(frozenset((name, other)), Link(a=name, b=other, type=state))
                    if worst.type == "OK" and state != "OK":
                        found[frozenset((name, other))] = Link(a=worst.a, b=worst.b, type=state)
        return list(found.values())
