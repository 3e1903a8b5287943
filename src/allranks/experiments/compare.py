"""Run `allranks compare`: one job in which all strategies take turns, and its evaluation."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import msgspec

from allranks.errors import RunFailed, SpecError
from allranks.experiments.communication_model import CommunicationModel, Prediction
from allranks.experiments.conclusions import recommend_strategy
from allranks.experiments.gates import ComparisonRow, evaluate_strategies, trial_limits
from allranks.experiments.page import comparison_page, find_links
from allranks.experiments.profiles import add_profiles
from allranks.experiments.tables import csv_text
from allranks.launch import runs
from allranks.launch.preview import planning_facts
from allranks.launch.runs import Observer
from allranks.nodes import preflight
from allranks.planning.planner import make_plan
from allranks.rundir.files import read_json, write_json, write_text_atomic
from allranks.rundir.paths import RunDir
from allranks.spec.records import CompareRequest, RunSpec, StrategyChoice, StrategySpec
from allranks.spec.strategies import REGISTRY, resolve_options, strategy_info


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison."""

    folder: str
    rows: list[ComparisonRow]
    advice: list[str]
    model: CommunicationModel | None
    predictions: list[Prediction]
    measured: dict[str, Any]

    @property
    def ok(self) -> bool:
        return all(row.gates.passed for row in self.rows)

    def document(self) -> dict[str, Any]:
        """Return comparison.json: rows, recommendations, the fitted model and its predictions."""
        known = {k: v for k, v in self.measured.items() if k not in ("ranks", "references")}
        limits = {kind: trial_limits(self.measured, kind) for kind in self.measured["references"]}
        return {
            "rows": [_row_document(row) for row in self.rows],
            "advice": self.advice,
            "model": msgspec.to_builtins(self.model),
            "predictions": msgspec.to_builtins(self.predictions),
            "setting": known | {"limits": limits},
        }


def _row_document(row: ComparisonRow) -> dict[str, Any]:
    plain = msgspec.to_builtins(row)
    figures = plain.pop("figures")
    names = figures or dict.fromkeys(
        (
            "tokens_per_s",
            "step_time_s",
            "forward_s",
            "backward_s",
            "optimizer_s",
            "exposed_comm_s",
            "idle_s",
            "profiled_step_s",
            "overlap",
            "memory",
            "collectives",
            "load",
            "spread",
        )
    )
    return {**plain, **names}


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


def compare(spec: RunSpec, asked: CompareRequest, observer: Observer) -> Comparison:
    """Run the comparison, evaluate it, and write comparison.json, .csv and .html to its folder.

    Raises:
        SpecError: the spec cannot be used for a comparison (a script, one rank).
        RunFailed: the job did not complete.
    """
    if spec.script is not None:
        raise SpecError("script: a program has its own training loop; strategies cannot be compared in it")
    first = asked.strategies[0]
    spec = msgspec.structs.replace(
        spec,
        name=f"{spec.name}-compare",
        strategy=StrategySpec(name=first.name, options=first.options),
        observe=msgspec.structs.replace(spec.observe, profile=None),
    )
    preflight.check_request(spec)
    if make_plan(spec, planning_facts(spec)).world_size < 2:
        raise SpecError("cluster.procs_per_node: a comparison needs at least two ranks")
    run, plan = runs.prepare_run(spec)
    write_json(run.compare, msgspec.to_builtins(asked))
    result = runs.launch(run, spec, plan, attempt=1, observer=observer)
    folder = run.root / "compare"
    measured = read_json(folder / "measured.json")
    if result.exit_code or not isinstance(measured, dict):
        raise RunFailed(f"the comparison did not complete: {result.message}")
    add_profiles(folder, measured)
    write_json(folder / "measured.json", measured)  # complete: it can be evaluated again without the traces
    return write_comparison(run, measured)


def write_comparison(run: RunDir, measured: dict[str, Any]) -> Comparison:
    """Evaluate the measurements, and write the result."""
    found = evaluate_strategies(measured)
    advice, model, predictions = recommend_strategy(measured, found)
    done = Comparison(
        folder=str(run.root), rows=found, advice=advice, model=model, predictions=predictions, measured=measured
    )
    write_json(run.root / "comparison.json", done.document())
    write_text_atomic(run.root / "comparison.csv", csv_text(found))
    links = find_links(run.root, [row.strategy for row in found])
    page = comparison_page(run.name, measured, found, advice, predictions, links)
    write_text_atomic(run.root / "comparison.html", page)
    return done
