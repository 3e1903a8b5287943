"""Common parts of the pages: tables, escaping templates, plotly.js inside the page, and a policy that forbids loading."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from allranks.analysis.report.figures import stylesheet
from allranks.utils.redaction import redact, redact_forms
from allranks.utils.text import NO_VALUE, printable
from allranks.version import __version__

PLOTLY_SLOT = "<!-- plotly.js -->"  # cannot come from a run, whose texts are escaped
_PACKAGES = ("allranks.analysis.report", "allranks.analysis.trace")


def plotly_source() -> str | None:
    """Return plotly.js, or None if the `report` extra is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    return get_plotlyjs()


def content_security_policy(scripts: list[str]) -> str:
    """Return the page's content policy: it loads nothing, and only runs our scripts, identified by their hashes."""
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts if s]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


@cache
def read_asset(name: str) -> str:
    """Return the content of a file in a `templates` folder."""
    found = [resources.files(package) / "templates" / name for package in _PACKAGES]
    return next((f for f in found if f.is_file()), found[0]).read_text(encoding="utf-8")


def html_environment() -> jinja2.Environment:
    """Return the environment for templates: it escapes every text, and fails if a value is missing.

    ``colours`` is the CSS that defines the colours of all pages.
    """
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_sanitize_value,
    )
    environment.globals["colours"] = Markup(stylesheet())  # noqa: S704 - our own values
    return environment


def _sanitize_value(value: Any) -> Any:
    """Remove secrets and control characters from every text on a page, except our own markup."""
    return redact(printable(value)) if type(value) is str else value


@cache
def load_template(name: str) -> jinja2.Template:
    """Return a template of a `templates` folder."""
    return html_environment().get_template(name)


def render_page(name: str, context: dict[str, Any], figures: str, plotly: str | None) -> str:
    """Return a page with charts. ``figures``: from `charts.figures_json`; ``plotly``: plotly.js, which is inserted last."""
    script = read_asset("report.js")
    frame = {
        "version": __version__,
        "css": Markup(read_asset("report.css")),  # noqa: S704 - our own file
        "script": Markup(script),  # noqa: S704 - our own file
        "figures": Markup(figures),  # noqa: S704 - figures_json made it safe
        "plotly_slot": Markup(PLOTLY_SLOT),  # noqa: S704 - our own mark
        "policy": content_security_policy([script, plotly or ""]),
    }
    html = redact_forms(
        load_template(name).render(context | frame)
    )  # second safeguard: each text was already sanitized when it was read
    return html.replace(PLOTLY_SLOT, f"<script>{plotly}</script>" if plotly else "", 1)


MAX_ROWS = 16


@dataclass(frozen=True)
class Cell:
    """Text of a cell; ``tone`` is a CSS class: good, bad, muted, code, num, long or wrap (several lines), or none."""

    text: str
    tone: str = ""


Row = Sequence[Cell | str]


@dataclass(frozen=True)
class Table:
    """A table; without columns it is a list of names and values."""

    id: str
    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""


def table(id: str, title: str, columns: list[str], rows: Iterable[Row], note: str = "") -> Table | None:
    """Return a table, or None if it would be empty."""
    made = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    return Table(id, title, columns, made, note) if made else None


def fact_table(id: str, title: str, pairs: Iterable[tuple[str, str]], note: str = "") -> Table | None:
    """Return names and values, without unknown values."""
    return table(
        id, title, [], [(Cell(name, "muted"), value) for name, value in pairs if value and value != NO_VALUE], note
    )


def number_cell(value: str) -> Cell:
    """Return a number, right-aligned."""
    return Cell(value, "num")


def long_cell(value: str) -> Cell:
    """Return text that may span several lines."""
    return Cell(value, "long")


def limit_rows(rows: list[Row], what: str) -> tuple[list[Row], str]:
    """Return at most `MAX_ROWS` rows with the last one, and a sentence about the rows left out."""
    if len(rows) <= MAX_ROWS:
        return rows, ""
    kept = [*rows[: MAX_ROWS - 1], rows[-1]]
    return kept, f"{len(rows) - MAX_ROWS:,} of {len(rows):,} {what} are left out, before the last."
