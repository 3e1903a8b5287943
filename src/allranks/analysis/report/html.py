"""Render the pages of runs, traces, comparisons and smoke tests: one offline file with light and dark mode, which also
prints well.

A page is a list of sections, each a list of blocks: tables, charts, bars, lists and texts. `render` makes HTML of any
of them: it escapes every text, hides secrets, and gives the page a policy that forbids loading anything.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, ClassVar, NamedTuple

import jinja2
from markupsafe import Markup

from allranks.analysis.report.figures import Chart, figures_json
from allranks.utils.palette import css_value, stylesheet
from allranks.utils.redaction import redact, redact_forms
from allranks.utils.text import NO_VALUE, format_value, printable
from allranks.version import __version__

PLOTLY_SLOT = "<!-- plotly.js -->"  # cannot come from a run, whose texts are escaped
MAX_ROWS = 16


@dataclass(frozen=True)
class Link:
    """A link, relative to the page."""

    text: str
    href: str


@dataclass(frozen=True)
class Cell:
    """A cell. `tone`: CSS class good, warn, bad, muted, code, num, long, wrap (multi-line) or none. `note`: below."""

    text: str
    tone: str = ""
    note: str = ""
    links: Sequence[Link] = ()


Row = Sequence[Cell | str]


@dataclass(frozen=True)
class Table:
    """A table; without columns it is a list of names and values."""

    id: str
    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""
    kind: ClassVar[str] = "table"

    @property
    def style(self) -> str:
        """Return CSS classes: a table with long texts is shown row by row on a phone, one of numbers is scrolled."""
        texts = any(cell.tone.startswith(("long", "wrap")) or cell.links for row in self.rows for cell in row)
        return ("listed stacked" if texts else "listed") if self.columns else "facts"


@dataclass(frozen=True)
class KeyFigure:
    """One key figure. ``before`` is set if the value has changed since then."""

    label: str
    value: str
    note: str = ""
    before: str | None = None


@dataclass(frozen=True)
class Part:
    """A part of a bar; `share` in percent of the width, `paint` a colour as figures name it."""

    name: str
    value: str
    share: float
    paint: str


@dataclass(frozen=True)
class Bar:
    """A stacked bar with its total, and the range of the total in percent of the width: (left, width)."""

    name: str
    parts: list[Part]
    total: str = ""
    range_text: str = ""
    range: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Bars:
    """A chart of bars that needs no script; the legend has the values if there is one bar without name."""

    title: str
    bars: list[Bar]
    keys: list[tuple[str, str]]
    note: str = ""
    kind: ClassVar[str] = "bars"


class BarValues(NamedTuple):
    """The values of a bar: parts as (name, colour, value), the total, and the range of the total with its text."""

    name: str
    parts: Sequence[tuple[str, str, float]]
    total: float
    range: tuple[float, float] = (0.0, 0.0)
    range_text: str = ""


@dataclass(frozen=True)
class Item:
    """A line of a list: its mark or severity with a tone, the text, and a detail below it."""

    mark: str
    tone: str
    text: str
    detail: str = ""


@dataclass(frozen=True)
class Items:
    """A list."""

    title: str
    items: list[Item]
    note: str = ""
    kind: ClassVar[str] = "items"


@dataclass(frozen=True)
class Text:
    """Paragraphs, with links below them."""

    title: str
    paragraphs: list[str] = field(default_factory=list)
    links: Sequence[Link] = ()
    tone: str = ""
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Log:
    """Preformatted text that can be folded."""

    title: str
    text: str
    open: bool = False
    kind: ClassVar[str] = "log"


@dataclass(frozen=True)
class Answer:
    """An answer; ``right`` means an exact match, as ``exact_match`` counts; text None if it was not asked."""

    label: str
    text: str | None
    right: bool = False


@dataclass(frozen=True)
class Sample:
    """A held-out question with its answers."""

    question: str
    answers: list[Answer]


@dataclass(frozen=True)
class Samples:
    """Questions with their answers side by side."""

    title: str
    samples: list[Sample]
    kind: ClassVar[str] = "samples"


Block = Table | Chart | Bars | Items | Text | Log | Samples
Group = tuple[str, Sequence[Block | None]]
"""A layout (``two``: side by side, ``columns``: filled from the left, ``stack``) and its blocks; None is left out."""


@dataclass(frozen=True)
class Section:
    """A part of a page. One without title has no entry in the navigation, one without blocks is left out."""

    id: str
    title: str
    groups: Sequence[Group]
    note: str = ""
    short: str = ""
    """Title in the navigation, if another."""


@dataclass(frozen=True)
class Page:
    """A page. `status` and `banners` have a tone: good, warn, bad, info or muted."""

    kind: str
    name: str
    sections: Sequence[Section]
    subtitle: Sequence[str] = ()
    status: tuple[str, str] | None = None
    banners: Sequence[tuple[str, str, str]] = ()  # tone, head, text
    cards: Sequence[KeyFigure] = ()
    footer: Sequence[str] = ()


def render(page: Page) -> str:
    """Return the page as HTML. A page with charts holds plotly.js."""
    sections = []
    for section in page.sections:
        groups = [(layout, [block for block in blocks if block]) for layout, blocks in section.groups]
        if kept := [group for group in groups if group[1]]:
            sections.append((section, kept))
    charts = [b for _, groups in sections for _, blocks in groups for b in blocks if isinstance(b, Chart)]
    script = _asset("page.js")
    scripts = [script.encode(), gzip.decompress(_plotly())] if charts else []
    html = _template().render(
        page=page,
        sections=sections,
        card_columns=_card_columns(len(page.cards)),
        figures=Markup(figures_json(charts)) if charts else "",  # noqa: S704 - figures_json made it safe
        version=__version__,
        css=Markup(_asset("page.css")),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        plotly_slot=Markup(PLOTLY_SLOT),  # noqa: S704 - our own mark
        policy=Markup(content_security_policy(scripts)),  # noqa: S704
    )
    html = redact_forms(html)  # second safeguard: each text was already sanitized when it was read
    return html.replace(PLOTLY_SLOT, base64.b64encode(_plotly()).decode(), 1)


def _card_columns(cards: int) -> int:
    """Return how many key figures a row has, so that the last row is not nearly empty."""
    return min(cards, 5) if cards in (5, 9, 10) else 3 if cards in (3, 6) else min(cards, 4)


def content_security_policy(scripts: list[bytes]) -> str:
    """Return the page's content policy: it loads nothing, and only runs our scripts, identified by their hashes."""
    hashes = [base64.b64encode(hashlib.sha256(s).digest()).decode() for s in scripts]
    allowed = "script-src " + " ".join(f"'sha256-{h}'" for h in hashes) + "; " if hashes else ""
    return f"default-src 'none'; {allowed}style-src 'unsafe-inline'; img-src data: blob:"


