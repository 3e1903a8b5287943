"""A diagnosis for the terminal: the cause, where, what to do, the lines that show it; then what else is worth knowing."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

from allranks.diagnose.records import Clocks, Diagnosis, Evidence, Finding, Health

MORE = 2  # further causes that are shown in full; the rest by name
LABEL, LINES = 12, 3  # width of the labels; lines of the terminal that one line of a log may take
SHOWN_EVIDENCE, SHOWN_BENIGN, SHOWN_PROBLEMS = 3, 8, 12


def show(console: Console, diagnosis: Diagnosis) -> None:
    """Print a diagnosis."""
    if diagnosis.findings:
        _causes(console, diagnosis.findings)
    else:
        told = (
            "No failure found in these logs."
            if diagnosis.readable
            else "Nothing here could be read, so nothing can be said."
        )
        console.print(Text(told, style="bold green" if diagnosis.readable else "bold yellow"))
    _health(console, diagnosis.health, brief=bool(diagnosis.findings))
    _story(console, diagnosis.story, diagnosis.clocks)
    _benign(console, diagnosis)
    _problems(console, diagnosis)
    read = f"{diagnosis.files} file{'s' if diagnosis.files != 1 else ''}, {_size(diagnosis.bytes_read)} read"
    console.print(Text(read, style="dim"))


def _causes(console: Console, findings: list[Finding]) -> None:
    for number, finding in enumerate(findings[: 1 + MORE]):
        if number:
            console.print(Text("or perhaps" if number == 1 else "or", style="dim"))
        _finding(console, finding, first=number == 0)
    rest = findings[1 + MORE :]
    if rest:
        console.print(Text("less likely: " + ", ".join(f"{f.title} ({f.id})" for f in rest), style="dim"))


def _finding(console: Console, finding: Finding, *, first: bool) -> None:
    title = Text.assemble(
        (finding.title, "bold red" if first else "bold"),
        ("  ", ""),
        (f"{finding.id}, {100 * finding.confidence:.0f} % sure", "dim"),
    )
    console.print(title, soft_wrap=True)
    _item(console, "where", _where(finding))
    _item(console, "why", finding.cause)
    _item(console, "do", finding.fix)
    for evidence in finding.evidence[: SHOWN_EVIDENCE if first else 2]:
        _line(console, evidence)
    for text in finding.against:
        _item(console, "against", text)
    _item(console, "to be sure", finding.next_test)
    console.print()


def _item(console: Console, label: str, text: str, style: str = "") -> None:
    """A label and its text, wrapped beside it; without blanks at the ends of lines, so that it can be piped and copied."""
    for i, part in enumerate(textwrap.wrap(text, _room(console)) or [""]):
        console.print(
            Text.assemble((f"  {'' if i else label:<{LABEL}}", "cyan"), (part, style)), soft_wrap=True, highlight=False
        )


def _room(console: Console) -> int:
    return max(console.width - LABEL - 2, 30)


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


def _line(console: Console, evidence: Evidence) -> None:
    """Where a line stands, and what it says, as far as `LINES` lines hold it."""
    _item(console, "seen", f"{evidence.file}:{evidence.line}", "dim")
    parts = textwrap.wrap(evidence.text, _room(console))
    if len(parts) > LINES:
        parts = [*parts[: LINES - 1], parts[LINES - 1][: _room(console) - 4] + " ..."]
    for part in parts:
        _item(console, "", part, "yellow")


def _health(console: Console, health: Health, *, brief: bool) -> None:
    said = []
    if health.world_size or health.ranks_seen:
        ranks = health.world_size or len(health.ranks_seen)
        said.append(f"{ranks} rank{'s' if ranks > 1 else ''}")
    if health.hosts:
        said.append(
            f"{len(health.hosts)} host{'s' if len(health.hosts) > 1 else ''} ({', '.join(health.hosts[:6])}{', ...' if len(health.hosts) > 6 else ''})"
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
        _wrapped(console, "The job: " + "; ".join(said) + ".")
    for advice in health.advice:
        _wrapped(console, f"  note: {advice}.")


def _story(console: Console, story: list[str], clocks: Clocks) -> None:
    if len(story) < 2:
        return
    console.print(Text("In order of time:", style="bold"))
    for line in story:
        _wrapped(console, f"  {line}", hang=23)
    if clocks.note:
        _wrapped(console, f"  note: {clocks.note}.")


def _benign(console: Console, diagnosis: Diagnosis) -> None:
    if not diagnosis.benign:
        return
    console.print(Text("Harmless:", style="bold"))
    for item in diagnosis.benign[:SHOWN_BENIGN]:
        times = f" ({item.count} times)" if item.count > 1 else ""
        _wrapped(console, f"  {item.evidence.text[:100]}{times}: {item.why}", style="dim")


def _problems(console: Console, diagnosis: Diagnosis) -> None:
    if not diagnosis.problems:
        return
    console.print(Text("Not read, or only in part:", style="bold"))
    for problem in diagnosis.problems[:SHOWN_PROBLEMS]:
        _wrapped(console, f"  {problem.file}: {problem.text}")
    if len(diagnosis.problems) > SHOWN_PROBLEMS:
        console.print(Text(f"  and {len(diagnosis.problems) - SHOWN_PROBLEMS} more (--json has all)"))


def _wrapped(console: Console, text: str, *, hang: int = 4, style: str = "") -> None:
    indent = " " * (len(text) - len(text.lstrip()))
    for part in textwrap.wrap(text.strip(), console.width, initial_indent=indent, subsequent_indent=" " * hang):
        console.print(Text(part, style), soft_wrap=True, highlight=False)


def _size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
