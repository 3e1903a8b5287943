"""Evaluate measurements of strategies: three gates, and figures with their range only for strategies that pass all of
them. Pure.

Measurements that an overloaded machine has disturbed are not counted, and are reported with the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import msgspec

from allranks.utils.kernel_counters import CpuUse, MachineLoad, describe_load, judge_machine

# Minimum limits: correct float32 trainings of tiny models differ by up to 9e-6 of the update.
WEIGHTS_FLOOR = {"float32": 2e-5, "float64": 1e-10, "bfloat16": 0.02, "float16": 5e-3}
NORM_FLOOR = {"float32": 0.01, "float64": 1e-4, "bfloat16": 0.1, "float16": 0.1}
LOSS_FLOOR = {"float32": 2e-5, "float64": 1e-10, "bfloat16": 0.02, "float16": 5e-3}
UNEVEN_FLOOR = 2e-5  # of all three; the uneven trial is in float32
CEILING = {"float32": 5e-3, "float64": 1e-6, "bfloat16": 0.3, "float16": 0.1}
"""Limits of the weights above which the comparison proves nothing."""
SPREAD_FACTOR = 5.0
"""Limits are this many times the distance of two equivalent trainings in one process."""
LIBRARY_TOLERANCE = 0.01  # of bytes, if a library decides the number of messages
SHOWN_OVERLAP = 0.05
Json = dict[str, Any]
TIMED = ("step_time_s", "forward_s", "backward_s", "optimizer_s")
PROFILED = ("comm_s", "exposed_comm_s", "idle_s", "compute_s")


class Gates(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the gates; a row only has figures if all passed."""

    parity: bool
    mechanism: bool
    equal_work: bool

    @property
    def passed(self) -> bool:
        return self.parity and self.mechanism and self.equal_work


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy. ``reasons``: why a gate failed; ``marks``: other remarks; ``parity_error``: of the first trial."""

    strategy: str
    gates: Gates
    reasons: list[str]
    marks: list[str]
    parity_error: float | None
    figures: Json | None
    parity_errors: dict[str, float | None] = {}
    """Largest distance of the weights from one process in each kind of trial."""


def evaluate_strategies(measured: Json) -> list[ComparisonRow]:
    """Return one row per strategy, in the requested order."""
    problem = reference_problem(measured)
    return [_row(measured, name, problem) for name in measured["ranks"][0]]


def trial_limits(measured: Json, kind: str) -> dict[str, float]:
    """Return the limits of weights, gradient norms and losses in one kind of trial.

    The timed trial is the work of ``verified`` with more steps, so that it is allowed at least as much.
    """
    dtype = _precision(measured)
    floors = {"error": WEIGHTS_FLOOR[dtype], "norm_error": NORM_FLOOR[dtype], "loss_error": LOSS_FLOOR[dtype]}
    if kind == "uneven":
        floors = dict.fromkeys(floors, UNEVEN_FLOOR)
    spreads = [measured["references"][k]["spread"] for k in ({kind, "verified"} if kind == "timed" else {kind})]
    return {
        key: max(floor, *(SPREAD_FACTOR * _number_or_inf(spread[key]) for spread in spreads))
        for key, floor in floors.items()
    }


def _precision(measured: Json) -> str:
    """Return the dtype that rounds most: that of compute, or that in which trained weights are stored."""
    stored = measured.get("param_dtype", "float32")
    return measured["dtype"] if stored == "float32" else stored


def reference_problem(measured: Json) -> str | None:
    """Return why the parity gate is invalid: wrong data, too much rounding, or a defect that it would not detect."""
    for kind, reference in measured["references"].items():
        if reference["problem"]:
            return f"the data are not those of the spec: {reference['problem']}"
        limit, most = (
            trial_limits(measured, kind)["error"],
            CEILING["float32" if kind == "uneven" else _precision(measured)],
        )
        if limit > most:
            return (
                f"nothing can be proved: two equivalent trainings in one process differ by {limit / SPREAD_FACTOR:.1e} "
                f"of the update ({kind}); use fewer steps, a lower train.lr, or float32"
            )
    clip = measured["uneven_clip_norm"]
    if min(measured["references"]["uneven"]["norms"]) < 2 * clip:
        return f"the uneven trial does not clip every step by {clip}"
    control = measured["negative_control"]
    if measured["world_size"] < 2:
        return None
    if control["error"] <= trial_limits(measured, "verified")["error"] or control["ranks_differ"] == 0.0:
        return (
            f"the negative control (no synchronisation) was not detected (error {control['error']:.1e}): too few steps"
        )
    return None


def _row(measured: Json, name: str, problem: str | None) -> ComparisonRow:
    failed = next((rank[name]["failed"] for rank in measured["ranks"] if rank[name]["failed"]), None)
    if failed:
        gates = Gates(parity=False, mechanism=False, equal_work=False)
        return ComparisonRow(strategy=name, gates=gates, reasons=[failed], marks=[], parity_error=None, figures=None)
    parity, mechanism = _parity(measured, name, problem), _mechanism(measured, name)
    work = _equal_work(measured, name)
    gates = Gates(parity=parity is None, mechanism=mechanism is None, equal_work=work is None)
    first = measured["ranks"][0][name]
    return ComparisonRow(
        strategy=name,
        gates=gates,
        reasons=[r for r in (parity, mechanism, work) if r],
        marks=[*_remarks(measured, name), *load_marks(measured, name)],
        parity_error=first["verified"]["error"],
        figures=_figures(measured, name) if gates.passed else None,
        parity_errors={
            kind: max((t["error"] for t in trials), key=_number_or_inf, default=None)
            for kind, trials in _trials(first).items()
        },
    )


def _trials(measured: Json) -> dict[str, list[Json]]:
    """Return the trials of a strategy on one rank, by kind."""
    return {"verified": [measured["verified"]], "uneven": [measured["uneven"]], "timed": measured["repeats"]}


def _name_of(kind: str, i: int) -> str:
    return {"verified": "verification", "uneven": "the uneven trial"}.get(kind, f"repeat {i + 1}")


def _parity(measured: Json, name: str, problem: str | None) -> str | None:
    if problem:
        return f"parity: {problem}"
    for kind, trials in _trials(measured["ranks"][0][name]).items():
        limits = trial_limits(measured, kind)
        for i, trial in enumerate(trials):
            apart = max(_trials(rank[name])[kind][i].get("ranks_differ", 0.0) for rank in measured["ranks"])
            if (deviation := _trial_parity(trial, limits, apart)) is not None:
                return f"parity: in {_name_of(kind, i)} {deviation}"
    return None


def _trial_parity(trial: Json, limits: dict[str, float], apart: float) -> str | None:
    error, norm, loss = (_number_or_inf(trial[key]) for key in ("error", "norm_error", "loss_error"))
    if not error <= limits["error"]:
        steps = len(trial["work"])
        return (
            f"the weights after {steps} steps differ from those of one process by {error:.1e} of the update (limit "
            f"{limits['error']:.0e})"
        )
    if not norm <= limits["norm_error"]:
        return (
            f"the gradient norm differs from that of one process by {norm:.1e} (relative; limit "
            f"{limits['norm_error']:.0e}): a factor that AdamW hides, such as a missing division by the number of ranks"
        )
    if not loss <= limits["loss_error"]:
        return f"the loss differs from that of one process by {loss:.1e} (relative; limit {limits['loss_error']:.0e})"
    return f"the ranks' weights differ by {apart:.1e}" if apart else None


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
            counterpart = _take_any_phase(left, e)
            if abs(counterpart - e["bytes"]) > LIBRARY_TOLERANCE * max(e["bytes"], 1):
                return f"{e['kind']}: {counterpart:,.0f} bytes per step, expected {e['bytes']:,}"
            continue
        count, size = left.pop((e["kind"], e["phase"]), (0, 0))
        if count != e["count"] or size != e["bytes"]:
            return (
                f"{e['kind']} in {e['phase']}: {count:g} calls of {size:,.0f} bytes per step, expected {e['count']} of "
                f"{e['bytes']:,}"
            )
    if left:
        (kind, phase), (count, size) = next(iter(left.items()))
        return f"unexpected: {count:g} {kind} of {size:,.0f} bytes per step in {phase}"
    return None


def _take_any_phase(left: dict[tuple[str, str], list[float]], wanted: Json) -> float:
    """Return bytes of a kind in any phase.

    A library prefetches, so its gathers of forward and backward cannot be distinguished; each line of the formula takes
    its own bytes and leaves the rest.
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


