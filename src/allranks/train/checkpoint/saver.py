"""Decide when a checkpoint is due, and save it in the foreground or in the background.

A save runs `Saver.save`, `Saver._write` (until all ranks' files are written), `Saver._complete` (until publication).
Ranks agree on each phase through a separate process group, and every wait has a time limit.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import CheckpointError
from allranks.rundir.checkpoints import file_hash
from allranks.rundir.files import SCHEMA_VERSION, json_text, write_json
from allranks.rundir.paths import RunDir
from allranks.spec.records import CheckpointSpec
from allranks.train import distributed
from allranks.train.attempt import Attempt
from allranks.train.checkpoint import commit, writer
from allranks.train.checkpoint.commit import make_room, publish_checkpoint, require_room
from allranks.train.checkpoint.snapshot import CpuCopies, collect_parts, on_cpu
from allranks.train.checkpoint.writer import PartHash, PublishedFiles, RankParts, TrainingIdentity
from allranks.train.distributed import DistContext
from allranks.train.models.safetensors_files import check_file, content_hash
from allranks.train.replica_check import ReplicaCheck
from allranks.train.save_requests import REQUESTED, SaveRequests
from allranks.train.strategies import shards
from allranks.train.strategies.base import Strategy
from allranks.utils.filesystem import low_space_text
from allranks.utils.machine import host_name
from allranks.version import __version__

T = TypeVar("T")
SLOW_DISK_BYTES_PER_S = 20e6


class RankAgreement:
    """Run actions on all ranks so that they succeed or fail together.

    Ranks wait `meet_timeout_s` for all to join a save, and `work_timeout_s` for a rank to write its part.
    """

    def __init__(self, meet_timeout_s: float, work_timeout_s: float, run: RunDir) -> None:
        self._meet_s, self._run = meet_timeout_s, run
        # of its own, since a save in the background runs beside the collectives of training
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=work_timeout_s), group_desc="checkpoint")
        self.group = cast(dist.ProcessGroup, group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def meet(self, what: str) -> None:
        """Wait for all ranks. Raise `CheckpointError` if one did not join in time; rank 0 names it."""
        began = time.monotonic()
        try:
            dist.monitored_barrier(self.group, timeout=timedelta(seconds=self._meet_s), wait_all_ranks=True)
        except RuntimeError as error:
            named = re.search(r"[Rr]anks? ([\d, ]+) failed", str(error))
            who = f"rank {named.group(1).strip()}" if named and self.rank == 0 else "another rank, see that of rank 0,"
            waited_s = time.monotonic() - began
            problem = f"did not join within {self._meet_s:.0f} s (checkpoint.timeout_s), and every rank must"
            if waited_s < self._meet_s * 0.9:  # not a timeout
                problem = f"ended within {waited_s:.0f} s (Connection closed by peer)"
            raise CheckpointError(f"{what}: {who} {problem}; earlier checkpoints are untouched") from None

    def each(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run an action on all ranks, return results in rank order; if one fails, `CheckpointError` names it on all."""
        mine: tuple[T | None, str | None] = (None, None)
        try:
            mine = (action(), None)
        except CheckpointError as error:
            mine = (None, str(error))
        except Exception as error:  # noqa: BLE001 - also of other libraries' writers; the other ranks must fail, too
            text = (str(error) or type(error).__name__).splitlines()[0]
            if isinstance(error, OSError):
                text = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
            # torch's writer reports a full disk as "unexpected pos"
            low = low_space_text(self._run.checkpoints)
            mine = (None, f"{text} ({low})" if low else text)
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, (*mine, host_name(), os.access(self._run.spec, os.F_OK)), group=self.group)
        # a rank that lost the shared folder may write to an empty one; Path.exists raises for a stale handle
        blind = ", ".join(sorted({host for _, _, host, sees in answers if not sees}))
        hint = f". The run folder is no longer visible on {blind}" if blind and any(a[3] for a in answers) else ""
        for rank, (_, problem, host, _) in enumerate(answers):
            if problem is not None:
                raise CheckpointError(
                    f"the checkpoint could not be saved: rank {rank} on {host} failed to {what}: {problem}{hint}. "
                    "Earlier checkpoints are untouched"
                )
        return [value for value, *_ in answers]

    def first(self, what: str, action: Callable[[], T]) -> T:
        """Run an action on rank 0 only, and return its result on all ranks; otherwise like `each`."""
        return self.each(what, lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]


