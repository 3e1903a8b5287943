"""State of an attempt that all parts of a rank share, and functions that record facts about the run as events."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from allranks.planning.records import BatchPlan, LaunchPlan
from allranks.rundir.events import EventLog
from allranks.rundir.files import read_json, write_json
from allranks.rundir.heartbeat import heartbeat
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec
from allranks.spec.records import DataSpec, ModelSpec
from allranks.spec.strategies import offload_warnings
from allranks.train.distributed import DistContext
from allranks.train.models.attention_flops import AttentionCost
from allranks.train.step_metrics import StopRequest
from allranks.train.strategies.base import Strategy
from allranks.utils.inputs import read_regular
from allranks.utils.machine import host_name

if TYPE_CHECKING:
    pass


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


def load_plan(run: RunDir) -> LaunchPlan:
    """Return the plan of a run."""
    return msgspec.json.decode(read_regular(run.plan), type=LaunchPlan)


def load_attempt_args(run: RunDir, attempt: int) -> AttemptArgs:
    """Return the arguments that the launcher wrote for this attempt."""
    return msgspec.convert(read_json(run.logs_of(attempt) / "args.json") or {}, AttemptArgs)


def open_event_log(run: RunDir, attempt: int, resumed_from: int | None) -> EventLog:
    """Open this rank's event log and write its first event, which says where the rank runs."""
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


RECORDED_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "allranks",
)


def log_remarks(here: Attempt, adapted: Sequence[str], strategy: Strategy, computing: Sequence[str] = ()) -> None:
    """Log remarks on the adapters, on the strategy after its set-up, and on how attention and loss are computed."""
    remarks = [("adapter", text) for text in adapted]
    remarks += [("strategy", text) for text in offload_warnings(here.plan.strategy_options, here.world.device.type)]
    remarks += [("strategy", text) for text in strategy.remarks]
    remarks += [("model", text) for text in computing]
    for what, remark in remarks:
        here.events.write("remark", what=what, message=remark)
        here.say_once(remark)


def log_engine(here: Attempt, strategy: Strategy) -> None:
    """Log the version, start-up time and configuration of the engine, if the strategy uses another library's."""
    if strategy.engine_facts:
        here.events.write("engine", **strategy.engine_facts)
    if strategy.engine_config and here.world.is_first:
        write_json(here.run.engine_config, strategy.engine_config)


def log_model(
    here: Attempt,
    parameters: tuple[int, int],
    active: tuple[int, int] | None,
    attention: AttentionCost | None,
    seconds: float,
) -> None:
    """Log the model's size, device, and the versions that results depend on.

    Args:
        parameters: (all, trained).
        active: those that a token uses; None: unknown.
        attention: None: unknown.
    """
    device = here.world.device
    here.events.write(
        "model",
        parameters=parameters[0],
        parameters_trained=parameters[1],
        parameters_active=active[0] if active else None,
        parameters_trained_active=active[1] if active else None,
        attention_flops_per_pair=attention.flops_per_pair if attention else None,
        attention_window=attention.window if attention else None,
        seconds=round(seconds, 3),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=str(torch.__version__),
        versions=versions(),
        threads=torch.get_num_threads(),
    )


def log_batch(here: Attempt, batch: Any, model: torch.nn.Module) -> None:
    """Log the dtypes of the inputs and the weights: layers refuse inputs of another dtype than their weights."""
    weights = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    inputs = batch.inputs
    here.events.write(
        "batch", shape=list(inputs.shape), dtype=str(inputs.dtype).removeprefix("torch."), weights=weights
    )


def versions() -> dict[str, str]:
    """Return the versions of the libraries that results depend on."""
    found = {}
    for name in RECORDED_PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
