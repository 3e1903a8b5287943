"""A diagnosis for the terminal: the cause, where, what to do, the lines that show it; then what else is worth knowing."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from allranks.diagnose.records import Diagnosis, Evidence, Finding, Health

MORE = 2  # further causes that are shown in full; the rest by name
LINE = 300  # characters of a log line
SHOWN_BENIGN, SHOWN_PROBLEMS = 8, 12


def show(console: Console, diagnosis: Diagnosis) -> None:
    """Print a diagnosis."""
    if diagnosis.findings:
        _causes(console, diagnosis.findings)
    else:
        console.print(Text("No failure found in these logs.", style="bold green"))
    _health(console, diagnosis.health, brief=bool(diagnosis.findings))
    _story(console, diagnosis.story)
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
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("where", Text(_where(finding)))
    table.add_row("why", Text(finding.cause))
    table.add_row("do", Text(finding.fix))
    console.print(Padding(table, (0, 0, 0, 2)))
    for evidence in finding.evidence:
        _line(console, evidence)
    extra = Table.grid(padding=(0, 2))
    extra.add_column(style="cyan", no_wrap=True)
    extra.add_column(overflow="fold")
    for text in finding.against:
        extra.add_row("against", Text(text))
    extra.add_row("to be sure", Text(finding.next_test))
    console.print(Padding(extra, (0, 0, 0, 2)))
    console.print()


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
    text = evidence.text if len(evidence.text) <= LINE else evidence.text[:LINE] + " ..."
    console.print(
        Text.assemble("  ", (f"{evidence.file}:{evidence.line}", "dim"), "  ", (text, "yellow")), soft_wrap=True
    )


def _health(console: Console, health: Health, *, brief: bool) -> None:
    said = []
    if health.world_size or health.ranks_seen:
        said.append(f"{health.world_size or len(health.ranks_seen)} ranks")
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
        console.print(Text("The job: " + "; ".join(said) + "."), soft_wrap=True)
    for advice in health.advice:
        console.print(Text(f"  note: {advice}."), soft_wrap=True)


def _story(console: Console, story: list[str]) -> None:
    if len(story) < 2:
        return
    console.print(Text("In order of time:", style="bold"))
    for line in story:
        console.print(Text(f"  {line}"), soft_wrap=True)


def _benign(console: Console, diagnosis: Diagnosis) -> None:
    if not diagnosis.benign:
        return
    console.print(Text("Harmless:", style="bold"))
    for item in diagnosis.benign[:SHOWN_BENIGN]:
        times = f" ({item.count} times)" if item.count > 1 else ""
        console.print(Text(f"  {item.evidence.text[:100]}{times}: {item.why}", style="dim"), soft_wrap=True)


def _problems(console: Console, diagnosis: Diagnosis) -> None:
    if not diagnosis.problems:
        return
    console.print(Text("Not read, or only in part:", style="bold"))
    for problem in diagnosis.problems[:SHOWN_PROBLEMS]:
        console.print(Text(f"  {problem.file}: {problem.text}"), soft_wrap=True)
    if len(diagnosis.problems) > SHOWN_PROBLEMS:
        console.print(Text(f"  and {len(diagnosis.problems) - SHOWN_PROBLEMS} more (--json has all)"))


def _size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
