"""Charts over the steps: loss with learning rate, scores, tokens per second. Pure."""

from __future__ import annotations

from allranks.observe.summary import WARMUP_STEPS
from allranks.report.figure import (
    Chart,
    Figure,
    axis,
    colour,
    line,
    log_ticks,
    marker_line,
    row_name,
    step_layout,
    warm_up,
)
from allranks.report.gather import RunData
from allranks.report.series import rates, smooth, smoothing_width
from allranks.report.story import Events, Step
from allranks.report.text import number

WARM_NOTE = f"Shaded: the {WARMUP_STEPS} warm-up steps."


def loss_chart(data: RunData) -> Chart | None:
    """Train loss of every step, held-out loss where it was measured; learning rate and gradient norm below."""
    steps, evals = data.zero.steps, [e for e in data.zero.of("eval") if number(e.get("loss")) is not None]
    if not steps and len(evals) < 2:
        return None
    traces = _loss_traces(steps, evals)
    xs = [float(s.step) for s in steps]
    rows = [
        (name, values)
        for name, values in (("learning rate", [s.lr for s in steps]), ("gradient norm", [s.grad_norm for s in steps]))
        if any(v is not None for v in values)
    ]
    for i, (name, values) in enumerate(rows):
        width = None if name == "learning rate" else smoothing_width(len(xs))
        shown = smooth(values, width) if width else values
        traces.append(line(name, xs, shown, colour(3 + i), axis=i + 2, width=1.5, showlegend=False, mode="lines"))
    figure = {"data": traces, "layout": _loss_layout(data, [name for name, _ in rows])}
    return Chart("loss", "Loss and learning rate", _loss_note(data, len(xs), bool(evals)), figure, wide=True)


def _loss_traces(steps: list[Step], evals: Events) -> list[Figure]:
    xs, losses = [float(s.step) for s in steps], [s.loss for s in steps]
    width = smoothing_width(len(xs))
    traces = []
    if width:
        traces.append(line("train loss, each step", xs, losses, "--c1/0.35", width=1, mode="lines"))
        traces.append(line(f"train loss, mean of {width} steps", xs, smooth(losses, width), colour(0), width=2.5))
    elif xs:
        traces.append(line("train loss", xs, losses, colour(0)))
    if evals:
        at, held_out = [float(e["step"]) for e in evals], [number(e.get("loss")) for e in evals]
        mark = {"mode": "lines+markers", "marker": {"size": 9, "symbol": "diamond", "color": colour(1)}}
        traces.append(line("held-out loss", at, held_out, colour(1), dash="dot", **mark))
    return traces


def _loss_layout(data: RunData, rows: list[str]) -> Figure:
    bottom = 0.22 * len(rows)
    seen = [v for s in data.zero.steps if (v := s.loss) is not None]
    # a loss that fell a hundredfold is a flat line on a linear axis
    log = (
        {"type": "log", **log_ticks(min(seen), max(seen))}
        if seen and min(seen) > 0 and max(seen) / min(seen) > 100
        else {}
    )
    more: Figure = {"yaxis": axis(bottom + 0.06 if rows else 0.0, 1.0, **log)}
    for i, _ in enumerate(rows):
        top = bottom - 0.22 * i - 0.05
        more[f"yaxis{i + 2}"] = axis(top - 0.13, top, nticks=3, rangemode="tozero")
    found = step_layout(300 + 80 * len(rows), [0.0, *(float(s.step) for s in data.zero.steps)], **more)
    found["xaxis"]["anchor"] = f"y{len(rows) + 1}" if rows else "y"
    found["annotations"] = [row_name(name, i + 2) for i, name in enumerate(rows)]
    found["shapes"] = step_shapes(data) + [marker_line(e["from_step"]) for e in data.zero.of("resume")]
    return found


def _loss_note(data: RunData, points: int, evaluated: bool) -> str:
    parts = ["Mean over the trained tokens of all ranks, in nats; lower is better."]
    if not evaluated:
        parts.append("Nothing was evaluated.")
    if points and step_shapes(data):
        parts.append(WARM_NOTE)
    if data.zero.of("resume"):
        parts.append("Dotted upright lines: where a later attempt went on.")
    return " ".join(parts)


def step_shapes(data: RunData) -> list[Figure]:
    steps = data.zero.steps
    return warm_up(steps[0].step, steps[-1].step) if steps else []


def score_chart(data: RunData) -> Chart | None:
    """Accuracy, or the share of right answers, over the evaluations."""
    names = (("accuracy", "accuracy"), ("exact_match", "right answers"))
    traces = []
    for i, (key, name) in enumerate(names):
        known = [(float(e["step"]), v) for e in data.zero.of("eval") if (v := number(e.get(key))) is not None]
        if len(known) > 1:
            xs, ys = zip(*known, strict=True)
            traces.append(line(name, xs, ys, colour(2 + i), hovertemplate="%{y:.1%}"))
    if not traces:
        return None
    top = max(max(t["y"]) for t in traces)
    limits = {"range": [0, min(1.05, max(top * 1.15, 0.1))], "tickformat": ".0%"}
    figure = {"data": traces, "layout": step_layout(230, [x for t in traces for x in t["x"]], yaxis=axis(**limits))}
    title = "Right answers" if traces[0]["name"] == "right answers" else "Accuracy"
    return Chart("score", title, "Share of the held-out rows that were answered right.", figure, wide=True)


def throughput_chart(data: RunData) -> Chart | None:
    """Real, trained and padded tokens per second, summed over the ranks."""
    found = rates({rank: story.steps for rank, story in data.stories.items()})
    if not found:
        return None
    xs = [float(r.step) for r in found]
    width = smoothing_width(len(xs))
    lines = (
        ("real", [r.real for r in found], colour(0), 1),
        ("trained", [r.trained for r in found], colour(2), 1),
        ("padded", [r.padded for r in found], colour(5), 2),
    )
    traces = []
    for name, values, paint, row in lines:
        if all(v is None for v in values):
            continue
        if width:
            faint = f"{paint}/0.25"
            traces.append(
                line(
                    name,
                    xs,
                    values,
                    faint,
                    axis=row,
                    width=1,
                    mode="lines",
                    group=name,
                    showlegend=False,
                    hoverinfo="skip",
                )
            )
        shown = smooth(values, width) if width else values
        traces.append(line(name, xs, shown, paint, axis=row, showlegend=row == 1))
    parts = {
        "yaxis": axis(0.36, 1.0, rangemode="tozero", tickformat="~s"),
        "yaxis2": axis(0.0, 0.24, rangemode="tozero", tickformat="~s", nticks=3),
    }
    figure = {"data": traces, "layout": step_layout(340, xs, **parts)}
    figure["layout"]["xaxis"]["anchor"] = "y2"
    figure["layout"]["annotations"] = [row_name("padded tokens per second", 2)]
    figure["layout"]["shapes"] = warm_up(found[0].step, found[-1].step)
    return Chart("throughput", "Tokens per second", _throughput_note(data, width), figure)


def _throughput_note(data: RunData, width: int | None) -> str:
    ranks = sum(bool(story.steps) for story in data.stories.values())
    parts = [f"Sum over {ranks} rank{'s' * (ranks != 1)}. Real tokens are all but padding, trained ones carry loss."]
    if data.world_size and ranks < data.world_size:
        parts.append(f"{data.world_size - ranks} of {data.world_size} ranks have logged no step and are not in it.")
    if width:
        parts.append(f"Strong lines: mean of {width} steps.")
    if step_shapes(data):
        parts.append(WARM_NOTE)
    return " ".join(parts)
