"""Read the reports of NCCL's RAS subsystem (NCCL 2.24 and later), as ``ncclras`` prints them.

Forms: docs/userguide/source/troubleshooting/ras.rst and src/ras/client_support.cc of NCCL 2.30. Not run on GPUs.
"""

from __future__ import annotations

import re

from msgspec import Struct, structs

MAX_BYTES = 16 << 20
MAX_NAMED = 8
TABLE = "Communicators..."
_LINE = re.compile(r"\s|$|=+$|#\d+-\d+ \(|Group  |(?:Errors|Warnings|[A-Z]+)$")
_ROW = re.compile(r" +(\d+) +\d+ +\d+ +[\d-]+ +(\d+) +\d+ +[A-Z]+ +\S+")
_BLOCK = re.compile(r"(?:#(\d+)-\d+ \(([0-9a-f]+)\) )?(INCOMPLETE|DEAD|MISMATCH)")
_OPERATION = re.compile(r" +Communicator ranks have different (\w+ )operation counts")
_COUNT = re.compile(r" +(\d+) ranks have (?:launched up to operation (\d+)|not launched)")
_RANK = re.compile(
    r" +(?:Rank (?P<rank>\d{1,7})|The missing rank: (?P<missing>\d{1,7})|(?=Process))"
    r"(?P<own> has (?:launched up to operation (?P<count>\d+)|not launched any operations))?"
    r"(?:.*[Pp]rocess (?P<pid>\d+) on node (?P<host>\S+))?.*"
)


class RasRank(Struct, frozen=True):
    """A rank of a communicator, or (None) a process, as far as RAS names it."""

    rank: int | None
    pid: int | None = None
    host: str = ""


class RasFinding(Struct, frozen=True, kw_only=True):
    """What RAS reports about a communicator or a process.

    ``kind``: dead or missing (no answer), behind (fewer operations launched than the others), or uneven (other numbers
    that differ). ``apart``: the difference in operations. ``largest``: no other communicator has more ranks.
    """

    kind: str
    text: str
    largest: bool = False
    ranks: list[RasRank] = []
    apart: int = 0
    line: int = 1


Counts = dict[int, tuple[int, list[RasRank]]]  # by number of operations: how many ranks, and those that are named


def read_ras(text: str) -> list[list[RasFinding]]:
    """Return the findings of each report in a text, in order."""
    return [_read_text(lines, number) for number, lines in report_lines(text)]


def report_lines(text: str) -> list[tuple[int, list[str]]]:
    """Return the lines of each report in a log, from its table to the first line of other form, and their number."""
    lines, reports = text.splitlines(), []
    for start in [i for i, line in enumerate(lines) if line.startswith(TABLE)]:
        end = next((i for i in range(start + 1, len(lines)) if not _LINE.match(lines[i])), len(lines))
        reports.append((start + 1, lines[start:end]))
    return reports


def _read_text(lines: list[str], first: int) -> list[RasFinding]:
    sizes: dict[str | None, int] = {}
    findings: list[RasFinding] = []
    for number, line in enumerate(lines):
        if row := _ROW.fullmatch(line):
            sizes[row[1]] = int(row[2])
        if block := _BLOCK.fullmatch(line):
            end = next((i for i in range(number + 1, len(lines)) if not lines[i].startswith("  ")), len(lines))
            size = sizes.get(block[1], 0)
            largest = size == max(sizes.values(), default=-1)
            of = f" of communicator {block[2]}" if block[2] else ""
            parts = _read_block(block[3], lines[number + 1 : end], size, of)
            findings += [structs.replace(part, largest=largest, line=first + number) for part in parts]
    return findings


def _read_block(kind: str, body: list[str], size: int, of: str) -> list[RasFinding]:
    named, operations = list[RasRank](), dict[str, Counts]()
    counts, latest = Counts(), 0
    for line in body:
        if operation := _OPERATION.match(line):
            counts = operations.setdefault(operation[1], {})
        elif count := _COUNT.match(line):
            latest = int(count[2] or 0)
            counts[latest] = int(count[1]), []
        elif (match := _RANK.fullmatch(line)) and (match["rank"] or match["missing"] or match["pid"]):
            rank = match["rank"] or match["missing"]
            named.append(RasRank(int(rank) if rank else None, int(match["pid"] or 0) or None, match["host"] or ""))
            latest = int(match["count"] or 0) if match["own"] else latest
            many, ranks = counts.get(latest, (0, []))
            counts[latest] = many + bool(match["own"]), [*ranks, named[-1]]
    if kind == "MISMATCH":
        return [part for operation, counts in operations.items() for part in _compare(operation, counts, size, of)]
    text = f"{body[0].strip() if body else kind}{of}{_names(named)}"
    return [RasFinding(kind="dead" if kind == "DEAD" else "missing", ranks=named, text=text)]


def _compare(operation: str, counts: Counts, size: int, of: str) -> list[RasFinding]:
    """Return what different numbers of one operation mean: fewer than half of the ranks behind are named as such."""
    if len(counts) < 2:
        return []
    most, least = max(counts), min(counts)
    behind = [rank for count, (_, named) in counts.items() if count < most for rank in named]
    many = sum(number for count, (number, _) in counts.items() if count < most)
    if many * 2 < size and len(behind) == many:
        text = f"{many} of {size} ranks{of} launched up to {operation}{least}, the others {most}{_names(behind)}"
        return [RasFinding(kind="behind", ranks=behind, text=text, apart=most - least)]
    parts = (f"{number} ranks {count}{_names(named)}" for count, (number, named) in sorted(counts.items()))
    text = f"ranks{of} launched up to different numbers of {operation}operations: {', '.join(parts)}"
    named = [rank for _, ranks in counts.values() for rank in ranks]
    return [RasFinding(kind="uneven", ranks=named, text=text, apart=most - least)]


def _names(ranks: list[RasRank]) -> str:
    """Return ranks and processes, in parentheses."""
    words = [
        ", ".join([f"rank {r.rank}"] * (r.rank is not None) + [f"process {r.pid} on {r.host}"] * (r.pid is not None))
        for r in ranks[:MAX_NAMED]
    ]
    return f" ({'; '.join(words)})" if words else ""
