"""Report smoke tests: a table for the terminal, smoke.json, and one offline page."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from allranks.analysis.report.html import html_environment
from allranks.lab.smoke.records import FAILED, NOT_REACHED, NOT_TESTABLE, PASSED, FigureRow, SmokeReport, TestResult
from allranks.rundir.files import write_json, write_text_atomic
from allranks.utils.redaction import redact_forms
from allranks.version import __version__

MARKS = {PASSED: "✓", FAILED: "✗", NOT_REACHED: "·", NOT_TESTABLE: "-"}
COLOURS = {PASSED: "green", FAILED: "red", NOT_REACHED: "yellow", NOT_TESTABLE: "dim"}


PLACES = {"local": "on this machine", "slurm": "through Slurm", "cluster": "in a cluster in a box on this machine"}


def verdict(results: SmokeReport) -> str:
    """Return the summary of all tests in one line."""
    states = [(s, sum(t.status == s for t in results.tests)) for s in ("passed", "failed", "not run")]
    said = ", ".join(f"{count} {state}" for state, count in states if count)
    criteria = [j.state for t in results.tests for j in t.criteria]
    left = criteria.count(NOT_TESTABLE)
    tests = f"{len(results.tests)} test{'s' * (len(results.tests) != 1)}: {said}"
    if not criteria:
        return tests
    untested = f", {left} more could not be tested here" if left else ""
    return (
        f"{tests}; of the tests that ran, {criteria.count(PASSED)} of {len(criteria) - left} criteria passed{untested}"
    )


def figure_text(number: float | None, unit: str) -> str:
    """Return a figure with its unit."""
    if number is None:
        return "-"
    return f"{number:{',.4g' if abs(number) < 1000 else ',.0f'}} {unit}".strip()


def criterion_line(j: Any) -> str:
    """Return one line with markup: mark, title, measured value, threshold, and reason."""
    colour = COLOURS[j.state]
    why = f"  ({escape(j.why)})" if j.why else ""
    shown = j.state if j.state in (NOT_TESTABLE, NOT_REACHED) else escape(j.measured)
    return f"  [{colour}]{MARKS[j.state]}[/{colour}] {escape(j.title)}: {shown}  [dim]expected: {escape(j.threshold)}[/dim]{why}"


def overview_table(results: SmokeReport) -> Table:
    """Return one row per test."""
    table = Table(show_edge=False, pad_edge=False)
    for name in ("test", "result", "criteria", "not testable", "seconds", "setting"):
        table.add_column(name, justify="right" if name in ("criteria", "not testable", "seconds") else "left")
    for t in results.tests:
        count = {state: sum(j.state == state for j in t.criteria) for state in MARKS}
        ticked = f"{count[PASSED]} of {len(t.criteria) - count[NOT_TESTABLE]}" if t.criteria else "-"
        colour = {"passed": "green", "failed": "red"}.get(t.status, "dim")
        seconds = f"{t.seconds:.0f}" if t.status != "not run" else "-"
        setting = t.setting if t.status != "not run" else t.message
        table.add_row(
            t.name,
            f"[{colour}]{t.status}[/{colour}]",
            ticked,
            str(count[NOT_TESTABLE] or "-"),
            seconds,
            escape(setting),
        )
    return table


def figures_title(test: TestResult) -> str:
    """Return the hardware of each column of `figures_table`. Not the table's own title, which would be wrapped at its width."""
    return f"{test.name}: reference ({test.seed_hardware}) and measured ({test.hardware})"


def figures_table(test: TestResult) -> Table:
    """Return the reference figures next to the measured ones."""
    table = Table(show_edge=False, pad_edge=False)
    for name in ("figure", "reference", "measured", "comparable"):
        table.add_column(name, justify="right" if name in ("reference", "measured") else "left", overflow="fold")
    for f in test.figures:
        table.add_row(
            f.name,
            _reference_text(f),
            figure_text(f.ours, f.unit),
            escape(f.not_comparable and f"no: {f.not_comparable}") or "yes",
        )
    return table


def _reference_text(f: FigureRow) -> str:
    if f.correct is None:
        return figure_text(f.seed, f.unit)
    return f"{figure_text(f.seed, f.unit)}, corrected {figure_text(f.correct, f.unit)}"


def as_document(results: SmokeReport) -> dict[str, Any]:
    """Return smoke.json, which ``--json`` prints too."""
    return {**msgspec.to_builtins(results), "passed": not results.failed and results.ran}


def html_page(results: SmokeReport) -> str:
    """Return smoke.html."""
    text = (resources.files("allranks.lab.smoke") / "templates" / "smoke.html.j2").read_text("utf-8")
    environment = html_environment()
    environment.filters["value"] = figure_text
    marks = {state: (mark, state.replace(" ", "-")) for state, mark in MARKS.items()}
    html = environment.from_string(text).render(
        results=results, marks=marks, version=__version__, place=PLACES[results.place], verdict=verdict(results)
    )
    return redact_forms(html)


def write_report(results: SmokeReport, folder: Path) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "smoke.json", as_document(results))
    write_text_atomic(folder / "smoke.html", html_page(results))
