"""Send rank 0's metrics to TensorBoard, Weights & Biases, MLflow, or a class of the user's (``observe.trackers``).

Each tracker has a thread and a queue, so that a slow one delays no step. One that raises, hangs or does not keep up is
reported once and dropped; the run continues.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import msgspec

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.rundir.paths import RunDir
from allranks.spec import spec_to_dict
from allranks.spec.records import RunSpec, TrackingSpec
from allranks.utils.redaction import redact, redact_tree

LOGGED_FIELDS = {
    "step": ("loss", "router_aux_loss", "lr", "grad_norm", "step_time_s", "memory_bytes"),
    "eval": ("loss", "perplexity", "accuracy", "exact_match"),
}
QUEUED = 1000
HANGS_S = 120.0
CLOSE_S = 60.0
CLOSE_EARLY_S = 8.0  # after a stop or a failure, where others wait for the process


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a tracker is created with: the run's name (unique, and the same in all attempts), its folder, its spec
    without secrets, ``observe.tracking``, and the step after which this attempt continues (None: it begins)."""

    name: str
    folder: Path
    spec: dict[str, Any]
    tracking: TrackingSpec
    resume_step: int | None = None


class Tracker(Protocol):
    """A class that is called with a `TrackedRun`, and then in one thread of rank 0: ``log`` with values such as
    ``train/loss`` and ``eval/loss``, at the end ``finish`` with succeeded, stopped or failed (not after a kill)."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self, status: str) -> None: ...


class TensorBoardTracker:
    """Event files in ``<run>/tensorboard``; what an earlier attempt wrote after the checkpoint is hidden."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if run.resume_step is None else run.resume_step + 1
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: str) -> None:
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases with the run's name as its ID, which resumes it; the key comes from WANDB_API_KEY."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        given = run.tracking
        names = {
            "project": given.project or os.environ.get("WANDB_PROJECT") or "allranks",
            "id": run.name,
            "name": run.name,
        }
        names |= {"group": given.group, "tags": given.tags or None, "mode": "offline" if given.offline else None}
        more = {"dir": str(run.folder), "config": run.spec, "settings": {"console": "off"}}  # output may hold secrets
        self._run = wandb.init(resume="allow", **names, **more)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))


