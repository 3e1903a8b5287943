"""Build charts of memory and host telemetry, and group a run's charts for the page. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allranks.analysis.report.figures import (
    MAX_LINES,
    Chart,
    Elapsed,
    Figure,
    Value,
    axis,
    band,
    common_byte_unit,
    common_steps,
    downsample,
    label,
    layout,
    line,
    marked_area,
    scale,
    step_layout,
)
from allranks.analysis.report.run_data import RunData, StepRecord
from allranks.analysis.report.step_charts import loss_chart, rank_time_chart, score_chart, step_shapes, throughput_chart
from allranks.utils.palette import colour
from allranks.utils.text import as_dicts, finite_float, format_bytes


def memory_chart(data: RunData) -> Chart | None:
    """Return the chart of memory in use by rank, with the highest peak of all ranks."""
    ranks = {rank: s.steps for rank, s in data.histories.items() if any(p.memory is not None for p in s.steps)}
    if not ranks:
        return None
    peaks = {rank: max((s.peak for s in steps if s.peak is not None), default=None) for rank, steps in ranks.items()}
    divisor, unit = common_byte_unit([*peaks.values(), *(s.memory for steps in ranks.values() for s in steps)])
    traces = _memory_traces(ranks, divisor)
    traces += _peak_trace(ranks, divisor)
    figure = {
        "data": traces,
        "layout": step_layout(
            280, [float(s.step) for s in data.zero.steps], axis("memory", unit=unit, rangemode="tozero")
        ),
    }
    figure["layout"]["shapes"] = step_shapes(data)
    kind = "of the CUDA allocator" if data.plan.get("device") == "cuda" else "resident in the process"
    known = {rank: peak for rank, peak in peaks.items() if peak is not None}
    top = max(known, key=lambda rank: known[rank], default=None)
    where = f" Highest peak: {format_bytes(known[top])} on rank {top}." if top is not None else ""
    return Chart("memory", "Memory by rank", f"Memory {kind} at the end of each step.{where}", figure)


def _memory_traces(ranks: dict[int, list[StepRecord]], divisor: float) -> list[Figure]:
    if len(ranks) <= MAX_LINES:
        return [
            curve(f"rank {r}", [float(s.step) for s in steps], scale([s.memory for s in steps], divisor), colour(r))
            for r, steps in ranks.items()
        ]
    rows = common_steps(ranks)
    low, middle, high = band([[s.memory for s in row] for row in rows])
    return band_traces([float(row[0].step) for row in rows], low, middle, high, divisor, "ranks")


def band_traces(
    xs: list[float], low: list[Value], middle: list[Value], high: list[Value], divisor: float, what: str
) -> list[Figure]:
    """Return lowest to highest as an area, and the median, for more lines than can be distinguished."""
    group = f"median of the {what} (area: lowest to highest)"
    edge = {"width": 1, "mode": "lines", "showlegend": False, "group": group}
    area = {**edge, "fill": "tonexty", "fillcolor": "--c1/0.18"}
    return [
        line(f"lowest of the {what}", xs, scale(low, divisor), "--c1/0.5", **edge),
        line(f"highest of the {what}", xs, scale(high, divisor), "--c1/0.5", **area),
        line(group, xs, scale(middle, divisor), colour(0), mode="lines"),
    ]


def _peak_trace(ranks: dict[int, list[StepRecord]], divisor: float) -> list[Figure]:
    tops: dict[int, float] = {}
    for steps in ranks.values():
        for step in steps:
            if step.peak is not None:
                tops[step.step] = max(tops.get(step.step, 0.0), step.peak)
    xs = sorted(tops)
    name = label("highest peak so far")
    x, y = downsample([float(n) for n in xs], scale([tops[n] for n in xs], divisor))
    return [line(name, x, y, "--muted", width=1.5, dash="dash", mode="lines")] if xs else []


Rows = list[dict[str, Any]]
Read = Callable[[dict[str, Any]], Value]
HEIGHT = 230
UNITS = (("hours", 3600), ("minutes", 60))


def telemetry_charts(data: RunData) -> list[Chart]:
    """Return the charts of the hosts' CPU, memory, network and disk, and of their GPUs."""
    if not data.telemetry:
        return []
    elapsed = Elapsed(_moments(data))
    hosts = {host: (_times(rows, elapsed), rows) for host, rows in data.telemetry.items()}
    net = [("sent", "net_sent_bytes_per_s"), ("received", "net_received_bytes_per_s")]
    if len(hosts) == 1:
        net.append(("loopback", "loopback_bytes_per_s"))
    disk = [("read", "disk_read_bytes_per_s"), ("written", "disk_write_bytes_per_s")]
    charts = [
        _percent("cpu", "CPU", "Busy share of all cores.", hosts, lambda row: finite_float(row.get("cpu_percent"))),
        _percent("host-memory", "Host memory", "Used share of the host's memory.", hosts, _memory_share),
        _bytes(
            "network",
            "Network",
            "All interfaces except loopback" + (", which is shown separately" * (len(hosts) == 1)) + ".",
            hosts,
            net,
        ),
        _bytes("disk", "Disk", "Reads and writes of the host's disks.", hosts, disk),
        *_gpu_charts(hosts),
    ]
    drawn = [chart for chart in charts if chart]
    longest = max((xs[-1] for xs, _ in hosts.values()), default=0.0)
    for chart in drawn:
        chart.figure["layout"]["shapes"] = _training(data, elapsed)
        _rescale(chart.figure, longest)
    return drawn


