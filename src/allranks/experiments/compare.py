"""Run `allranks compare`: one job in which strategies take turns, its evaluation, and figures of profiler traces."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.analysis.trace import read_traces
from allranks.analysis.trace.rank import RankResult, UnreadableTrace
from allranks.analysis.trace.records import PHASES, Breakdown
from allranks.errors import RunFailed, SpecError
from allranks.experiments.conclusions import recommend_strategy
from allranks.experiments.gates import ComparisonRow, evaluate_strategies, trial_limits
from allranks.experiments.output import comparison_page, csv_text, file_links
from allranks.launch import runs
from allranks.launch.preview import PreparedRun, prepare
from allranks.launch.runs import Observer
from allranks.planning import memory
from allranks.rundir.files import read_json, write_json, write_text_atomic
from allranks.rundir.paths import RunDir
from allranks.spec.records import CompareRequest, RunSpec, StrategyChoice, StrategySpec
from allranks.spec.strategies import REGISTRY, resolve_options, strategy_info

UNPHASED = PHASES.index("other")  # the loop's own small reduction is launched outside of training phases
Json = dict[str, Any]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison."""

    folder: str
    rows: list[ComparisonRow]
    advice: list[str]
    measured: dict[str, Any]

    @property
    def ok(self) -> bool:
        return all(row.gates.passed for row in self.rows)

    def document(self) -> dict[str, Any]:
        """Return comparison.json: rows, recommendations, the setting; ``model`` and ``predictions`` are always
        empty."""
        known = {k: v for k, v in self.measured.items() if k not in ("ranks", "references")}
        limits = {kind: trial_limits(self.measured, kind) for kind in self.measured["references"]}
        return {
            "rows": [_row_document(row) for row in self.rows],
            "advice": self.advice,
            "model": None,
            "predictions": [],
            "setting": known | {"limits": limits},
        }


def _row_document(row: ComparisonRow) -> dict[str, Any]:
    plain = msgspec.to_builtins(row)
    figures = plain.pop("figures")
    absent = (
        "tokens_per_s step_time_s forward_s backward_s optimizer_s exposed_comm_s idle_s profiled_step_s overlap "
        "memory collectives load spread"
    )
    return {**plain, **(figures or dict.fromkeys(absent.split()))}


def comparison_request(spec: RunSpec, names: Sequence[str], repeats: int) -> CompareRequest:
    """Return the request to the ranks. Options of the spec's own strategy go to the strategies that support them.

    Raises:
        SpecError: a strategy is unknown, given twice, or for one process.
    """
    if not names:
        raise SpecError("--strategies is empty; give names separated by commas, or all")
    candidates = []
    for name in names:
        known = strategy_info(name)
        if known.single_process:
            raise SpecError(
                f"strategy {name} is for one process: it is the reference that the others are compared with"
            )
        given = {k: v for k, v in spec.strategy.options.items() if k in known.options}
        candidates.append(StrategyChoice(name=name, options=resolve_options(name, given)))
    twice = {n for n in names if list(names).count(n) > 1}
    if twice:
        raise SpecError(f"given twice:  {', '.join(sorted(twice))}")
    steps = spec.train.max_steps or 10
    return CompareRequest(strategies=candidates, repeats=repeats, steps=steps)


def every_strategy() -> list[str]:
    """Return all distributed strategies whose libraries are installed."""
    return [
        name
        for name, known in REGISTRY.items()
        if not known.single_process and (not known.package or importlib.util.find_spec(known.package) is not None)
    ]


def compare(spec: RunSpec, request: CompareRequest, observer: Observer) -> Comparison:
    """Run the comparison, evaluate it, and write comparison.json, .csv and .html to its folder.

    Raises:
        SpecError: the spec cannot be used for a comparison (a script, one rank).
        RunFailed: the job did not complete.
    """
    if spec.script is not None:
        raise SpecError("script: a program has its own training loop; strategies cannot be compared in it")
    if spec.model is not None and spec.model.float8:
        raise SpecError("model.float8: a comparison proves strategies against plain torch without it; set it to false")
    first = request.strategies[0]
    spec = msgspec.structs.replace(
        spec,
        name=f"{spec.name}-compare",
        strategy=StrategySpec(name=first.name, options=first.options),
        observe=msgspec.structs.replace(spec.observe, profile=None),
    )
    if spec.model is not None and spec.model.compile is True:
        observer.say("note     model.compile: a comparison does not compile blocks")
    prepared = prepare(without_compilation(spec))
    if prepared.plan.world_size < 2:
        raise SpecError("cluster.procs_per_node: a comparison needs at least two ranks")
    run, plan = runs.create(prepared)
    for warning in plan.warnings:
        observer.say(f"note     {warning}")
    request = msgspec.structs.replace(request, strategies=[_decided(prepared, entry) for entry in request.strategies])
    write_json(run.compare, msgspec.to_builtins(request))
    result = runs.launch(run, prepared.spec, plan, attempt=1, observer=observer)
    folder = run.root / "compare"
    measured = read_json(folder / "measured.json")
    if result.exit_code or not isinstance(measured, dict):
        raise RunFailed(f"the comparison did not complete: {result.message}")
    add_profiles(folder, measured)
    write_json(folder / "measured.json", measured)  # complete: it can be evaluated again without the traces
    return write_comparison(run, measured)


