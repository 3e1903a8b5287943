"""Engines: what runs the optimizer steps of a strategy. `train.loop.TrainingLoop` is the usual one.

Other libraries are here: Hugging Face's Trainer, which is an engine and has a strategy of its own, and DeepSpeed, whose
strategies are run by `TrainingLoop`.
"""

from __future__ import annotations

from typing import Any, Protocol

from allranks.rundir.events import EventLog
from allranks.spec.strategies import strategy_info
from allranks.train.distributed import DistContext
from allranks.train.loop import StepWatcher
from allranks.train.step_metrics import LoopPlan, TrainingRows
from allranks.train.strategies import import_target


class Engine(Protocol):
    """Run optimizer steps until all planned steps are done or all ranks agree to stop.

    ``strategy`` is a `Strategy` of the kind that the engine needs, which the annotation of its constructor says.
    """

    def __init__(
        self,
        world: DistContext,
        strategy: Any,
        rows: TrainingRows,
        plan: LoopPlan,
        events: EventLog,
        watcher: StepWatcher | None = None,
    ) -> None: ...

    def run(self) -> int:
        """Run all steps; return how many are done, the same number on every rank. Raise `NonFiniteLoss` on every rank;
        the weights are those before the named step."""
        ...


def engine_of(name: str) -> type[Engine]:
    """Return the engine that runs the optimizer steps of a strategy."""
    return import_target(strategy_info(name).engine)