def _rescale(figure: Figure, longest: float) -> None:
    """Use minutes or hours instead of seconds for a long run."""
    unit, seconds = next(((u, s) for u, s in UNITS if longest > 3 * s), ("seconds", 1))
    figure["layout"]["xaxis"]["title"]["text"] = f"{unit} since the start"
    for trace in figure["data"]:
        trace["x"] = [x / seconds for x in trace["x"]]
    for shape in figure["layout"]["shapes"]:
        shape["x0"], shape["x1"] = shape["x0"] / seconds, shape["x1"] / seconds


def _moments(data: RunData) -> list[float]:
    sampled = [t for rows in data.telemetry.values() for row in rows if (t := finite_float(row["time"])) is not None]
    return sampled + [at for attempt in data.zero.attempts for _, at in attempt.phases]


def _times(rows: Rows, elapsed: Elapsed) -> list[float]:
    return [elapsed(finite_float(row["time"]) or 0.0) for row in rows]


def _training(data: RunData, elapsed: Elapsed) -> list[Figure]:
    """Return areas that mark training with its evaluations and checkpoints."""
    shapes = []
    for attempt in data.zero.attempts:
        starts = [at for name, at in attempt.phases if name == "train"]
        if starts and attempt.ended is not None:
            shapes.append(marked_area(elapsed(starts[0]), elapsed(attempt.ended), "--area"))
    return shapes


def _memory_share(row: dict[str, Any]) -> Value:
    used, total = finite_float(row.get("memory_used_bytes")), finite_float(row.get("memory_total_bytes"))
    return 100 * used / total if used is not None and total else None


Hosts = dict[str, tuple[list[float], Rows]]
Keys = list[tuple[str, str]]
Lines = dict[str, tuple[list[float], list[Value]]]


def _percent(id: str, title: str, note: str, hosts: Hosts, read: Read) -> Chart | None:
    lines = {host: (xs, [read(row) for row in rows]) for host, (xs, rows) in hosts.items()}
    return _chart(id, title, note, _draw(lines, 1.0, "hosts"), axis("share", unit="%", range=[0, 105]))


