"""Split a line of a log into emitter, severity, subject (rank, host) and text.

The emitter decides how a text is read: `No space left on device` of the kernel, NCCL and Python are different failures.
A class names the emitters whose lines it accepts. A line whose emitter is not recognised belongs to the program.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

from msgspec import Struct, structs

from allranks import errors

# Escape codes: of a terminal; written out by a program that quotes its output (\\x1b[4m, ^[[4m); and those that lost
# their first character.
_SGR = rb"\[(?:\d{1,3}(?:;\d{1,3}){0,4})?m"
ANSI = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])"
    rb"|(?:\\x1b|\\u001b|\\033|\\e|\^\[|\xe2\x90\x9b|\xef\xbf\xbd)"
    + _SGR
    +
    # without its first character: one digit may also be a time, as in [5m 3s]
    rb"|\[(?:0|[2-9]\d|10[0-7]|\d{1,2}(?:;\d{1,3}){1,4})m(?!\])|(?:(?<!\w)|(?<=\dm))\[[1-9]m(?=\S)(?!\])"
)
_LOST = re.compile(rb"\[(?:\d{1,2};)?\d{1,2}m")
_SAMPLE_BYTES = 1 << 15  # codes without their first character occur all over a log, or not at all


def strip_escapes(block: bytes) -> bytes:
    """Return text without escape codes, also those written out or without their first character."""
    if b"\x1b" in block or _LOST.search(block[:_SAMPLE_BYTES]) or _LOST.search(block[-_SAMPLE_BYTES:]):
        return ANSI.sub(b"", block)
    return block


MAX_LINE_TEXT = 600

_RANK = re.compile(r"^\s*\[(?P<kind>rank|default)\s?(?P<rank>\d{1,7})\]:?\s?", re.IGNORECASE)
_TASK = re.compile(r"^\s*(?P<task>\d{1,6}): (?=\S|\s)")
_RAY = re.compile(r"^\s*\((?P<name>[\w.-]+)(?:\[rank=(?P<rank>\d{1,7})\])? pid=\d+(?:, ip=(?P<host>[\w.:-]+))?\) ?")
_NCCL = re.compile(r"^\s*(?P<host>[A-Za-z][\w.-]*):(?P<pid>\d+):\d+ \[(?P<device>\d+)\] ")
_SYSLOG = re.compile(
    r"^(?:<\d+>)?(?P<time>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
    r" (?P<host>[A-Za-z][\w.-]*) (?=[\w./-]+(?:\[\d+\])?:)"
)
# Prefixes of containers, log collectors and launchers that stand before the program's own text.
_TAGGED = re.compile(r"^\s*\[\d+,(?P<rank>\d{1,7})\]<std(?:out|err|diag)>:\s?")
_POD = re.compile(r"^\[pod/(?P<host>[\w.-]+)/[\w.-]+\] ?|^(?P<service>[A-Za-z][\w.-]*-\d+) +\| ")
_COLLECTED = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.]*(?:Z|[+-]\d\d:\d\d) (?:std(?:out|err) [FP] )")
# A time stamp or a host before a message that has its own form: the rest is what the emitter wrote.
_OWN_FORM = (
    r"(?=\s*(?:Traceback \(|File \"|(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b|\[(?:rank|default)\d|[\w.-]+:\d+:\d+ \[\d+\] NCCL"
    r"|(?:srun|sbatch|slurmstepd|slurmd)(?:\[\d+\])?: |E[A-Z]\d{4}: |\[[EWF] \w+\.cpp))"
)
_STAMPED = re.compile(
    r"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:? ?(?:\W{0,3}(?:ERROR|INFO|WARNING|CRITICAL)\W{1,4})?"
    + _OWN_FORM
)
_UNIT = re.compile(r"^[\w./-]+\[\d+\]: " + _OWN_FORM)  # the program and process that syslog and journald name
_JSON_MESSAGE = re.compile(r"^\s*\"message\": \"" + _OWN_FORM)  # of the error file of torch's launcher
_AT_HOST = re.compile(r"^(?P<host>[A-Za-z][\w-]*\d[\w.-]*): " + _OWN_FORM)
_HOST = re.compile(r"^(?!python\d)(?:slurm(?:step)?d-)?(?P<host>[A-Za-z][\w-]*\d[\w.-]*): (?=\S)")
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


class LogLine(Struct, frozen=True):
    """A parsed line. ``local`` is a rank within its node, ``task`` the number that srun --label prints before the line.

    ``text`` has no prefixes; ``emitter`` (after `identified`) is one of `EMITTERS`, ``severity`` is info, warning,
    error, fatal or "" if the line has none.
    """

    text: str
    rank: int | None
    local: int | None
    task: int | None
    host: str | None
    pid: int | None
    emitter: str = ""
    severity: str = ""

    def identified(self) -> LogLine:
        """Return the line with emitter and severity. Few lines need them, and they cost more to find than the rest."""
        ours = self.text.startswith('{"event"') and '"known":true' in self.text
        emitter = "allranks" if ours else self.emitter or emitter_of(self.text[:EMITTER_REACH])
        return structs.replace(self, emitter=emitter, severity=severity_of(self.text))


def decode_line(raw: bytes) -> str:
    """Return a line as text, without control characters, at most `MAX_TEXT` long."""
    text = raw.decode("utf-8", "replace")
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    return text


_OWN_ERRORS = "|".join(name for name, value in vars(errors).items() if isinstance(value, type))
# The first that matches a line, without its prefixes of rank and task, is its emitter.
_EMITTERS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        # What allranks itself wrote: its exceptions, by their module, and the sentences in its records. Patterns for
        # libraries do not apply.
        (
            "allranks",
            rf"^\s*allranks(?:\.\w+)*(?:\.[A-Z]\w*(?::|\s*$)|: )|^\s*\"failure\": \"(?:{_OWN_ERRORS}): "
            r"|^\s*\"(?:message|why|refused|stopped|ended|hang|gave_up|reasons?)\": ",
        ),
        ("launcher", r"\bChildFailedError\b|^\s*(?:ERROR|WARNING|INFO):torch\.distributed\.elastic"),
        (
            "python",
            r"^\s*(?:Traceback \(most recent call last\)|Fatal Python error|File \"[^\"]+\", line \d|(?:[\w<>]+\.)*(?:\w*(?:Error"
            r"|Exception|Interrupt|Exit|Failure|Timeout|Expired|Abort)|Exception)(?:\(\w+\))?(?::|\s*$))",
        ),
        (
            "slurm_daemon",
            r"^(?:\[[\dT:.+-]+\] )?(?:\[[\w.]+\] )?(?:slurmstepd|slurmd|slurmctld|slurmdbd|slurmrestd|munged)(?:-[\w.-]+)?(?:\[\d+\])?: "
            r"|^\[\d{4}-\d\d-\d\dT[\d:.]+\] (?:\[[\w.]+\] )?(?:error|fatal|debug\d?|info|sched|backfill|_slurm\w*|\w*JobId)\b",
        ),
        (
            "slurm_client",
            r"^\s*(?:srun|sbatch|salloc|scancel|squeue|sinfo|sacct|scontrol|sacctmgr|sbcast|sattach|sstat)(?:\[\d+\])?: ",
        ),
        (
            "shell",
            r"^(?:/\S+/)?(?:ba|z|da|c|k)?sh: |^\S*(?:slurm_script|\.sh|\.sbatch|\.slurm|\.bash|\.job)(?::| \[).{0,20}?line \d+:? "
            r"|^\S+: line \d+: +|^g?make(?:\[\d+\])?: ",
        ),
        (
            "kernel",
            r"^(?:kern\s*:\w+\s*: .{0,40}?|<\d+>)?\[ *\d+\.\d{1,9}\] |^kern\s*:"
            r"|\bkernel: |^\s*(?:\[[^\]]{0,40}\] )?(?:NVRM|nvidia-nvswitch\d*|amdgpu|mce|EDAC)\b"
            r"|\bNVRM: |\bnvidia-nvswitch\d*: ",
        ),
        (
            "nccl",
            r"\b(?:NCCL|RCCL) (?:WARN|INFO|TRACE|ERROR|CALL)\b|^NCCL version"
            r"|^\[\d+\] (?:transport|misc|graph|enqueue|init|bootstrap|proxy)\S*\.(?:cc|cu):\d+",
        ),
        (
            "hccl",
            r"\b(?:HCCL|HCCP|ASCENDCL|AICPU)\b|\[(?:ERROR|WARNING|INFO|EVENT)\] ?(?:RUNTIME|GE|TDT|DRV|IDEDH)\("
            r"|^\s*E[A-Z]\d{4}: |\[ERROR\] .{0,40}\bERR\d{5}\b",
        ),
        (
            "launcher",
            r"torch[./]distributed[./](?:run|launch|elastic|launcher)\b|\[(?:launch|runner|multinode_runner|launcher)\.py"
            r"|\bChildFailedError\b|accelerate[./]commands|deepspeed[./]launcher"
            r"|\btorchrun\b|^\s*\S+\.py FAILED\s*$|^\s*Root Cause \(first|^\s*(?:exitcode|error_file|traceback)\s+: "
            r"|\bexits with return code\b",
        ),
        (
            "mpi",
            r"^\s*(?:mpirun|mpiexec(?:\.hydra)?|prterun|orterun|prted|orted|hydra\w*)\b"
            r"|^\[[\w.-]+:\d+\] |^\[proxy:|^\[mpiexec|^MPI_ABORT|^MPI startup"
            r"|^Abort\(\d+\)|BAD TERMINATION|PMIX ERROR|\b(?:ORTE|PRTE|MPICH2?|PMIX?2?|OMPI)\b"
            r"|^Primary job +terminated|\bMPI_\w+|mpirun (?:noticed|detected|has)",
        ),
        (
            "network_library",
            r"\blibfabric:|\bUCX {1,2}(?:ERROR|WARN|DIAG|INFO|FATAL)|^libibverbs|\blibibverbs: |^(?:mlx[45]|efa|bnxt_re|irdma): ",
        ),
        (
            "ray",
            r"\braylet\b|\bray[./](?:exceptions|_private|serve|train|tune|util)"
            r"|^\[[\d ,:.-]+ [EWICF] \d+ \d+\] |\bRayActor|\bRay (?:worker|node|cluster|head)",
        ),
        (
            "torch",
            r"\[?[EWFI]\d{0,4} ?[\d:.]* ?\d* ?\w+\.(?:cpp|hpp|h|cc):\d+\]|\bProcessGroup(?:NCCL|Gloo|MPI|HCCL)\b"
            r"|^terminate called|\bc10(?:d|::|_)|\bTCPStore\b|\btorch/csrc/"
            r"|\btorch/_dynamo|\btorch/_inductor",
        ),
    )
)
EMITTERS = (*dict.fromkeys(name for name, _ in _EMITTERS), "program")
# What these mark as information or a warning is not an error. Others, such as NCCL and Slurm, report errors as
# warnings.
REMARKING_EMITTERS = frozenset({"program", "python", "ray", "launcher"})
_SYSLOG_EMITTERS = {"kernel": "kernel"} | dict.fromkeys(
    ("slurmd", "slurmctld", "slurmdbd", "slurmstepd", "munged"), "slurm_daemon"
)
_SEVERITY = re.compile(
    r"\b(?:NCCL|RCCL|UCX) +(?P<library>WARN|INFO|ERROR|TRACE|DIAG|FATAL)\b"
    r"|^\W{0,3}(?P<glog>[IWEF])(?:\d{3,4} [\d:.]+| \w+\.\w+:\d+\])"
    r"|^(?:\[[^\]]{0,40}\] ?){0,2}(?:s(?:run|batch|alloc|cancel|queue|info|acct|control|lurm\w+)(?:-\S+)?(?:\[\d+\])?: )?(?P<slurm>error"
    r"|fatal|debug\d?|info|warning): "
    r"|(?<![\w.'\"=/])(?P<level>DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL|SEVERE)(?![\w'\"=/.])"
    r"|\b\w*(?P<python>Warning): "
    r"|\[(?P<small>debug|info|warning|error|fatal|critical)\]"
)
# first letters
_SEVERITIES = dict.fromkeys("itdn", "info") | {"w": "warning", "e": "error"} | dict.fromkeys("fcs", "fatal")
EMITTER_REACH = 400
SEVERITY_REACH = 160  # a level stands near the start of a line


def severity_of(text: str) -> str:
    """Return info, warning, error or fatal, as the line's logger states it; "" if it states none."""
    match = _SEVERITY.search(text[:SEVERITY_REACH])
    return _SEVERITIES[match[match.lastgroup or 0][0].lower()] if match else ""


