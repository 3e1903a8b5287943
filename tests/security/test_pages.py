"""Names and messages with markup, scripts and links in the pages of a comparison and a climb; formulas in CSV cells."""

from __future__ import annotations

import csv
import io
from html.parser import HTMLParser

import msgspec
import pytest

from allranks.experiments.gates import ComparisonRow, Gates
from allranks.experiments.output import comparison_page, csv_text
from allranks.lab.smoke import records
from allranks.lab.smoke import report as smoke_report
from allranks.utils.text import csv_cell
from tests.unit.test_smoke_criteria import ladder, result

PAYLOADS = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "]]><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "{{ 7*7 }}{% for x in y %}",
    "<!--",
    "\u202e\x1b[31m\x00",
    "<a href='javascript:alert(1)'>x</a>",
]
FORMULAS = ["=cmd|' /C calc'!A0", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", " =1", "\uff1d1+1"]


class Watcher(HTMLParser):
    """Notes what a page could run, or fetch, or lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "svg", "img", "iframe", "object"):
            self.found.append(tag)
        for name, value in attrs:
            if name.startswith("on") or (name in ("href", "src") and "javascript:" in (value or "").lower()):
                self.found.append(f"{tag} {name}={value}")


def watched(html: str) -> list[str]:
    watcher = Watcher()
    watcher.feed(html)
    return watcher.found


def row(text: str) -> ComparisonRow:
    gates = Gates(parity=False, mechanism=True, equal_work=True)
    return ComparisonRow(strategy=text, gates=gates, reasons=[text], marks=[text], parity_error=None, figures=None)


@pytest.mark.parametrize("text", PAYLOADS)
def test_page_of_a_comparison(text: str) -> None:
    measured = {
        "model": text, "parameters": 1, "dtype": text, "world_size": 2, "nodes": 1, "device": text, "global_batch_size": 2,
        "grad_accum": 1, "repeats": 1, "steps": 1, "warmup_steps": 1, "negative_control": {"error": 1.0},
        "ranks": [{name: {"repeats": [{}]} for name in (text, "a")}],
    }  # fmt: skip
    html = comparison_page(text, measured, [row(text)], [text])
    clean = comparison_page("a", {**measured, **dict.fromkeys(("model", "dtype", "device"), "a")}, [row("a")], ["a"])
    assert watched(html) == watched(clean) == []
    assert "default-src 'none'" in html


@pytest.mark.parametrize("text", PAYLOADS)
def test_page_of_a_climb(text: str) -> None:
    made = ladder(_with(result(message=text), text))
    assert watched(smoke_report.html_page(made)) == []


def _with(test: records.TestResult, text: str) -> records.TestResult:
    fields = {f: text for f in ("title", "setting", "source", "hardware", "seed_hardware", "path") if hasattr(test, f)}
    return msgspec.structs.replace(test, **fields, scaled=[text], untested=[text])


@pytest.mark.parametrize("text", FORMULAS)
def test_cells_are_no_formulas(text: str) -> None:
    shown = "'" + text.replace("\r", "\n")
    assert csv_cell(text) == shown
    gates = Gates(parity=False, mechanism=True, equal_work=True)
    one = ComparisonRow(strategy=text, gates=gates, reasons=[text, "x"], marks=[], parity_error=-1.5, figures=None)
    cells = next(iter(csv.DictReader(io.StringIO(csv_text([one]), newline=""))))
    assert cells["strategy"] == shown and cells["reasons"].startswith("'")
    assert cells["parity_error"] == "-1.5"  # a number is no formula
    assert csv_cell("pytorch_ddp") == "pytorch_ddp" and csv_cell("a=b") == "a=b" and csv_cell("") == ""