@dataclass(frozen=True)
class CheckpointContent:
    """What is saved: weights and state of a strategy, and what belongs to them. ``identity`` has facts for the
    manifest; ``progress`` returns the state of schedule and data for a step."""

    strategy: Strategy
    model: nn.Module
    tokenizer: Any
    published: PublishedFiles
    identity: dict[str, Any]
    progress: Callable[[int], dict[str, Any]] = lambda step: {"step": step}


@dataclass(frozen=True)
class _Save:
    """A save under way on this rank."""

    step: int
    mode: str
    parts: RankParts
    eval_loss: float | None
    started: float  # the clock when it was asked for
    aside: Path


@dataclass(frozen=True)
class _Written:
    """What a rank has written."""

    hashes: dict[str, bytes]  # of its files of tensors
    places: dict[str, str]  # file of each key
    others: list[str]  # its files without tensors
    removed: tuple[int, ...]


class Saver:
    """Save checkpoints in the foreground or background. `save` and `finish` are collective.

    Args:
        on_published: called with the facts of each published checkpoint and the steps whose checkpoints were removed to
            make room for it, in the thread that wrote it. ``seconds``: how long it blocked training; ``written_s``:
            from the call to the publication; ``bytes``: written by this rank.
        flush_events: waits until what led up to the checkpoint is on the disk; called before it is published.
    """

    def __init__(
        self,
        run: RunDir,
        world: DistContext,
        content: CheckpointContent,
        spec: CheckpointSpec,
        on_published: Callable[[dict[str, Any], tuple[int, ...]], None] = lambda saved, removed: None,
        flush_events: Callable[[], None] = lambda: None,
    ) -> None:
        self.run, self.world, self._content = run, world, content
        self._published, self._spec, self._on_published = content.published, spec, on_published
        self._flush_events = flush_events
        self.limit_s = spec.timeout_s + 4 * content.published.bytes / SLOW_DISK_BYTES_PER_S
        """After how long the ranks abandon a save in which one of them makes no progress."""
        self._together = RankAgreement(spec.timeout_s, self.limit_s, run)
        self._copies = CpuCopies()
        self._configs: dict[str, bytes] | None = None
        self._in_flight: threading.Thread | None = None
        self._removing: threading.Thread | None = None
        self._failed: CheckpointError | None = None

    def require_room(self) -> None:
        """Raise `CheckpointError` on every rank, before any step, if the disk cannot hold the first checkpoint."""
        if need := self._spec.least_bytes(self._published.bytes):
            find = partial(require_room, self.run, need, keep_best=self._spec.keep_best)
            self._together.first("find room for the first checkpoint", find)

    def save(
        self,
        steps_done: int,
        mode: str,
        *,
        behind: bool = False,
        wait_for_disk: bool = True,
        eval_loss: float | None = None,
    ) -> float:
        """Save after `steps_done` steps; ``mode``: weights_only (trained weights) or full (all that a resume needs).

        Args:
            eval_loss: the held-out loss of these weights, for the manifest; None if they were not evaluated.
            behind: copy the state to host memory and write it in the background, at most one save at a time.
            wait_for_disk: return when the checkpoint is published. False: return when the files of all ranks are
                written and the memory that they must equal is hashed; they are read again, flushed to the disk and
                published in the background.

        Returns:
            Seconds that training was blocked.

        Raises:
            CheckpointError: on all ranks if this or an earlier background save failed on any; old checkpoints stay.
        """
        started = time.perf_counter()
        self.finish()
        # in the background the thread meets the others: training waits for no slower rank
        if not behind:
            self._together.meet(f"the checkpoint of step {steps_done}")
        random = distributed.rng_state() if mode == "full" else None
        parts = collect_parts(self._content.strategy, self._published, self.world.rank, self.world.size, random)
        parts = self._copies.of(parts) if behind else on_cpu(parts)
        # renamed when it is complete: a crash before that leaves nothing that looks like a checkpoint
        aside = self.run.checkpoints / f".step-{steps_done}.tmp"
        save = _Save(steps_done, mode, parts, eval_loss, started, aside)
        every = None if behind else self._write(save)
        if every is not None and wait_for_disk:
            self._complete(save, every, None)
            return time.perf_counter() - started
        blocked_s = time.perf_counter() - started
        self._in_flight = threading.Thread(
            target=self._save_in_background, args=(save, every, blocked_s), name="checkpoint", daemon=True
        )
        self._in_flight.start()
        return blocked_s

    def finish(self) -> None:
        """Wait for any background save and removal of old checkpoints. Raise `CheckpointError` if the save failed."""
        for thread in (self._in_flight, self._removing):
            if thread is not None:
                thread.join()
        self._in_flight = self._removing = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _save_in_background(self, save: _Save, every: list[_Written] | None, blocked_s: float) -> None:
        """Write what is not written yet, and complete the save, in a thread of its own."""
        if self.world.device.type == "cuda":  # a new thread has GPU 0, on which each rank would open a context
            torch.cuda.set_device(self.world.device)
        try:
            if every is None:
                self._together.meet(f"the checkpoint of step {save.step}")
                every = self._write(save)
            self._complete(save, every, blocked_s)
        except CheckpointError as error:
            self._failed = error
        except RuntimeError as error:  # the process group failed because another rank ended
            self._failed = CheckpointError(f"the checkpoint could not be saved: {str(error).splitlines()[0]}")

    def _write(self, save: _Save) -> list[_Written]:
        """Make room and write this rank's files; return what all ranks have written. Nothing is on the disk yet."""
        parts, rank, size = save.parts, self.world.rank, self.world.size
        try:
            positions = shards.positions_of(parts.scattered), shards.positions_of(parts.state)
            announced = self._together.each("count its parts", lambda: (parts.bytes, positions))

            def make() -> tuple[int, ...]:
                for kind in (0, 1):
                    shards.require_whole_tensors(part for _, of_rank in announced for part in of_rank[kind])
                removed = make_room(self.run, sum(own for own, _ in announced), keep_best=self._spec.keep_best)
                for left in self.run.checkpoints.glob(".step-*.tmp"):  # left by a save that was killed
                    shutil.rmtree(left, ignore_errors=True)
                (save.aside / "on-the-way").mkdir(parents=True)
                if save.mode == "full":
                    (save.aside / "state").mkdir()
                return tuple(removed)

            removed = self._together.first("find room for it", make)

            def write_scattered() -> list[PartHash]:
                """Write the parts of weights that only this rank has, for the ranks that put them together."""
                if parts.scattered:
                    shards.write_parts(parts.scattered, save.aside / "on-the-way" / shards.shard_file(rank))
                return [PartHash(s.key, s.offset, s.tensor.numel(), content_hash(s.tensor)) for s in parts.scattered]

            held: list[PartHash] = []
            if any(scattered for _, (scattered, _) in announced):
                every = self._together.each("write its parts of the weights", write_scattered)
                held = [part for of_rank in every for part in of_rank]

            def write() -> _Written:
                hashes, others = {}, []
                if parts.state:
                    name = f"state/{shards.shard_file(rank)}"
                    hashes[name] = shards.write_parts(parts.state, save.aside / name)
                published, places = writer.write_files(
                    save.aside, parts, self._published, self._content.model, rank, size, held
                )
                if parts.random is not None:
                    others.append(f"state/rank{rank}.pt")
                    torch.save(parts.random, save.aside / others[0])
                if self.world.is_first:
                    others += self._write_small(save)
                return _Written(hashes | published, places, others, removed)

            return self._together.each("write its files", write)
        except CheckpointError:
            self._discard(save)
            raise

    def _write_small(self, save: _Save) -> list[str]:
        """Write the files that have no tensors; return their names."""
        if self._configs is None:
            self._configs = writer.read_configs(self._published, self._content.model, self._content.tokenizer)
        files = dict(self._configs)
        if save.mode == "full":
            files["state/progress.json"] = json_text(self._content.progress(save.step)).encode()
            if self.run.spec.exists():
                files["state/spec.yaml"] = self.run.spec.read_bytes()
        for name, content in files.items():
            (save.aside / name).parent.mkdir(exist_ok=True)
            (save.aside / name).write_bytes(content)
        return list(files)

    def _complete(self, save: _Save, every: list[_Written], blocked_s: float | None) -> None:
        """Reread and flush the files, and publish the checkpoint. Training waited `blocked_s`; None: it still waits."""
        own = every[self.world.rank]

        def verify() -> commit.FileFacts:
            self._flush_events()
            # one waits for the disk while the other computes hashes
            with ThreadPoolExecutor(2, "checkpoint") as threads:
                flushed = threads.map(
                    lambda name: commit.flush_file(self.run, save.aside / name), [*own.hashes, *own.others]
                )
                checked = threads.map(lambda name: check_file(save.aside / name, own.hashes[name]), own.hashes)
                facts = dict(zip(own.hashes, checked, strict=True))
                list(flushed)  # raises what a flush has raised
            return facts

        try:
            facts = self._together.each("write its files", verify)
            self._together.first("publish it", lambda: self._publish(save, every, facts))
        except CheckpointError:
            self._discard(save)
            raise
        if self.world.is_first:  # training does not wait for it
            keep, best = self._spec.keep, self._spec.keep_best
            remove = partial(commit.remove_old_checkpoints, self.run, save.step, keep, keep_best=best)
            self._removing = threading.Thread(target=remove, name="checkpoint-removal")
            self._removing.start()
        seconds = time.perf_counter() - save.started
        saved = {
            "step": save.step,
            "mode": save.mode,
            "seconds": round(seconds if blocked_s is None else blocked_s, 4),
            "written_s": round(seconds, 4),
            "bytes": save.parts.bytes,
            "path": str(self.run.checkpoint(save.step)),
        }
        self._on_published(saved, own.removed)

    def _discard(self, save: _Save) -> None:
        if self.world.is_first:
            shutil.rmtree(save.aside, ignore_errors=True)

    def _publish(self, save: _Save, every: list[_Written], facts: list[commit.FileFacts]) -> None:
        """Check that the files of all ranks are present and complete, and publish them."""
        aside, checked = save.aside, {name: fact for of_rank in facts for name, fact in of_rank.items()}
        # these parts are in whole tensors now
        shutil.rmtree(aside / "on-the-way")
        commit.require_files(aside, checked)
        writer.write_index(aside, self._published, {k: f for written in every for k, f in written.places.items()})
        files = {str(p.relative_to(aside)): p for p in sorted(aside.rglob("*")) if p.is_file()}
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "step": save.step,
            "mode": save.mode,
            "world_size": self.world.size,
            "allranks": __version__,
            "torch": str(torch.__version__),
            **self._content.identity,
            "eval_loss": save.eval_loss,
            "created": time.time(),
            "files": {
                name: checked.get(name) or {"bytes": path.stat().st_size, "sha256": file_hash(path)}
                for name, path in files.items()
            },
        }
        write_json(aside / "manifest.json", manifest)
        publish_checkpoint(self.run, aside, save.step, keep_best=self._spec.keep_best)