def finished_comparison(run: RunDir) -> Comparison | None:
    """Return the comparison of a run folder, evaluated again; None if the run is none, or did not complete."""
    measured = read_json(run.root / "compare" / "measured.json")
    complete = isinstance(measured, dict) and (run.root / "comparison.json").is_file()
    return write_comparison(run, measured) if complete else None


def without_compilation(spec: RunSpec) -> RunSpec:
    """Return the spec with ``model.compile: false``: all strategies get the same arithmetic as one process."""
    if spec.model is None:
        return spec
    return msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, compile=False))


def _decided(prepared: PreparedRun, entry: StrategyChoice) -> StrategyChoice:
    """Return a strategy with the options that the plan decides by the memory of a rank."""
    if "replicate" not in entry.options:
        return entry
    one = msgspec.structs.replace(prepared.spec, strategy=StrategySpec(name=entry.name, options=entry.options))
    plan = memory.make_plan(one, prepared.facts)
    return msgspec.structs.replace(entry, options={**entry.options, "replicate": plan.strategy_options["replicate"]})


def write_comparison(run: RunDir, measured: dict[str, Any]) -> Comparison:
    """Evaluate the measurements, and write the result."""
    verdicts = evaluate_strategies(measured)
    advice = recommend_strategy(measured, verdicts)
    done = Comparison(folder=str(run.root), rows=verdicts, advice=advice, measured=measured)
    write_json(run.root / "comparison.json", done.document())
    write_text_atomic(run.root / "comparison.csv", csv_text(verdicts))
    files = file_links(run.root, [row.strategy for row in verdicts])
    page = comparison_page(run.name, measured, verdicts, advice, files)
    write_text_atomic(run.root / "comparison.html", page)
    return done


def add_profiles(folder: Path, measured: Json) -> None:
    """Add ``window`` and the peak of memory to every rank's verified strategies, in place.

    A trace that cannot be read marks its strategy as failed on all ranks; the other strategies keep their figures.

    Args:
        folder: the folder ``compare`` of the run, with ``<strategy>/traces/rank<R>.json.gz``.
        measured: the content of measured.json.
    """
    traces = {
        (r, name): folder / name / "traces" / f"rank{r}.json.gz"
        for r, rank in enumerate(measured["ranks"])
        for name, known in rank.items()
        if known["verified"]
    }
    results = read_traces(list(traces.values()))
    for (r, name), path in traces.items():
        known, result = measured["ranks"][r][name], results[path]
        if isinstance(result, UnreadableTrace):
            known["verified"] = {}
            for rank in measured["ranks"]:
                rank[name]["failed"] = rank[name]["failed"] or f"rank {r}: {path}: {result.message}"
        else:
            verified = known["verified"]
            memory, before = verified["memory"], verified.pop("before_bytes")
            memory["peak_bytes"] = memory["peak_bytes"] or before + peak_new_bytes(result)
            verified["window"] = trace_figures(result)


def trace_figures(result: RankResult) -> Json:
    """Return the seconds per step as in `allranks trace`, and the collectives of training as (kind, bytes, seconds).

    The seconds are of compute, communication (exposed and overlapped) and idle time; ``steps`` has them by step.
    """
    n = max(len(result.steps), 1)
    training = [c for c in result.collectives if c.phase != UNPHASED]
    return {
        **_seconds(result.total, n),
        "steps": [_seconds(step, 1) for step in result.by_step],
        "collectives": [(c.kind, c.bytes or 0, c.duration / 1e6) for c in training],
    }


def _seconds(part: Breakdown, steps: int) -> Json:
    names = ("compute_s", "comm_s", "overlapped_comm_s", "exposed_comm_s", "idle_s")
    return {"step_s": part.span_s / steps, **{name: getattr(part, name) / steps for name in names}}


def peak_new_bytes(result: RankResult) -> int:
    """Return the maximum number of bytes that were allocated on the host during the trace and not yet freed."""
    return max((m.peak_bytes for m in result.memory if m.device == "cpu"), default=0)
