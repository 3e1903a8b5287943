"""Publish a checkpoint: check free space, atomically rename the complete folder, point to it, and remove old ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from allranks.errors import CheckpointError
from allranks.rundir.checkpoints import best_checkpoint_step, missing_room, with_spare
from allranks.rundir.files import make_folder, write_text_atomic
from allranks.rundir.paths import RunDir, restrict_permissions

FileFacts = dict[str, dict[str, Any]]  # by file: bytes, sha256


def require_files(folder: Path, facts: FileFacts) -> None:
    """Raise `CheckpointError` unless this rank finds exactly the files that all ranks wrote, with their sizes."""
    for name, fact in facts.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder / name}: another rank wrote it, but it is not here: the run folder must be shared by all "
                "nodes"
            ) from None
        if size != fact["bytes"]:
            raise CheckpointError(f"{folder / name}: has {size} bytes, {fact['bytes']} were written")
    extra = sorted({str(p.relative_to(folder)) for p in folder.rglob("*.safetensors")} - facts.keys())
    if extra:
        raise CheckpointError(f"{folder / extra[0]}: is not a file of this checkpoint")


def require_room(run: RunDir, need_bytes: int, *, keep_best: bool = False) -> dict[int, int]:
    """Return the steps whose checkpoints may be removed to free `need_bytes` bytes, oldest first, with their sizes.

    With `keep_best`, never that of lowest held-out loss. Raise `CheckpointError` if removing all would not be enough.
    """
    make_folder(run.checkpoints)
    best = best_checkpoint_step(run) if keep_best else None
    sizes = {
        step: sum(p.stat().st_size for p in run.checkpoint(step).rglob("*") if p.is_file())
        for step in run.checkpoint_steps()[:-1]
        if step != best
    }
    if problem := missing_room(run.checkpoints, need_bytes, sum(sizes.values())):
        raise CheckpointError(problem)
    return sizes


def make_room(run: RunDir, need_bytes: int, *, keep_best: bool = False) -> list[int]:
    """Remove the oldest checkpoints that `require_room` allows until `need_bytes` bytes are free; return their steps.

    If that does not free enough, nothing is removed, and `CheckpointError` is raised.
    """
    sizes = require_room(run, need_bytes, keep_best=keep_best)
    free = shutil.disk_usage(run.checkpoints).free
    removed = []
    for step, size in sizes.items():
        if free >= with_spare(need_bytes):
            break
        shutil.rmtree(run.checkpoint(step), ignore_errors=True)
        free += size
        removed.append(step)
    return removed


def publish_checkpoint(run: RunDir, aside: Path, step: int, *, keep_best: bool = False) -> None:
    """Atomically rename the complete folder; set ``latest`` and, if `keep_best`, ``best`` (lowest held-out loss)."""
    restrict_permissions(run, aside)
    for path in (*aside.rglob("*"), aside):  # files of tensors have been flushed by the ranks that wrote them
        sync(path)
    final = run.checkpoint(step)
    if final.exists():  # saved again in full at a stop, or the step was repeated
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    aside.rename(final)
    best = best_checkpoint_step(run) if keep_best else None
    write_text_atomic(run.latest_checkpoint, f"{final.name}\n")
    if best is not None:
        write_text_atomic(run.best_checkpoint, f"{run.checkpoint(best).name}\n")
    sync(run.checkpoints)


def remove_old_checkpoints(run: RunDir, step: int, keep: int, *, keep_best: bool = False) -> None:
    """Remove checkpoints beyond the newest `keep`, and replaced ones; never that of `step`, which is published."""
    best = best_checkpoint_step(run) if keep_best else None
    shutil.rmtree(run.checkpoints / f".{run.checkpoint(step).name}.old", ignore_errors=True)
    for number in run.checkpoint_steps()[:-keep]:
        if number not in (step, best):
            shutil.rmtree(run.checkpoint(number), ignore_errors=True)


def flush_file(run: RunDir, path: Path) -> None:
    """Restrict the permissions of a complete file, and flush it to the disk."""
    restrict_permissions(run, path)
    sync(path)


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