def _equal_work(measured: Json, name: str) -> str | None:
    for r, rank in enumerate(measured["ranks"]):
        updates, steps = rank[name]["verified"]["updates"], measured["verify_steps"]
        if updates != steps:
            return f"equal work: rank {r} made {updates} updates in {steps} steps"
        for kind, trials in _trials(rank[name]).items():
            planned = measured["references"][kind]["planned"][r]
            accum = measured["uneven_accum" if kind == "uneven" else "grad_accum"]
            for i, trial in enumerate(trials):
                if (deviation := _trial_work(trial, planned, accum)) is not None:
                    return f"equal work: in {_name_of(kind, i)} rank {r} {deviation}"
    return None


def _trial_work(trial: Json, planned: list[Json], accum: int) -> str | None:
    steps = len(planned)
    if trial["micro_batches"] != steps * accum:
        return f"trained {trial['micro_batches']} micro-batches in {steps} steps, planned {steps * accum}"
    if len(trial["work"]) != steps:
        return f"recorded {len(trial['work'])} steps of {steps}"
    for step, (done, wanted) in enumerate(zip(trial["work"], planned, strict=True), 1):
        if done["rows"] != wanted["rows"]:
            return f"trained other rows in step {step} than planned"
        for key in ("tokens", "tokens_trained"):
            if done[key] != wanted[key]:
                return f"recorded {done[key]} {key} in step {step}, the planned rows have {wanted[key]}"
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
    repeats = counted_repeats(measured, name)
    rates = [tokens_per_s([r["repeats"][k] for r in ranks]) for k in repeats]
    everything = [r["repeats"][k] for r in ranks for k in repeats]
    steps = sorted(t for one in everything for t in one["step_time_s"])
    windows = [r["verified"]["window"] for r in ranks]
    middle = {part: median(w[part] for w in windows) for part in PROFILED}
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
        "load": load_figures(measured, name),
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


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A figure and the range of the values behind it: one per repeat, per rank and profiled step, or per rank."""

    value: float
    min: float
    max: float
    samples: int


def spread_of(figure: float, values: Iterable[float]) -> Spread:
    """Return the range of `values`; it includes the figure, which may be a median over more than they are."""
    figures = list(values)
    return Spread(value=figure, min=min([figure, *figures]), max=max([figure, *figures]), samples=len(figures))


def figure_spreads(figures: Json, ranks: Sequence[Json], repeats: Sequence[int], rates: Sequence[float]) -> Json:
    """Return {figure: {value, min, max, samples}} for the figures of one strategy.

    Args:
        figures: the strategy's figures, with the medians.
        ranks: what each rank measured of this strategy.
        repeats: the numbers of the repeats that count.
        rates: tokens/s of each of them.
    """
    windows = [r["verified"]["window"] for r in ranks]
    steps = [step for window in windows for step in window.get("steps") or [window]]
    spreads = {"tokens_per_s": spread_of(figures["tokens_per_s"]["median"], rates)}
    for part in TIMED:
        figure = figures[part]["median"] if part == "step_time_s" else figures[part]
        spreads[part] = spread_of(figure, [median(t for r in ranks for t in r["repeats"][k][part]) for k in repeats])
    for part in PROFILED:
        spreads[part] = spread_of(figures[part], [step[part] for step in steps])
    whole = figures["profiled_step_s"]
    spreads["profiled_step_s"] = spread_of(whole, [step["step_s"] for step in steps])
    for share, part in (("exposed_share", "exposed_comm_s"), ("idle_share", "idle_s")):
        if 0 <= figures[part] <= whole and whole > 0:  # otherwise the profile is inconsistent
            spreads[share] = spread_of(figures[part] / whole, _ratios(steps, lambda s, p=part: (s[p], s["step_s"])))
    if figures["overlap"] is not None:
        hidden = _ratios(steps, lambda s: (s["overlapped_comm_s"], s["comm_s"]))
        spreads["overlap"] = spread_of(figures["overlap"], hidden)
    for key, figure in figures["memory"].items():
        spreads[key] = spread_of(figure, [_bytes(r["verified"]["memory"], key) for r in ranks])
    return msgspec.to_builtins(spreads)


def _ratios(steps: Sequence[Json], parts: Callable[[Json], tuple[float, float]]) -> list[float]:
    return [part / whole for part, whole in map(parts, steps) if whole > 0]


def _bytes(memory: Json, key: str) -> float:
    if key == "state_bytes":
        return sum(v for k, v in memory.items() if k != "peak_bytes")
    return memory[key]


def find_spread(figures: Json, name: str) -> Spread | None:
    """Return one figure with its range; None if it is not known."""
    known = figures["spread"].get(name)
    return Spread(**known) if known is not None else None


def _worst(loads: Sequence[Json | None]) -> MachineLoad | None:
    """Return the load of the host that lost the largest share, from all ranks' records; None if one is missing."""
    hosts: dict[str, list[CpuUse]] = {}
    for load in loads:
        try:
            hosts.setdefault(str((load or {})["host"]), []).append(msgspec.convert(load, CpuUse))
        except (KeyError, msgspec.ValidationError):
            return None
    judgements = [judge_machine(host, uses) for host, uses in hosts.items()]
    known = [load for load in judgements if load.taken_share is not None]
    return max(known, key=lambda load: load.taken_share or 0.0) if known else None


