"""Run one spec with many settings: a grid, a list of points, or trials that Optuna suggests. It can be continued.

The folder of a sweep has ``sweep.json`` and the run folder of each point. What became of a point stands in its run
folder alone, so that a sweep that was interrupted anywhere continues with the points that have not succeeded. Points
run one after another, or as the tasks of a Slurm array (`allranks.experiments.sweep_array`).
"""

from __future__ import annotations

import fcntl
import itertools
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import AllranksError, CheckpointError, RequestError
from allranks.experiments import sweep_trials
from allranks.launch import preview, runs
from allranks.launch.runs import NullObserver, Observer
from allranks.planning.cost import cost_row
from allranks.rundir.checkpoints import newest_checkpoint
from allranks.rundir.files import read_json, read_record, write_json, write_text_atomic
from allranks.rundir.paths import RunDir, create_run, list_runs
from allranks.spec import RunSpec
from allranks.utils.redaction import redact
from allranks.utils.text import finite_float, finite_int

RECORD = "sweep.json"
SPEC = "sweep-spec.yaml"
STOPPED = "stopped"
"""File in the run folder of a point that the user, or Slurm's time limit, has stopped."""
MAX_POINTS = 1000
LOSS_WINDOW = 10
CONTINUED = ("open", "stopped", "unfinished")
"""What may become of a point that a continued sweep runs."""
DIVERGED_FACTOR = 1.5
"""A point has diverged if the mean of its last losses is this many times the lowest such mean, and above the first."""


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one point, as for ``--set``; of a trial they are empty, and in a file since it began."""

    name: str
    sets: list[str]


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """A request. ``sets`` apply to every point, `folder` holds spec and run folders."""

    folder: str
    sets: list[str]
    points: list[SweepPoint]
    space: dict[str, sweep_trials.Axis] = {}
    """What Optuna chooses from; empty: every point has its settings."""

    def extremes(self) -> list[SweepPoint]:
        """Return the points, or of trials one for each end of a range and each value of a list, alone."""
        ends = [
            SweepPoint(name=key, sets=[f"{key}={axis.text(value)}"])
            for key, axis in self.space.items()
            for value in (axis.values or (axis.low, axis.high))
        ]
        return ends or self.points

    def settings(self, point: SweepPoint) -> list[str]:
        """Return the settings of a point; empty for a trial that has not begun."""
        return sweep_trials.read_settings(Path(self.folder), point.name) if self.space else point.sets


class PointResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a point: ``status`` of its run, ``diverged``, ``refused`` (not started) or ``open``."""

    name: str
    sets: list[str]
    run: str | None
    status: str
    message: str
    eval_loss: float | None = None
    train_loss: float | None = None
    steps: int | None = None
    tokens_per_s: float | None = None
    peak_memory_bytes: float | None = None
    cost: dict[str, Any] | None = None


