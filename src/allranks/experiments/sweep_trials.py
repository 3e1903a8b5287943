"""Choose the settings of a sweep's points with Optuna, whose study is in the sweep's folder. Tables do not need it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.rundir.files import read_record, write_json

RANGE = re.compile(r"([^\[{(]+)\.\.([^:]+)(:log)?$")


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """A range of numbers, or values to choose from."""

    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    log: bool = False
    values: list[str] = []

    def text(self, value: Any) -> str:
        """Return a value as a setting has it: a number with at most four significant digits, which tables can show."""
        return str(value) if self.values else str(int(value)) if self.whole else f"{float(value):.4g}"


def parse_axis(key: str, values: Sequence[str]) -> Axis:
    """Return what ``key=low..high[:log]`` or ``key=value,...`` offers; a range of two integers has integers.

    Raises:
        RequestError: it is not a range.
    """
    if not any(".." in value for value in values):
        return Axis(values=list(values))
    match = RANGE.match(values[0]) if len(values) == 1 else None
    try:
        low, high, log = match.groups() if match else ("", "", None)
        axis = Axis(low=float(low), high=float(high), whole=low.isdigit() and high.isdigit(), log=log is not None)
        if axis.low < axis.high and not (log and axis.low <= 0):
            return axis
    except ValueError:
        pass
    raise RequestError(
        f"--grid {key}={','.join(values)}: expected one range of numbers, the lower one first, such as 1e-5..1e-3 or "
        "1e-5..1e-3:log (above 0)"
    )


def read_settings(folder: Path, point: str) -> list[str]:
    """Return the settings that were suggested for a point; empty if it has not begun."""
    return read_record(folder / f"{point}.trial.json").get("sets") or []


def suggest(folder: Path, space: dict[str, Axis], point: str) -> list[str]:
    """Choose the settings of a point by what the earlier ones reached, and record them."""
    kinds = optuna().distributions
    offers = {
        key: kinds.CategoricalDistribution(axis.values) if axis.values
        else kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log) if axis.whole
        else kinds.FloatDistribution(axis.low, axis.high, log=axis.log)
        for key, axis in space.items()
    }  # fmt: skip
    trial = _study(folder).ask(offers)
    sets = [f"{key}={axis.text(trial.params[key])}" for key, axis in space.items()]
    write_json(folder / f"{point}.trial.json", {"trial": trial.number, "sets": sets})
    return sets


def report(folder: Path, results: Sequence[Any]) -> None:
    """Give the study the losses of the points (`PointResult`) that have ended; a diverged one counts as pruned."""
    study, kinds = _study(folder), optuna().trial.TrialState
    states = {"diverged": kinds.PRUNED, "failed": kinds.FAIL, "refused": kinds.FAIL}
    waiting = {trial.number for trial in study.get_trials(deepcopy=False) if not trial.state.is_finished()}
    for result in results:
        number = read_record(folder / f"{result.name}.trial.json").get("trial")
        loss = result.train_loss if result.eval_loss is None else result.eval_loss
        if number in waiting and result.status == "succeeded" and loss is not None:
            study.tell(number, loss, skip_if_finished=True)
        elif number in waiting and result.status in states:
            study.tell(number, state=states[result.status], skip_if_finished=True)


def optuna() -> Any:
    """Return the package.

    Raises:
        EnvironmentNotAble: it is missing.
    """
    try:
        import optuna  # pyright: ignore[reportMissingImports] - an extra
    except ImportError:
        raise EnvironmentNotAble("--trials: the package optuna is missing; pip install 'allranks[optuna]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _study(folder: Path) -> Any:
    """Return the study. Its seed is the number of trials: a continued sweep does not repeat the first suggestions."""
    storages = optuna().storages
    storage = storages.JournalStorage(storages.journal.JournalFileBackend(str(folder / "optuna.log")))
    study = optuna().create_study(study_name="sweep", storage=storage, load_if_exists=True)
    seed = len(study.get_trials(deepcopy=False))
    study.sampler = optuna().samplers.TPESampler(seed=seed, constant_liar=True)  # trials of an array run at once
    return study