def make_saver(
    attempt: Attempt,
    strategy: Strategy,
    model: torch.nn.Module,
    tokenizer: Any,
    published: PublishedFiles,
    identity: TrainingIdentity,
) -> Saver:
    """Return the saver of this run's checkpoints."""
    facts = {"strategy": attempt.plan.strategy, "shard_ranks": attempt.plan.shard_ranks, "run": attempt.run.name}

    def progress(done: int) -> dict[str, Any]:
        """Return what a resume needs beside the state: schedule and data depend only on the step and on these facts."""
        return {
            "step": done,
            **msgspec.to_builtins(identity),
            "sequences_done": done * attempt.batch.global_batch_size,
            "global_batch_size": attempt.batch.global_batch_size,
            "data_seed": attempt.data.seed,
            "scaler": None,  # bfloat16 and float32 need no loss scaling
        }

    def log(saved: dict[str, Any], removed: tuple[int, ...]) -> None:
        if removed and attempt.world.is_first:
            steps = ", ".join(str(step) for step in removed)
            message = f"checkpoints of steps {steps} were removed to make room on the disk"
            attempt.events.write("warning", what="checkpoint", message=message)
        attempt.events.write("checkpoint", **saved)

    content = CheckpointContent(strategy, model, tokenizer, published, facts, progress)
    return Saver(attempt.run, attempt.world, content, attempt.spec.checkpoint, log, attempt.events.sync)


