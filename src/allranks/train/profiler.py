"""Profile a window of steps with the PyTorch profiler and publish one Perfetto-readable trace file per rank.

The first ``wait`` steps of an attempt run without the profiler, the next ``warmup`` steps warm it up, and the next
``active`` steps are recorded. Steps are marked ``ProfilerStep#N`` with N as in the events (the first is 1), their parts
``allranks.data``, ``allranks.forward``, ``allranks.backward``, ``allranks.optimizer`` and ``allranks.control``, modules
``allranks.module:<name>``. Evaluation and checkpoints are outside the marks. Traces are written to a temporary file,
checked, compressed and renamed; earlier ones are kept.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from allranks.errors import AllranksError
from allranks.rundir.events import EventLog, read_events
from allranks.rundir.files import file_mode, make_folder
from allranks.rundir.paths import RunDir
from allranks.spec.records import ProfileSpec
from allranks.train.loop import StepWatcher

_COMPRESSION = 3  # a third of the time of 9, a tenth larger


class TraceNotWritten(AllranksError):
    """The profiler did not write a complete trace, for example because the disk is full."""


def publish_trace(export: Callable[[str], object], target: Path, before: Callable[[], None] | None = None) -> int:
    """Let ``export(path)`` write JSON beside ``target``, compress it, call `before`, and rename it into place; return
    the compressed size in bytes. Raise `TraceNotWritten` if the file is not complete (torch raises no error then)."""
    make_folder(target.parent)
    aside = target.with_name(f".{target.name}.{os.getpid()}")  # torch leaves partial files next to its file
    plain, packed = aside / "trace.json", aside / target.name
    try:
        make_folder(aside)
        export(str(plain))
        with plain.open("rb") if plain.exists() else io.BytesIO() as file:
            file.seek(-min(64, file.seek(0, os.SEEK_END)), os.SEEK_END)
            if not file.read().rstrip().endswith(b"}"):
                raise TraceNotWritten(f"the profiler wrote no complete file in {target.parent}; is the disk full?")
        with plain.open("rb") as source, packed.open("wb") as raw:
            with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=_COMPRESSION, mtime=0) as into:
                shutil.copyfileobj(source, into, 1 << 20)
            raw.flush()
            os.fsync(raw.fileno())
        packed.chmod(packed.stat().st_mode & file_mode(target.parent))
        size = packed.stat().st_size
        if before is not None:
            before()
        packed.replace(target)
        return size
    finally:
        shutil.rmtree(aside, ignore_errors=True)


MODULE_PREFIX = "allranks.module:"
_NOTHING = nullcontext()
SETTLE_S = 0.05  # a Gloo thread ends its own record shortly after the work completes


class TraceMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the run that the trace holds under the key ``allranks``."""

    run: str
    attempt: int
    rank: int
    world_size: int
    backend: str
    device: str
    strategy: str
    grad_accum: int


class Profiler(StepWatcher):
    """Profile a window of steps and write ``traces/rank<R>.json.gz`` at its end.

    A profiler that does not start, or a trace that cannot be written, is a ``warning`` event; training continues.
    """

    def __init__(
        self,
        wanted: ProfileSpec,
        facts: TraceMetadata,
        run: RunDir,
        model: nn.Module,
        events: EventLog,
        first_step: int,
    ) -> None:
        self._facts, self._run, self._model, self._events = facts, run, model, events
        self._ready_at = first_step + wanted.wait
        self._from = self._ready_at + wanted.warmup
        self._until = self._from + wanted.active
        self._profile: profile | None = None
        self._modules: _ModuleRanges | None = None
        self._step: record_function | None = None
        self._recorded: list[int] = []
        self._quiet: Callable[[], None] = lambda: None

    def attach(self, quiet: Callable[[], None]) -> None:
        """Keep the function that waits for pending communication."""
        self._quiet = quiet

    def step_begins(self, step: int) -> None:
        """Warm up or start the profiler if due, and mark the step."""
        if step == self._ready_at:
            self._attempt(self._prepare)
        if step == self._from and self._profile is not None:
            self._attempt(self._start)
        if self._modules is not None:
            self._step = record_function(f"ProfilerStep#{step + 1}")
            self._step.__enter__()

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Return a named range inside the window, a null context outside it."""
        return _NOTHING if self._step is None else record_function(f"allranks.{name}")

    def step_ends(self, step: int) -> bool:
        """End the mark of the step; after the last step of the window write the trace."""
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
        """Write the recorded steps, unless there are none or they are already written."""
        if self._step is not None:  # an error interrupted the step
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
        except (OSError, RuntimeError, TraceNotWritten) as error:  # RuntimeError: raised by torch if tracing fails
            self._profile = None
            text = (
                f"observe.profile: no trace of rank {self._facts.rank}: {str(error).splitlines()[0][:300]}; training "
                "continues without it"
            )
            self._events.write("warning", what="profile", message=text)

    def _prepare(self) -> None:
        gpu = [ProfilerActivity.CUDA] if self._facts.device == "cuda" else []
        # no with_stack: it makes every call several times slower. with_modules names modules of TorchScript only;
        # _ModuleRanges names all
        made = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True, profile_memory=True)
        self._settle()
        made.prepare_trace()
        self._profile = made

    def _start(self) -> None:
        assert self._profile is not None
        self._settle()
        self._profile.start_trace()  # writes distributedInfo for every backend
        self._profile.add_metadata_json("allranks", json.dumps(msgspec.to_builtins(self._facts)))
        self._modules = _ModuleRanges(self._model)

    def _write(self) -> None:
        assert self._profile is not None
        began = time.perf_counter()
        self._settle()
        self._profile.stop_trace()
        target = self._run.trace_of(self._facts.rank)
        size = publish_trace(self._profile.export_chrome_trace, target, before=self._set_earlier_aside)
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
        """Wait until no collective runs: starting or stopping the profiler during Gloo's work can corrupt the heap."""
        self._quiet()
        time.sleep(SETTLE_S)

    def _set_earlier_aside(self) -> None:
        rank = self._facts.rank
        written = [e for e in read_events(self._run.events_of(rank)) if e["event"] == "trace"]
        attempt = written[-1].get("attempt") if written else None
        number = attempt if isinstance(attempt, int) else self._facts.attempt - 1
        current, earlier = self._run.trace_of(rank), self._run.trace_of(rank, attempt=number)
        if current.exists():
            make_folder(earlier.parent)
            current.replace(earlier)


class _ModuleRanges:
    """Mark each module's forward pass with a named range, by global hooks that exist only during the window."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules() if name}
        self._open: list[tuple[int, record_function]] = []
        enter = nn.modules.module.register_module_forward_pre_hook(self._enter)
        leave = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        self._handles = (enter, leave)

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is not None and not torch.compiler.is_compiling():
            opened = record_function(MODULE_PREFIX + name)
            opened.__enter__()
            self._open.append((id(module), opened))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open and self._open[-1][0] == id(module):
            self._open.pop()[1].__exit__(None, None, None)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
