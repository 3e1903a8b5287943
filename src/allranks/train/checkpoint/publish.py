"""A checkpoint's folder: room for it, its one rename, the pointer to the newest, and what goes when there are too many."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from allranks.errors import CheckpointError
from allranks.rundir import RunDir

SPARE_BYTES = 1 << 20


def make_room(run: RunDir, need_bytes: int) -> list[int]:
    """Remove the oldest checkpoints, never the newest, until `need_bytes` are free.

    Returns:
        The steps whose checkpoints were removed.

    Raises:
        CheckpointError: there is not room enough even so; nothing was removed then.
    """
    need = int(need_bytes * 1.05) + SPARE_BYTES
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(run.checkpoints).free
    old = run.checkpoint_steps()[:-1]
    sizes = {step: _bytes_below(run.checkpoint(step)) for step in old}
    if free + sum(sizes.values()) < need:
        raise CheckpointError(
            f"{run.checkpoints}: about {need_bytes / 2**20:.1f} MiB are needed, {free / 2**20:.1f} MiB are free"
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


def publish(run: RunDir, aside: Path, step: int, keep: int) -> None:
    """Give a folder that is whole its name, then point to it, then remove all but the newest `keep`."""
    sync_tree(aside)
    final = run.checkpoint(step)
    old = final.with_name(f".{final.name}.old")
    if final.exists():  # what a stop saves again in full, or a step that was done again
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    aside.rename(final)
    sync(final.parent)
    point_to(run, step)
    shutil.rmtree(old, ignore_errors=True)
    for number in run.checkpoint_steps()[:-keep]:
        if number != step:
            shutil.rmtree(run.checkpoint(number), ignore_errors=True)


def point_to(run: RunDir, step: int) -> None:
    """``checkpoints/latest`` holds the newest one's name."""
    pointer = run.latest_checkpoint
    aside = pointer.with_name(".latest.tmp")
    aside.write_text(f"{run.checkpoint(step).name}\n")
    sync(aside)
    aside.replace(pointer)
    sync(pointer.parent)


def sync_tree(folder: Path) -> None:
    """All files and lists of names below a folder, and its own, to the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """A file, or a folder's list of names, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
