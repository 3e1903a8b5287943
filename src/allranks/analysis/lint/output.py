"""Show findings on a terminal by file and line, or as workflow commands of GitHub Actions; repair files."""

from __future__ import annotations

import difflib
import os
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from allranks.analysis.lint.files import MAX_BYTES
from allranks.analysis.lint.records import Edit, LintFinding, LintReport
from allranks.errors import RequestError
from allranks.utils.filesystem import write_error
from allranks.utils.inputs import STDIN_NAME, read_input
from allranks.utils.redaction import redact

# most severe first
STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
INDENT = 16
MAX_WIDTH = 120


def show_report(console: Console, report: LintReport, hidden: int = 0) -> None:
    """Print the findings line by line, most severe first; cause, fix and source are printed once per rule and file.

    Args:
        hidden: findings below the level that is shown.
    """
    for name in report.files:
        findings = [f for f in report.findings if f.file == name]
        if findings:
            _print(console, Text(name, style="bold underline"))
            _show_file(console, findings)
    for item in report.allowed:
        _print(console, Text(f"allowed  {item.file}:{item.line}  {item.message} [{item.id}]", style="dim"))
    for problem in report.unread:
        place = f"{problem.file}:{problem.line}" if problem.line else problem.file
        _print(console, Text.assemble(("not read  ", "bold red"), f"{place}: {problem.why}"))
    more = f" ({hidden} note{'s' * (hidden > 1)} with --level note)" if hidden else ""
    _print(console, Text(summary(report) + more))


def _show_file(console: Console, findings: list[LintFinding]) -> None:
    groups: dict[tuple[str, str], list[LintFinding]] = {}
    for item in findings:
        groups.setdefault((item.id, item.message), []).append(item)
    explained: set[tuple[str, str, str]] = set()
    quoted = 0
    for items in sorted(groups.values(), key=lambda items: (items[0].line, [*STYLES].index(items[0].severity))):
        first = items[0]
        _headline(console, items, quote=first.line != quoted)
        quoted = first.line
        why = (first.id, first.why, first.cure)
        if why in explained:
            _block(console, "", "cause and fix: see above", "dim")
        else:
            explained.add(why)
            _block(console, "why   ", first.why, "")
            _block(console, "cure  ", first.cure, "green")
            _block(console, "from  ", first.source, "dim")
        console.print()


def _headline(console: Console, items: list[LintFinding], quote: bool) -> None:
    """Print the headline. `quote`: include the line of the script, which is printed once for several findings."""
    first = items[0]
    lines = _wrapped(console, f"{first.message} [{first.id}]")
    head = Text.assemble(
        (f"{first.line:>5}  ", "bold"), (f"{first.severity:<9}", STYLES[first.severity]), (lines[0], "bold")
    )
    _print(console, head)
    for line in lines[1:]:
        _print(console, Text(" " * INDENT + line, style="bold"))
    if quote and first.text and first.text not in first.message:
        _print(console, Text(" " * INDENT + _cut(console, "> " + first.text), style="dim"))
    if len(items) > 1:
        numbers = list(dict.fromkeys(str(i.line) for i in items[1:] if i.line != first.line))
        if numbers:
            shown = ", ".join(numbers[:10]) + (" and more" if len(numbers) > 10 else "")
            _block(console, "", f"also line{'s' * (len(numbers) > 1)} {shown}", "dim")


def _width(console: Console) -> int:
    return max(24, min(console.width, MAX_WIDTH) - INDENT)


def _cut(console: Console, text: str) -> str:
    width = _width(console)
    return text if len(text) <= width else text[: width - 3] + "..."


def _wrapped(console: Console, text: str, less: int = 0) -> list[str]:
    return textwrap.wrap(text, _width(console) - less, break_on_hyphens=False) or [""]


def _block(console: Console, label: str, text: str, style: str) -> None:
    """Print indented text with its label before the first line."""
    for number, line in enumerate(_wrapped(console, text, len(label))):
        front = label if number == 0 else " " * len(label)
        _print(console, Text.assemble(" " * INDENT, (front, "dim"), (line, style)))


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)