def emitter_of(text: str) -> str:
    """Return who wrote a line; "program" if nothing in the line shows it."""
    return next((name for name, pattern in _EMITTERS if pattern.search(text)), "program")


_PREFIXES = (_STAMPED, _COLLECTED, _TAGGED, _RANK, _RAY, _NCCL, _POD, _AT_HOST, _SYSLOG, _UNIT, _JSON_MESSAGE)
MAX_PREFIXES = 4
_RAY_DAEMONS = ("raylet", "gcs_server")


def parse_line(text: str, labelled: bool) -> LogLine:
    """Split a line: strip the prefixes of srun, torchrun, Ray, syslog and NCCL, which name its subject or emitter."""
    emitter, task = "", None
    if labelled and (match := _TASK.match(text)):
        task, text = int(match["task"]), text[match.end() :]
    subject: dict[str, str] = {}
    for _ in range(MAX_PREFIXES):
        match = next((m for prefix in _PREFIXES if (m := prefix.match(text))), None)
        if match is None:
            break
        text = text[match.end() :]
        if '"message"' in match.group():
            text = text.rstrip('", ')
        groups = {name: value for name, value in match.groupdict().items() if value is not None}
        if groups.pop("kind", "").lower() == "default":
            groups["local"] = groups.pop("rank")
        subject |= groups
        emitter = _emitter_of_prefix(match, groups, text) or emitter
    rank, host = subject.get("rank"), subject.get("host")
    if rank is None and "ank " in text.lower() and (match := _IN_RANK.search(text)):
        rank = match["rank"]
    if host is None:
        srun = _SRUN.search(text) if "srun: " in text else None
        match = (_ON.search(text) if "*** " in text else None) or srun or _HOST.match(text)
        host = match["host"] if match else None
        task = int(srun["task"]) if srun and match is srun else task
    return LogLine(text, _number(rank), _number(subject.get("local")), task, host, _number(subject.get("pid")), emitter)


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _emitter_of_prefix(match: re.Match[str], groups: dict[str, str], rest: str) -> str | None:
    """Return the emitter that a prefix names, if it names one."""
    if match.re is _NCCL:
        return "nccl"
    if match.re is _SYSLOG:
        return _SYSLOG_EMITTERS.get(re.split(r"[\[:]", rest, maxsplit=1)[0])
    return "ray" if groups.get("name") in _RAY_DAEMONS else None