def _bytes(id: str, title: str, note: str, hosts: Hosts, keys: Keys) -> Chart | None:
    values = [finite_float(row.get(key)) for _, rows in hosts.values() for row in rows for _, key in keys]
    if not any(values):
        return None
    divisor, unit = common_byte_unit(values)
    if len(hosts) == 1:
        ((xs, rows),) = hosts.values()
        lines: Lines = {name: (xs, [finite_float(row.get(key)) for row in rows]) for name, key in keys}
    else:
        lines = {
            host: (xs, [sum(finite_float(row.get(key)) or 0.0 for _, key in keys) for row in rows])
            for host, (xs, rows) in hosts.items()
        }
        note += f" Sum of {' and '.join(name for name, _ in keys)}."
    return _chart(id, title, note, _draw(lines, divisor, "hosts"), axis("rate", unit=f"{unit}/s", rangemode="tozero"))


def _gpu_charts(hosts: Hosts) -> list[Chart | None]:
    bytes_used = [v for _, values in _gpu_lines(hosts, "memory_used_bytes").values() for v in values]
    divisor, unit = common_byte_unit(bytes_used)
    share, memory = axis("utilisation", unit="%", range=[0, 105]), axis("memory", unit=unit, rangemode="tozero")
    power = axis("power", unit="W", rangemode="tozero")
    of_all = "Memory of each GPU in use by all processes."
    kinds = (
        ("gpu", "GPU utilisation", "Share of the time in which a kernel ran.", "utilisation_percent", 1.0, share),
        ("gpu-memory", "GPU memory", of_all, "memory_used_bytes", divisor, memory),
        ("gpu-power", "GPU power", "Power of each GPU.", "power_w", 1.0, power),
    )
    return [
        _chart(id, title, note, _draw(_gpu_lines(hosts, key), divisor, "GPUs"), y)
        for id, title, note, key, divisor, y in kinds
    ]


def _gpu_lines(hosts: Hosts, key: str) -> Lines:
    lines: Lines = {}
    for host, (xs, rows) in hosts.items():
        gpus: dict[str, list[Value]] = {}
        for i, row in enumerate(rows):
            for gpu in as_dicts(row.get("gpus")):
                each = gpus.setdefault(str(gpu.get("index")), [None] * len(rows))
                each[i] = finite_float(gpu.get(key))
        for index, values in gpus.items():
            lines[f"{host} GPU {index}" if len(hosts) > 1 else f"GPU {index}"] = (xs, values)
    return lines


def _draw(lines: Lines, divisor: float, what: str) -> list[Figure]:
    """Return one line each, or an area from lowest to highest if there are too many lines."""
    known = {name: line_ for name, line_ in lines.items() if any(v is not None for v in line_[1])}
    if len(known) <= MAX_LINES:
        return [curve(name, xs, scale(ys, divisor), colour(i)) for i, (name, (xs, ys)) in enumerate(known.items())]
    # hosts sample at different times: round to seconds
    table: dict[int, list[Value]] = {}
    for xs, ys in known.values():
        for x, y in zip(xs, ys, strict=True):
            table.setdefault(round(x), []).append(y)
    seconds = sorted(table)
    return band_traces([float(s) for s in seconds], *band([table[s] for s in seconds]), divisor, f"{len(known)} {what}")


def curve(name: str, xs: list[float], ys: list[Value], paint: str) -> Figure:
    """Return a measure over time."""
    return line(name, xs, ys, paint, width=1.5, mode="lines")


def _chart(id: str, title: str, note: str, traces: list[Figure], y: Figure) -> Chart | None:
    if not any(v is not None for trace in traces for v in trace["y"]):
        return None
    figure = {"data": traces, "layout": layout(HEIGHT, "", y)}
    return Chart(id, title, note, figure)


def training_charts(data: RunData) -> list[Chart]:
    """Return the charts of loss and scores."""
    return [chart for chart in (loss_chart(data), score_chart(data)) if chart]


def speed_charts(data: RunData) -> list[Chart]:
    """Return the charts of time and memory."""
    makers = (throughput_chart, rank_time_chart, memory_chart)
    return [chart for make in makers if (chart := make(data))]
