"""Build the charts of training steps: loss, scores, throughput, step time and time per rank. Pure."""

from __future__ import annotations

from allranks.analysis.metrics import WARMUP_STEPS
from allranks.analysis.report import figures
from allranks.analysis.report.run_data import PARTS, Events, RunData, StepRecord
from allranks.rundir.events import REPORTED
from allranks.utils.palette import PHASE_COLOURS, colour
from allranks.utils.text import finite_float

HEIGHT = 280
WARMUP_NOTE = f"Shaded: the {WARMUP_STEPS} warm-up steps."


def loss_chart(data: RunData) -> figures.Chart | None:
    """Return the chart of train and held-out losses, with learning rate and gradient norm below."""
    steps, evals = data.zero.steps, [e for e in data.zero.of("eval") if finite_float(e.get("loss")) is not None]
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
        width = None if name == "learning rate" else figures.smoothing_width(len(xs))
        shown = figures.smooth(values, width) if width else values
        traces.append(
            figures.line(name, xs, shown, colour(3 + i), axis=i + 2, width=1.5, showlegend=False, mode="lines")
        )
    losses = [v for trace in traces if "yaxis" not in trace for v in trace["y"]]
    figure = {"data": traces, "layout": _loss_layout(data, losses, rows)}
    title = "Loss and learning rate" if rows else "Loss"
    return figures.Chart("loss", title, _loss_note(data, len(xs), bool(evals)), figure, wide=True, log=True)


def _loss_traces(steps: list[StepRecord], evals: Events) -> list[figures.Figure]:
    xs, losses = [float(s.step) for s in steps], [s.loss for s in steps]
    traces = (
        figures.smoothed("train loss", xs, losses, colour(0), figures.smoothing_width(len(xs)), faint="0.35")
        if xs
        else []
    )
    if evals:
        at, held_out = [float(e["step"]) for e in evals], [finite_float(e.get("loss")) for e in evals]
        mark = {"mode": "lines+markers", "marker": {"size": 9, "symbol": "diamond", "color": colour(1)}}
        traces.append(figures.line("held-out loss", at, held_out, colour(1), dash="dot", **mark))
    return traces


def _loss_layout(
    data: RunData, losses: list[figures.Value], rows: list[tuple[str, list[figures.Value]]]
) -> figures.Figure:
    bottom, unit = 0.22 * len(rows), "" if data.own_program else "nats"
    y = figures.axis("loss", bottom + 0.06 if rows else 0.0, 1.0, unit=unit, **figures.scale_type(losses))
    more: figures.Figure = {}
    for i, (name, values) in enumerate(rows):
        top = bottom - 0.22 * i - 0.05
        kind = figures.scale_type(values) if name == "gradient norm" else {}
        more[f"yaxis{i + 2}"] = figures.axis(name, top - 0.13, top, nticks=3, **(kind or {"rangemode": "tozero"}))
    axes = figures.step_layout(300 + 80 * len(rows), [0.0, *(float(s.step) for s in data.zero.steps)], y, **more)
    axes["xaxis"]["anchor"] = f"y{len(rows) + 1}" if rows else "y"
    axes["shapes"] = step_shapes(data) + [figures.marker_line(e["from_step"]) for e in data.zero.of("resume")]
    return axes


def _loss_note(data: RunData, points: int, evaluated: bool) -> str:
    parts = ["Mean over the trained tokens of all ranks, in nats; lower is better."]
    if data.own_program:  # what it means and its unit are the program's
        parsed = data.metrics.get("progress_source") != REPORTED
        parts = ["As rank 0 printed it." if parsed else "As the program reported it."]
    elif not evaluated:
        parts.append("There was no evaluation.")
    if width := figures.smoothing_width(points):
        parts.append(f"Bold line: mean of {width} steps.")
    if points and step_shapes(data):
        parts.append(WARMUP_NOTE)
    if data.zero.of("resume"):
        parts.append("Dotted vertical lines: start of a resumed attempt.")
    return " ".join(parts)


def step_shapes(data: RunData) -> list[figures.Figure]:
    steps = [] if data.own_program else data.zero.steps
    return figures.warmup_shapes(steps[0].step, steps[-1].step) if steps else []


