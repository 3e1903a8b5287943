"""A window of the PyTorch profiler over some steps: one Perfetto-readable trace a rank. Imports torch.

The first ``wait`` steps of an attempt run untouched, before the next ``warmup`` the profiler is made ready, the next
``active`` are recorded. Steps are marked ``ProfilerStep#N`` with N as in the events (the first is 1), their parts
``allranks.data``, ``allranks.forward``, ``allranks.backward``, ``allranks.optimizer`` and ``allranks.control``, modules
``allranks.module:<name>``. Evaluation and checkpoints lie between the marks. Outside the window nothing is attached.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from allranks.observe.events import EventLog, read_events
from allranks.observe.tracefile import TraceNotWritten, publish, set_aside
from allranks.rundir import RunDir
from allranks.spec.records import ProfileSpec

MODULE = "allranks.module:"
_NOTHING = nullcontext()
SETTLE_S = 0.05  # a thread of gloo closes its own record shortly after the work that others wait for is done


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace says about its run, under the key ``allranks``."""

    run: str
    attempt: int
    rank: int
    world_size: int
    backend: str
    device: str
    strategy: str
    grad_accum: int


class Profiler:
    """Watches steps (`allranks.train.watching.StepWatcher`) and writes ``traces/rank<R>.json.gz`` when its window ends.

    A profiler that does not start, or a trace that cannot be written, is a ``warning`` event: training goes on.
    """

    def __init__(
        self, wanted: ProfileSpec, facts: Facts, run: RunDir, model: nn.Module, events: EventLog, first_step: int
    ) -> None:
        self._facts, self._run, self._model, self._events = facts, run, model, events
        self._ready_at = first_step + wanted.wait
        self._from = self._ready_at + wanted.warmup
        self._until = self._from + wanted.active
        self._profile: profile | None = None
        self._modules: _ModuleRanges | None = None
        self._step: record_function | None = None
        self._recorded: list[int] = []
        self._quiet: Callable[[], None] = _nobody

    def attach(self, quiet: Callable[[], None]) -> None:
        """How to wait for communication under way."""
        self._quiet = quiet

    def step_begins(self, step: int) -> None:
        """Make ready, start, and mark the step, each where it is due."""
        if step == self._ready_at:
            self._attempt(self._prepare)
        if step == self._from and self._profile is not None:
            self._attempt(self._start)
        if self._modules is not None:
            self._step = record_function(f"ProfilerStep#{step + 1}")
            self._step.__enter__()

    def part(self, name: str) -> AbstractContextManager[Any]:
        """A named range within the window, nothing outside it."""
        return _NOTHING if self._step is None else record_function(f"allranks.{name}")

    def step_ends(self, step: int) -> bool:
        """Close the mark; after the last step of the window write the trace."""
        if self._step is None:
            return False
        self._step.__exit__(None, None, None)
        self._step = None
        self._recorded.append(step + 1)
        if step + 1 < self._until:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Write what was recorded; nothing if the window was not reached or is written already."""
        if self._step is not None:  # an error left the step in its middle
            self._step.__exit__(None, None, None)
            self._step = None
        if self._modules is not None:
            self._modules.remove()
            self._modules = None
            self._attempt(self._write)
        self._profile = None

    def _attempt(self, work: Any) -> None:
        try:
            work()
        except (OSError, RuntimeError, TraceNotWritten) as error:  # RuntimeError: how torch says that tracing fails
            self._profile = None
            text = f"observe.profile: no trace of rank {self._facts.rank}: {str(error).splitlines()[0][:300]}; training goes on without it"
            self._events.write("warning", what="profile", message=text)

    def _prepare(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._facts.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # no with_stack: it slows each call many times. with_modules names modules of TorchScript only; _ModuleRanges names all
        made = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._settle()
        made.prepare_trace()
        self._profile = made

    def _start(self) -> None:
        assert self._profile is not None
        self._settle()
        self._profile.start_trace()  # writes distributedInfo, whatever the backend
        self._profile.add_metadata_json("allranks", json.dumps(msgspec.to_builtins(self._facts)))
        self._modules = _ModuleRanges(self._model)

    def _write(self) -> None:
        assert self._profile is not None
        began = time.perf_counter()
        self._settle()
        self._profile.stop_trace()
        target = self._run.trace_of(self._facts.rank)
        size = publish(self._profile.export_chrome_trace, target, before=self._set_earlier_aside)
        self._events.write(
            "trace",
            attempt=self._facts.attempt,
            path=str(target),
            bytes=size,
            first_step=self._recorded[0] if self._recorded else None,
            last_step=self._recorded[-1] if self._recorded else None,
            seconds=round(time.perf_counter() - began, 3),
        )

    def _settle(self) -> None:
        """torch's profiler, switched while threads of gloo are at work, has been seen to corrupt the heap, which ends the
        process some time later."""
        self._quiet()
        time.sleep(SETTLE_S)

    def _set_earlier_aside(self) -> None:
        rank = self._facts.rank
        written = [e for e in read_events(self._run.events_of(rank)) if e["event"] == "trace"]
        attempt = written[-1].get("attempt") if written else None
        number = attempt if isinstance(attempt, int) else self._facts.attempt - 1
        set_aside(self._run.trace_of(rank), self._run.trace_of(rank, attempt=number))


def _nobody() -> None: ...


class _ModuleRanges:
    """Names the range of each module's forward, by hooks for all modules that exist only within the window."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules() if name}
        self._open: list[tuple[int, record_function]] = []
        enter = nn.modules.module.register_module_forward_pre_hook(self._enter)
        leave = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        self._handles = (enter, leave)

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is not None and not torch.compiler.is_compiling():
            opened = record_function(MODULE + name)
            opened.__enter__()
            self._open.append((id(module), opened))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open and self._open[-1][0] == id(module):
            self._open.pop()[1].__exit__(None, None, None)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
