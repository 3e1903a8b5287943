"""Print a diagnosis on a terminal: cause, place, fix and evidence, then other facts about the job."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

import click

from allranks.analysis.diagnose.known_failures import KNOWN_FAILURES
from allranks.analysis.diagnose.records import (
    EMPTY_FILE,
    ClockOffsets,
    Diagnosis,
    DiagnosisFinding,
    JobHealth,
    LastGoodRun,
    LogEvidence,
    UnexplainedFailure,
    place,
)
from allranks.utils.text import format_bytes, printable

MORE_CAUSES = 2  # number of further causes shown in full; the others by title only
LABEL_WIDTH, MAX_EVIDENCE_LINES = 12, 3  # width of the labels; terminal lines per log line
PIPED_WIDTH = 160  # width if there is no terminal
SHOWN_EVIDENCE, SHOWN_BENIGN, SHOWN_PROBLEMS, SHOWN_CHANGES = 3, 8, 12, 12


def _style(text: str, *args: Any, **options: Any) -> str:
    """Return text with a colour or weight, and without control codes of its own: it may quote a log or a file name."""
    return click.style(printable(text), *args, **options)


def show_diagnosis(diagnosis: Diagnosis) -> None:
    """Print a diagnosis."""
    width = shutil.get_terminal_size(fallback=(PIPED_WIDTH, 24)).columns
    for line in diagnosis_lines(diagnosis, width):
        click.echo(printable(line, styled=True))


def diagnosis_lines(diagnosis: Diagnosis, width: int) -> Iterator[str]:
    """Yield the lines of a diagnosis with colour codes (click removes them if there is no terminal)."""
    if diagnosis.summary:
        yield _style(diagnosis.summary, "red", bold=True)  # not wrapped: one line for a pager
        yield ""
    if diagnosis.findings:
        yield from _causes(diagnosis.findings, width)
    elif not diagnosis.bytes_read and diagnosis.readable:
        empty = "This log is empty" if diagnosis.files == 1 else "These logs are empty"
        yield _style(f"{empty}: there is nothing to diagnose.", "yellow", bold=True)
    elif diagnosis.unexplained is not None:
        yield from _unexplained(diagnosis.unexplained, width)
    elif diagnosis.readable:
        yield from _no_failure(diagnosis, width)
    else:
        yield _style("None of these files could be read, so there is no diagnosis.", "yellow", bold=True)
    yield from _changes(diagnosis.last_good_run, width)
    yield from _health(diagnosis.health, width, brief=diagnosis.verdict != "healthy")
    yield from _timeline(diagnosis.story, diagnosis.clocks, width)
    yield from _benign(diagnosis, width)
    yield from _problems(diagnosis, width)
    read = f"{diagnosis.files} file{'s' if diagnosis.files != 1 else ''}, {format_bytes(diagnosis.bytes_read)} read"
    yield _style(read, dim=True)


EMITTER_NAMES = {
    "kernel": "the kernel",
    "nccl": "NCCL",
    "hccl": "HCCL (Ascend)",
    "torch": "torch",
    "slurm_client": "a Slurm command",
    "slurm_daemon": "a Slurm daemon",
    "ray": "Ray",
    "python": "Python",
    "launcher": "the launcher",
    "mpi": "MPI or PMIx",
    "network_library": "the network library",
    "shell": "the shell",
    "program": "the program",
}


def _unexplained(failure: UnexplainedFailure, width: int) -> Iterator[str]:
    """Yield the lines that show a failure which no class explains, and where to look next."""
    yield (
        _style("A failure whose cause is not in these logs", "red", bold=True) + "  " + _style("unexplained", dim=True)
    )
    if failure.rank is not None or failure.host is not None:
        yield from _item("where", place(failure.rank, failure.host), width)
    yield from _item("seen", f"{failure.says}, from {EMITTER_NAMES.get(failure.emitter, failure.emitter)}", width)
    for evidence in failure.evidence[: SHOWN_EVIDENCE + 1]:
        yield from _seen(evidence, width)
    yield from _item("read next", failure.read_next, width)
    yield ""


def _no_failure(diagnosis: Diagnosis, width: int) -> Iterator[str]:
    """Yield the verdict without a failure; it names files that were not read, because they may contain one."""
    missing = len({p.file for p in diagnosis.problems if p.text != EMPTY_FILE})
    if missing:
        files = "1 file was" if missing == 1 else f"{missing} files were"
        said = f"No failure found in the part that was read; {files} not read, or only in part."
        yield from _wrapped(said, width, fg="yellow", bold=True)
    elif diagnosis.verdict == "healthy":
        yield _style("No failure found in these logs; they end in progress or completion.", "green", bold=True)
    else:
        said = (
            "No failure found, but these logs are incomplete: they end neither in progress nor in completion. Whatever "
            "happened next is in a later part, or in the log of another rank or of the scheduler."
        )
        yield from _wrapped(said, width, fg="yellow", bold=True)


def _causes(findings: list[DiagnosisFinding], width: int) -> Iterator[str]:
    for number, finding in enumerate(findings[: 1 + MORE_CAUSES]):
        if number:
            yield _style("or perhaps" if number == 1 else "or", dim=True)
        yield from _finding(finding, width, first=number == 0)
    rest = findings[1 + MORE_CAUSES :]
    if rest:
        yield from _wrapped("less likely: " + ", ".join(f"{f.title} ({f.id})" for f in rest), width, dim=True)


def _finding(finding: DiagnosisFinding, width: int, *, first: bool) -> Iterator[str]:
    title = _style(finding.title, "red" if first else None, bold=True)
    yield f"{title}  " + _style(f"{finding.id}, {100 * finding.confidence:.0f} % sure", dim=True)
    yield from _item("where", _where(finding), width)
    yield from _item("cause", finding.cause, width)
    yield from _item("fix", finding.fix, width)
    for evidence in finding.evidence[: SHOWN_EVIDENCE if first else 2]:
        yield from _seen(evidence, width)
    for text in finding.against:
        yield from _item("against", text, width)
    yield from _item("next test", finding.next_test, width)
    for failure in KNOWN_FAILURES:
        if finding.id in failure.classes:
            yield from _item("more", f"allranks failures {failure.number}", width)
    yield ""


def _item(label: str, text: str, width: int, **style: object) -> Iterator[str]:
    """Yield a label and its wrapped text; without trailing blanks, so that it can be piped and copied."""
    # as `_wrapped`
    parts = textwrap.wrap(printable(text), _room(width), break_on_hyphens=False, break_long_words=False)
    for i, part in enumerate(parts or [""]):
        shown = _style(part, **style) if style else part  # type: ignore[arg-type]
        yield _style(f"  {'' if i else label:<{LABEL_WIDTH}}", "cyan") + shown


def _room(width: int) -> int:
    return max(width - LABEL_WIDTH - 2, 30)


def _where(finding: DiagnosisFinding) -> str:
    if finding.rank is None and finding.host is None:
        return (
            f"no single rank or host in {finding.count} lines"
            if finding.count > 1
            else "the line does not say which rank or host"
        )
    times = f" ({finding.count} such lines)" if finding.count > 1 else ""
    return place(finding.rank, finding.host) + times


def _seen(evidence: LogEvidence, width: int) -> Iterator[str]:
    """Yield the place of a log line and its text, at most `MAX_EVIDENCE_LINES` lines."""
    # not wrapped, so that it can be copied
    yield _style(f"  {'evidence':<{LABEL_WIDTH}}", "cyan") + _style(f"{evidence.file}:{evidence.line}", dim=True)
    parts = textwrap.wrap(evidence.text, _room(width))
    if len(parts) > MAX_EVIDENCE_LINES:
        parts = [*parts[: MAX_EVIDENCE_LINES - 1], parts[MAX_EVIDENCE_LINES - 1][: _room(width) - 4] + " ..."]
    for part in parts:
        yield from _item("", part, width, fg="yellow")


def _changes(good: LastGoodRun | None, width: int) -> Iterator[str]:
    """Yield what changed since the newest successful run."""
    if good is None:
        return
    same = "the same spec" if good.same_spec else "a spec of the same name"
    if not good.changes:
        yield from _wrapped(f"Nothing that is recorded changed since the last good run, {good.run} ({same}).", width)
        return
    yield from _wrapped(f"Changed since the last good run, {good.run} ({same}):", width, bold=True)
    for change in good.changes[:SHOWN_CHANGES]:
        yield from _wrapped(f"  {change.what}: {change.before} -> {change.now}", width)
    if len(good.changes) > SHOWN_CHANGES:
        yield f"  and {len(good.changes) - SHOWN_CHANGES} more (--json has all)"


def _health(health: JobHealth, width: int, *, brief: bool) -> Iterator[str]:
    said = []
    if health.world_size or health.ranks_seen:
        ranks = health.world_size or len(health.ranks_seen)
        said.append(f"{ranks} rank{'s' if ranks > 1 else ''}")
    if health.hosts:
        more = ", ..." if len(health.hosts) > 6 else ""
        said.append(
            f"{len(health.hosts)} host{'s' if len(health.hosts) > 1 else ''} ({', '.join(health.hosts[:6])}{more})"
        )
    if health.transports:
        said.append("data by " + ", ".join(f"{name} ({count})" for name, count in list(health.transports.items())[:5]))
    elif health.network:
        said.append("network " + ", ".join(health.network[:3]))
    if health.channels:
        said.append(f"{health.channels} channels")
    said += [f"{name} {', '.join(versions[:3])}" for name, versions in health.versions.items()]
    if not brief and health.progressed:
        said.append("training continued")
    if said:
        yield from _wrapped("The job: " + "; ".join(said) + ".", width)
    for advice in health.advice:
        yield from _wrapped(f"  note: {advice}.", width)


def _timeline(story: list[str], clocks: ClockOffsets, width: int) -> Iterator[str]:
    if len(story) < 2:
        return
    yield _style("In order of time:", bold=True)
    for line in story:
        yield from _wrapped(f"  {line}", width, hang=23)
    if clocks.note:
        yield from _wrapped(f"  note: {clocks.note}.", width)


def _benign(diagnosis: Diagnosis, width: int) -> Iterator[str]:
    if not diagnosis.benign:
        return
    yield _style("Harmless:", bold=True)
    for item in diagnosis.benign[:SHOWN_BENIGN]:
        times = f" ({item.count} times)" if item.count > 1 else ""
        text = item.evidence.text
        shown = textwrap.shorten(text, 100, placeholder=" ...") if len(text) > 100 else text
        yield from _wrapped(f"  {shown}{times}: {item.why}", width, dim=True)


def _problems(diagnosis: Diagnosis, width: int) -> Iterator[str]:
    if not diagnosis.problems:
        return
    yield _style("Not read, or only in part:", bold=True)
    for problem in diagnosis.problems[:SHOWN_PROBLEMS]:
        yield from _wrapped(f"  {problem.file}: {problem.text}", width)
    if len(diagnosis.problems) > SHOWN_PROBLEMS:
        yield f"  and {len(diagnosis.problems) - SHOWN_PROBLEMS} more (--json has all)"


def _wrapped(text: str, width: int, *, hang: int = 4, **style: Any) -> Iterator[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    # paths and host names are not broken, so that they can be copied
    wrapper = textwrap.TextWrapper(
        width, initial_indent=indent, subsequent_indent=" " * hang, break_on_hyphens=False, break_long_words=False
    )
    for part in wrapper.wrap(printable(text.strip())):
        yield _style(part, **style) if style else part
