"""Writes the checkpoints of one run, while training waits or behind its back."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allranks import __version__
from allranks.errors import CheckpointError
from allranks.integrity import file_hash
from allranks.rundir import RunDir, write_json
from allranks.spec.records import CheckpointSpec
from allranks.train import rng, shards
from allranks.train.checkpoint import proof, writing
from allranks.train.checkpoint.parts import Copies, Parts, Print, on_cpu, parts_of, prints_of
from allranks.train.checkpoint.publish import make_room, publish
from allranks.train.checkpoint.published import Published
from allranks.train.checkpoint.together import Together
from allranks.train.strategies.contract import Strategy
from allranks.train.world import World

SLOW_DISK_BYTES_PER_S = 20e6


@dataclass(frozen=True)
class Saved:
    """One checkpoint that was published.

    Attributes:
        stalled_s: how long training stood still for it.
        seconds: from the call to its publication.
        bytes: that this rank wrote.
    """

    step: int
    mode: str
    stalled_s: float
    seconds: float
    bytes: int
    removed: tuple[int, ...]


class Saver:
    """`save` and `finish` are collective.

    Args:
        published: how the model's weights stand in the files, from before the strategy took it.
        identity: facts for the manifest.
        progress: by step, what else must go on where it was: schedule and data.
        told: hears of each checkpoint once it is published, in the thread that wrote it.
    """

    def __init__(
        self,
        run: RunDir,
        world: World,
        strategy: Strategy,
        model: nn.Module,
        tokenizer: Any,
        published: Published,
        spec: CheckpointSpec,
        identity: dict[str, Any],
        progress: Callable[[int], dict[str, Any]] = lambda step: {"step": step},
        told: Callable[[Saved], None] = lambda saved: None,
    ) -> None:
        self.run, self.world, self.strategy, self.model = run, world, strategy, model
        self._tokenizer, self._published, self._spec = tokenizer, published, spec
        self._identity, self._progress, self._told = identity, progress, told
        slow = 4 * published.bytes / SLOW_DISK_BYTES_PER_S
        self._together = Together(spec.timeout_s, spec.timeout_s + slow, run.checkpoints)
        self._copies = Copies()
        self._flying: threading.Thread | None = None
        self._failed: CheckpointError | None = None

    def save(self, steps_done: int, mode: str, *, behind: bool = False) -> float:
        """Save after `steps_done` steps; ``mode`` is lite (what is trained) or full (all that resuming needs).

        Args:
            behind: return once the state is copied; it is written while training goes on. One at most is in flight.

        Returns:
            Seconds that training stood still.

        Raises:
            CheckpointError: on every rank, if any rank failed, now or behind training's back; what was there before is untouched.
        """
        started = time.perf_counter()
        self.finish()
        self._together.meet(f"the checkpoint of step {steps_done}")
        random = rng.rng_state() if mode == "full" else None
        parts = parts_of(self.strategy, self._published, self.world.rank, self.world.size, random)
        removed = self._find_room(parts)
        parts = self._copies.of(parts) if behind else on_cpu(parts)
        if not behind:
            self._write_out(steps_done, mode, parts, started, None, removed)
            return time.perf_counter() - started
        stalled = time.perf_counter() - started
        self._flying = threading.Thread(
            target=self._behind,
            args=(steps_done, mode, parts, started, stalled, removed),
            name="checkpoint",
            daemon=True,
        )
        self._flying.start()
        return stalled

    def finish(self) -> None:
        """Wait for the checkpoint in flight, if there is one.

        Raises:
            CheckpointError: it failed.
        """
        if self._flying is not None:
            self._flying.join()
            self._flying = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _behind(self, *args: Any) -> None:
        try:
            self._write_out(*args)
        except CheckpointError as error:
            self._failed = error
        except RuntimeError as error:  # the group broke: another rank ended
            self._failed = CheckpointError(f"the checkpoint could not be saved: {str(error).splitlines()[0]}")

    def _find_room(self, parts: Parts) -> tuple[int, ...]:
        need = sum(self._together.each("count its bytes", lambda: parts.bytes))
        return tuple(self._together.first("find room for it", lambda: make_room(self.run, need)))

    def _write_out(
        self, step: int, mode: str, parts: Parts, started: float, stalled: float | None, removed: tuple[int, ...]
    ) -> None:
        aside = self.run.checkpoints / f".step-{step}.tmp"
        try:
            self._together.first("make its folder", lambda: self._begin(aside, mode))
            self._write_parts(aside, parts)
            prints = self._write_files(aside, parts, mode, step)
            found = self._prove(aside, prints)
            self._together.first("publish it", lambda: self._publish(aside, step, mode, found))
        except CheckpointError:
            if self.world.is_first:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        seconds = time.perf_counter() - started
        self._told(Saved(step, mode, seconds if stalled is None else stalled, seconds, parts.bytes, removed))

    def _begin(self, aside: Path, mode: str) -> None:
        for left in self.run.checkpoints.glob(".step-*.tmp"):  # of a save that a kill ended
            shutil.rmtree(left, ignore_errors=True)
        (aside / "on-the-way").mkdir(parents=True)
        if mode == "full":
            (aside / "state").mkdir()

    def _write_parts(self, aside: Path, parts: Parts) -> None:
        """What goes through `torch.distributed.checkpoint`: all ranks call it, or none."""
        counts = self._together.each("count its parts", lambda: (len(parts.scattered), len(parts.state)))
        if any(scattered for scattered, _ in counts):
            self._together.each(
                "write its parts of the weights",
                lambda: shards.write(parts.scattered, aside / "on-the-way", self._together.group),
            )
        if any(state for _, state in counts):
            self._together.each(
                "write its state", lambda: shards.write(parts.state, aside / "state", self._together.group)
            )

    def _write_files(self, aside: Path, parts: Parts, mode: str, step: int) -> list[Print]:
        """The files for others, and the small ones. Returns the fingerprints of all ranks."""

        def write() -> tuple[list[Print], dict[str, str]]:
            more, places = writing.write_files(
                aside, aside / "on-the-way", parts, self._published, self.model, self.world.rank, self.world.size
            )
            if parts.random is not None:
                self._write_random(aside, parts.random)
            return [*prints_of(parts, self._published), *more], places

        answers = self._together.each("write its files", write)
        places = {key: file for _, some in answers for key, file in some.items()}
        self._together.first("write the small files", lambda: self._write_small(aside, mode, step, places))
        return [p for some, _ in answers for p in some]

    def _write_random(self, aside: Path, random: dict[str, Any]) -> None:
        torch.save(random, aside / "state" / f"rank{self.world.rank}.pt")

    def _write_small(self, aside: Path, mode: str, step: int, places: dict[str, str]) -> None:
        shutil.rmtree(aside / "on-the-way")
        writing.write_configs(aside, self._published, self.model, self._tokenizer)
        writing.write_index(aside, self._published, places)
        if mode == "full":
            write_json(aside / "state" / "progress.json", self._progress(step))
            if self.run.spec.exists():
                shutil.copyfile(self.run.spec, aside / "state" / "spec.yaml")

    def _prove(self, aside: Path, prints: list[Print]) -> proof.Files:
        """Each rank has a fresh process read its neighbour's files; what all of them found is what all had in memory."""
        files = self._together.first("list its files", lambda: proof.tensor_files(aside))
        others = files[(self.world.rank + 1) % self.world.size :: self.world.size]
        limit = self._together.work_timeout_s
        answers = self._together.each("read it again", lambda: proof.read_again(aside, others, prints, limit))
        found = {name: facts for some in answers for name, facts in some.items()}
        self._together.first("prove it", lambda: self._require_equal(found, prints))
        return found

    def _require_equal(self, found: proof.Files, prints: list[Print]) -> None:
        proof.require_coverage(self._published, prints)
        proof.compare(found, prints, self._published)

    def _publish(self, aside: Path, step: int, mode: str, found: proof.Files) -> None:
        facts = {
            "step": step,
            "mode": mode,
            "world_size": self.world.size,
            "allranks": __version__,
            "torch": str(torch.__version__),
            **self._identity,
        }
        paths = sorted(p for p in aside.rglob("*") if p.is_file())
        files = {str(p.relative_to(aside)): p for p in paths}
        hashes = {
            name: {k: found[name][k] for k in ("bytes", "sha256")}
            if name in found
            else {"bytes": path.stat().st_size, "sha256": file_hash(path)}
            for name, path in files.items()
        }
        write_json(aside / "manifest.json", {**facts, "created": time.time(), "files": hashes})
        publish(self.run, aside, step, self._spec.keep)
