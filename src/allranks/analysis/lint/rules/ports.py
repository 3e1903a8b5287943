"""Rules for ports, and for the id of the rendezvous."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from allranks.analysis.lint.command_options import Option
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.placement import started_by
from allranks.analysis.lint.records import Argument, Assignment, Severity, Violation
from allranks.analysis.lint.rules.dataflow import under_srun
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex

PORT_WHY = (
    "Two jobs on one node use the same port. With c10d the second job does not fail: it joins the store of the first one, and fails when "
    "that job ends; with a static rendezvous it stops with 'Address already in use'."
)
PORT_CURE = "derive it from the job ID, below the ephemeral range: MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000)); on one node use torchrun --standalone"
EPHEMERAL_WHY = "The kernel assigns ports of its ephemeral range (32768 to 60999) to outgoing connections, so such a port is often in use."
PER_NODE_WHY = "Every node gets a different value, so the nodes never find each other."
ID_WHY = "Jobs with the same id, address and port share one rendezvous: one of them is killed, or it uses nodes of the other."
ID_CURE = "--rdzv_id=$SLURM_JOB_ID (with requeue: $SLURM_JOB_ID.$SLURM_RESTART_COUNT)"
PORT_NAME = lazy_regex(r"(?:MASTER|RDZV|HEAD|MAIN|RENDEZVOUS)\w*PORT\Z|PORT\Z", re.IGNORECASE)
DEFAULT_PORTS = ("29500", "29400")
EPHEMERAL_START, EPHEMERAL_END = 32768, 60999
SMALL_PART = 0.05
"""Part of a range that may be in the ephemeral range without a report."""


def backend(launch: LauncherCall) -> str:
    return (launch.value("rdzv_backend") or "static").lower()


def is_torchrun(launch: LauncherCall) -> bool:
    return launch.kind in ("torchrun", "torch.distributed.launch")


def _severity(job: JobDescription) -> Severity:
    """Return how certain it is that another job can use the port: unknown is a note."""
    return "warning" if job.shared_nodes or job.kind == "environment" else "note"


def _severity_of_port(job: JobDescription) -> Severity:
    """Return how certain it is that two users of a port meet: other jobs may, tasks of one array do."""
    return "warning" if job.kind == "environment" or (job.shared_nodes and "array" in job.heading) else "note"


def _severity_of_ephemeral(job: JobDescription) -> Severity:
    """Return a note for a job that starts one process: nobody else has to find its port."""
    alone = all(_one_task(job, la) if la.kind == "python" else _one_rank(la) for la in job.launches)
    return "note" if alone else _severity(job)


def _one_rank(launch: LauncherCall) -> bool:
    ranks = launch.value("nproc_per_node", "num_gpus", "num_processes")
    return ranks == "1" and launch.value("nnodes", "num_machines") in (None, "1")


def _one_task(job: JobDescription, launch: LauncherCall) -> bool:
    started = started_by(job, launch)
    return started is not None and started.total == 1


def _standalone(job: JobDescription) -> bool:
    """Return whether no launcher uses a port of the script: ``--standalone`` finds a free one itself."""
    return bool(job.launches) and all("standalone" in la.options for la in job.launches)


def _at_the_same_time(job: JobDescription) -> Iterator[Violation]:
    """Report launchers that the script runs side by side on one node with the same port."""
    used: dict[str, LauncherCall] = {}
    waits = [c.offset for c in job.calls if c.program == "wait" and not c.in_function]
    for launch in job.launches:
        outer = launch.call.under[0] if launch.call.under else launch.call
        if launch.srun or launch.call.in_function or launch.call.in_loop or job.multi_node or not _is_static(launch):
            continue
        told = launch.value("master_port", "main_process_port")
        read = ("PET_MASTER_PORT",) if is_torchrun(launch) else ("MASTER_PORT", "PET_MASTER_PORT")
        number = told if told is not None else "29500" if not job.has(*read) else ""
        before = used.get(number)
        if before is not None and any(before.call.offset < place < launch.call.offset for place in waits):
            used.clear()
            before = None
        if number.isdecimal() and before is not None and not before.call.instead_of(launch.call):
            text = f"port {number} is that of the launcher in line {job.lines.place(before.call.offset)[0]}, which still runs"
            yield Violation(launch.call.offset, text, severity="error")
        if outer.after == "&":
            used[number] = launch


LOOP_OF_WORDS = lazy_regex(r"(?m)^[ \t]*for\s+\w+\s+in\s+([^;\n]*)")
WAITS = lazy_regex(r"(?m)^\s*(?:wait|break|exit)\b|&\s*wait\b|\bwait\s+-n|;\s*(?:wait|break)\b")


def _in_every_run(job: JobDescription) -> Iterator[Violation]:
    """Report a loop that starts launchers in the background, all with one port."""
    for launch in job.launches:
        outer = launch.call.starter
        if not outer.in_loop or outer.after != "&" or outer.in_function or outer.program in ("srun", "ssh", "pdsh"):
            continue
        if launch.open_ended or launch.option("standalone", "rdzv_endpoint", "config_file") or launch.srun:
            continue
        if launch.option("node_rank", "machine_rank") or launch.value("nnodes", "num_nodes") not in (None, "1"):
            continue  # each on a node of its own
        alone = launch.kind == "accelerate" and launch.value("num_processes") in (None, "1")
        option = launch.option("master_port", "main_process_port")
        number = (option.value or "") if option else "29500" if not _any_port(job) else ""
        if alone or not number.isdecimal() or number == "0" or backend(launch) != "static":
            continue
        loops = [*LOOP_OF_WORDS.finditer(job.text[: outer.offset])]
        body = re.search(r"(?m)(?:^|[;&])\s*done\b", job.text[outer.offset :])
        if not loops or body is None or re.fullmatch(r"[\"']?[\w./-]*[\"']?", loops[-1][1].strip()):
            continue  # it may run once only
        if WAITS.search(job.text[loops[-1].start() : outer.offset + body.start()]):
            continue
        place = option.arg.offset if option else launch.call.offset
        text = f"every run of the loop uses port {number}, while the one before still runs"
        yield Violation(place, text, severity="error", cure="a port for each: --master_port=$((29500 + i))")


def _any_port(job: JobDescription) -> bool:
    return job.has("MASTER_PORT", "PET_MASTER_PORT") or "MASTER_PORT" in job.reading.exported


def _is_static(launch: LauncherCall) -> bool:
    """Return whether the launcher listens on the port of its options, or on 29500."""
    alone = launch.option("standalone", "rdzv_endpoint", "config_file") or launch.open_ended
    several = launch.kind == "deepspeed" or (
        launch.value("nproc_per_node", "num_processes") not in (None, "1")
        or (is_torchrun(launch) and launch.option("nproc_per_node", "master_port") is not None)
    )
    return not alone and backend(launch) == "static" and several


def port(job: JobDescription) -> Iterator[Violation]:
    yield from _at_the_same_time(job)
    yield from _in_every_run(job)
    if job.whole_nodes:
        return
    seen: set[int] = set()
    severity = _severity_of_port(job)
    for item in [] if _standalone(job) else _first_assignments(job):
        if (
            item.removed
            or not PORT_NAME.match(item.name)
            or item.items
            or not _is_rendezvous_port(job, item.name, item.value)
        ):
            continue
        digits = re.fullmatch(r"(\d{2,5})|\$\{\w+:?[-=](\d{2,5})\}", item.value)
        if digits and (job.kind == "script" or digits[1] in DEFAULT_PORTS):
            seen.add(job.lines.place(item.offset)[0])
            said = f"is always {digits[1]}" if digits[1] else f"is {digits[2]} unless it is set outside"
            if not _is_ephemeral(int(digits[1] or digits[2])):
                yield Violation(item.offset, f"{item.name} {said}", severity=severity)
    for launch in job.launches:
        for hit in _launch_port(job, launch):
            line = job.lines.place(hit.offset)[0]
            if line not in seen:
                seen.add(line)
                yield hit


def _first_assignments(job: JobDescription) -> list[Assignment]:
    """Return the assignments without those that copy a port to another variable, or export it."""
    ports = [a for a in job.assignments if PORT_NAME.match(a.name)]
    counts = Counter(a.value for a in ports)
    return [a for a in ports if not (counts[a.value] > 1 and job.is_copy(a))]


def _is_rendezvous_port(job: JobDescription, name: str, value: str) -> bool:
    """Return whether the variable reaches a launcher: one called PORT may be that of another server."""
    if job.kind == "script" and not any(a.exported or a.under for a in job.set_values(name)):
        if name not in job.reading.exported and name not in job.used_names:
            return False
    return name.upper() != "PORT" or any(value in a.text for la in job.launches for a in la.call.args)


def _launch_port(job: JobDescription, launch: LauncherCall) -> Iterator[Violation]:
    severity = _severity_of_port(job)
    for name, pattern in (
        ("master_port", r"(?<![\w$])\d+\Z"),
        ("main_process_port", r"(?<![\w$])\d+\Z"),
        ("rdzv_endpoint", r"(?<=:)\d+\Z"),
    ):
        option = launch.option(name)
        found = re.search(pattern, option.value or "") if option else None
        if option and found and found[0] != "0" and "standalone" not in launch.options:
            where = launch.place_of(option.arg, found[0], last=True)
            if not _is_ephemeral(int(found[0][:6])):
                yield Violation(where, f"the port of --{name} is always {found[0]}", severity=severity)
    if launch.option("standalone", "master_port", "main_process_port", "rdzv_endpoint", "config_file") or job.has(
        "PET_MASTER_PORT"
    ):
        return
    if is_torchrun(launch) and job.multi_node and backend(launch) == "static" and launch.srun:
        yield Violation(
            launch.call.offset,
            "no --master_port: torchrun uses 29500 (it does not read MASTER_PORT)",
            severity=severity,
        )
    elif (
        launch.kind in ("deepspeed", "accelerate", "torch.distributed.launch") and not launch.srun and job.shared_nodes
    ):
        several = launch.value("num_gpus", "num_processes", "nproc_per_node")
        alone = several is None and (job.gpus_per_node == 1 or launch.kind == "torch.distributed.launch")
        if several != "1" and not alone and not job.multi_node and not job.has("MASTER_PORT") and not launch.open_ended:
            option = "main_process_port" if launch.kind == "accelerate" else "master_port"
            yield Violation(
                launch.call.offset,
                f"no --{option}: {launch.kind} uses 29500, as every other job on the node does",
                severity=severity,
            )


# ------------------------------------------------------------------------------ the ephemeral range


def _is_ephemeral(number: int) -> bool:
    return EPHEMERAL_START <= number <= EPHEMERAL_END


def ephemeral(job: JobDescription) -> Iterator[Violation]:
    if _standalone(job):
        return
    for item in _first_assignments(job):
        if (
            item.removed
            or item.items
            or not PORT_NAME.match(item.name)
            or not _is_rendezvous_port(job, item.name, item.value)
        ):
            continue
        span = port_range(item.value)
        if span is not None:
            yield from _range_hits(job, f"{item.name} is", item.offset, span)
    for launch in job.launches:
        for name in ("master_port", "main_process_port", "rdzv_endpoint"):
            option = launch.option(name)
            number = (option.value or "").rpartition(":")[2] if option else ""
            drawn = port_range(number) if option and "$" in number else None
            if option and drawn and not any(_is_port_of(job, a, option) for a in job.assignments):
                place = next(
                    (p for a in _value_args(launch, option.arg) for p in _place_of(a, number)), option.arg.offset
                )
                yield from _range_hits(job, f"the port of --{name} is", place, drawn)
            if option and number.isdecimal() and _is_ephemeral(int(number[:6])) and not job.whole_nodes:
                where = launch.place_of(option.arg, number, last=True)
                if not any(a.offset <= where <= a.offset + 40 and PORT_NAME.match(a.name) for a in job.assignments):
                    text = f"the port of --{name} is always {number}, in the ephemeral range"
                    yield Violation(where, text, severity=_severity_of_ephemeral(job))


def _value_args(launch: LauncherCall, arg: Argument) -> list[Argument]:
    index = launch.call.args.index(arg)
    return list(launch.call.args[index : index + 2])


def _place_of(arg: Argument, text: str) -> list[int]:
    """Return where the last unresolved part of the word is written: in a variable's value further up, perhaps."""
    index = arg.source.text.rfind(UNRESOLVED_OPEN)
    return [arg.source.where(index)] if index >= 0 and text in arg.text else []


