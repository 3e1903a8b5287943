"""Decide when a checkpoint is due, and save it in the foreground or in the background.

Ranks agree on each phase through a separate process group, and every wait has a time limit.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from allranks.errors import CheckpointError
from allranks.rundir.checkpoints import file_hash
from allranks.rundir.files import SCHEMA_VERSION, json_text, write_json
from allranks.rundir.paths import RunDir
from allranks.spec.records import CheckpointSpec
from allranks.train import distributed
from allranks.train.attempt import Attempt
from allranks.train.checkpoint import commit, writer
from allranks.train.checkpoint.agreement import RankAgreement
from allranks.train.checkpoint.commit import CompleteFiles, TensorDigest, make_room, publish_checkpoint, require_room
from allranks.train.checkpoint.snapshot import CpuCopies, PartCollector, UpdateGuard, on_cpu, on_own_stream
from allranks.train.checkpoint.writer import PublishedFiles, RankParts, TrainingIdentity, digests_of
from allranks.train.distributed import DistContext
from allranks.train.strategies import shards
from allranks.train.strategies.base import Strategy
from allranks.version import __version__

SLOW_DISK_BYTES_PER_S = 20e6


@dataclass(frozen=True)
class SavedCheckpoint:
    """A published checkpoint.

    Attributes:
        stalled_s: how long it blocked training.
        seconds: from the call to the publication.
        bytes: written by this rank.
    """

    step: int
    mode: str
    stalled_s: float
    seconds: float
    bytes: int
    removed: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointContent:
    """What is saved: weights and state of a strategy, and what belongs to them.

    Attributes:
        published: layout of the weights in the published files, planned before the strategy's set-up.
        identity: facts for the manifest.
        progress: returns the state of schedule and data for a step.
    """

    strategy: Strategy
    model: nn.Module
    tokenizer: Any
    published: PublishedFiles
    identity: dict[str, Any]
    progress: Callable[[int], dict[str, Any]] = lambda step: {"step": step}


@dataclass
class _Wait:
    """Training's wait for one save.

    Attributes:
        started: the clock when it began.
        ends_when_written: training goes on when this rank's files are written, before they are compared and on the disk.
        blocked_s: how long it lasted; None while it lasts.
    """

    started: float
    ends_when_written: bool
    blocked_s: float | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def end(self) -> float:
        """Let training go on; return how long it waited."""
        if self.blocked_s is None:
            self.blocked_s = time.perf_counter() - self.started
        self._over.set()
        return self.blocked_s

    def until_over(self, thread: threading.Thread) -> None:
        """Wait until training may go on, or the thread that saves has ended."""
        while thread.is_alive() and not self._over.wait(0.05):
            pass


@dataclass(frozen=True)
class _Written:
    """What a rank has written and checked.

    Attributes:
        facts: size and hash of its files of tensors.
        places: file of each key.
        held: digests of the scattered parts that it holds.
        assembled: digests of the same ranges in the weights that it put together.
        flushed: its files that are on the disk.
    """

    facts: commit.FileFacts
    places: dict[str, str]
    held: list[TensorDigest]
    assembled: list[TensorDigest]
    flushed: list[str]


@dataclass(frozen=True)
class _Announced:
    """What a rank is going to write.

    Attributes:
        bytes: the room that it needs.
        scattered, state: positions of its parts.
    """

    bytes: int
    scattered: list[tuple[str, int, int, int]]
    state: list[tuple[str, int, int, int]]


class Saver:
    """Save checkpoints in the foreground or background. `save` and `finish` are collective.

    Args:
        told: called with each published checkpoint, in the thread that wrote it.
        flush_events: waits until what led up to the checkpoint is on the disk; called before it is published.
    """

    def __init__(
        self,
        run: RunDir,
        world: DistContext,
        content: CheckpointContent,
        spec: CheckpointSpec,
        told: Callable[[SavedCheckpoint], None] = lambda saved: None,
        flush_events: Callable[[], None] = lambda: None,
    ) -> None:
        self.run, self.world, self._content = run, world, content
        self._published, self._spec, self._told = content.published, spec, told
        self._flush_events = flush_events
        slow = 4 * content.published.bytes / SLOW_DISK_BYTES_PER_S
        self._together = RankAgreement(spec.timeout_s, spec.timeout_s + slow, run.checkpoints)
        self._collector = PartCollector(content.strategy, content.published, world.rank, world.size)
        self._copies, self._guard = CpuCopies(), UpdateGuard()
        self._configs: dict[str, bytes] | None = None
        self._in_flight: threading.Thread | None = None
        self._removing: threading.Thread | None = None
        self._failed: CheckpointError | None = None

    @property
    def limit_s(self) -> float:
        """Return after how long the ranks abandon a save in which one of them makes no progress."""
        return self._together.work_timeout_s

    def require_room(self) -> None:
        """Refuse a disk that cannot hold the first checkpoint, before any step is trained.

        Raises:
            CheckpointError: on every rank.
        """
        need = self._spec.least_bytes(self._published.bytes)
        if not need:
            return
        self._together.first(
            "find room for the first checkpoint", lambda: require_room(self.run, need, keep_best=self._spec.keep_best)
        )

    def save(
        self,
        steps_done: int,
        mode: str,
        *,
        behind: bool = False,
        wait_for_disk: bool = True,
        eval_loss: float | None = None,
    ) -> float:
        """Save after `steps_done` steps; ``mode`` is weights_only (trained weights) or full (everything that a resume needs).

        Args:
            eval_loss: the held-out loss of these weights, for the manifest; None if they were not evaluated.
            behind: write in the background, at most one save at a time. The state is copied there, too, while training goes on; the next
                update of the optimizer waits until it is copied.
            wait_for_disk: return when the checkpoint is published. False: return when this rank's files are written and the memory that
                they must equal is hashed; they are read again, flushed to the disk and published in the background.

        Returns:
            Seconds that training was blocked.

        Raises:
            CheckpointError: on every rank, if this save or an earlier background save failed on any rank. Earlier checkpoints
                are untouched.
        """
        wait = _Wait(time.perf_counter(), ends_when_written=not wait_for_disk)
        self.finish()
        self._guard.waited_s = 0.0
        if not behind:
            self._together.meet(f"the checkpoint of step {steps_done}")
        random = distributed.rng_state() if mode == "full" else None
        guarded = behind and self._content.strategy.updates_in_step
        parts = self._collector.collect(random, copy_buffers=guarded)
        if not behind and wait_for_disk:
            self._write_out(steps_done, mode, on_cpu(parts), wait, eval_loss)
            return wait.end()
        copy = None
        if not behind:
            parts = on_cpu(parts)
        elif guarded:
            self._guard.begin(self._collector.optimizers())
            copy = on_own_stream(self.world.device, partial(self._copies.of, parts))
        else:
            parts = self._copies.of(parts)
        if behind:
            wait.end()
        self._in_flight = threading.Thread(
            target=self._behind,
            args=(copy, parts, steps_done, mode, wait, eval_loss, behind),
            name="checkpoint",
            daemon=True,
        )
        self._in_flight.start()
        wait.until_over(self._in_flight)
        if wait.blocked_s is None:  # it failed before the files were written
            self.finish()
        return wait.end()

    def finish(self) -> None:
        """Wait for the background save, if there is one, and until old checkpoints are removed.

        Raises:
            CheckpointError: the save failed.
        """
        if self._in_flight is not None:
            self._in_flight.join()
            self._in_flight = None
        if self._removing is not None:
            self._removing.join()
            self._removing = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _behind(
        self,
        copy: Callable[[], RankParts] | None,
        parts: RankParts,
        step: int,
        mode: str,
        wait: _Wait,
        eval_loss: float | None,
        meet: bool,
    ) -> None:
        """Copy the state if that is left to do, and write it, in a thread of its own."""
        if self.world.device.type == "cuda":  # a new thread has GPU 0, on which each rank would open a context
            torch.cuda.set_device(self.world.device)
        try:
            try:
                parts = copy() if copy else parts
            finally:
                self._guard.end()
            if meet:
                self._together.meet(f"the checkpoint of step {step}")
            self._write_out(step, mode, parts, wait, eval_loss)
        except CheckpointError as error:
            self._failed = error
        except RuntimeError as error:  # the process group failed because another rank ended
            self._failed = CheckpointError(f"the checkpoint could not be saved: {str(error).splitlines()[0]}")

    def _find_room(
        self, parts: RankParts, aside: Path, mode: str
    ) -> tuple[tuple[int, ...], dict[str, list[tuple[int, int]]]]:
        """Make room on the disk, and the folder.

        Returns:
            The steps whose checkpoints were removed; by key, offset and number of elements of the parts of all scattered weights.
        """
        mine = _Announced(parts.bytes, shards.positions_of(parts.scattered), shards.positions_of(parts.state))
        every = self._together.each("count its parts", lambda: mine)
        need = sum(announced.bytes for announced in every)

        def make() -> tuple[int, ...]:
            shards.require_whole_tensors(part for announced in every for part in announced.state)
            removed = tuple(make_room(self.run, need, keep_best=self._spec.keep_best))
            self._begin(aside, mode)
            return removed

        ranges: dict[str, list[tuple[int, int]]] = {}
        for announced in every:
            for key, offset, count, _ in announced.scattered:
                ranges.setdefault(key, []).append((offset, count))
        return self._together.first("find room for it", make), ranges

    def _write_out(
        self,
        step: int,
        mode: str,
        parts: RankParts,
        wait: _Wait,
        eval_loss: float | None,
    ) -> None:
        """Write, check and publish. Complete files are read again and flushed to the disk while others are written, or afterwards if
        training waits for the writing."""
        aside = self.run.checkpoints / f".step-{step}.tmp"
        try:
            removed, ranges = self._find_room(parts, aside, mode)
            held = self._write_scattered(aside, parts) if ranges else []
            with ThreadPoolExecutor(2, "checkpoint") as threads:
                files = CompleteFiles(self.run, aside, threads, after_writing=wait.ends_when_written)
                files.flush_events(self._flush_events)

                def write() -> _Written:
                    assembled, places = self._write_files(aside, parts, mode, step, files, ranges)
                    if wait.ends_when_written:  # nothing is read from the memory of the training any more
                        wait.end()
                    files.all_written()
                    facts = self._prove(files)
                    files.wait_for_disk()
                    return _Written(facts, places, held, assembled, files.flushed)

                every = self._together.each("write its files", write)
            self._together.first("publish it", lambda: self._publish(aside, step, mode, every, eval_loss))
            if self.world.is_first:  # training does not wait for it
                keep, best = self._spec.keep, self._spec.keep_best
                remove = partial(commit.remove_old_checkpoints, self.run, step, keep, keep_best=best)
                self._removing = threading.Thread(target=remove, name="checkpoint-removal")
                self._removing.start()
        except CheckpointError:
            if self.world.is_first:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        seconds = time.perf_counter() - wait.started
        blocked = seconds if wait.blocked_s is None else wait.blocked_s + self._guard.waited_s
        self._told(SavedCheckpoint(step, mode, blocked, seconds, parts.bytes, removed))

    def _begin(self, aside: Path, mode: str) -> None:
        for left in self.run.checkpoints.glob(".step-*.tmp"):  # left by a save that was killed
            shutil.rmtree(left, ignore_errors=True)
        (aside / "on-the-way").mkdir(parents=True)
        if mode == "full":
            (aside / "state").mkdir()

    def _write_scattered(self, aside: Path, parts: RankParts) -> list[TensorDigest]:
        """Write the parts of weights that only this rank has, for the ranks that put them together; return their digests."""

        def write() -> list[TensorDigest]:
            shards.write_shards(parts.scattered, aside / "on-the-way", self._together.group)
            return digests_of(parts.scattered)

        return self._together.each("write its parts of the weights", write)[self.world.rank]

    def _write_files(
        self,
        aside: Path,
        parts: RankParts,
        mode: str,
        step: int,
        files: CompleteFiles,
        ranges: Mapping[str, Sequence[tuple[int, int]]],
    ) -> tuple[list[TensorDigest], dict[str, str]]:
        """Write this rank's files. Returns the digests of what it put together, and the file of each key."""
        early, rank = files.write_back, self.world.rank
        writer.write_state(aside, rank, parts.state, files.check, write_back=early)
        written = writer.write_files(
            aside,
            parts,
            self._published,
            self._content.model,
            rank,
            self.world.size,
            files.check,
            ranges,
            write_back=early,
        )
        if parts.random is not None:
            self._write_random(aside, parts.random)
            files.flush(f"state/rank{rank}.pt")
        if self.world.is_first:
            for name in self._write_small(aside, mode, step):
                files.flush(name)
        return written

    def _write_random(self, aside: Path, random: dict[str, Any]) -> None:
        torch.save(random, aside / "state" / f"rank{self.world.rank}.pt")

    def _write_small(self, aside: Path, mode: str, step: int) -> list[str]:
        """Write the files that have no tensors; return their names."""
        if self._configs is None:
            self._configs = writer.read_configs(self._published, self._content.model, self._content.tokenizer)
        files = dict(self._configs)
        if mode == "full":
            files["state/progress.json"] = json_text(self._content.progress(step)).encode()
            if self.run.spec.exists():
                files["state/spec.yaml"] = self.run.spec.read_bytes()
        for name, content in files.items():
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_bytes(content)
        return list(files)

    def _prove(self, files: CompleteFiles) -> commit.FileFacts:
        """Wait until this rank's files equal memory; return their facts."""
        return files.compared()

    def _publish(self, aside: Path, step: int, mode: str, every: list[_Written], eval_loss: float | None) -> None:
        """Check that the files of all ranks are here and complete, and publish them."""
        shutil.rmtree(aside / "on-the-way")
        found = {name: facts for written in every for name, facts in written.facts.items()}
        commit.require_files(aside, found)
        commit.compare_digests(
            (digest for written in every for digest in written.held),
            (digest for written in every for digest in written.assembled),
        )
        writer.write_index(aside, self._published, {k: f for written in every for k, f in written.places.items()})
        facts = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "mode": mode,
            "world_size": self.world.size,
            "allranks": __version__,
            "torch": str(torch.__version__),
            **self._content.identity,
            "eval_loss": eval_loss,
        }
        paths = sorted(p for p in aside.rglob("*") if p.is_file())
        files = {str(p.relative_to(aside)): p for p in paths}
        hashes = {
            name: found.get(name) or {"bytes": path.stat().st_size, "sha256": file_hash(path)}
            for name, path in files.items()
        }
        write_json(aside / "manifest.json", {**facts, "created": time.time(), "files": hashes})
        flushed = {name for written in every for name in written.flushed} | {"manifest.json"}
        publish_checkpoint(self.run, aside, step, None, keep_best=self._spec.keep_best, flushed=flushed)


