"""Read the reports of NCCL's RAS subsystem (NCCL 2.24 and later): the text of ``ncclras``, and its JSON (2.28.7 and
later).

Forms: docs/userguide/source/troubleshooting/ras.rst and src/ras/client_support.cc of NCCL 2.30. Not run on GPUs.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct

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

    ``kind``: dead or missing (no answer), behind (fewer operations launched than the others), uneven (other numbers
    that differ), or even (all ranks have launched the same). ``apart``: the difference in operations. ``largest``: no
    other communicator has more ranks.
    """

    kind: str
    text: str
    communicator: str = ""
    size: int | None = None
    largest: bool = False
    ranks: list[RasRank] = []
    apart: int = 0
    line: int = 1


Counts = dict[int, tuple[int, list[RasRank]]]  # by number of operations: how many ranks, and those that are named


def is_ras_json(head: bytes) -> bool:
    """Return whether a file starts as the JSON of ``ncclras``."""
    return head.lstrip().startswith(b"{") and all(key in head for key in (b'"nccl_version"', b'"communicators_count"'))


def read_ras(text: str) -> list[list[RasFinding]]:
    """Return the findings of each report in a text, in order; nothing of one that is damaged."""
    if is_ras_json(text[:4096].encode()):
        try:
            return [_read_json(msgspec.json.decode(text))]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return []
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
    found: list[RasFinding] = []
    for number, line in enumerate(lines):
        if row := _ROW.fullmatch(line):
            sizes[row[1]] = int(row[2])
        if block := _BLOCK.fullmatch(line):
            end = next((i for i in range(number + 1, len(lines)) if not lines[i].startswith("  ")), len(lines))
            place = {"communicator": block[2] or "", "size": (size := sizes.get(block[1])), "line": first + number}
            place["largest"] = size is not None and size == max(sizes.values())
            found += _read_block(block[3], lines[number + 1 : end], place)
    return found


def _read_block(kind: str, body: list[str], place: dict[str, Any]) -> list[RasFinding]:
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
        return [found for operation, counts in operations.items() for found in _compare(operation, counts, place)]
    text = f"{body[0].strip() if body else kind}{_of(place)}{_names(named)}"
    return [RasFinding(kind="dead" if kind == "DEAD" else "missing", ranks=named, text=text, **place)]


def _compare(operation: str, counts: Counts, place: dict[str, Any]) -> list[RasFinding]:
    """Return what different numbers of one operation mean: fewer than half of the ranks behind are named as such."""
    if len(counts) < 2:
        return []
    most, least = max(counts), min(counts)
    behind = [rank for count, (_, named) in counts.items() if count < most for rank in named]
    many = sum(number for count, (number, _) in counts.items() if count < most)
    size = place["size"] or sum(number for number, _ in counts.values())
    if many * 2 < size and len(behind) == many:
        text = (
            f"{many} of {size} ranks{_of(place)} launched up to {operation}{least}, the others {most}{_names(behind)}"
        )
        return [RasFinding(kind="behind", ranks=behind, text=text, apart=most - least, **place)]
    parts = (f"{number} ranks {count}{_names(named)}" for count, (number, named) in sorted(counts.items()))
    text = f"ranks{_of(place)} launched up to different numbers of {operation}operations: {', '.join(parts)}"
    named = [rank for _, ranks in counts.values() for rank in ranks]
    return [RasFinding(kind="uneven", ranks=named, text=text, apart=most - least, **place)]


def _names(ranks: list[RasRank]) -> str:
    """Return ranks and processes, in parentheses."""
    words = [
        ", ".join([f"rank {r.rank}"] * (r.rank is not None) + [f"process {r.pid} on {r.host}"] * (r.pid is not None))
        for r in ranks[:MAX_NAMED]
    ]
    return f" ({'; '.join(words)})" if words else ""


def _of(place: dict[str, Any]) -> str:
    return f" of communicator {place['communicator']}" if place["communicator"] else ""


def _read_json(report: dict[str, Any]) -> list[RasFinding]:
    found: list[RasFinding] = []
    for comm in report["communicators"]:
        place = {"communicator": str(comm["hash"]).removeprefix("0x")[:20], "size": int(comm["size"])}
        place["largest"] = place["size"] == max(int(other["size"]) for other in report["communicators"])
        absent = [(_json_rank(r), r["status"]) for r in comm["missing_ranks"] if r["status"]["unresponsive"]]
        dead = [rank for rank, status in absent if status["considered_dead"]]
        before = len(found)
        for kind, ranks in (("dead", dead), ("missing", [rank for rank, _ in absent if rank not in dead])):
            state = "are dead" if kind == "dead" else "do not answer"
            text = f"{len(ranks)} of {place['size']} ranks{_of(place)} {state}{_names(ranks)}"
            found += [RasFinding(kind=kind, ranks=ranks, text=text, **place)] * bool(ranks)
        present = [(_json_rank(r), r["collective_counts"]) for r in comm["ranks"]]
        for operation in present[0][1] if present else ():
            counts: Counts = {}
            for rank, own in present:
                many, named = counts.get(int(own[operation]), (0, []))
                counts[int(own[operation])] = many + 1, [*named, rank]
            largest = max(number for number, _ in counts.values())
            outliers = {count: (n, named if n < largest else []) for count, (n, named) in counts.items()}
            found += _compare(f"{operation} ", outliers, place)
        if present and before == len(found):
            text = f"{len(present)} ranks{_of(place)} have launched equal numbers of operations"
            found.append(RasFinding(kind="even", ranks=[rank for rank, _ in present], text=text, **place))
    return found


def _json_rank(rank: dict[str, Any]) -> RasRank:
    return RasRank(int(rank["rank"]), int(rank["pid"]), str(rank["host"])[:200])