def score_chart(data: RunData) -> figures.Chart | None:
    """Return the chart of accuracy, or of the share of exact matches, over the evaluations."""
    names = (("accuracy", "accuracy"), ("exact_match", "exact match"))
    traces = []
    for i, (key, name) in enumerate(names):
        known = [(float(e["step"]), v) for e in data.zero.of("eval") if (v := finite_float(e.get(key))) is not None]
        if len(known) > 1:
            xs, ys = zip(*known, strict=True)
            traces.append(figures.line(name, xs, ys, colour(2 + i), hovertemplate="%{y:.1%}"))
    if not traces:
        return None
    top = max(max(t["y"]) for t in traces)
    limits = {"range": [0, min(1.05, max(top * 1.15, 0.1))], "tickformat": ".0%"}
    y = figures.axis("share of the held-out rows", **limits)
    figure = {"data": traces, "layout": figures.step_layout(230, [x for t in traces for x in t["x"]], y)}
    title = "Exact match" if traces[0]["name"] == "exact match" else "Accuracy"
    return figures.Chart("score", title, "Share of the held-out rows with the right answer.", figure, wide=True)


def throughput_chart(data: RunData) -> figures.Chart | None:
    """Return the chart of real and trained tokens per second, summed over the ranks."""
    lines = figures.rates({rank: story.steps for rank, story in data.histories.items()})
    if not lines:
        return None
    xs = [float(step) for step, _, _ in lines]
    width = figures.smoothing_width(len(xs))
    traces = figures.smoothed("real", xs, [real for _, real, _ in lines], colour(0), width, faint="0.25")
    trained = [each for _, _, each in lines]
    if any(v is not None for v in trained):
        traces += figures.smoothed("trained", xs, trained, colour(2), width, faint="0.25")
    y = figures.axis("speed", unit="tokens/s", rangemode="tozero", tickformat="~s")
    figure = {"data": traces, "layout": figures.step_layout(HEIGHT, xs, y)}
    figure["layout"]["shapes"] = figures.warmup_shapes(lines[0][0], lines[-1][0])
    return figures.Chart("throughput", "Tokens per second", _throughput_note(data, width), figure)


def _throughput_note(data: RunData, width: int | None) -> str:
    ranks = sum(bool(story.steps) for story in data.histories.values())
    parts = [
        f"Sum over {ranks} rank{'s' * (ranks != 1)}. Real tokens exclude padding; trained tokens are included in the "
        "loss."
    ]
    if data.world_size and ranks < data.world_size:
        parts.append(f"{data.world_size - ranks} of {data.world_size} ranks logged no step and are not included.")
    if width:
        parts.append(f"Bold lines: mean of {width} steps.")
    if step_shapes(data):
        parts.append(WARMUP_NOTE)
    return " ".join(parts)


def rank_time_chart(data: RunData) -> figures.Chart | None:
    """Return the mean step of each rank, split into known parts."""
    ranks = figures.rank_times({rank: story.steps for rank, story in data.histories.items()})
    parted = any(r.parts for r in ranks)
    if not ranks or (len(ranks) == 1 and not parted):
        return None
    longest = max(sum(r.parts.values()) + r.other for r in ranks)
    factor, unit = (1000.0, "ms") if longest < 2 else (1.0, "s")
    parts = [
        (part, [r.parts.get(part, 0.0) for r in ranks], PHASE_COLOURS[part])
        for part in PARTS
        if any(part in r.parts for r in ranks)
    ]
    rest = ("other", PHASE_COLOURS["other"]) if parted else ("mean step", colour(0))
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": [r.rank for r in ranks],
            "y": [value * factor for value in values],
            "marker": {"color": paint, "line": {"width": 0}},
            "hovertemplate": f"%{{y:.3~g}} {unit}",
        }
        for name, values, paint in [*parts, (rest[0], [r.other for r in ranks], rest[1])]
    ]
    y = figures.axis("mean step", unit=unit, rangemode="tozero")
    figure = {"data": traces, "layout": figures.layout(HEIGHT, "rank", y, bargap=0.5 if len(ranks) < 8 else 0.25)}
    if len(ranks) <= 24:
        figure["layout"]["xaxis"]["dtick"] = 1
    note = "Mean of the steps after warm-up, by rank."
    if parted and len(ranks) > 1:
        note += " Backward includes waiting for the other ranks."
    return figures.Chart("rank-time", "Step time by rank and part" if parted else "Step time by rank", note, figure)