def _is_port_of(job: JobDescription, item: Assignment, option: Option) -> bool:
    return bool(PORT_NAME.match(item.name) and item.value and item.value in (option.value or ""))


def _range_hits(job: JobDescription, what: str, offset: int, span: tuple[int, int]) -> Iterator[Violation]:
    low, high = span
    inside = min(high, EPHEMERAL_END) - max(low, EPHEMERAL_START) + 1
    if low == high and _is_ephemeral(low) and not job.whole_nodes:
        yield Violation(offset, f"{what} always {low}, in the ephemeral range", severity=_severity_of_ephemeral(job))
    elif high > 65535 and low > 1024:
        yield Violation(
            offset,
            f"{what} chosen from {low} to {high}, but the last port is 65535",
            why="A larger number is refused.",
            severity="warning",
        )
    elif inside > SMALL_PART * (high - low + 1) and low < high and not job.whole_nodes:
        yield Violation(offset, f"{what} chosen from {low} to {high}, in the ephemeral range")
    elif low < 1024 and low < high:
        seldom = 1024 - low < SMALL_PART * (high - low + 1)
        yield Violation(
            offset,
            f"{what} perhaps below 1024, which only root may use",
            why="Binding fails with 'Permission denied'.",
            severity="note" if seldom else "warning",
        )


