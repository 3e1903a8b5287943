"""One line of a log: whose it is, when it was written, and its text without prefixes and terminal codes."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from msgspec import Struct

ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])")
MAX_TEXT = 600

_RANK = re.compile(r"^\s*\[(?P<kind>rank|default)\s?(?P<rank>\d{1,7})\]:?\s?", re.IGNORECASE)
_TASK = re.compile(r"^\s*(?P<task>\d{1,6}): (?=\S|\s)")
_RAY = re.compile(r"^\s*\((?P<name>[\w.-]+)(?:\[rank=(?P<rank>\d{1,7})\])? pid=\d+(?:, ip=(?P<host>[\w.:-]+))?\) ?")
_NCCL = re.compile(r"^\s*(?P<host>[A-Za-z][\w.-]*):(?P<pid>\d+):\d+ \[(?P<device>\d+)\] ")
_SYSLOG = re.compile(
    r"^(?:<\d+>)?(?P<time>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
    r" (?P<host>[A-Za-z][\w.-]*) (?=[\w./-]+(?:\[\d+\])?:)"
)
_HOST = re.compile(r"^(?P<host>[A-Za-z][\w-]*\d[\w.-]*): (?=\S)")
_IN_RANK = re.compile(r"\[(?:PG [^\]]{0,80}?)?\bRank (?P<rank>\d{1,7})\]", re.IGNORECASE)
_ON = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON (?P<host>[\w.-]+) ")
_SRUN = re.compile(r"srun: error: (?P<host>[A-Za-z][\w.-]*): tasks? (?P<task>\d+)")
_ISO = re.compile(
    r"(?P<day>\d{4}-\d\d-\d\d)[T _-](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_GLOG = re.compile(r"\b[IWEF](?P<month>\d\d)(?P<date>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.(?P<part>\d{1,9})")
_EPOCH = re.compile(r'"time": ?(?P<time>\d{10}(?:\.\d+)?)')
_UNIX_DAY = re.compile(
    r"\b(?P<month>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(?P<date>\d{1,2}) (?P<clock>\d\d:\d\d:\d\d)(?: (?P<year>\d{4}))?"
)
_MONTHS = {
    m: i for i, m in enumerate(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1)
}


class Line(Struct, frozen=True):
    """A line taken apart. ``local`` is a rank within its node only, ``task`` the number that srun --label puts before it."""

    text: str
    rank: int | None
    local: int | None
    task: int | None
    host: str | None
    pid: int | None


def decode(raw: bytes) -> str:
    """Text of a line, whatever its bytes; without control characters, at most `MAX_TEXT` long."""
    text = raw.decode("utf-8", "replace")
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    return text


def take_apart(text: str, labelled: bool) -> Line:
    """Strip the prefixes of srun, torchrun, Ray, syslog and NCCL, and keep what they say."""
    rank = local = task = pid = None
    host: str | None = None
    if labelled and (match := _TASK.match(text)):
        task, text = int(match["task"]), text[match.end() :]
    for _ in range(3):
        if match := _RANK.match(text):
            if match["kind"].lower() == "rank":
                rank = int(match["rank"])
            else:
                local = int(match["rank"])
        elif match := _RAY.match(text):
            host = match["host"] or host
            rank = int(match["rank"]) if match["rank"] else rank
        elif match := _NCCL.match(text):
            host, pid = match["host"], int(match["pid"])
        elif match := _SYSLOG.match(text):
            host = match["host"]
        else:
            break
        text = text[match.end() :]
    if rank is None and (match := _IN_RANK.search(text)):
        rank = int(match["rank"])
    if host is None:
        srun = _SRUN.search(text)
        found = _ON.search(text) or srun or _HOST.match(text)
        host = found["host"] if found else None
        task = int(srun["task"]) if srun and found is srun else task
    return Line(text, rank, local, task, host, pid)


def is_labelled(lines: list[bytes]) -> bool:
    """Whether most lines begin with a task number, as srun --label writes them."""
    filled = [line for line in lines if line.strip()]
    return len(filled) >= 2 and sum(bool(re.match(rb"\s*\d{1,6}: ", line)) for line in filled) > 0.6 * len(filled)


def time_of(text: str) -> float | None:
    """Seconds since the epoch of the first time stamp in a line, or None.

    Stamps without a year are taken to be of 2000, those without a zone of UTC: only their order counts. Times within one
    log family compare; across families without a year they do not (`comparable`).
    """
    if match := _ISO.search(text[:200]):
        zone = (match["zone"] or "").replace("Z", "+00:00")
        return _stamp(f"{match['day']}T{match['clock']}{zone}", match["part"])
    if match := _EPOCH.search(text[:200]):
        return float(match["time"])
    if match := _GLOG.search(text[:200]):
        return _stamp(f"2000-{match['month']}-{match['date']}T{match['clock']}", match["part"])
    if match := _UNIX_DAY.search(text[:60]):
        day = f"{match['year'] or 2000}-{_MONTHS[match['month']]:02d}-{int(match['date']):02d}"
        return _stamp(f"{day}T{match['clock']}", None)
    return None


def _stamp(text: str, part: str | None) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{part}") if part else 0.0)


def comparable(a: float, b: float) -> bool:
    """Whether two times may be compared: both with a year, or both without."""
    return (a < YEAR_KNOWN) == (b < YEAR_KNOWN)


def with_year(time: float, like: float) -> float:
    """A time without a year (see `time_of`), in the year of another one, or in the year before where that is nearer."""
    moment, other = datetime.fromtimestamp(time, UTC), datetime.fromtimestamp(like, UTC)
    day = min(moment.day, 28) if moment.month == 2 else moment.day
    candidates = [moment.replace(year=year, day=day).timestamp() for year in (other.year, other.year - 1)]
    return min(candidates, key=lambda t: abs(t - like))


YEAR_KNOWN = datetime(2001, 1, 1, tzinfo=UTC).timestamp()
