"""Evaluate measurements of strategies: three gates, and figures only for strategies that pass all of them. Pure."""

from __future__ import annotations

from statistics import median
from typing import Any

import msgspec

from allranks.experiments.spread import figure_spreads

TOLERANCE = {"float32": 2e-3, "float64": 1e-6, "bfloat16": 0.05, "float16": 0.05}
# relative to the gradient's norm: a missing division by W ranks gives W - 1, and AdamW's weights do not show it
NORM_TOLERANCE = {"float32": 0.01, "float64": 1e-4, "bfloat16": 0.1, "float16": 0.1}
LOSS_TOLERANCE = {"float32": 1e-3, "float64": 1e-6, "bfloat16": 0.05, "float16": 0.05}
LIBRARY_TOLERANCE = 0.01  # of bytes, if a library decides the number of messages
SHOWN_OVERLAP = 0.05
Json = dict[str, Any]


class Gates(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the gates; a row only has figures if all passed."""

    parity: bool
    mechanism: bool
    equal_work: bool

    @property
    def passed(self) -> bool:
        return self.parity and self.mechanism and self.equal_work


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy. ``reasons`` say why a gate failed, ``marks`` are other remarks."""

    strategy: str
    gates: Gates
    reasons: list[str]
    marks: list[str]
    parity_error: float | None
    figures: Json | None


def evaluate_strategies(measured: Json) -> list[ComparisonRow]:
    """Return one row per strategy, in the requested order."""
    control = negative_control_problem(measured)
    names = list(measured["ranks"][0])
    sound = next((n for n in names if not _failed(measured, n) and not _parity(measured, n, control)), None)
    return [_row(measured, name, control, sound) for name in names]


def negative_control_problem(measured: Json) -> str | None:
    """Return why the parity gate itself is invalid: without synchronisation it must detect wrong weights."""
    control, limit = measured["negative_control"], TOLERANCE[measured["dtype"]]
    if measured["world_size"] < 2:
        return None
    if control["error"] <= limit or control["ranks_differ"] == 0.0:
        return (
            f"the negative control (no synchronisation) was not detected (error {control['error']:.1e}): too few steps"
        )
    return None


def _row(measured: Json, name: str, control: str | None, sound: str | None) -> ComparisonRow:
    failed = _failed(measured, name)
    if failed:
        gates = Gates(parity=False, mechanism=False, equal_work=False)
        return ComparisonRow(strategy=name, gates=gates, reasons=[failed], marks=[], parity_error=None, figures=None)
    parity, mechanism = _parity(measured, name, control), _mechanism(measured, name)
    work = _equal_work(measured, name, sound)
    gates = Gates(parity=parity is None, mechanism=mechanism is None, equal_work=work is None)
    return ComparisonRow(
        strategy=name,
        gates=gates,
        reasons=[r for r in (parity, mechanism, work) if r],
        marks=_remarks(measured, name),
        parity_error=measured["ranks"][0][name]["verified"]["error"],
        figures=_figures(measured, name) if gates.passed else None,
    )


def _failed(measured: Json, name: str) -> str | None:
    return next((rank[name]["failed"] for rank in measured["ranks"] if rank[name]["failed"]), None)


def _parity(measured: Json, name: str, control: str | None) -> str | None:
    if control:
        return f"parity: {control}"
    verified, dtype = measured["ranks"][0][name]["verified"], measured["dtype"]
    error, limit = _number_or_inf(verified["error"]), TOLERANCE[dtype]
    if not error <= limit:
        return f"parity: after {measured['verify_steps']} steps the weights differ from those of one process by {error:.1e} of the update (limit {limit:.0e})"
    norm, limit = _number_or_inf(verified["norm_error"]), NORM_TOLERANCE[dtype]
    if not norm <= limit:
        return (
            f"parity: the gradient norm differs from that of one process by {norm:.1e} (relative; limit {limit:.0e}): "
            "a factor that AdamW hides, such as a missing division by the number of ranks"
        )
    apart = max(rank[name]["verified"].get("ranks_differ", 0.0) for rank in measured["ranks"])
    return f"parity: the ranks' weights differ by {apart:.1e}" if apart else None


def _number_or_inf(value: float | None) -> float:
    """Return infinity for null, because JSON has no infinity and no NaN."""
    return float("inf") if value is None else value


def _mechanism(measured: Json, name: str) -> str | None:
    for r, rank in enumerate(measured["ranks"]):
        verified = rank[name]["verified"]
        problem = compare_traffic(verified["expected"], verified["measured"])
        if problem:
            return f"mechanism: rank {r}: {problem}"
    return None


def compare_traffic(expected: list[Json], measured: list[Json]) -> str | None:
    """Return the first difference between the process group's traffic and the strategy's formula."""
    left = {(m["kind"], m["phase"]): [m["count"], m["bytes"]] for m in measured}
    for e in expected:
        if e["count"] is None:
            found = _take_any_phase(left, e)
            if abs(found - e["bytes"]) > LIBRARY_TOLERANCE * max(e["bytes"], 1):
                return f"{e['kind']}: {found:,.0f} bytes per step, expected {e['bytes']:,}"
            continue
        count, size = left.pop((e["kind"], e["phase"]), (0, 0))
        if count != e["count"] or size != e["bytes"]:
            return f"{e['kind']} in {e['phase']}: {count:g} calls of {size:,.0f} bytes per step, expected {e['count']} of {e['bytes']:,}"
    if left:
        (kind, phase), (count, size) = next(iter(left.items()))
        return f"unexpected: {count:g} {kind} of {size:,.0f} bytes per step in {phase}"
    return None


def _take_any_phase(left: dict[tuple[str, str], list[float]], wanted: Json) -> float:
    """Return bytes of a kind in any phase.

    A library prefetches, so its gathers of forward and backward cannot be distinguished; each line of the formula takes its own
    bytes and leaves the rest.
    """
    total = 0.0
    order = sorted((k for k in left if k[0] == wanted["kind"]), key=lambda k: k[1] != wanted["phase"])
    for key in order:
        rest = wanted["bytes"] * (1 + LIBRARY_TOLERANCE) - total
        if rest <= wanted["bytes"] * 2 * LIBRARY_TOLERANCE:
            break
        count, size = left[key]
        if size <= rest:
            total += size
            left.pop(key)
        else:
            taken = wanted["bytes"] - total
            left[key] = [count, size - taken]
            total += taken
    return total


def _equal_work(measured: Json, name: str, sound: str | None) -> str | None:
    steps, accum = measured["verify_steps"], measured["grad_accum"]
    timed = measured["steps"] + measured["warmup_steps"]
    for r, rank in enumerate(measured["ranks"]):
        work = rank[name]["verified"]["work"]
        if work["updates"] != steps:
            return f"equal work: rank {r} made {work['updates']} updates in {steps} steps"
        for found, n in [(work, steps), *((repeat["work"], timed) for repeat in rank[name]["repeats"])]:
            if found["micro_batches"] != n * accum:
                return f"equal work: rank {r} trained {found['micro_batches']} micro-batches in {n} steps, planned {n * accum}"
        if sound is None:
            continue
        like = rank[sound]
        for key in ("rows", "tokens"):
            if work[key] != like["verified"]["work"][key]:
                return f"equal work: rank {r} trained {work[key]} {key}, but {sound} trained {like['verified']['work'][key]}"
        limit = LOSS_TOLERANCE[measured["dtype"]]
        pairs = zip(rank[name]["verified"]["losses"], like["verified"]["losses"], strict=True)
        if any(abs(a - b) > limit * max(abs(b), 1e-6) for a, b in pairs):
            return f"equal work: the losses differ from those of {sound}"
    return None


def _remarks(measured: Json, name: str) -> list[str]:
    verified = measured["ranks"][0][name]["verified"]
    marks = []
    if verified["error"] == 0.0:
        marks.append("weights bitwise equal to those of one process")
    if verified["claims_overlap"] and measured["world_size"] > 1:
        shown = max(_overlap(rank[name]["verified"]["window"]) or 0.0 for rank in measured["ranks"])
        if not any(m["phase"] == "backward" for m in verified["measured"]):
            marks.append("is expected to overlap, but launches no collective during backward")
        elif shown < SHOWN_OVERLAP:
            marks.append(f"is expected to overlap, but hides only {shown:.0%} of its communication here")
    return marks


def _overlap(window: Json) -> float | None:
    return window["overlapped_comm_s"] / window["comm_s"] if window["comm_s"] > 0 else None


def _figures(measured: Json, name: str) -> Json:
    ranks = [rank[name] for rank in measured["ranks"]]
    repeats = range(len(ranks[0]["repeats"]))
    rates = [tokens_per_s([r["repeats"][k] for r in ranks]) for k in repeats]
    everything = [r["repeats"][k] for r in ranks for k in repeats]
    steps = sorted(t for one in everything for t in one["step_time_s"])
    windows = [r["verified"]["window"] for r in ranks]
    middle = {part: median(w[part] for w in windows) for part in ("comm_s", "exposed_comm_s", "idle_s", "compute_s")}
    profiled = median(w["step_s"] for w in windows)
    overlaps = [o for w in windows if (o := _overlap(w)) is not None]
    memory = {key: max(r["verified"]["memory"][key] for r in ranks) for key in ranks[0]["verified"]["memory"]}
    figures = {
        "tokens_per_s": {"median": median(rates), "min": min(rates), "max": max(rates)},
        "step_time_s": {"median": median(steps), "p90": steps[int(0.9 * (len(steps) - 1))]},
        **{p: median(t for one in everything for t in one[p]) for p in ("forward_s", "backward_s", "optimizer_s")},
        **middle,
        "profiled_step_s": profiled,
        "overlap": median(overlaps) if overlaps else None,
        "collectives": _collectives(ranks[0]["verified"]),
        "collective_s": collective_seconds(windows, measured),
        "memory": {**memory, "state_bytes": sum(v for k, v in memory.items() if k != "peak_bytes")},
    }
    return {**figures, "spread": figure_spreads(figures, ranks, repeats, rates)}


def tokens_per_s(ranks: list[Json]) -> float:
    """Return all ranks' tokens over the time of the slowest rank, in one repeat."""
    return sum(sum(r["tokens"]) for r in ranks) / max(sum(r["step_time_s"]) for r in ranks)


def _collectives(verified: Json) -> list[Json]:
    theory: dict[str, float] = {}
    for e in verified["expected"]:
        theory[e["kind"]] = theory.get(e["kind"], 0) + e["bytes"]
    return [{**m, "theory_bytes_of_kind": theory.get(m["kind"])} for m in verified["measured"]]


def collective_seconds(windows: list[Json], measured: Json) -> Json:
    """Return seconds per step in each kind of collective, mean over ranks, by the names in the trace."""
    steps = measured["verify_steps"] - 3
    total: dict[str, float] = {}
    for window in windows:
        for name, _, seconds in window["collectives"]:
            total[name] = total.get(name, 0.0) + seconds
    return {name: seconds / len(windows) / steps for name, seconds in sorted(total.items())}