def repeat_loads(measured: Json, name: str) -> list[MachineLoad | None]:
    """Return the load of the most disturbed host in each repeat of a strategy; None where it is not known."""
    ranks = [rank[name]["repeats"] for rank in measured["ranks"]]
    return [_worst([repeats[k].get("load") for repeats in ranks]) for k in range(len(ranks[0]))]


def counted_repeats(measured: Json, name: str) -> list[int]:
    """Return the numbers of the repeats that figures use: those that were not disturbed; all if there are no others."""
    loads = repeat_loads(measured, name)
    good = [k for k, load in enumerate(loads) if load is None or not load.overloaded]
    return good or list(range(len(loads)))


def load_figures(measured: Json, name: str) -> Json:
    """Return how many repeats were timed, counted and disturbed, and the largest share of CPU time that was taken.

    ``taken_share`` is None if it is not known in any repeat; ``undisturbed`` is False if all repeats were disturbed.
    """
    loads = repeat_loads(measured, name)
    known = [load for load in loads if load is not None]
    disturbed = sum(load.overloaded for load in known)
    return {
        "repeats": len(loads),
        "counted": len(counted_repeats(measured, name)),
        "disturbed": disturbed,
        "taken_share": max((load.taken_share for load in known if load.taken_share is not None), default=None),
        "undisturbed": disturbed < len(loads),
    }


