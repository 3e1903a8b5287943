"""Verify folders by the file hashes in their manifest, and find the newest complete checkpoint. No torch."""

from __future__ import annotations

import math
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.errors import CheckpointError, RequestError
from allranks.rundir.files import read_json, read_record, require_current
from allranks.rundir.paths import RunDir
from allranks.utils.filesystem import user_name
from allranks.utils.inputs import open_regular
from allranks.utils.text import format_bytes

MANIFEST = "manifest.json"
SPARE_BYTES = 1 << 20


def with_spare(need_bytes: int) -> int:
    """Return how much must be free to write so many bytes."""
    return int(need_bytes * 1.05) + SPARE_BYTES


def missing_room(folder: Path, need_bytes: int, removable_bytes: int = 0) -> str:
    """Return that a folder lacks room for so many bytes, even if others are removed; empty if it has it."""
    free = shutil.disk_usage(folder).free
    if free + removable_bytes >= with_spare(need_bytes):
        return ""
    return f"{folder}: about {format_bytes(need_bytes)} are needed, {format_bytes(free)} are free"


def find_damage(entry: Path) -> str | None:
    """Return what is wrong with an entry, or None if every file matches its hash in the manifest."""
    manifest = read_json(entry / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict) or not manifest["files"]:
        return "its manifest is missing or unreadable"
    for name, expected in manifest["files"].items():
        if not isinstance(expected, dict):
            return f"its manifest has no size and hash of {name}"
        try:
            if (entry / name).stat().st_size != expected.get("bytes"):
                return f"{name} has the wrong size"
            if file_hash(entry / name) != expected.get("sha256"):
                return f"{name} has the wrong hash"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def untrusted_reason(entry: Path) -> str | None:
    """Return why an entry of a shared cache may be another user's work, or None.

    Hashes reveal damage, not intent: whoever writes an entry also writes its manifest. So it matters who can write
    here. Trusted are this user, root, the owner of the cache folder, and the members of its group if only the group can
    write to the folder. Entries that are symbolic links are not followed.
    """
    folder, entry_stat = entry.parent.stat(), entry.lstat()
    if stat.S_ISLNK(entry_stat.st_mode):
        return "it is a symbolic link"
    trusted = {os.geteuid(), 0, folder.st_uid}
    open_to_all = bool(folder.st_mode & stat.S_IWOTH)
    if entry_stat.st_uid not in trusted and open_to_all:
        return f"it belongs to user {user_name(entry_stat.st_uid)}, and everybody can write to {entry.parent}"
    if entry_stat.st_mode & stat.S_IWOTH:
        return "everybody can write to it"
    for path in entry.rglob("*"):
        inside = path.lstat()
        if stat.S_ISLNK(inside.st_mode):
            return f"{path.relative_to(entry)} in it is a symbolic link"
        if open_to_all and (inside.st_uid not in trusted or inside.st_mode & stat.S_IWOTH):
            return (
                f"{path.relative_to(entry)} in it belongs to user {user_name(inside.st_uid)} and has mode "
                f"{inside.st_mode & 0o777:o}"
            )
    return None


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, as hex."""
    with open_regular(path) as file:
        import hashlib  # plan imports this module and hashes nothing

        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def hash_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and hash of every file below a folder, by relative name."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": file_hash(p)} for p in files}


def newest_checkpoint(run: RunDir, *, repair: bool = True, full: bool = False) -> tuple[int, list[str]]:
    """Return the newest complete checkpoint, and what is wrong with newer ones.

    Args:
        full: only one with optimizer state; a user may have requested it between others.
        repair: rename back what a kill left between two renames; not while the run may be writing.

    Raises:
        CheckpointError: there is none.
        RequestError: a newer complete checkpoint is of another allranks version; older ones are not used instead.
    """
    problems = []
    if repair:
        restore_replaced(run)
    for step in reversed(run.checkpoint_steps()):
        if full and read_record(run.checkpoint(step) / MANIFEST).get("mode") == "weights_only":
            problems.append(f"step {step} is a weights-only checkpoint without optimizer state")
            continue
        problem = checkpoint_problem(run.checkpoint(step), step)
        if problem is None:
            return step, problems
        problems.append(f"{run.checkpoint(step)}: {problem}")
    detail = "; ".join(problems) or "none was saved (checkpoint.mode none, or the run ended before the first)"
    raise CheckpointError(f"run {run.name} has no complete checkpoint: {detail}")


def best_checkpoint_step(run: RunDir) -> int | None:
    """Return the step of the checkpoint with the lowest held-out loss, the earliest of equal ones, or None."""
    recorded = {step: read_record(run.checkpoint(step) / MANIFEST).get("eval_loss") for step in run.checkpoint_steps()}
    losses = {s: float(v) for s, v in recorded.items() if isinstance(v, (int, float)) and math.isfinite(v)}
    return min(losses, key=lambda step: (losses[step], step)) if losses else None


def best_checkpoint(run: RunDir) -> int:
    """Return the step of the complete checkpoint with the lowest held-out loss.

    Raises:
        RequestError: no checkpoint was evaluated.
        CheckpointError: the best one is damaged.
    """
    step = best_checkpoint_step(run)
    if step is None:
        raise RequestError(
            f"run {run.name}: no checkpoint has a held-out loss, so none is the best; evaluate where checkpoints are "
            "saved (eval.every and checkpoint.every, or both at_end), with checkpoint.keep_best: true"
        )
    if problem := checkpoint_problem(run.checkpoint(step), step):
        raise CheckpointError(f"{run.checkpoint(step)}, the best checkpoint: {problem}; name another step")
    return step


def checkpoint_problem(folder: Path, step: int) -> str | None:
    """Return why this is not a valid checkpoint of `step`, or None.

    Complete files are not sufficient: the folder may have been renamed, or another checkpoint copied over it.

    Raises:
        RequestError: another version of allranks wrote it.
    """
    problem, facts = find_damage(folder), read_record(folder / MANIFEST)
    if problem is None or "schema_version" in facts:  # another version may list its files in another format
        require_current(folder / MANIFEST, facts)
    if problem is not None:
        return problem
    if facts.get("mode") not in ("weights_only", "full") or not isinstance(facts.get("world_size"), int):
        return "its manifest has no mode and number of ranks"
    if facts.get("step") != step:
        return f"its manifest is that of step {facts.get('step')}: the folder was renamed, or another was copied here"
    return None


def read_manifest(run: RunDir, step: int) -> dict[str, Any]:
    """Return the manifest of a checkpoint."""
    manifest = read_json(run.checkpoint(step) / MANIFEST)
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{run.checkpoint(step)}: the manifest is missing or unreadable")
    return manifest


def restore_replaced(run: RunDir) -> None:
    """Rename back an old checkpoint after a kill between the two renames that replace it; it is still valid."""
    for old in run.checkpoints.glob(".step-*.old"):
        final = old.with_name(old.name[1:].removesuffix(".old"))
        if not final.exists():
            with suppress(FileNotFoundError):  # another process was faster
                old.rename(final)
