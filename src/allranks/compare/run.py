"""`allranks compare`: one job in which all strategies take turns, and what follows from what it measured."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import msgspec

from allranks import api, preflight
from allranks.compare.advice import advise
from allranks.compare.judge import Row, rows
from allranks.compare.model import Fit
from allranks.compare.request import Candidate, CompareRequest
from allranks.compare.show import csv_text, page
from allranks.errors import RunFailed, SpecError
from allranks.facts import machine_facts
from allranks.launch.follow import Observer
from allranks.planning import make_plan
from allranks.rundir import RunDir, read_json, write_json, write_text_atomic
from allranks.spec.records import RunSpec, StrategySpec
from allranks.train.strategies import REGISTRY, entry, resolve_options


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a comparison."""

    folder: str
    rows: list[Row]
    advice: list[str]
    model: Fit | None
    predictions: list[dict[str, Any]]
    measured: dict[str, Any]

    @property
    def ok(self) -> bool:
        return all(row.gates.passed for row in self.rows)

    def document(self) -> dict[str, Any]:
        """comparison.json: rows, the advice, the fitted model and its predictions."""
        known = {k: v for k, v in self.measured.items() if k != "ranks"}
        return {
            "rows": [_row(row) for row in self.rows],
            "advice": self.advice,
            "model": msgspec.to_builtins(self.model),
            "predictions": self.predictions,
            "setting": known,
        }


def _row(row: Row) -> dict[str, Any]:
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
            "overlap",
            "memory",
            "collectives",
        )
    )
    return {**plain, **names}


def request(spec: RunSpec, names: Sequence[str], repeats: int) -> CompareRequest:
    """What the ranks are to do. Options of the spec's own strategy go to the strategies that know them.

    Raises:
        SpecError: a strategy is unknown, named twice, or for one process.
    """
    if not names:
        raise SpecError("--strategies names none; give names separated by commas, or all")
    candidates = []
    for name in names:
        known = entry(name)
        if known.single_process:
            raise SpecError(
                f"strategy {name} is for one process: it is the reference that the others are compared with"
            )
        given = {k: v for k, v in spec.strategy.options.items() if k in known.options}
        candidates.append(Candidate(name=name, options=resolve_options(name, given)))
    twice = {n for n in names if list(names).count(n) > 1}
    if twice:
        raise SpecError(f"named twice: {', '.join(sorted(twice))}")
    steps = spec.train.max_steps or 10
    return CompareRequest(strategies=candidates, repeats=repeats, steps=steps)


def every_strategy() -> list[str]:
    """All that share work between ranks in this program's own loop; DeepSpeed's where it is installed."""
    deepspeed = importlib.util.find_spec("deepspeed") is not None
    return [
        name
        for name, known in REGISTRY.items()
        if not known.single_process and (deepspeed or not name.startswith("deepspeed_"))
    ]


def compare(spec: RunSpec, asked: CompareRequest, observer: Observer) -> Comparison:
    """Run it, judge it, and write comparison.json, .csv and .html into its folder.

    Raises:
        SpecError: the spec cannot be compared on (a script, one rank).
        RunFailed: the job did not come to its end.
    """
    if spec.script is not None:
        raise SpecError("script: a program of your own has its own loop; strategies cannot be compared in it")
    first = asked.strategies[0]
    spec = msgspec.structs.replace(
        spec,
        name=f"{spec.name}-compare",
        strategy=StrategySpec(name=first.name, options=first.options),
        observe=msgspec.structs.replace(spec.observe, profile=None),
    )
    preflight.check_request(spec)
    if make_plan(spec, machine_facts()).world_size < 2:
        raise SpecError("cluster.procs_per_node: a comparison needs at least two ranks")
    run, plan = api.prepare_run(spec)
    write_json(run.compare, msgspec.to_builtins(asked))
    result = api.launch(run, spec, plan, attempt=1, observer=observer)
    measured = read_json(run.root / "compare" / "measured.json")
    if result.exit_code or not isinstance(measured, dict):
        raise RunFailed(f"the comparison did not come to its end: {result.message}")
    return conclude(run, measured)


def conclude(run: RunDir, measured: dict[str, Any]) -> Comparison:
    """Judge what was measured, and write it."""
    found = rows(measured)
    advice, model, predictions = advise(measured, found)
    done = Comparison(
        folder=str(run.root), rows=found, advice=advice, model=model, predictions=predictions, measured=measured
    )
    write_json(run.root / "comparison.json", done.document())
    write_text_atomic(run.root / "comparison.csv", csv_text(found))
    write_text_atomic(run.root / "comparison.html", page(run.name, measured, found, advice, predictions))
    return done