class MlflowTracker:
    """A run of MLflow with a tag, by which later attempts find it; without MLFLOW_TRACKING_URI in ``<run>/mlflow``."""

    TAG = "allranks.run"

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient, entities  # pyright: ignore[reportMissingImports] - an extra

        given, uri = run.tracking, os.environ.get("MLFLOW_TRACKING_URI")
        if given.offline or not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.folder / "mlflow").as_uri()
        self._client, self._metric = MlflowClient(tracking_uri=uri), entities.Metric
        name = given.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "allranks"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        if before := self._client.search_runs([experiment], f"tags.`{self.TAG}` = '{run.name}'"):
            self._id = before[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {
            self.TAG: run.name,
            **dict.fromkeys(given.tags, "true"),
            **({"group": given.group} if given.group else {}),
        }
        self._id = self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        params = [entities.Param(key, str(value)[:500]) for key, value in _flat(run.spec) if value is not None]
        for first in range(0, len(params), 100):  # MLflow's limit
            self._client.log_batch(self._id, params=params[first : first + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[self._metric(k, v, now, step) for k, v in values.items()])

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._id, {"succeeded": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    parts = (_flat(v, f"{prefix}{k}.") if isinstance(v, dict) else [(prefix + k, v)] for k, v in values.items())
    return [pair for part in parts for pair in part]


BUILT_IN = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker, "mlflow": MlflowTracker}


class _Feed(threading.Thread):
    """The thread of one tracker; `problem` says why it is dropped."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        super().__init__(name=f"allranks-{name}", daemon=True)
        self.tracker, self._make = name, make
        self.queue: queue.Queue[tuple[int, dict[str, float]] | str] = queue.Queue(QUEUED)
        self.problem = ""
        self._busy_since: float | None = time.monotonic()
        self.start()

    def run(self) -> None:
        try:
            tracker = self._make()
            while True:
                self._busy_since = None
                item = self.queue.get()
                self._busy_since = time.monotonic()
                if isinstance(item, str):
                    tracker.finish(item)
                    return
                tracker.log(*item)
        except BaseException as error:  # noqa: BLE001 - code of others; monitoring never ends a run
            self.problem = f"{type(error).__name__}: {' '.join(redact(str(error)).split())[:300]}"

    def put(self, item: tuple[int, dict[str, float]] | str) -> None:
        try:
            self.queue.put_nowait(item)
        except queue.Full:
            self.problem = self.problem or f"it does not keep up: {QUEUED} records wait"
        if (since := self._busy_since) is not None and time.monotonic() - since > HANGS_S:
            self.problem = self.problem or f"a call has not returned for {HANGS_S:g} s"


class Trackers:
    """Pass metrics to trackers, by name."""

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]], report: Callable[[str], None]) -> None:
        self._feeds, self._report = [_Feed(name, make) for name, make in makers.items()], report
        atexit.register(self.close, "failed", quiet=True)

    def event(self, event: str, fields: dict[str, Any]) -> None:
        """Pass on the metrics of a step or an evaluation; other events have none."""
        if event not in LOGGED_FIELDS:
            return
        prefix = "train" if event == "step" else "eval"
        given = {k: fields.get(k) for k in LOGGED_FIELDS[event]}
        values = {f"{prefix}/{k}": float(v) for k, v in given.items() if isinstance(v, (int, float))}
        for feed in list(self._feeds):
            feed.put((int(fields["step"]), values))
            self._drop_if_broken(feed)

    def close(self, status: str, *, quiet: bool = False) -> None:
        """End all trackers, and wait a limited time until they have sent what they have."""
        limit_s = CLOSE_S if status == "succeeded" else CLOSE_EARLY_S
        deadline, feeds = time.monotonic() + limit_s, list(self._feeds)
        for feed in feeds:
            feed.put(status)
        for feed in feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
            if feed.is_alive():
                feed.problem = feed.problem or f"it did not end within {limit_s:g} s; its last values may be missing"
            if not quiet:
                self._drop_if_broken(feed)
        self._feeds.clear()

    def _drop_if_broken(self, feed: _Feed) -> None:
        if feed.problem:
            self._feeds.remove(feed)
            self._report(f"observe.trackers: {feed.tracker} is dropped: {feed.problem}")


def make_trackers(
    spec: RunSpec, run: RunDir, report: Callable[[str], None], resume_step: int | None = None
) -> Trackers | None:
    """Return the trackers that the spec names, or None.

    Raises:
        SpecError: a class cannot be imported, or lacks a method.
        EnvironmentNotAble: a package is missing.
    """
    shown, tracking = redact_tree(spec_to_dict(spec)), spec.observe.tracking
    facts = TrackedRun(name=run.name, folder=run.root, spec=shown, tracking=tracking, resume_step=resume_step)
    made = {name: partial(_load(name), facts) for name in spec.observe.all_trackers}
    return Trackers(made, report) if made else None


def _load(name: str) -> Callable[[TrackedRun], Tracker]:
    module, _, class_name = name.partition(":")
    try:
        imported = import_module("torch.utils.tensorboard" if name == "tensorboard" else module)
        made = BUILT_IN[name] if name in BUILT_IN else getattr(imported, class_name)
    except Exception as error:  # noqa: BLE001 - code of others
        if name in BUILT_IN:
            text = f"observe.trackers: the package {name} is missing or broken: {error}; pip install 'allranks[{name}]'"
            raise EnvironmentNotAble(text) from None
        raise SpecError(f"observe.trackers: {name} cannot be imported: {type(error).__name__}: {error}") from None
    if missing := [method for method in ("log", "finish") if not callable(getattr(made, method, None))]:
        text = f"{name} has no method {' and '.join(missing)}; a tracker has log(step, values) and finish(status)"
        raise SpecError(f"observe.trackers: {text}")
    return made