def grid_axes(grid: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each key of ``key=value,value,...``; a value with a comma stands in brackets.

    Raises:
        RequestError: an item is malformed, or a key is given twice.
    """
    axes = dict[str, list[str]]()
    for item in grid:
        key, equals, values = item.partition("=")
        key, parts = key.strip(), [part.strip() for part in _split(values)]
        if not equals or not key or "" in parts:
            raise RequestError(f"--grid {item!r}: expected key=value,value,..., such as train.lr=1e-4,3e-4")
        if key in axes:
            raise RequestError(f"--grid {key} is given twice; write all its values in one")
        axes[key] = parts
    return axes


def grid_points(grid: Sequence[str], lines: Iterable[str] = ()) -> list[SweepPoint]:
    """Return the points of a grid (the product of all keys), and of lines with one ``key=value ...`` each.

    Raises:
        RequestError: an item is malformed, a point is there twice, or there are too many points or none.
    """
    axes = grid_axes(grid)
    if math.prod(map(len, axes.values())) > MAX_POINTS:
        raise RequestError(
            f"the grid has {math.prod(map(len, axes.values())):,} points; at most {MAX_POINTS:,} are run"
        )
    if key := next((key for key, values in axes.items() if any(map(sweep_trials.RANGE.match, values))), None):
        raise RequestError(f"--grid {key}: a range needs --trials N; without it, list the values: {key}=V,V,...")
    chosen = [[f"{k}={v}" for k, v in zip(axes, values, strict=True)] for values in itertools.product(*axes.values())]
    listed = [line.split() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    for sets in listed:
        if wrong := next((word for word in sets if "=" not in word), None):
            raise RequestError(f"--list: {wrong!r} is not key=value; each line has the settings of one point")
    sets_of_points = [*(chosen if axes else []), *listed]
    if not sets_of_points:
        raise RequestError(
            "a sweep needs points: --grid train.lr=1e-4,3e-4, or --list FILE with one key=value ... a line"
        )
    if len(sets_of_points) > MAX_POINTS:
        raise RequestError(f"{len(sets_of_points):,} points are requested; at most {MAX_POINTS:,} are run")
    points, seen = _named(sets_of_points), dict[tuple[str, ...], str]()
    for point in points:
        if (first := seen.setdefault(tuple(sorted(point.sets)), point.name)) != point.name:
            raise RequestError(f"{first} and {point.name} are the same point ({' '.join(point.sets)}); leave one out")
    return points


def trial_points(grid: Sequence[str], count: int) -> tuple[list[SweepPoint], dict[str, sweep_trials.Axis]]:
    """Return points whose settings Optuna suggests when they begin, and what it chooses from.

    Raises:
        RequestError: a range is malformed, or nothing is to be chosen.
        EnvironmentNotAble: Optuna is missing.
    """
    sweep_trials.optuna()
    if space := {key: sweep_trials.parse_axis(key, values) for key, values in grid_axes(grid).items()}:
        return _named([[]] * count), space
    raise RequestError("--trials needs --grid with what to choose from, such as train.lr=1e-5..1e-3:log")


def _named(sets_of_points: Sequence[list[str]]) -> list[SweepPoint]:
    width = len(str(len(sets_of_points)))
    return [SweepPoint(name=f"p{i:0{width}}", sets=sets) for i, sets in enumerate(sets_of_points, 1)]


def _split(values: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth = [""], 0
    for character in values:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def create_sweep(
    spec: Path,
    sets: Sequence[str],
    points: Sequence[SweepPoint],
    space: dict[str, sweep_trials.Axis] | None = None,
    *,
    new: bool = False,
) -> Sweep:
    """Check every point, and return the unfinished sweep of the same request (unless `new`), else create its folder.

    Raises:
        RequestError: the spec, or a point, is wrong; nothing was created.
    """
    base = preview.read_spec(spec, sets)
    wanted = Sweep(folder="", sets=[*sets, *_absolute(base)], points=list(points), space=space or {})
    for point in wanted.extremes():
        try:
            preview.check_paths(preview.read_spec(spec, [*sets, *point.sets]))
        except AllranksError as error:
            raise RequestError(f"point {point.name} ({' '.join(point.sets)}): {error}") from None
    text = spec.read_text("utf-8")
    if secret := next((t for t in (text, *sets, *(s for p in points for s in p.sets)) if redact(t) != t), None):
        raise RequestError(
            f"{spec if secret is text else redact(secret)}: a sweep saves spec and settings, and these hold a secret; "
            "leave it out, and export the variable in the shell: ranks get its variables"
        )
    same = [] if new else Path(base.run_root).absolute().glob(f"{base.name}-sweep-*/{RECORD}")
    for record in sorted(same, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        one = open_sweep(record.parent)
        if msgspec.structs.replace(one, folder="") == wanted and (record.parent / SPEC).read_text("utf-8") == text:
            if any(result.status in CONTINUED for result in results_of(one)):
                return one
            break
    folder = create_run(base.run_root, f"{base.name}-sweep").root
    for unused in list(folder.iterdir()):  # a sweep has no logs or events of its own
        unused.rmdir()
    write_text_atomic(folder / SPEC, text)
    sweep = msgspec.structs.replace(wanted, folder=str(folder))
    write_json(folder / RECORD, msgspec.to_builtins(sweep))
    return sweep


def _absolute(base: RunSpec) -> list[str]:
    """Return settings with absolute paths, because a sweep may be continued from another folder."""
    values = {
        "data.source": base.data and base.data.source,
        "eval.source": base.eval.source,
        "model.name": base.model and base.model.name,
        "script.path": base.script and base.script.path,
    }
    return [f"{key}={Path(value).absolute()}" for key, value in values.items() if value and Path(value).exists()]


def open_sweep(folder: Path) -> Sweep:
    """Return the sweep of a folder.

    Raises:
        RequestError: it is not the folder of a sweep.
    """
    try:
        sweep = msgspec.convert(read_json(folder / RECORD), Sweep)
    except msgspec.ValidationError:
        raise RequestError(f"{folder}: is not the folder of a sweep ({RECORD} is missing or damaged)") from None
    return msgspec.structs.replace(sweep, folder=str(folder.absolute()))  # it may have been moved


def results_of(sweep: Sweep) -> list[PointResult]:
    """Return what became of each point so far, in the order of the points."""
    by_name = {run.name.partition("-")[0]: run for run in list_runs(sweep.folder)}
    return [_result(sweep, point, by_name.get(point.name)) for point in sweep.points]


def ranked(results: Sequence[PointResult]) -> tuple[str, list[PointResult]]:
    """Return by which loss the points are ranked, and the points: the best of the finished ones first, the others last.

    The held-out loss decides if every finished point has one, else the last train loss.
    """
    done = [r for r in results if r.status == "succeeded"]
    key = "eval_loss" if done and all(r.eval_loss is not None for r in done) else "train_loss"

    def order(result: PointResult) -> tuple[bool, float]:
        value = getattr(result, key) if result.status == "succeeded" else None
        return (value is None, 0.0 if value is None else value)

    return key, sorted(results, key=order)


def _result(sweep: Sweep, point: SweepPoint, run: RunDir | None) -> PointResult:
    sets = sweep.settings(point)
    if run is None:
        refused = _refusal(sweep, point)
        status, message = ("refused", refused.read_text("utf-8")) if refused.exists() else ("open", "")
        return PointResult(name=point.name, sets=sets, run=None, status=status, message=message)
    metrics = read_record(run.metrics)
    diverged = (run.root / "diverged").exists()
    status = "diverged" if diverged else str(metrics.get("status") or "unfinished")
    if status not in ("diverged", "succeeded") and (run.root / STOPPED).exists():
        status = "stopped"
    return PointResult(
        name=point.name,
        sets=sets,
        run=run.name,
        status=status,
        message=(run.root / "diverged").read_text() if diverged else str(metrics.get("message") or ""),
        eval_loss=finite_float(metrics.get("eval_loss")),
        train_loss=finite_float(metrics.get("train_loss_last")),
        steps=finite_int(metrics.get("steps")),
        tokens_per_s=finite_float(metrics.get("tokens_per_s")),
        peak_memory_bytes=finite_float(metrics.get("peak_memory_bytes")),
        cost=metrics.get("cost") if cost_row(metrics.get("cost")) else None,
    )


def _refusal(sweep: Sweep, point: SweepPoint) -> Path:
    """Return the file that says why a point could not start; one a point, because tasks of an array write at once."""
    return Path(sweep.folder) / f"{point.name}.refused"


@contextmanager
def only_one(sweep: Sweep) -> Iterator[None]:
    """Hold a sweep; raise `RequestError` if another process of this machine runs it."""
    with (Path(sweep.folder) / RECORD).open("rb") as record:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"{sweep.folder}: another process runs this sweep; its table: allranks sweep {sweep.folder} --show"
            raise RequestError(text) from None
        except OSError:  # a file system without locks
            pass
        yield


def is_left(result: PointResult, *, again: bool) -> bool:
    """Return whether a sweep that continues runs this point; `again`: also what failed, diverged or was refused."""
    return result.status in CONTINUED or (again and result.status != "succeeded")


def run_sweep(sweep: Sweep, observer: Observer | None = None, *, again: bool = False) -> bool:
    """Run the points that have not succeeded, one after another; return False if the user ended it.

    A point that fails does not end the sweep. A stopped one is resumed, a diverged or failed one is left as it is.

    Args:
        again: run failed, diverged and refused points once more.

    Raises:
        RequestError: another process runs this sweep.
    """
    view = observer or NullObserver()
    with only_one(sweep):
        for number, before in enumerate(results_of(sweep), 1):
            if is_left(before, again=again) and not run_point(sweep, number, before, view):
                return False
        if sweep.space:
            sweep_trials.report(Path(sweep.folder), results_of(sweep))
    return True


def run_point(sweep: Sweep, number: int, before: PointResult, view: Observer) -> bool:
    """Run or resume the point of this number; return False if the user ended it."""
    watch, folder, point = DivergenceWatch(view), Path(sweep.folder), sweep.points[number - 1]
    if sweep.space and not before.sets:
        sweep_trials.report(folder, results_of(sweep))
        before = msgspec.structs.replace(before, sets=sweep_trials.suggest(folder, sweep.space, point.name))
    view.say(f"point    {number} of {len(sweep.points)}: {' '.join(before.sets)}")
    _refusal(sweep, point).unlink(missing_ok=True)
    try:
        if before.status in ("stopped", "unfinished") and before.run and _can_resume(RunDir(folder / before.run)):
            (folder / before.run / STOPPED).unlink(missing_ok=True)
            result = runs.resume(before.run, run_root=folder, observer=watch)
        else:
            if before.run:
                shutil.rmtree(folder / before.run)
            sets = [*sweep.sets, *before.sets, f"name={point.name}", f"run_root={folder}"]
            observe = preview.read_spec(folder / SPEC, sets).observe
            if observe.all_trackers and observe.tracking.group is None:
                sets.append(f"observe.tracking.group={folder.name}")
            prepared = preview.prepare(folder / SPEC, sets)
            run, plan = runs.create(prepared)
            result = runs.launch(run, prepared.spec, plan, attempt=1, observer=watch)
    except AllranksError as error:  # this point cannot run, such as one that does not fit in memory; others may
        view.say(f"refused  {error}")
        write_text_atomic(_refusal(sweep, point), str(error))
        return True
    if watch.reason:
        (Path(result.folder) / "diverged").write_text(watch.reason)
        view.say(f"ended    {point.name}: {watch.reason}")
    elif result.status == "stopped" or (result.signalled and result.status == "failed"):
        (Path(result.folder) / STOPPED).touch()  # a run that could save nothing has failed, but its point is not done
        return False
    else:
        view.say(f"{result.status:8} {point.name}: {result.message if result.exit_code else _losses(result.metrics)}")
    return True


def _can_resume(run: RunDir) -> bool:
    try:
        return bool(newest_checkpoint(run, full=True))
    except CheckpointError:
        return False


def _losses(metrics: dict[str, Any]) -> str:
    known = {"held-out loss": metrics.get("eval_loss"), "train loss": metrics.get("train_loss_last")}
    return ", ".join(f"{name} {value:.4f}" for name, value in known.items() if finite_float(value) is not None)


class DivergenceWatch:
    """Forward to another observer, and end a run whose loss is not finite or has risen for good."""

    def __init__(self, view: Observer, end: Callable[[RunDir], object] | None = None) -> None:
        self._view = view
        self._end = end or (lambda run: runs.cancel(run, now=True))
        self._run: RunDir | None = None
        self._losses: list[float] = []
        self._lowest = math.inf
        self.reason = ""

    def start(self, run_dir: RunDir, launch_plan: Any) -> None:
        self._run = run_dir
        if (show := getattr(self._view, "start", None)) is not None:
            show(run_dir, launch_plan)

    def say(self, text: str) -> None:
        self._view.say(text)

    def event(self, event: dict[str, Any]) -> None:
        self._view.event(event)
        if event.get("event") == "error" and event.get("type") == "NonFiniteLoss":  # it ends by itself
            self.reason = self.reason or str(event.get("message")).partition(". ")[0]
        reported = event.get("event") in ("step", "progress") and event.get("rank") == 0 and "loss" in event
        if not reported or self.reason:
            return
        step, loss = event.get("step"), finite_float(event["loss"])
        if loss is None:
            self._diverged(f"the loss is not finite at step {step}")
            return
        self._losses.append(loss)
        if len(self._losses) < 2 * LOSS_WINDOW:
            return
        mean = sum(self._losses[-LOSS_WINDOW:]) / LOSS_WINDOW
        self._lowest = min(self._lowest, mean)
        if mean > DIVERGED_FACTOR * self._lowest and mean > self._losses[0]:
            self._diverged(
                f"the mean of the last {LOSS_WINDOW} losses, {mean:.3f} at step {step}, is above the first loss, and "
                f"{mean / self._lowest:.1f} times the lowest mean"
            )

    def _diverged(self, reason: str) -> None:
        self.reason = reason
        if self._run is not None:
            try:
                self._end(self._run)
            except AllranksError as error:  # it has ended by itself
                self._view.say(f"note     {error}")
