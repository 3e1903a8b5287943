"""Show a comparison as an offline page, with links to the files that its figures come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from allranks.analysis.report.figures import ACTIVITY_COLOURS, PHASE_COLOURS, STATE_COLOURS, css_value
from allranks.analysis.report.html import html_environment
from allranks.experiments.communication_model import Prediction
from allranks.experiments.gates import ComparisonRow, Spread, find_spread
from allranks.experiments.tables import number_text, percent_text, range_text, rate_text, time_unit
from allranks.utils.formatting import format_bytes
from allranks.utils.redaction import redact_forms
from allranks.version import __version__

Json = dict[str, Any]
Parts = Sequence[tuple[str, str, str]]
Columns = dict[str, tuple[str, Callable[[float], str]]]
TIME_PARTS: Parts = (
    ("forward_s", "forward", PHASE_COLOURS["forward"]),
    ("backward_s", "backward, including waits", PHASE_COLOURS["backward"]),
    ("optimizer_s", "optimizer, including waits", PHASE_COLOURS["optimizer"]),
    ("other_s", "data and bookkeeping", PHASE_COLOURS["other"]),
)
COMMUNICATION_PARTS: Parts = (
    ("hidden_s", "hidden behind compute", ACTIVITY_COLOURS["hidden"]),
    ("exposed_comm_s", "exposed", ACTIVITY_COLOURS["exposed"]),
)
STATE_PARTS: Parts = (
    ("weights_bytes", "weights", STATE_COLOURS["weights"]),
    ("gradients_bytes", "gradients", STATE_COLOURS["gradients"]),
    ("optimizer_bytes", "optimizer state", STATE_COLOURS["optimizer"]),
)
MAX_LINKED_RANKS = 8


class Link(msgspec.Struct, frozen=True):
    """A link of the page, relative to it."""

    text: str
    href: str


class StrategyLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Files of one strategy: by column of the table, one link per rank, or one to their folder if there are many."""

    strategy: str
    folder: Link
    columns: dict[str, list[Link]]


class PageLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Files of the comparison and of each strategy. Only what exists is linked."""

    run: list[Link]
    strategies: list[StrategyLinks]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.strategies for name in one.columns))


RUN_FILES = {
    "measured.json": "compare/measured.json",
    "comparison.json": "comparison.json",
    "comparison.csv": "comparison.csv",
    "spec.yaml": "spec.yaml",
    "plan.json": "plan.json",
    "report of the job": "report.html",
}


def find_links(root: Path, names: Sequence[str]) -> PageLinks:
    """Return links to the files of a comparison in its run folder: results, and the traces and step records of each strategy."""
    run = [Link(text, href) for text, href in RUN_FILES.items() if (root / href).is_file()]
    return PageLinks(run=run, strategies=[_strategy_links(root, n) for n in names if (root / "compare" / n).is_dir()])


def _strategy_links(root: Path, name: str) -> StrategyLinks:
    folder = root / "compare" / name
    repeats = sorted(
        (p for p in folder.glob("repeat*") if p.is_dir()), key=lambda p: int(p.name.removeprefix("repeat"))
    )
    columns = {"traces": _rank_links(root, folder / "traces")}
    columns |= {f"repeat {p.name.removeprefix('repeat')}": _rank_links(root, p) for p in repeats}
    if "repeat 0" in columns:  # the steps that were verified
        columns = {"verified" if key == "repeat 0" else key: links for key, links in columns.items()}
    return StrategyLinks(strategy=name, folder=Link(name, _href(root, folder) + "/"), columns=columns)


def _rank_links(root: Path, folder: Path) -> list[Link]:
    files = [(int(number), p) for p in folder.glob("rank*") if (number := p.name.split(".")[0][4:]).isdecimal()]
    if len(files) > MAX_LINKED_RANKS:
        return [Link(f"{len(files)} ranks", _href(root, folder) + "/")]
    return [Link(f"rank {number}", _href(root, p)) for number, p in sorted(files)]


def _href(root: Path, path: Path) -> str:
    return quote(path.relative_to(root).as_posix())


def comparison_page(
    name: str,
    measured: Json,
    rows: list[ComparisonRow],
    advice: list[str],
    predictions: list[Prediction],
    links: PageLinks | None = None,
) -> str:
    """Return comparison.html."""
    template = (resources.files("allranks.experiments") / "templates" / "comparison.html.j2").read_text("utf-8")
    environment = html_environment()
    scale, unit = time_unit(rows)
    environment.filters |= {"bytes": format_bytes, "rough": two_digits, "css": css_value}
    good = [r for r in rows if r.figures]
    html = environment.from_string(template).render(
        name=name,
        measured=measured,
        rows=rows,
        good=good,
        advice=advice,
        charts=_charts(good, lambda s: number_text(s / scale), unit),
        tables=_tables(good, lambda s: number_text(s / scale), unit, measured["repeats"]),
        ranks=sorted({p.ranks for p in predictions}),
        errors={p.strategy: p.error for p in predictions},
        predictions=_by_strategy(predictions),
        links=links,
        version=__version__,
    )
    return redact_forms(html)


def two_digits(value: float) -> str:
    """Round to two digits: 1100248 becomes 1,100,000."""
    return f"{float(f'{value:.2g}'):,.0f}"


def _tables(good: list[ComparisonRow], ms: Callable[[float], str], unit: str, repeats: int) -> list[Json]:
    """Return the tables of figures: each cell is a figure and its range."""
    timed: Columns = {
        "tokens_per_s": ("tokens/s", rate_text), "step_time_s": (f"step, {unit}", ms), "forward_s": ("forward", ms),
        "backward_s": ("backward", ms), "optimizer_s": ("optimizer", ms),
    }  # fmt: skip
    profiled: Columns = {
        "profiled_step_s": (f"profiled step, {unit}", ms), "comm_s": ("communication", ms), "overlap": ("of it hidden", percent_text),
        "exposed_share": ("exposed, of the step", percent_text), "idle_share": ("idle, of the step", percent_text),
    }  # fmt: skip
    memory: Columns = {
        "weights_bytes": ("weights", format_bytes), "gradients_bytes": ("gradients", format_bytes),
        "optimizer_bytes": ("optimizer state", format_bytes), "state_bytes": ("sum", format_bytes), "peak_bytes": ("peak", format_bytes),
    }  # fmt: skip
    over = f"the range from min to max of the {repeats} repeats" if repeats > 1 else "no range, as there is one repeat"
    sums = "The median is computed for each part, so the sum can differ from the step."
    return [
        _table("Timed steps", f"Median, and {over}. {sums}", timed, good),
        _table("Profiled steps", "Median of the ranks, and the range over ranks and steps. They are slower than timed steps.", profiled, good),
        _table("Memory per rank", "The rank with most, and the range over ranks where they differ.", memory, good),
    ]  # fmt: skip


def _table(title: str, note: str, columns: Columns, good: list[ComparisonRow]) -> Json:
    def cell(figures: Json, name: str) -> tuple[str, str]:
        text, found = columns[name][1], find_spread(figures, name)
        return text(found.value) if found else "-", range_text(found, text, " to ")

    rows = [(r.strategy, [cell(r.figures, name) for name in columns]) for r in good if r.figures]
    return {"title": title, "note": note, "heads": [head for head, _ in columns.values()], "rows": rows}


def _charts(good: list[ComparisonRow], ms: Callable[[float], str], unit: str) -> list[Json]:
    """Return the charts: bars with the range of the whole bar."""
    speed: Parts = (("tokens_per_s", "tokens/s", "--c1"),)
    return [
        _chart("Speed, tokens/s", good, lambda f: {"tokens_per_s": f["tokens_per_s"]["median"]}, speed, "tokens_per_s", rate_text),
        _chart(f"Time of a step, {unit}", good, _times, TIME_PARTS, "step_time_s", ms),
        _chart(f"Communication of a profiled step, {unit}", good, _communication, COMMUNICATION_PARTS, "comm_s", ms),
        _chart("State per rank", good, lambda f: f["memory"], STATE_PARTS, "state_bytes", format_bytes),
    ]  # fmt: skip


def _times(figures: Json) -> Json:
    known = sum(figures[p] for p in ("forward_s", "backward_s", "optimizer_s"))
    return {**figures, "other_s": max(figures["step_time_s"]["median"] - known, 0.0)}


def _communication(figures: Json) -> Json:
    return {**figures, "hidden_s": max(figures["comm_s"] - figures["exposed_comm_s"], 0.0)}


def _chart(
    title: str, rows: list[ComparisonRow], values: Callable[[Json], Json], parts: Parts, whole: str, text: Callable[[float], str]
) -> Json:  # fmt: skip
    """Return stacked bars as shares of the longest one, or of the longest range; `whole` is the figure that a bar shows."""
    found = [(r.strategy, values(r.figures), find_spread(r.figures, whole)) for r in rows if r.figures]
    ends = [max(sum(v[k] for k, _, _ in parts), spread.max if spread else 0.0) for _, v, spread in found]
    longest = max(ends, default=1.0) or 1.0

    def bar(name: str, value: Json, spread: Spread | None) -> Json:
        return {
            "strategy": name,
            "parts": [(label, colour, text(value[k]), 100 * value[k] / longest) for k, label, colour in parts],
            "total": text(spread.value if spread else 0.0),
            "range": range_text(spread, text, " to "),
            "left": 100 * (spread.min if spread else 0.0) / longest,
            "width": 100 * (spread.max - spread.min if spread else 0.0) / longest,
        }

    keys = [(label, colour) for _, label, colour in parts] if len(parts) > 1 else []
    return {"title": title, "bars": [bar(*one) for one in found], "keys": keys}


def _by_strategy(predictions: list[Prediction]) -> dict[str, dict[int, float]]:
    out: dict[str, dict[int, float]] = {}
    for p in predictions:
        out.setdefault(p.strategy, {})[p.ranks] = p.tokens_per_s
    return out
