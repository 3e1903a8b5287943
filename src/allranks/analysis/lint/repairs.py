"""Repair what is safe to repair: quotes, a blank before ], `set -o pipefail`. Nothing else of a file changes.

A repair is planned on the file's bytes, shown as a diff, and written only if the file still has these bytes. The file keeps its
mode, its line ends, and its place behind a symbolic link.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from allranks.analysis.lint.files import MAX_BYTES
from allranks.analysis.lint.records import Edit, LintFinding, LintReport
from allranks.errors import RequestError
from allranks.utils.filesystem import write_error
from allranks.utils.inputs import STDIN_NAME, read_input
from allranks.utils.redaction import redact


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
    found = []
    for name in dict.fromkeys(report.files):
        findings = [f for f in report.findings if f.file == name and f.fix]
        if not findings or name == STDIN_NAME:
            continue
        try:
            before = read_input(name, MAX_BYTES)
            text = before.decode("utf-8")
        except (OSError, ValueError):
            continue
        if any(not _still_there(text, finding) for finding in findings):
            continue
        after = apply_edits(text, [edit for finding in findings for edit in finding.fix])
        found.append(Repair(Path(name), before, after.encode("utf-8"), len(findings), _diff(name, text, after)))
    return found


def _still_there(text: str, finding: LintFinding) -> bool:
    """Return whether the file still has the line that the finding quotes."""
    lines = text.split("\n")
    return finding.line <= len(lines) and redact(lines[finding.line - 1].strip())[:300] == finding.text


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """Return the text with all edits; the same edit counts once, and of two that overlap the first one is kept."""
    pieces, at = [], 0
    for edit in sorted(set(edits), key=lambda e: (e.start, e.end)):
        if edit.start >= at:
            pieces += [text[at : edit.start], edit.text]
            at = edit.end
    return "".join([*pieces, text[at:]])


def _diff(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        redact(before).splitlines(),
        redact(after).splitlines(),
        f"a/{name.lstrip('/')}",
        f"b/{name.lstrip('/')}",
        lineterm="",
    )
    return "\n".join(lines)


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
        found = path.stat()
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(repair.after)
            file.flush()
            os.fsync(file.fileno())
            with suppress(PermissionError):
                os.fchown(file.fileno(), found.st_uid, found.st_gid)
            os.fchmod(file.fileno(), found.st_mode & 0o7777)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise write_error(repair.path, error, "another FILE") from None