_RANGES = (
    lazy_regex(r"shuf\s.*?-i\s*(\d{1,5})-(\d{1,5})"),
    lazy_regex(r"seq\s+(\d{1,5})\s+(\d{1,5})[^|]*\|\s*(?:shuf|sort\s+-R)"),
    lazy_regex(r"rand(?:int|range)\(\s*(\d{1,5})\s*,\s*(\d{1,5})\s*\)"),
    lazy_regex(r"seq\s+(\d{1,5})\s+(\d{1,5})\)?.*\bshuf\b"),
)


def port_range(value: str) -> tuple[int, int] | None:
    """Return the smallest and the largest value that an expression can have; None if that is unknown."""
    if re.search(r"\.bind\(|getsockname|free.?port", value, re.IGNORECASE):
        return None
    for pattern in _RANGES:
        found = pattern.search(value)
        if found:
            return int(found[1]), int(found[2])
    text = value.strip().strip("\"'")
    if found := re.fullmatch(r"\$\(\((.*)\)\)|\$\[(.*)\]|\$\(\s*expr\s+(.*)\)", text, re.DOTALL):
        return _Arithmetic(found[1] or found[2] or found[3]).value()
    if found := re.fullmatch(r"(\d{1,4})\$\{SLURM_(?:ARRAY_)?JOB_?ID:\s*-(\d)\}", text):
        return int(found[1] + "0" * int(found[2])), int(found[1] + "9" * int(found[2]))
    if found := re.fullmatch(r"\d{2,5}|\$\{\w+:?[-=](\d{2,5})\}", text):
        number = int(found[1] or found[0])
        return number, number
    return (0, 32767) if text == "$RANDOM" else None


