"""Compare what ranks wrote, and atomically rename the complete folder of a checkpoint.

This module also checks free space, updates the pointer to the newest checkpoint and removes old ones.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from allranks.errors import CheckpointError
from allranks.rundir.checkpoints import best_checkpoint_step
from allranks.rundir.files import make_folder, write_text_atomic
from allranks.rundir.paths import RunDir, restrict_permissions
from allranks.train.checkpoint.writer import TensorDigest
from allranks.utils.formatting import format_bytes

FileFacts = dict[str, dict[str, Any]]  # by file: bytes, sha256


def tensor_files(folder: Path) -> list[str]:
    """Return the safetensors files of a checkpoint, relative to it."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.safetensors"))


def require_files(folder: Path, facts: FileFacts) -> None:
    """Check that this rank finds exactly the files that all ranks wrote and checked, with their sizes.

    Raises:
        CheckpointError: names the first file that is missing, incomplete, or was not checked.
    """
    for name, fact in facts.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder / name}: another rank wrote it, but it is not here: the run folder must be shared by all nodes"
            ) from None
        if size != fact["bytes"]:
            raise CheckpointError(f"{folder / name}: has {size} bytes, {fact['bytes']} were written")
    extra = sorted(set(tensor_files(folder)) - facts.keys())
    if extra:
        raise CheckpointError(f"{folder / extra[0]}: is not a file of this checkpoint")


def compare_digests(wanted: Iterable[TensorDigest], found: Iterable[TensorDigest]) -> None:
    """Check that the weights that were put together from parts have the bytes of the ranks that hold the parts.

    Args:
        wanted: digests of the parts, by the ranks that hold them.
        found: digests of the same ranges, by the ranks that write the files.

    Raises:
        CheckpointError: names the first range that differs.
    """
    there = set(found)
    for digest in wanted:
        if digest not in there:
            end = digest.offset + digest.numel
            raise CheckpointError(
                f"{digest.key} (elements {digest.offset} to {end}) differs from the memory of the rank that holds it"
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


def publish_checkpoint(
    run: RunDir,
    aside: Path,
    step: int,
    keep: int | None,
    *,
    keep_best: bool = False,
    flushed: Collection[str] = (),
) -> None:
    """Atomically rename the complete folder, update the pointers to the newest and the best one, and remove old ones.

    Args:
        keep: the number of newest checkpoints that stay; None: nothing is removed until `remove_old_checkpoints`.
        keep_best: keep the one with the lowest held-out loss, too, and let ``checkpoints/best`` name it.
        flushed: files, relative to the folder, that `flush_file` has flushed to the disk.
    """
    restrict_permissions(run, aside)
    sync_tree(aside, flushed)
    final = run.checkpoint(step)
    if final.exists():  # saved again in full at a stop, or the step was repeated
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    aside.rename(final)
    best = best_checkpoint_step(run) if keep_best else None
    point_latest_to(run, step)
    if best is not None:
        _point_to(run, run.best_checkpoint, best)
    sync(run.checkpoints)
    if keep is not None:
        remove_old_checkpoints(run, step, keep, keep_best=keep_best)


def remove_old_checkpoints(run: RunDir, step: int, keep: int, *, keep_best: bool = False) -> None:
    """Remove checkpoints beyond the newest `keep`, and those that were replaced; never that of `step`, which is published."""
    best = best_checkpoint_step(run) if keep_best else None
    shutil.rmtree(run.checkpoints / f".{run.checkpoint(step).name}.old", ignore_errors=True)
    for number in run.checkpoint_steps()[:-keep]:
        if number not in (step, best):
            shutil.rmtree(run.checkpoint(number), ignore_errors=True)


def point_latest_to(run: RunDir, step: int) -> None:
    """Write the name of the newest checkpoint to ``checkpoints/latest``."""
    _point_to(run, run.latest_checkpoint, step)


def _point_to(run: RunDir, pointer: Path, step: int) -> None:
    write_text_atomic(pointer, f"{run.checkpoint(step).name}\n")


def flush_file(run: RunDir, path: Path) -> None:
    """Restrict the permissions of a complete file, and flush it to the disk."""
    restrict_permissions(run, path)
    sync(path)


def sync_tree(folder: Path, flushed: Collection[str] = ()) -> None:
    """Flush a folder to the disk, with all files and folders below it, except the files in `flushed`."""
    for path in folder.rglob("*"):
        if str(path.relative_to(folder)) not in flushed:
            sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:  # a full disk is told here by file systems that allocate late
        error.filename = str(path)
        raise
    finally:
        os.close(fd)
