"""Report smoke tests: a table for the terminal, smoke.json, and one offline page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from allranks.analysis.report import html
from allranks.analysis.report.html import Cell, Item, Section, long_cell, number_cell
from allranks.lab.smoke.records import FAILED, NOT_REACHED, NOT_TESTABLE, PASSED, FigureRow, SmokeReport, TestResult
from allranks.rundir.files import write_json, write_text_atomic

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
    return (
        f"  [{colour}]{MARKS[j.state]}[/{colour}] {escape(j.title)}: {shown}  [dim]expected: "
        f"{escape(j.threshold)}[/dim]{why}"
    )


def overview_rows(results: SmokeReport) -> list[tuple[str, str, str, str, str, str]]:
    """Return name, status, passed criteria, untestable ones, seconds, and setting (or why it did not run) of each
    test."""
    rows = []
    for t in results.tests:
        ran, states = t.status != "not run", [j.state for j in t.criteria]
        left = states.count(NOT_TESTABLE)
        passed = f"{states.count(PASSED)} of {len(states) - left}" if states else "-"
        seconds = f"{t.seconds:.0f}" if ran else "-"
        rows.append((t.name, t.status, passed, str(left or "-"), seconds, t.setting if ran else t.message))
    return rows


def overview_table(results: SmokeReport) -> Table:
    """Return one row per test."""
    table = Table(show_edge=False, pad_edge=False)
    for name in ("test", "result", "criteria", "not testable", "seconds", "setting"):
        table.add_column(name, justify="right" if name in ("criteria", "not testable", "seconds") else "left")
    for name, status, *counts, setting in overview_rows(results):
        colour = {"passed": "green", "failed": "red"}.get(status, "dim")
        table.add_row(name, f"[{colour}]{status}[/{colour}]", *counts, escape(setting))
    return table


def figures_title(test: TestResult) -> str:
    """Return the hardware of each column of `figures_table`. Not the table's own title, which would be wrapped at its
    width."""
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


_TONES = {PASSED: "good", FAILED: "bad", NOT_REACHED: "warn", "passed": "good", "failed": "bad"}


def html_page(results: SmokeReport) -> str:
    """Return smoke.html."""
    m = results.machine
    gpus, memory = len(m["gpus"]), m["memory_bytes"] / 2**30
    about = [
        PLACES[results.place],
        f"{m['cpus']} cores of {m['cpu_model']}, {memory:.0f} GiB, {gpus or 'no'} GPU{'s' * (gpus != 1)}",
        ", ".join(f"{name} {version}" for name, version in results.versions.items()),
        f"{results.started}, {results.seconds:.0f} s",
    ]
    tone = "bad" if results.failed else "good" if results.ran else "muted"
    sections = [Section("overview", "Overview", [("stack", [_page_overview(results)])])]
    sections += [
        Section(t.name, f"{t.name}: {t.title}", [("stack", _page_test(t))], short=t.name)
        for t in results.tests
        if t.status != "not run"
    ]
    left = [Item(t.name, "muted", line) for t in results.tests for line in t.untested]
    if left:
        sections.append(Section("untested", "Not testable here", [("stack", [html.Items("", left)])]))
    footer = ["✓ passed, ✗ failed, · the run ended before, - not testable here."]
    page = html.Page(
        "smoke tests",
        results.name,
        sections,
        [part for part in about if part],
        ("failed" if results.failed else "passed" if results.ran else "nothing ran", tone),
        [(tone, "Result", verdict(results))],
        footer=footer,
    )
    return html.render(page)


def _page_overview(results: SmokeReport) -> html.Table | None:
    rows: list[html.Row] = []
    for name, status, *counts, setting in overview_rows(results):
        test = Cell(name) if status == "not run" else Cell("", links=[html.Link(name, f"#{name}")])
        result = Cell(status, _TONES.get(status, "muted"))
        rows.append([test, result, *map(number_cell, counts), long_cell(setting)])
    columns = ["test", "result", "passed", "not testable", "seconds", "setting, or why it did not run"]
    note = 'The criteria and the figures called "reference" are from the field notes on which the tests are based.'
    return html.table("overview", "", columns, rows, note)


def _page_test(t: TestResult) -> list[html.Block | None]:
    path = f"; communication: {t.path}" if t.path else ""
    scaled = [f"Differs from the reference: {'; '.join(t.scaled)}."] if t.scaled else []
    criteria: list[html.Row] = [
        [
            Cell(f"{MARKS[j.state]} {j.title}", "wrap"),
            Cell(j.measured if j.state in (PASSED, FAILED) else j.state, f"wrap {_TONES.get(j.state, 'muted')}", j.why),
            Cell(j.threshold, "wrap"),
        ]
        for j in t.criteria
    ]
    figures: list[html.Row] = [
        [
            Cell(f.name, "wrap", f.definition),
            number_cell(
                figure_text(f.seed, f.unit),
                f"corrected {figure_text(f.correct, f.unit)}" if f.correct is not None else "",
            ),
            number_cell(figure_text(f.ours, f.unit)),
            Cell(f"no: {f.not_comparable}" if f.not_comparable else "yes", "wrap", f.correction),
        ]
        for f in t.figures
    ]
    return [
        html.Text("", [f"{t.status}: {t.message}"], tone=_TONES.get(t.status, "")) if t.message else None,
        html.Text("", [f"{t.source}. {t.setting}{path}.", *scaled]),
        html.table("", "Criteria", ["criterion", "measured", "expected"], criteria),
        html.table("", "Figures", ["figure", "reference", "measured", "comparable"], figures, f"Reference on {t.seed_hardware}; measured on {t.hardware}."),
    ]  # fmt: skip


def write_report(results: SmokeReport, folder: Path) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "smoke.json", as_document(results))
    write_text_atomic(folder / "smoke.html", html_page(results))