MAX_TOKENS = 60
_UNBOUNDED = 10**12


class _Arithmetic:
    """Bounds of an arithmetic expression of numbers, RANDOM, and job ids or other unknown counts."""

    TOKEN = lazy_regex(
        r"\s*(?:10#(?=\$)|(10#)?(\d{1,9})|\$?\{?(RANDOM)\}?|(?P<cut>\$\{\w+:\s*-\d\}|\$\([^()]*(?:\([^()]*\)[^()]*)*\))|(?P<name>\$?\{?[A-Za-z_]\w*\}?)"
        r"|(?P<op>\\?[-+*/%()]))"
    )

    def __init__(self, text: str) -> None:
        self.tokens: list[str | tuple[int, int]] = []
        i = 0
        text = text.strip()
        while i < len(text):
            found = self.TOKEN.match(text, i)
            if found is None or len(self.tokens) > MAX_TOKENS:
                self.tokens = []
                return
            i = found.end()
            self._add(found)
        self.i = 0

    def _add(self, found: re.Match[str]) -> None:
        if found[2]:
            self.tokens.append((int(found[2]), int(found[2])))
        elif found[3]:
            self.tokens.append((0, 32767))
        elif found["cut"]:
            digits = re.search(r":\s*-(\d)\}|tail\s+-c\s*(\d)|cut\s+-c\s*(\d)-(\d)", found["cut"])
            count = int(digits[1] or digits[2] or 0) if digits else 0
            if digits and digits[2] and not re.search(r"echo\s+-n|printf", found["cut"]):
                count -= 1  # the line break is a character, too
            count = int(digits[4]) - int(digits[3]) + 1 if digits and digits[4] else count
            self.tokens.append((0, 10**count - 1 if count > 0 else _UNBOUNDED))
        elif found["name"]:
            self.tokens.append((0, _UNBOUNDED))
        elif found["op"]:
            self.tokens.append(found["op"].lstrip("\\"))

    def value(self) -> tuple[int, int] | None:
        """Return the bounds; None if the expression is not understood or has no upper bound."""
        if not self.tokens:
            return None
        try:
            found = self._sum()
        except (IndexError, TypeError, ZeroDivisionError):
            return None
        return found if self.i == len(self.tokens) and found[1] < _UNBOUNDED // 2 else None

    def _operator(self, *names: str) -> str | None:
        token = self.tokens[self.i] if self.i < len(self.tokens) else None
        if isinstance(token, str) and token in names:
            self.i += 1
            return token
        return None

    def _sum(self) -> tuple[int, int]:
        low, high = self._product()
        while operator := self._operator("+", "-"):
            a, b = self._product()
            low, high = (low + a, high + b) if operator == "+" else (low - b, high - a)
        return low, high

    def _product(self) -> tuple[int, int]:
        low, high = self._atom()
        while operator := self._operator("*", "/", "%"):
            a, b = self._atom()
            if operator == "%":
                low, high = (low, high) if high < a else (0, b - 1)
            elif operator == "*":
                low, high = low * a, min(high * b, _UNBOUNDED)
            else:
                low, high = low // b, high // a
        return low, high

    def _atom(self) -> tuple[int, int]:
        if self._operator("("):
            found = self._sum()
            if not self._operator(")"):
                raise IndexError
            return found
        token = self.tokens[self.i]
        if isinstance(token, str):
            raise TypeError
        self.i += 1
        return token


