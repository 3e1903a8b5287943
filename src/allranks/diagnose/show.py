"""A diagnosis for the terminal: the cause, where, what to do, the lines that show it; then what else is worth knowing."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

import click

from allranks.diagnose.records import Clocks, Diagnosis, Evidence, Finding, Health

MORE = 2  # further causes that are shown in full; the rest by name
LABEL, LINES = 12, 3  # width of the labels; lines of the terminal that one line of a log may take
PIPED = 160  # width where there is no terminal
SHOWN_EVIDENCE, SHOWN_BENIGN, SHOWN_PROBLEMS = 3, 8, 12


def show(diagnosis: Diagnosis) -> None:
    """Print a diagnosis."""
    width = shutil.get_terminal_size(fallback=(PIPED, 24)).columns
    for line in lines(diagnosis, width):
        click.echo(line)


def lines(diagnosis: Diagnosis, width: int) -> Iterator[str]:
    """The lines of a diagnosis, with the terminal's codes for colours (click takes them out where there is no terminal)."""
    if diagnosis.findings:
        yield from _causes(diagnosis.findings, width)
    elif not diagnosis.bytes_read and diagnosis.readable:
        empty = "This log is empty" if diagnosis.files == 1 else "These logs are empty"
        yield click.style(f"{empty}: nothing was written, so nothing can be said.", "yellow", bold=True)
    elif diagnosis.readable:
        yield click.style("No failure found in these logs.", "green", bold=True)
    else:
        yield click.style("Nothing here could be read, so nothing can be said.", "yellow", bold=True)
    yield from _health(diagnosis.health, width, brief=bool(diagnosis.findings))
    yield from _story(diagnosis.story, diagnosis.clocks, width)
    yield from _benign(diagnosis, width)
    yield from _problems(diagnosis, width)
    read = f"{diagnosis.files} file{'s' if diagnosis.files != 1 else ''}, {_size(diagnosis.bytes_read)} read"
    yield click.style(read, dim=True)


def _causes(findings: list[Finding], width: int) -> Iterator[str]:
    for number, finding in enumerate(findings[: 1 + MORE]):
        if number:
            yield click.style("or perhaps" if number == 1 else "or", dim=True)
        yield from _finding(finding, width, first=number == 0)
    rest = findings[1 + MORE :]
    if rest:
        yield from _wrapped("less likely: " + ", ".join(f"{f.title} ({f.id})" for f in rest), width, dim=True)


def _finding(finding: Finding, width: int, *, first: bool) -> Iterator[str]:
    title = click.style(finding.title, "red" if first else None, bold=True)
    yield f"{title}  " + click.style(f"{finding.id}, {100 * finding.confidence:.0f} % sure", dim=True)
    yield from _item("where", _where(finding), width)
    yield from _item("why", finding.cause, width)
    yield from _item("do", finding.fix, width)
    for evidence in finding.evidence[: SHOWN_EVIDENCE if first else 2]:
        yield from _seen(evidence, width)
    for text in finding.against:
        yield from _item("against", text, width)
    yield from _item("to be sure", finding.next_test, width)
    yield ""


def _item(label: str, text: str, width: int, **style: object) -> Iterator[str]:
    """A label and its text, wrapped beside it; without blanks at the ends of lines, so that it can be piped and copied."""
    for i, part in enumerate(textwrap.wrap(text, _room(width), break_on_hyphens=False) or [""]):
        shown = click.style(part, **style) if style else part  # type: ignore[arg-type]
        yield click.style(f"  {'' if i else label:<{LABEL}}", "cyan") + shown


def _room(width: int) -> int:
    return max(width - LABEL - 2, 30)


def _where(finding: Finding) -> str:
    if finding.rank is None and finding.host is None:
        return (
            f"no rank or host stands out in {finding.count} lines"
            if finding.count > 1
            else "the line does not say which rank or host"
        )
    rank = f"rank {finding.rank}" if finding.rank is not None else ""
    host = f"host {finding.host}" if finding.host else ""
    times = f" ({finding.count} such lines)" if finding.count > 1 else ""
    return " on ".join(part for part in (rank, host) if part) + times


def _seen(evidence: Evidence, width: int) -> Iterator[str]:
    """Where a line stands, and what it says, as far as `LINES` lines hold it."""
    yield click.style(f"  {'seen':<{LABEL}}", "cyan") + click.style(
        f"{evidence.file}:{evidence.line}", dim=True
    )  # in one piece, to be copied
    parts = textwrap.wrap(evidence.text, _room(width))
    if len(parts) > LINES:
        parts = [*parts[: LINES - 1], parts[LINES - 1][: _room(width) - 4] + " ..."]
    for part in parts:
        yield from _item("", part, width, fg="yellow")


def _health(health: Health, width: int, *, brief: bool) -> Iterator[str]:
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
    said += [f"{name} {', '.join(found[:3])}" for name, found in health.versions.items()]
    if not brief and health.progressed:
        said.append("training went on")
    if said:
        yield from _wrapped("The job: " + "; ".join(said) + ".", width)
    for advice in health.advice:
        yield from _wrapped(f"  note: {advice}.", width)


def _story(story: list[str], clocks: Clocks, width: int) -> Iterator[str]:
    if len(story) < 2:
        return
    yield click.style("In order of time:", bold=True)
    for line in story:
        yield from _wrapped(f"  {line}", width, hang=23)
    if clocks.note:
        yield from _wrapped(f"  note: {clocks.note}.", width)


def _benign(diagnosis: Diagnosis, width: int) -> Iterator[str]:
    if not diagnosis.benign:
        return
    yield click.style("Harmless:", bold=True)
    for item in diagnosis.benign[:SHOWN_BENIGN]:
        times = f" ({item.count} times)" if item.count > 1 else ""
        yield from _wrapped(f"  {_short(item.evidence.text)}{times}: {item.why}", width, dim=True)


def _short(text: str) -> str:
    return textwrap.shorten(text, 100, placeholder=" ...") if len(text) > 100 else text


def _problems(diagnosis: Diagnosis, width: int) -> Iterator[str]:
    if not diagnosis.problems:
        return
    yield click.style("Not read, or only in part:", bold=True)
    for problem in diagnosis.problems[:SHOWN_PROBLEMS]:
        yield from _wrapped(f"  {problem.file}: {problem.text}", width)
    if len(diagnosis.problems) > SHOWN_PROBLEMS:
        yield f"  and {len(diagnosis.problems) - SHOWN_PROBLEMS} more (--json has all)"


def _wrapped(text: str, width: int, *, hang: int = 4, dim: bool = False) -> Iterator[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    # paths and names of hosts stay in one piece, to be copied
    wrapper = textwrap.TextWrapper(
        width, initial_indent=indent, subsequent_indent=" " * hang, break_on_hyphens=False, break_long_words=False
    )
    for part in wrapper.wrap(text.strip()):
        yield click.style(part, dim=True) if dim else part


def _size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
