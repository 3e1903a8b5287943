"""Finding checkpoints that can be trusted, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allranks.errors import CheckpointError
from allranks.integrity import MANIFEST, damage
from allranks.rundir import RunDir, read_json


def newest(run: RunDir) -> tuple[int, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with newer ones.

    Raises:
        CheckpointError: there is none.
    """
    problems = []
    restore_replaced(run)
    for step in reversed(run.checkpoint_steps()):
        problem = wrong_with(run.checkpoint(step), step)
        if problem is None:
            return step, problems
        problems.append(f"{run.checkpoint(step)}: {problem}")
    detail = "; ".join(problems) or "none was saved (checkpoint.mode none, or the run ended before the first)"
    raise CheckpointError(f"run {run.name} has no checkpoint that is whole: {detail}")


def wrong_with(folder: Path, step: int) -> str | None:
    """Why a checkpoint cannot be trusted to be that of `step`, or None. Files that belong together elsewhere are whole, too: a
    folder that was renamed, or copied over another."""
    problem = damage(folder)
    if problem is not None:
        return problem
    facts = read_json(folder / MANIFEST)
    if facts.get("mode") not in ("lite", "full") or not isinstance(facts.get("world_size"), int):
        return "its manifest does not tell its mode and its number of ranks"
    if facts.get("step") != step:
        return f"its manifest is that of step {facts.get('step')}: the folder was renamed, or another was copied here"
    return None


def manifest(run: RunDir, step: int) -> dict[str, Any]:
    """The manifest of a checkpoint."""
    found = read_json(run.checkpoint(step) / MANIFEST)
    if not isinstance(found, dict):
        raise CheckpointError(f"{run.checkpoint(step)}: the manifest is missing or unreadable")
    return found


def restore_replaced(run: RunDir) -> None:
    """A kill between the two renames that replace a checkpoint left the old one under another name: it is good."""
    for old in run.checkpoints.glob(".step-*.old"):
        final = old.with_name(old.name[1:].removesuffix(".old"))
        if not final.exists():
            old.rename(final)