_TRACEBACK = b"Traceback (most recent call last)"
_DATED = re.compile(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_RANKED = re.compile(rb"(?<![_-])rank\W{0,2}(\d{1,7})", re.IGNORECASE)  # not local_rank
MAX_PREFIX, MAX_UNLIKE_PREFIXES = 160, 64


class UnknownPrefixes:
    """Prefixes that no pattern here describes: the same text, but for digits, precedes `Traceback` and its frames."""

    def __init__(self) -> None:
        self._forms: dict[bytes, bool] = {}  # each form that stood before a traceback: whether it is such a prefix
        self._any: re.Pattern[bytes] | None = None

    def strip(self, block: bytes, labelled: bool) -> bytes:
        """Return lines without these prefixes; their time and rank are kept, as `parse_line` reads them."""
        at = block.find(_TRACEBACK)
        while at >= 0:
            start = block.rfind(b"\n", max(0, at - MAX_PREFIX), at) + 1
            end = block.find(b"\n", at) + 1
            if (start or at < MAX_PREFIX) and end and (prefix := block[start:at]).strip():
                self._learn(prefix, block[end : end + 2 * MAX_PREFIX], labelled)
            at = block.find(_TRACEBACK, at + 1)
        return self._any.sub(_time_and_rank, block) if self._any else block

    def _learn(self, prefix: bytes, after: bytes, labelled: bool) -> None:
        form = re.sub(rb"\d+", rb"\\d+", re.escape(prefix))
        if form in self._forms or len(self._forms) >= MAX_UNLIKE_PREFIXES:
            return
        known = parse_line(decode_line(prefix + _TRACEBACK), labelled).text.startswith(_TRACEBACK.decode())
        self._forms[form] = not known and re.match(form + rb'[ \t]+File "', after) is not None
        if self._forms[form]:
            self._any = re.compile(rb"^(?:" + b"|".join(filter(self._forms.get, self._forms)) + rb")", re.MULTILINE)


def _time_and_rank(prefix: re.Match[bytes]) -> bytes:
    time, rank = _DATED.search(prefix.group()), _RANKED.search(prefix.group())
    return (time.group() + b" " if time else b"") + (b"[rank%s]: " % rank[1] if rank else b"")


# One JSON object per line of output, as Docker and log collectors write them; an event of a run is none.
_JSON_LINE = re.compile(
    rb'^\{(?!"event").*?"(?:log|textPayload|message|msg)": ?("(?:[^"\\\n]|\\.)*").*\}\s*?$', re.MULTILINE
)
_JSON_LEVEL = re.compile(rb'"(?:severity|level\w*)": ?"(\w+)"')


def unwrap_json(block: bytes) -> bytes:
    """Return the text of each line that is wrapped in JSON, after its time and level."""
    return _JSON_LINE.sub(_text_in_json, block) if block[:1] == b"{" else block


def _text_in_json(line: re.Match[bytes]) -> bytes:
    try:
        text = json.loads(line[1]).rstrip("\n").replace("\n", "\r").encode("utf-8", "replace")
    except ValueError:
        return line.group()
    time, level = _DATED.search(line.group()), _JSON_LEVEL.search(line.group())
    return (time.group() + b" " if time else b"") + (level[1].upper() + b" " if level else b"") + text


_NEW_MESSAGE = re.compile(
    r"^\s*(?:\[?\d{4}-\d\d-\d\d|\[?[EWIF]\d{3,4} |Traceback|File \"|[\w.-]+:\d+:\d+ \[|(?:\w+\.)*\w+(?:Error"
    r"|Exception|Warning)\b|(?:srun|sbatch|slurm\w+)\b|(?:NCCL|DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b"
    r"|[-=*#~]{4,}|\{|\[rank)"
)
_UNFINISHED = re.compile(r"(?:[-:,(\[=/_'`]|WARN| (?:to|of|the|with|from|for|an?|and|is|by))$")
MAX_PARTS, PART_REACH, WRAP_MARGIN, MAX_WRAP = 3, 8, 14, 200


def continuation(lines: list[bytes], i: int, labelled: bool) -> list[str]:
    """Return the texts of the next lines that belong to the message in line `i`: a wrapped message, or a header and its
    message.

    Lines of other ranks in between are skipped.
    """
    first = parse_line(decode_line(lines[i][:MAX_LINE_TEXT]), labelled)
    near = lines[max(0, i - 20) : i + 20]
    longest = max(map(len, near))
    width = longest if longest <= MAX_WRAP else None
    before, length, parts = first.text.rstrip(), len(lines[i]), []
    for raw in lines[i + 1 : i + 1 + PART_REACH]:
        line = parse_line(decode_line(raw[:MAX_LINE_TEXT]), labelled)
        if (line.rank, line.local, line.task) != (first.rank, first.local, first.task):
            continue
        text = line.text.strip()
        wrapped = width is not None and length >= width - WRAP_MARGIN
        if not text or _NEW_MESSAGE.match(line.text) or (before.endswith((".", "!")) and not wrapped):
            break
        if not (wrapped or _UNFINISHED.search(before) or text[0].islower() or line.text[:1] in " \t"):
            break
        parts.append(text)
        before, length = text, len(raw)
        if len(parts) == MAX_PARTS:
            break
    return parts


_LABEL = re.compile(rb"\s*\d{1,6}: ")


def has_task_labels(lines: list[bytes]) -> bool:
    """Return whether most lines start with a task number, as srun --label writes them."""
    filled = [line for line in lines if line.strip()]
    return len(filled) >= 2 and sum(bool(_LABEL.match(line)) for line in filled) > 0.6 * len(filled)


def timestamp_of(text: str) -> float | None:
    """Return the first time stamp in a line as seconds since the epoch, or None.

    A stamp without a year gets the year 2000, one without a zone is taken as UTC: only the order matters. Times within
    one log family can be compared; times of families with and without a year cannot (`times_comparable`).
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


def times_comparable(a: float, b: float) -> bool:
    """Return whether two times can be compared: both with a year, or both without."""
    return (a < YEAR_KNOWN) == (b < YEAR_KNOWN)


def in_year_of(time: float, like: float) -> float:
    """Move a time without a year to the year of another time, or to the year before if that is nearer."""
    moment, other = datetime.fromtimestamp(time, UTC), datetime.fromtimestamp(like, UTC)
    day = min(moment.day, 28) if moment.month == 2 else moment.day
    candidates = [moment.replace(year=year, day=day).timestamp() for year in (other.year, other.year - 1)]
    return min(candidates, key=lambda t: abs(t - like))


YEAR_KNOWN = datetime(2001, 1, 1, tzinfo=UTC).timestamp()