# ----------------------------------------------------------------------------------------- ids


def port_per_node(job: JobDescription) -> Iterator[Violation]:
    if not job.multi_node:
        return
    drawn = re.compile(r"RANDOM|shuf|\.bind\(|SLURM_(?:NODEID|PROCID|LOCALID)|free.?port", re.IGNORECASE)
    for item in job.assignments:
        # What stands in front of srun, or comes from further up, is expanded once, by the batch shell.
        inside = [c.offset for c in item.under if c.program in ("srun", "pdsh", "clush", "ssh")]
        if inside and min(item.offset, item.source.where(0) if item.value else item.offset) < inside[0]:
            continue
        if PORT_NAME.match(item.name) and under_srun(item.under) and drawn.search(item.value):
            yield Violation(
                item.offset,
                f"{item.name} is chosen on every node separately",
                cure="choose it once, in the batch script. " + PORT_CURE,
            )
    for use in job.uses:
        if use.name == "RANDOM" and use.program in ("torchrun", "python") and under_srun(use.under):
            yield Violation(use.offset, "$RANDOM differs on every node", cure=ID_CURE)


def identity(job: JobDescription) -> Iterator[Violation]:
    if job.whole_nodes:
        return
    for launch in job.launches:
        if launch.kind != "torchrun" or backend(launch) != "c10d" or "standalone" in launch.options:
            continue
        endpoint = launch.value("rdzv_endpoint") or ""
        if not endpoint and job.multi_node:
            continue  # every node meets only itself
        own_port = re.search(r":0\Z|:.*\$", endpoint) or (endpoint and not re.search(r":\d+\Z", endpoint))
        severity: Severity = "note" if own_port or job.is_batch else _severity(job)  # fixed-port reports the collision
        option = launch.option("rdzv_id")
        if option is None:
            if not job.has("PET_RDZV_ID"):
                yield Violation(
                    launch.call.offset, "no --rdzv_id: the default id is 'none' for every job", severity=severity
                )
        elif option.value and "$" not in option.value:
            yield Violation(option.arg.offset, f"the rendezvous id is always {option.value}", severity=severity)


# ----------------------------------------------------------------------------- digits of the job id