class CheckpointSchedule:
    """Save when due, each state once. Every rank calls every method."""

    def __init__(self, attempt: Attempt, saver: Saver, replicas: ReplicaCheck) -> None:
        self._attempt, self._saver = attempt, saver
        self._spec = attempt.spec.checkpoint
        self._saved: set[tuple[int, str]] = set()
        self._evaluated: tuple[int, float | None] = (0, None)
        self.requests = SaveRequests(self._spec, len(attempt.plan.nodes))
        self._replicas = replicas
        saver.require_room()

    def evaluated(self, done: int, loss: float) -> None:
        """Remember the held-out loss after `done` steps, for the manifest of their checkpoint."""
        self._evaluated = (done, loss if math.isfinite(loss) else None)

    def save(self, done: int, mode: str, *, last: bool = False) -> None:
        if (done, mode) in self._saved or (done, "full") in self._saved:
            return
        started = time.perf_counter()
        self._replicas.compare(done, with_state=mode == "full")
        self._attempt.phase("save", step=done, limit_s=self._saver.limit_s)
        # saves at a stop or at the end return when they are published: no training is left to overlap with
        step, loss = self._evaluated
        evaluated = loss if step == done else None
        self._saver.save(done, mode, behind=self._spec.async_ and not last, wait_for_disk=last, eval_loss=evaluated)
        self._saved.add((done, mode))
        self._attempt.phase("train", step=done)
        if self.requests.saved(time.perf_counter() - started) and self._attempt.world.is_first:
            chosen = {"every_s": self.requests.every_s, "cost_s": self.requests.cost_s, "mtbf_h": self.requests.mtbf_h}
            self._attempt.events.write("checkpoint_interval", step=done, **chosen)
            self._attempt.say(f"checkpoint every {self.requests.every_s:.0f} s from now on (checkpoint.every: auto)")

    def is_due(self, done: int) -> bool:
        """Return whether `save_due` has something to save after `done` steps."""
        every = self._spec.every_steps if self._spec.mode != "none" else None
        return self.requests.agreed > 0 or (every is not None and done % every == 0)

    def save_due(self, done: int) -> None:
        """Save what is due after `done` steps. Without a stop, a requested checkpoint is full in any mode."""
        if self.is_due(done):
            self.save(done, "full" if self._take_request(done) else self._spec.mode)

    def save_stop(self, done: int) -> None:
        """Save a full checkpoint before a stop."""
        self._take_request(done)
        self.save(done, "full", last=True)

    def save_end(self, done: int) -> None:
        """Save the final state if it was requested or the spec asks for it, and wait until all saves are on the
        disk."""
        if self._take_request(done):
            self.save(done, "full", last=True)
        if self._spec.at_end and self._spec.mode != "none" and done > 0:
            self.save(done, self._spec.mode, last=True)
        self._saver.finish()

    def _take_request(self, done: int) -> bool:
        """Return whether a user has requested a checkpoint, and record the step in which it is saved."""
        requested = self.requests.take() == REQUESTED
        if requested and self._attempt.world.is_first:
            self._attempt.events.write("checkpoint_request", step=done)
        return requested

    def save_last_good(self, done: int) -> None:
        """Save after a non-finite loss, in any mode: the weights are those before it."""
        if done > 0 and self._spec.mode != "none" and not self._attempt.run.checkpoint(done).exists():
            self.save(done, "full", last=True)