def summary(report: LintReport) -> str:
    """Return ``2 errors, 1 warning in 3 files; 1 file not read``; files not read at all are not among the 3 files."""
    counts = Counter(f.severity for f in report.findings)
    parts = [f"{counts[s]} {s}{'s' * (counts[s] > 1)}" for s in ("error", "warning", "note") if counts[s]]
    unread = {u.file for u in report.unread if u.line is None}
    incomplete = {u.file for u in report.unread} - unread
    read = len([name for name in report.files if name not in unread])
    sentences = [f"{', '.join(parts) or 'no findings'} in {_files(read)}"] if read else []
    if incomplete:
        sentences.append(f"{_files(len(incomplete))} not read completely")
    if unread:
        sentences.append(f"{_files(len(unread))} not read")
    return "; ".join(sentences)


def _files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


# https://docs.github.com/actions/reference/workflow-commands-for-github-actions
GITHUB_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


def github_commands(report: LintReport) -> Iterator[str]:
    """Yield one workflow command per finding and per unread file, then a summary that the log shows."""
    for finding in report.findings:
        text = f"{finding.message}. {finding.why} Fix: {finding.cure}"
        place = {
            "file": finding.file,
            "line": finding.line,
            "col": finding.column,
            "title": f"allranks lint: {finding.id}",
        }
        yield _github_command(GITHUB_LEVELS[finding.severity], place, text)
    for problem in report.unread:
        line = {"line": problem.line} if problem.line else {}
        yield _github_command("error", {"file": problem.file, **line, "title": "allranks lint: not read"}, problem.why)
    yield summary(report)


def _github_command(name: str, properties: dict[str, Any], message: str) -> str:
    shown = ",".join(f"{key}={_github_escape(str(value), ':,')}" for key, value in properties.items())
    return f"::{name} {shown}::{_github_escape(message)}"


def _github_escape(text: str, more: str = "") -> str:
    """Return the text with the characters escaped that end a command or a property."""
    for char in "%\r\n" + more:
        text = text.replace(char, f"%{ord(char):02X}")
    return text


class Repair(msgspec.Struct, frozen=True):
    """The repaired content of one file. `path` is None for standard input, which cannot be written."""

    path: Path | None
    before: bytes
    after: bytes
    count: int
    diff: str
    """Unified diff, without secrets."""


def plan_repairs(report: LintReport) -> list[Repair]:
    """Return the repairs of every file that has any; files that are not valid UTF-8 are left alone."""
    repairs = []
    for name in dict.fromkeys(report.files):
        findings = [f for f in report.findings if f.file == name and f.fix]
        if not findings or name == STDIN_NAME:
            continue
        try:
            before = read_input(name, MAX_BYTES)
            text = before.decode("utf-8")
        except (OSError, ValueError):
            continue
        after = apply_edits(text, [edit for finding in findings for edit in finding.fix])
        repairs.append(Repair(Path(name), before, after.encode("utf-8"), len(findings), _diff(name, text, after)))
    return repairs


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """Return the text with all edits; the same edit counts once, and of two that overlap the first one is kept."""
    pieces, at = [], 0
    for edit in sorted(set(edits), key=lambda e: (e.start, e.end)):
        if edit.start >= at:
            pieces += [text[at : edit.start], edit.text]
            at = edit.end
    return "".join([*pieces, text[at:]])


def _diff(name: str, before: str, after: str) -> str:
    old, new = redact(before).splitlines(), redact(after).splitlines()
    path = name.lstrip("/")
    return "\n".join(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}", lineterm=""))


def write_repair(repair: Repair) -> None:
    """Write the repaired file in one step.

    Raises:
        RequestError: the file has changed since the repair was planned.
        AllranksError: it cannot be written.
    """
    if repair.path is None:
        return
    path = repair.path.resolve()
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        if path.read_bytes() != repair.before:
            raise RequestError(f"{repair.path} has changed since it was read; nothing was written to it")
        info = path.stat()
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(repair.after)
            file.flush()
            os.fsync(file.fileno())
            with suppress(PermissionError):
                os.fchown(file.fileno(), info.st_uid, info.st_gid)
            os.fchmod(file.fileno(), info.st_mode & 0o7777)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise write_error(repair.path, error, "another FILE") from None