@cache
def _asset(name: str) -> str:
    return (resources.files("allranks.analysis.report") / "templates" / name).read_text(encoding="utf-8")


@cache
def _plotly() -> bytes:
    return (resources.files("allranks.analysis.report") / "vendor" / "plotly-basic.min.js.gz").read_bytes()


def html_environment() -> jinja2.Environment:
    """Return the environment for templates: it escapes every text, and fails if a value is missing.

    ``colours`` is the CSS that defines the colours of all pages.
    """
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_sanitize_value,
    )
    environment.globals["colours"] = Markup(stylesheet())  # noqa: S704 - our own values
    environment.filters["css"] = css_value
    return environment


def _sanitize_value(value: Any) -> Any:
    """Remove secrets and control characters from every text on a page, except our own markup."""
    return redact(printable(value)) if type(value) is str else value


@cache
def _template() -> jinja2.Template:
    return html_environment().from_string(_asset("page.html.j2"))


def table(id: str, title: str, columns: list[str], rows: Iterable[Row], note: str = "") -> Table | None:
    """Return a table, or None if it would be empty."""
    made = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    return Table(id, title, columns, made, note) if made else None


def stacked_bars(title: str, rows: Sequence[BarValues], show: Callable[[float], str], note: str = "") -> Bars | None:
    """Return bars with widths as shares of the longest one or of the longest range, or None if all are empty."""
    longest = max((max(sum(value for *_, value in row.parts), row.range[1]) for row in rows), default=0.0)
    if longest <= 0:
        return None
    scale = 100 / longest
    bars = [
        Bar(
            row.name,
            [Part(name, show(value), scale * value, paint) for name, paint, value in row.parts if value > 0],
            show(row.total),
            row.range_text,
            (scale * row.range[0], scale * (row.range[1] - row.range[0])),
        )
        for row in rows
    ]
    keys = dict.fromkeys((name, paint) for row in rows for name, paint, _ in row.parts if len(row.parts) > 1)
    return Bars(title, bars, list(keys), note)


def listing(
    id: str,
    title: str,
    items: Sequence[Any],
    columns: Sequence[tuple[str, Callable[[Any], Cell | str]]],
    note: str = "",
    *,
    what: str = "rows",
) -> Table | None:
    """Return a table with a row for each item, or None if there are none.

    Args:
        columns: names, and functions that return the cell of an item.
        what: the items; of too many, rows before the last one are left out.
    """
    shown = list(items) if len(items) <= MAX_ROWS else [*items[: MAX_ROWS - 1], items[-1]]
    if len(shown) < len(items):
        note = f"{note} {len(items) - len(shown):,} of {len(items):,} {what} are left out, before the last.".strip()
    return table(
        id, title, [name for name, _ in columns], [[show(item) for _, show in columns] for item in shown], note
    )


def column(key: str, show: Callable[[Any], str] = format_value, tone: str = "num") -> Callable[[Any], Cell]:
    """Return the function of a column that shows a value of a record."""
    return lambda item: Cell(show(item.get(key)), tone)


def fact_table(id: str, title: str, pairs: Iterable[tuple[str, str]], note: str = "") -> Table | None:
    """Return names and values, without unknown values."""
    return table(
        id, title, [], [(Cell(name, "muted"), value) for name, value in pairs if value and value != NO_VALUE], note
    )


def number_cell(value: str, note: str = "") -> Cell:
    """Return a number, right-aligned."""
    return Cell(value, "num", note)


def long_cell(value: str) -> Cell:
    """Return text that may span several lines."""
    return Cell(value, "long")
