"""Report smoke tests: tables for the terminal, smoke.json, and one offline page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from allranks.analysis.report import html
from allranks.analysis.report.html import Cell, Item, Section, long_cell, number_cell
from allranks.lab.smoke.records import (
    FAILED,
    NOT_REACHED,
    NOT_TESTABLE,
    PASSED,
    CriterionResult,
    FigureRow,
    SmokeReport,
    TestResult,
)
from allranks.rundir.files import write_json, write_text_atomic

MARKS = {PASSED: ("✓", "green"), FAILED: ("✗", "red"), NOT_REACHED: ("·", "yellow"), NOT_TESTABLE: ("-", "dim")}
PLACES = {"local": "on this machine", "slurm": "through Slurm", "cluster": "in a cluster in a box on this machine"}
_TONES = {PASSED: "good", FAILED: "bad", NOT_REACHED: "warn"}
OVERVIEW = ("test", "result", "criteria", "not testable", "seconds", "setting")
FIGURES = ("figure", "reference", "measured", "comparable")
NUMBERS = ("criteria", "not testable", "seconds", "reference", "measured")
"""Columns that are aligned to the right."""


def verdict(results: SmokeReport) -> str:
    """Return the summary of all tests in one line."""
    states = [(s, sum(t.status == s for t in results.tests)) for s in ("passed", "failed", "not run")]
    said = ", ".join(f"{count} {state}" for state, count in states if count)
    criteria = [j.state for t in results.tests for j in t.criteria]
    left = criteria.count(NOT_TESTABLE)
    text = f"{len(results.tests)} test{'s' * (len(results.tests) != 1)}: {said}"
    if criteria:
        text += f"; of the tests that ran, {criteria.count(PASSED)} of {len(criteria) - left} criteria passed"
        text += f", {left} more could not be tested here" if left else ""
    return text


def criterion_line(j: CriterionResult) -> str:
    """Return one line with markup: mark, title, measured value, threshold, and reason."""
    mark, colour = MARKS[j.state]
    why = f"  ({escape(j.why)})" if j.why else ""
    return (
        f"  [{colour}]{mark}[/{colour}] {escape(j.title)}: {escape(_measured(j))}  [dim]expected: "
        f"{escape(j.threshold)}[/dim]{why}"
    )


def _measured(j: CriterionResult) -> str:
    return j.measured if j.state in (PASSED, FAILED) else j.state


def _figure_text(number: float | None, unit: str) -> str:
    if number is None:
        return "-"
    return f"{number:{',.4g' if abs(number) < 1000 else ',.0f'}} {unit}".strip()


def _overview_cells(t: TestResult) -> list[str]:
    """Return the cells of `OVERVIEW`; the setting is the reason if the test did not run."""
    ran, states = t.status != "not run", [j.state for j in t.criteria]
    left = states.count(NOT_TESTABLE)
    passed = f"{states.count(PASSED)} of {len(states) - left}" if states else "-"
    seconds = f"{t.seconds:.0f}" if ran else "-"
    return [t.name, t.status, passed, str(left or "-"), seconds, t.setting if ran else t.message]


def _figure_cells(f: FigureRow) -> list[str]:
    """Return the cells of `FIGURES`."""
    seed = _figure_text(f.seed, f.unit)
    if f.correct is not None:
        seed += f", corrected {_figure_text(f.correct, f.unit)}"
    return [f.name, seed, _figure_text(f.ours, f.unit), f"no: {f.not_comparable}" if f.not_comparable else "yes"]


def overview_table(results: SmokeReport) -> Table:
    """Return one row per test."""
    return _table(OVERVIEW, list(map(_overview_cells, results.tests)))


def figures_table(test: TestResult) -> Table:
    """Return the reference figures next to the measured ones."""
    return _table(FIGURES, list(map(_figure_cells, test.figures)))


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=name == "test", overflow="fold")
    for row in rows:
        colours = (MARKS[text][1] if text in (PASSED, FAILED) else "" for text in row)
        table.add_row(*(f"[{c}]{text}[/{c}]" if c else escape(text) for c, text in zip(colours, row, strict=True)))
    return table


def figures_title(test: TestResult) -> str:
    """Return the hardware of each column of `figures_table`, whose own title would be wrapped at its width."""
    return f"{test.name}: reference ({test.seed_hardware}) and measured ({test.hardware})"


def as_document(results: SmokeReport) -> dict[str, Any]:
    """Return smoke.json, which ``--json`` prints too."""
    return {**msgspec.to_builtins(results), "passed": not results.failed and results.ran}


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
    status, tone = (
        ("failed", "bad") if results.failed else ("passed", "good") if results.ran else ("nothing ran", "muted")
    )
    sections = [Section("overview", "Overview", [("stack", [_page_overview(results)])])]
    sections += [
        Section(t.name, f"{t.name}: {t.title}", [("stack", _page_test(t))], short=t.name)
        for t in results.tests
        if t.status != "not run"
    ]
    left = [Item(t.name, "muted", line) for t in results.tests for line in t.untested]
    if left:
        sections.append(Section("untested", "Not testable here", [("stack", [html.Items("", left)])]))
    page = html.Page(
        "smoke tests",
        results.name,
        sections,
        [part for part in about if part],
        (status, tone),
        [(tone, "Result", verdict(results))],
        footer=["✓ passed, ✗ failed, · the run ended before, - not testable here."],
    )
    return html.render(page)


def _page_overview(results: SmokeReport) -> html.Table | None:
    rows: list[html.Row] = []
    for t in results.tests:
        name, status, *counts, setting = _overview_cells(t)
        test = Cell(name) if status == "not run" else Cell("", links=[html.Link(name, f"#{name}")])
        rows.append([test, Cell(status, _TONES.get(status, "muted")), *map(number_cell, counts), long_cell(setting)])
    note = 'The criteria and the figures called "reference" are from the field notes on which the tests are based.'
    return html.table("overview", "", [*OVERVIEW[:-1], "setting, or why it did not run"], rows, note)


def _page_test(t: TestResult) -> list[html.Block | None]:
    path = f"; communication: {t.path}" if t.path else ""
    scaled = [f"Differs from the reference: {'; '.join(t.scaled)}."] if t.scaled else []
    criteria: list[html.Row] = [
        [
            Cell(f"{MARKS[j.state][0]} {j.title}", "wrap"),
            Cell(_measured(j), f"wrap {_TONES.get(j.state, 'muted')}", j.why),
            Cell(j.threshold, "wrap"),
        ]
        for j in t.criteria
    ]
    figures: list[html.Row] = []
    for f in t.figures:
        name, seed, ours, comparable = _figure_cells(f)
        cells = [Cell(name, "wrap", f.definition), number_cell(seed), number_cell(ours)]
        figures.append([*cells, Cell(comparable, "wrap", f.correction)])
    hardware = f"Reference on {t.seed_hardware}; measured on {t.hardware}."
    return [
        html.Text("", [f"{t.status}: {t.message}"], tone=_TONES.get(t.status, "")) if t.message else None,
        html.Text("", [f"{t.source}. {t.setting}{path}.", *scaled]),
        html.table("", "Criteria", ["criterion", "measured", "expected"], criteria),
        html.table("", "Figures", list(FIGURES), figures, hardware),
    ]


def write_report(results: SmokeReport, folder: Path) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "smoke.json", as_document(results))
    write_text_atomic(folder / "smoke.html", html_page(results))
