"""State of an attempt that all parts of a rank share, and functions that record facts about the run as events."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from allranks.planning.records import BatchPlan, LaunchPlan
from allranks.rundir.events import EventLog
from allranks.rundir.files import read_json
from allranks.rundir.heartbeat import heartbeat
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec
from allranks.spec.records import DataSpec, ModelSpec
from allranks.train.distributed import DistContext
from allranks.train.step_metrics import StopRequest


class AttemptArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of one attempt; written by the launcher."""

    resume_step: int | None = None
    inexact: bool = False
    anew: bool = False  # an earlier attempt left no checkpoint: its records do not count


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """State of one rank in one attempt of a run that trains a model."""

    number: int
    run: RunDir
    spec: RunSpec
    plan: LaunchPlan
    args: AttemptArgs
    world: DistContext
    events: EventLog
    stop: StopRequest

    @property
    def model(self) -> ModelSpec:
        assert self.spec.model is not None
        return self.spec.model

    @property
    def data(self) -> DataSpec:
        assert self.spec.data is not None
        return self.spec.data

    @property
    def batch(self) -> BatchPlan:
        assert self.plan.batch is not None
        return self.plan.batch

    def phase(self, name: str, **more: Any) -> None:
        """Start a phase: write its event, and report it to hang detection."""
        self.events.write("phase", name=name, **more)
        heartbeat.phase(name)

    def say(self, text: str) -> None:
        """Write a line to this rank's log."""
        print(f"[RANK {self.world.rank}] {text}", flush=True)  # noqa: T201 - the rank's own log

    def say_once(self, text: str) -> None:
        """Write a line to the log of rank 0 only."""
        if self.world.is_first:
            self.say(text)


def load_attempt_args(run: RunDir, attempt: int) -> AttemptArgs:
    """Return the arguments that the launcher wrote for this attempt."""
    return msgspec.convert(read_json(run.attempt_args(attempt)) or {}, AttemptArgs)


RECORDED_PACKAGES = [
    "torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "allranks",
]  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of the libraries that results depend on."""
    installed = {}
    for name in RECORDED_PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