def make_saver(
    here: Attempt,
    strategy: Strategy,
    model: torch.nn.Module,
    tokenizer: Any,
    published: PublishedFiles,
    identity: TrainingIdentity,
) -> Saver:
    """Return the saver of this run's checkpoints."""
    facts = {"strategy": here.plan.strategy, "shard_ranks": here.plan.shard_ranks, "run": here.run.name}
    content = CheckpointContent(strategy, model, tokenizer, published, facts, partial(_progress, here, identity))
    return Saver(here.run, here.world, content, here.spec.checkpoint, partial(_log_saved, here), here.events.sync)


def _progress(here: Attempt, identity: TrainingIdentity, done: int) -> dict[str, Any]:
    """Return what a resume needs beside the state: schedule and data depend only on the step and on these facts."""
    return {
        "step": done,
        **msgspec.to_builtins(identity),
        "sequences_done": done * here.batch.global_batch_size,
        "global_batch_size": here.batch.global_batch_size,
        "data_seed": here.data.seed,
        "scaler": None,  # bfloat16 and float32 need no loss scaling
    }


def _log_saved(here: Attempt, saved: SavedCheckpoint) -> None:
    if saved.removed and here.world.is_first:
        steps = ", ".join(str(step) for step in saved.removed)
        here.events.write(
            "warning",
            what="checkpoint",
            message=f"checkpoints of steps {steps} were removed to make room on the disk",
        )
    here.events.write(
        "checkpoint",
        step=saved.step,
        mode=saved.mode,
        seconds=round(saved.stalled_s, 4),
        written_s=round(saved.seconds, 4),
        bytes=saved.bytes,
        path=str(here.run.checkpoint(saved.step)),
    )


