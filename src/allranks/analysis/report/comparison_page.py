"""Write the page of a comparison of runs: results, overlaid charts over equal steps and equal tokens, differences."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from allranks.analysis.metrics import WARMUP_STEPS
from allranks.analysis.report import html
from allranks.analysis.report.figures import Chart, axis, layout, line, scale_type, smoothed, smoothing_width
from allranks.analysis.report.html import Bars, BarValues, Cell, Page, Section, stacked_bars, table
from allranks.analysis.report.run_comparison import (
    FIGURES,
    HIGHER_IS_BETTER,
    LOWER_IS_BETTER,
    ComparedRun,
    EqualPoint,
    RunComparison,
)
from allranks.rundir.files import write_text_atomic
from allranks.utils.palette import PALETTE_SIZE, colour
from allranks.utils.text import (
    finite_float,
    format_bytes,
    format_count,
    format_duration,
    format_loss,
    format_percent,
    format_rate,
    format_value,
)

HEIGHT = 320
FORMATS: dict[str, Callable[[Any], str]] = {
    "status": format_value,
    "steps": format_count,
    "tokens_real": format_count,
    "train_loss_last": format_loss,
    "eval_loss": format_loss,
    "best_eval_loss": format_loss,
    "accuracy": format_percent,
    "exact_match": format_percent,
    "tokens_per_s": format_rate,
    "step_time_s": format_duration,
    "peak_memory_bytes": format_bytes,
    "wall_time_s": format_duration,
}
NAMES = {"train": "train loss", "held_out": "held-out loss"}


def write_page(comparison: RunComparison, path: Path, sweep: str = "") -> None:
    """Write the page of runs, or of the sweep of this name.

    Raises:
        OSError: it cannot be written.
    """
    verb = "sweep" if sweep else "compare-runs"
    page = Page(
        "sweep" if sweep else "run comparison",
        sweep or " / ".join(short_names(comparison.runs)),
        _sections(comparison),
        [data_line(comparison)],
        footer=[f"Speed and step time exclude the first {WARMUP_STEPS} steps. Made by allranks {verb}."],
    )
    write_text_atomic(path, html.render(page))


def data_line(comparison: RunComparison) -> str:
    """Return whether the runs trained on the same rows."""
    if comparison.data_equal is None:
        return "whether the training rows are the same is unknown"
    return "all runs trained on the same rows" if comparison.data_equal else "the training rows differ"


def best_run(key: str, values: Sequence[Any]) -> int | None:
    """Return the index of the best of at least two different values; None if there is none."""
    known = {i: v for i, value in enumerate(values) if (v := finite_float(value)) is not None}
    if len(set(known.values())) < 2 or key not in LOWER_IS_BETTER | HIGHER_IS_BETTER:
        return None
    return (max if key in HIGHER_IS_BETTER else min)(known, key=lambda i: known[i])


def point_name(point: EqualPoint) -> str:
    """Return what is compared, and where."""
    where = f"after step {point.at:,.0f}" if point.axis == "step" else f"after {point.at:,.0f} tokens"
    return f"{'mean train loss' if point.name == 'train' else NAMES[point.name]} {where}"


def _sections(comparison: RunComparison) -> list[Section]:
    runs = comparison.runs
    rows = []
    for key, title in FIGURES.items():
        values = [run.figures[key] for run in runs]
        if any(value is not None for value in values):
            best = best_run(key, values)
            rows.append([title, *(_number(FORMATS[key](v), best == i) for i, v in enumerate(values))])
    for point in comparison.equal:
        best = best_run("eval_loss", point.values)
        rows.append([point_name(point), *(_number(format_loss(v), best == i) for i, v in enumerate(point.values))])
    differing = [
        [Cell(row.key, "code"), *(Cell(format_value(v), "long") for v in row.values), row.changes]
        for row in comparison.differences
    ]
    names = short_names(runs)
    charts = [
        _loss_chart(runs, "step", "train"),
        _loss_chart(runs, "tokens", "train"),
        _loss_chart(runs, "step", "held_out"),
        _loss_chart(runs, "tokens", "held_out"),
        _speed_chart(runs),
        _memory_bars(runs),
    ]
    notes = "Green: the best value. Mean train loss: of neighbouring steps."
    smoothed = "Train losses are smoothed if they have many points."
    none = "The specs, and what is known of the environments, are equal."
    return [
        Section("results", "Results", [("stack", [table("results", "", ["figure", *names], rows, notes)])]),
        Section("curves", "Curves", [("two", charts)], f"One colour for each run. {smoothed}"),
        Section(
            "differences",
            "Differences",
            [("stack", [table("differences", "", ["key", *names, "changes"], differing) or html.Text("", [none])])],
            "Differences of the specs and of the recorded environments, with what such a difference changes.",
        ),
    ]  # fmt: skip


def short_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the names of the runs, without the time of their start where they are unique without it."""
    short = [re.sub(r"-\d{8}-\d{6}$", "", run.run) for run in runs]
    return [name if short.count(name) == 1 else run.run for name, run in zip(short, runs, strict=True)]


def _number(text: str, best: bool) -> Cell:
    return Cell(text, "num good" if best else "num")


def _run_style(i: int) -> dict[str, Any]:
    """Return the line of a run: a colour, and another dash where the colours begin again."""
    return {"paint": colour(i), "dash": ("solid", "dash", "dot")[i // PALETTE_SIZE % 3]}


def _loss_chart(runs: Sequence[ComparedRun], kind: str, name: str) -> Chart | None:
    traces = []
    for i, (run, label) in enumerate(zip(runs, short_names(runs), strict=True)):
        points = [(step if kind == "step" else tokens, value) for step, tokens, value in getattr(run, name)]
        known = [(float(x), value) for x, value in points if x is not None]
        if known:
            xs, ys = zip(*known, strict=True)
            traces.append(line(label, xs, ys, **_run_style(i), hovertemplate="%{y:.4f}"))
    if not traces:
        return None
    title = f"{NAMES[name].capitalize()} by {'step' if kind == 'step' else 'tokens'}"
    own_program = any(tokens is None for run in runs for _, tokens, _ in run.train)  # its unit is not known
    y = axis("loss", unit="" if own_program else "nats", **scale_type([v for trace in traces for v in trace["y"]]))
    figure = {"data": traces, "layout": layout(HEIGHT, "step" if kind == "step" else "real tokens of all ranks", y)}
    return Chart(f"{name}-{kind}", title, "", figure, log=True)


def _speed_chart(runs: Sequence[ComparedRun]) -> Chart | None:
    traces = []
    for i, (run, label) in enumerate(zip(runs, short_names(runs), strict=True)):
        if run.speed:
            xs, ys = zip(*((float(step), rate) for step, rate in run.speed), strict=True)
            traces += smoothed(label, xs, ys, window=smoothing_width(len(xs)), faint="0.25", **_run_style(i))
    if not traces:
        return None
    y = axis("speed", unit="tokens/s", rangemode="tozero", tickformat="~s")
    figure = {"data": traces, "layout": layout(HEIGHT, "step", y)}
    return Chart("speed", "Tokens per second", "Real tokens of all ranks. Bold lines: running means.", figure)


def _memory_bars(runs: Sequence[ComparedRun]) -> Bars | None:
    peaks = [
        BarValues(name, [(name, colour(i), peak)], peak)
        for i, (name, run) in enumerate(zip(short_names(runs), runs, strict=True))
        if (peak := finite_float(run.figures["peak_memory_bytes"]))
    ]
    return stacked_bars("Peak memory per rank", peaks, format_bytes, "The largest of all ranks.")