OCTAL_WHY = "Bash takes a number that begins with 0 as octal: for a job id that ends in 0089 the script stops with 'value too great for base'."


DATE_PART = lazy_regex(r"\$\([ \t]*date[ \t]+[\"']?\+%([NdHmMSjy])[\"']?[ \t]*\)")


def octal(job: JobDescription) -> Iterator[Violation]:
    """Report the last digits of a job id in arithmetic, which may begin with 0."""
    for found in re.finditer(r"\$\(\(([^\n]*)", job.text):
        inside = found[1]
        cut = re.search(
            r"\$\{SLURM_(?:ARRAY_)?JOB_?ID:(?:[ \t]+-\d+|[ \t]*\([ \t]*-\d+[ \t]*\))\}|\$\([^)]*SLURM_JOB_?ID[^)]*\|\s*(?:tail\s+-c|cut\s+-c)[^)]*\)",
            inside,
        )
        date = DATE_PART.search(inside)
        if date and "10#" not in inside[: date.start()] and not job.in_comment(found.start()):
            yield Violation(
                found.start(),
                f"{date[0]} may begin with 0, and 08 and 09 are refused as octal numbers",
                cure=f"10#{date[0]}, or +%-{date[1]} without the zero",
            )
        if cut and "10#" not in inside[: cut.start()] and not job.in_comment(found.start()):
            yield Violation(
                found.start(),
                "the last digits of the job id may begin with 0, and are then read as octal",
                cure="$((10000 + 10#${SLURM_JOB_ID: -4}))",
            )


# ------------------------------------------------------------------- ports in variables and options

PORT_VARIABLE = lazy_regex(r"(?:MASTER|RDZV|MAIN_PROCESS|RENDEZVOUS|DIST)_?PORT\Z", re.IGNORECASE)
JOB_NUMBER = lazy_regex(
    r"\$\{?(?:SLURM_JOB_?ID|PBS_JOBID|LSB_JOBID)\}?|\$\(\(\s*(?:\d+\s*\+\s*\$?\{?SLURM_JOB_?ID\}?|\$?\{?SLURM_JOB_?ID\}?\s*\+\s*\d+)\s*\)\)"
    r"|\$\(\s*expr\s+(?:\d+\s+\+\s+\$\{?SLURM_JOB_?ID\}?|\$\{?SLURM_JOB_?ID\}?\s+\+\s+\d+)\s*\)|\d\$\{?SLURM_JOB_?ID\}?"
)


def job_as_port(job: JobDescription) -> Iterator[Violation]:
    """Report the number of the job as a port: most numbers are above the last port."""
    why = "The last port is 65535, and the numbers of jobs are soon above it."
    cure = "$((10000 + SLURM_JOB_ID % 20000))"
    for item in job.assignments:
        if PORT_VARIABLE.match(item.name) and JOB_NUMBER.fullmatch(item.value) and not item.removed:
            yield Violation(item.offset, f"{item.name}={item.value} is the number of the job", why=why, cure=cure)
    for launch in job.launches:
        option = launch.option("master_port", "main_process_port")
        if option and JOB_NUMBER.fullmatch(option.value or ""):
            yield Violation(
                option.arg.offset,
                f"{option.written}={option.value} is the number of the job",
                why=why,
                cure=cure,
            )


LAST_PORT, FIRST_FREE_PORT = 65535, 1024


def ports_of_options(job: JobDescription) -> Iterator[Violation]:
    """Report a port of a launcher that does not exist, or that only root may use."""
    for launch in job.launches:
        for name in ("master_port", "main_process_port", "rdzv_endpoint"):
            option = launch.option(name)
            digits = re.search(r"(?:\A|:)(\d{1,7})\Z", (option.value or "") if option else "")
            if option is None or digits is None:
                continue
            port = int(digits[1])
            shown = option.written
            if port > LAST_PORT:
                yield Violation(
                    option.arg.offset,
                    f"{shown}: {port} is above the last port, {LAST_PORT}",
                    cure="a port from 10000 to 32000",
                )
            elif 1 < port < FIRST_FREE_PORT:
                yield Violation(
                    option.arg.offset,
                    f"{shown}: only root may use port {port}",
                    cure="a port from 10000 to 32000",
                    severity="warning",
                )