class CheckpointSchedule:
    """Save when due, each state once. Every rank calls every method."""

    def __init__(self, here: Attempt, saver: Saver) -> None:
        self._here, self._saver = here, saver
        self._spec = here.spec.checkpoint
        self._saved: set[tuple[int, str]] = set()
        self._evaluated: tuple[int, float | None] = (0, None)
        saver.require_room()

    def evaluated(self, done: int, loss: float) -> None:
        """Remember the held-out loss after `done` steps, for the manifest of their checkpoint."""
        self._evaluated = (done, loss if math.isfinite(loss) else None)

    def due(self, done: int) -> bool:
        """Return whether a checkpoint is due after `done` steps."""
        return self._spec.mode != "none" and bool(self._spec.every) and done % (self._spec.every or 1) == 0

    def save(self, done: int, mode: str, *, last: bool = False) -> None:
        if (done, mode) in self._saved or (done, "full") in self._saved:
            return
        self._here.phase("save", step=done, limit_s=self._saver.limit_s)
        # saves at a stop or at the end return when they are published: no training is left to overlap with
        step, loss = self._evaluated
        evaluated = loss if step == done else None
        self._saver.save(done, mode, behind=self._spec.async_ and not last, wait_for_disk=last, eval_loss=evaluated)
        self._saved.add((done, mode))
        self._here.phase("train", step=done)

    def save_due(self, done: int) -> None:
        if self.due(done):
            self.save(done, self._spec.mode)

    def save_end(self, done: int) -> None:
        """Save the final state if the spec asks for it, and wait until all saves are on the disk."""
        if self._spec.at_end and self._spec.mode != "none" and done > 0:
            self.save(done, self._spec.mode, last=True)
        self._saver.finish()

    def save_last_good(self, done: int) -> None:
        """Save after a non-finite loss, in any mode: the weights are those before it."""
        if done > 0 and self._spec.mode != "none" and not self._here.run.checkpoint(done).exists():
            self.save(done, "full", last=True)