def load_marks(measured: Json, name: str) -> list[str]:
    """Return remarks on a strategy's measurements that an overloaded machine disturbed."""
    load, marks = load_figures(measured, name), []
    disturbed, repeats = load["disturbed"], load["repeats"]
    if disturbed and not load["undisturbed"]:
        taken = f"up to {load['taken_share']:.0%} of the CPU time was taken"
        marks.append(f"timed on an overloaded machine in all {repeats} repeats: {taken}")
    elif disturbed:
        marks.append(f"{disturbed} of {repeats} repeats are not counted: the machine was overloaded")
    verified = _worst([rank[name]["verified"].get("load") for rank in measured["ranks"]])
    if verified is not None and verified.overloaded:
        marks.append(
            f"profiled on an overloaded machine ({verified.taken_share:.0%} of the CPU time was taken): exposed "
            "communication, idle and overlap are disturbed"
        )
    return marks


def load_conclusions(measured: Json, names: Sequence[str]) -> list[str]:
    """Return sentences on the overloaded machine with their evidence; none if it was not overloaded.

    Args:
        names: the strategies with figures.
    """
    loads = [load for name in names for load in repeat_loads(measured, name)]
    disturbed = [load for load in loads if load is not None and load.overloaded]
    if not disturbed:
        return []
    worst, total = max(disturbed, key=lambda load: load.taken_share or 0.0), len(loads)
    text = (
        f"The machine was overloaded in {len(disturbed)} of {total} timed repeats: on {worst.host} up to "
        f"{worst.taken_share:.0%} of the CPU time of the ranks was taken ({describe_load(worst)})."
    )
    spoiled = [name for name in names if not load_figures(measured, name)["undisturbed"]]
    if not spoiled:
        return [f"{text} These repeats are not counted."]
    which = "All figures" if len(spoiled) == len(names) else f"The figures of {', '.join(spoiled)}"
    return [f"{text} {which} are those of an overloaded machine; repeat the comparison on an idle one."]
