"""Verify a checkpoint's files against digests of memory, and atomically rename the complete folder.

A new process computes the digests of the files. This module also checks free space, updates the pointer to the newest
checkpoint and removes old ones.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allranks.errors import CheckpointError
from allranks.rundir.checkpoints import best_checkpoint_step
from allranks.rundir.files import make_folder, write_text_atomic
from allranks.rundir.paths import RunDir, restrict_permissions
from allranks.train.checkpoint.writer import PublishedFiles, TensorDigest
from allranks.train.models.weight_sources import NAME_OF
from allranks.utils.formatting import format_bytes

READER = Path(__file__).with_name("reread.py")
WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "module.", "_checkpoint_wrapped_module")
FileFacts = dict[str, dict[str, Any]]  # by file: bytes, sha256, tensors


def tensor_files(folder: Path) -> list[str]:
    """Return the safetensors files of a checkpoint, relative to it."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.safetensors"))


class Rereader:
    """A new process that reads files of a checkpoint, started before they are written. Use as a context manager.

    Args:
        timeout_s: the most that one request may take.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._folder, self._timeout_s, self._late = folder, timeout_s, False
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(READER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Rereader:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def read(self, files: Sequence[str], ranges: Mapping[str, Sequence[Sequence[int]]]) -> FileFacts:
        """Read the files, and return their facts.

        Args:
            files: names relative to the folder.
            ranges: by key of a full tensor, the ranges (first element, number of elements) whose digests are needed.

        Raises:
            CheckpointError: a file is incomplete, or reading took too long.
        """
        if not files:
            return {}
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(self._timeout_s, self._give_up)
        timer.start()
        try:
            json.dump({"folder": str(self._folder), "files": list(files), "ranges": ranges}, self._process.stdin)
            print(file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise CheckpointError(self._problem())
        answer = json.loads(line)
        if "problem" in answer:
            raise CheckpointError(f"{self._folder}/{answer['problem']}")
        return answer

    def _give_up(self) -> None:
        self._late = True
        self._process.kill()

    def _problem(self) -> str:
        if self._late:
            return f"{self._folder}: reading it again took more than {self._timeout_s:.0f} s"
        assert self._process.stderr is not None
        return f"{self._folder}: could not be read again: {self._process.stderr.read().strip().splitlines()[-1:]}"


def ranges_of(prints: Iterable[TensorDigest]) -> dict[str, list[list[int]]]:
    """Return by key the ranges of the digests: first element and number of elements."""
    ranges: dict[str, list[list[int]]] = {}
    for p in prints:
        ranges.setdefault(p.key, []).append([p.offset, p.numel])
    return ranges


def reread_files(folder: Path, files: Sequence[str], prints: Iterable[TensorDigest], timeout_s: float) -> FileFacts:
    """Read the files in a new process, as `Rereader.read`."""
    with Rereader(folder, timeout_s) as process:
        return process.read(files, ranges_of(prints))


def compare_digests(found: FileFacts, wanted: Iterable[TensorDigest], published: PublishedFiles) -> None:
    """Check that the files hold exactly the expected tensors, with the dtype, shape and bytes that they had in memory.

    Raises:
        CheckpointError: names the first file and tensor that differs.
    """
    shapes = {published.keys[n]: list(published.whole[n][1]) for n in published.keys}
    dtypes = {published.keys[n]: NAME_OF[published.whole[n][0]] for n in published.keys}
    missing: dict[tuple[str, int, int], TensorDigest] = {(p.key, p.offset, p.numel): p for p in wanted if p.numel}
    extra: list[tuple[str, str]] = []
    for file, facts in found.items():
        for key, offset, numel, crc, dtype, shape in facts["tensors"]:
            _refuse_wrapper(file, key)
            if not file.startswith("state/") and key in shapes and (shape, dtype) != (shapes[key], dtypes[key]):
                raise CheckpointError(f"{file}: {key} is {dtype}{shape}, the model's is {dtypes[key]}{shapes[key]}")
            if not numel:
                continue
            print_ = missing.pop((key, offset, numel), None)
            if print_ is None:
                extra.append((file, key))
            elif (print_.crc, print_.dtype) != (crc, dtype):
                raise CheckpointError(
                    f"{file}: {key} (elements {offset} to {offset + numel}) differs from memory after it was read again"
                )
    if missing:
        first = min(missing)
        raise CheckpointError(
            f"{len(missing)} ranges of tensors were not saved, first {first[0]} from element {first[1]}"
        )
    if extra:
        raise CheckpointError(f"{extra[0][0]}: {extra[0][1]} is not a tensor of this checkpoint, or is there twice")


def _refuse_wrapper(file: str, key: str) -> None:
    if any(w in key.removeprefix("model/") for w in WRAPPERS):
        raise CheckpointError(f"{file}: {key} has a wrapper's prefix; other programs could not load it")


def require_coverage(published: PublishedFiles, prints: Iterable[TensorDigest]) -> None:
    """Check that the ranks together hold all of each published weight; otherwise a part of it would have no digest.

    Raises:
        CheckpointError: names the weight.
    """
    covered: Mapping[str, int] = dict.fromkeys(published.keys.values(), 0)
    counts = dict(covered)
    for p in prints:
        if p.key in counts:
            counts[p.key] += p.numel
    for name, key in published.keys.items():
        if counts[key] != published.whole[name][1].numel():
            raise CheckpointError(
                f"{key}: the ranks together hold {counts[key]} of its {published.whole[name][1].numel()} elements"
            )


SPARE_BYTES = 1 << 20


def make_room(run: RunDir, need_bytes: int, *, keep_best: bool = False) -> list[int]:
    """Remove the oldest checkpoints, never the newest, until `need_bytes` bytes are free.

    Args:
        keep_best: never remove the one with the lowest held-out loss either.

    Returns:
        The steps whose checkpoints were removed.

    Raises:
        CheckpointError: that does not free enough; nothing is removed then.
    """
    need = int(need_bytes * 1.05) + SPARE_BYTES
    make_folder(run.checkpoints)
    free = shutil.disk_usage(run.checkpoints).free
    best = best_checkpoint_step(run) if keep_best else None
    old = [step for step in run.checkpoint_steps()[:-1] if step != best]
    sizes = {step: _bytes_below(run.checkpoint(step)) for step in old}
    if free + sum(sizes.values()) < need:
        raise CheckpointError(
            f"{run.checkpoints}: about {format_bytes(need_bytes)} are needed, {format_bytes(free)} are free"
        )
    removed = []
    for step in old:
        if free >= need:
            break
        shutil.rmtree(run.checkpoint(step), ignore_errors=True)
        free += sizes[step]
        removed.append(step)
    return removed


def _bytes_below(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def publish_checkpoint(run: RunDir, aside: Path, step: int, keep: int, *, keep_best: bool = False) -> None:
    """Atomically rename the complete folder, update the pointers to the newest and the best one, and remove old ones.

    Args:
        keep: the number of newest checkpoints that stay.
        keep_best: keep the one with the lowest held-out loss, too, and let ``checkpoints/best`` name it.
    """
    restrict_permissions(run, aside)
    sync_tree(aside)
    final = run.checkpoint(step)
    old = final.with_name(f".{final.name}.old")
    if final.exists():  # saved again in full at a stop, or the step was repeated
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    aside.rename(final)
    sync(final.parent)
    best = best_checkpoint_step(run) if keep_best else None
    point_latest_to(run, step)
    if best is not None:
        _point_to(run, run.best_checkpoint, best)
    shutil.rmtree(old, ignore_errors=True)
    for number in run.checkpoint_steps()[:-keep]:
        if number not in (step, best):
            shutil.rmtree(run.checkpoint(number), ignore_errors=True)


def point_latest_to(run: RunDir, step: int) -> None:
    """Write the name of the newest checkpoint to ``checkpoints/latest``."""
    _point_to(run, run.latest_checkpoint, step)


def _point_to(run: RunDir, pointer: Path, step: int) -> None:
    write_text_atomic(pointer, f"{run.checkpoint(step).name}\n")
    sync(run.checkpoints)


def sync_tree(folder: Path) -> None:
    """Flush a folder to the disk, with all files and folders below it."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
