"""What every part of a rank's work knows of the attempt that it belongs to, and how it tells what it does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import msgspec

from allranks.facts import host_name
from allranks.hang.pulse import pulse
from allranks.observe.events import EventLog
from allranks.planning import BatchPlan, LaunchPlan
from allranks.rundir import RunDir, read_json
from allranks.spec import RunSpec, load_spec
from allranks.spec.records import DataSpec, ModelSpec
from allranks.stage import spec_here
from allranks.train.control import StopRequest
from allranks.train.world import World


class AttemptArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What is special about one attempt; written by the launcher."""

    resume_step: int | None = None
    inexact: bool = False
    anew: bool = False  # an earlier attempt left no checkpoint: what it recorded does not count


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One rank's side of one attempt at a run that trains a model."""

    number: int
    run: RunDir
    spec: RunSpec
    plan: LaunchPlan
    args: AttemptArgs
    world: World
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
        """A new part of the work begins: for the records, and for whoever watches for hangs."""
        self.events.write("phase", name=name, **more)
        pulse.phase(name)

    def say(self, text: str) -> None:
        """A line of this rank's own log."""
        print(f"[RANK {self.world.rank}] {text}", flush=True)  # noqa: T201 - the rank's own log

    def say_once(self, text: str) -> None:
        """A line of rank 0's log alone."""
        if self.world.is_first:
            self.say(text)


def asked_of(run: RunDir) -> tuple[RunSpec, LaunchPlan]:
    """The run's spec, as it is on this node, and its plan."""
    spec = spec_here(load_spec(run.spec), run.stage)
    return spec, msgspec.json.decode(run.plan.read_bytes(), type=LaunchPlan)


def args_of(run: RunDir, attempt: int) -> AttemptArgs:
    """What the launcher wrote for this attempt."""
    return msgspec.convert(read_json(run.logs_of(attempt) / "args.json") or {}, AttemptArgs)


def begin_events(run: RunDir, attempt: int, resumed_from: int | None) -> EventLog:
    """This rank's log of events, with its first: where the rank is."""
    rank = int(os.environ["RANK"])
    events = EventLog(run.events_of(rank), rank)
    events.write(
        "start",
        host=host_name(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        attempt=attempt,
        pid=os.getpid(),
        world_size=int(os.environ["WORLD_SIZE"]),
        resumed_from=resumed_from,
    )
    return events
