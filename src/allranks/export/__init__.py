"""A run's checkpoint as a plain Hugging Face folder, proved before it is published. No torch here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from allranks import checkpoints
from allranks.errors import EXIT_REQUEST, CheckpointError, EnvironmentNotAble, RequestError
from allranks.integrity import MANIFEST
from allranks.mlp import is_mlp
from allranks.rundir import RunDir, read_json, write_json
from allranks.spec import load_spec

ADAPTER = "adapter_config.json"
OURS = frozenset({MANIFEST, "state", "shards"})  # what no other program reads
TIMEOUT_S = 3600
RECORD = "allranks_export.json"


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    folder: str
    run: str
    step: int
    kind: str  # adapter, merged or model
    base: str | None  # what an adapter needs to be loaded
    difference: float  # largest difference of a logit to those of the checkpoint, over the largest logit


def export(run: RunDir, *, step: int | None, merge: bool, out: Path | None, force: bool) -> Export:
    """Write the checkpoint of `step` (the newest whole one if None) into `out`; what was there before stays until the new
    folder is proved.

    Raises:
        RequestError: no such step, nothing to merge, `out` is taken or cannot be written.
        CheckpointError: the checkpoint is damaged, or what was written gives other logits when a fresh process reads it.
        EnvironmentNotAble: torch is not there, or the base model cannot be had.
    """
    _require_known(run)
    chosen = _choose(run, step)
    source = run.checkpoint(chosen)
    adapted = (source / ADAPTER).is_file()
    if merge and not adapted:
        raise RequestError(f"{source} holds a whole model, no adapter: leave --merge out")
    target = (out or run.root / "export" / f"step-{chosen}{'-merged' if merge else ''}").absolute()
    _require_free(target, force)
    aside = target.with_name(f".{target.name}.tmp")
    base = _base(run, source) if adapted else None
    kind = "merged" if merge else "adapter" if adapted else "model"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.mkdir(parents=True, exist_ok=True)
        if merge:
            _worker("merge", source, aside, base)
        else:
            shutil.copytree(
                source, aside, ignore=lambda folder, names: OURS & set(names) if folder == str(source) else ()
            )
        answer = _worker("prove", source, aside, base)
        done = Export(folder=str(target), run=run.name, step=chosen, kind=kind, base=base, difference=float(answer))
        write_json(aside / RECORD, {**msgspec.structs.asdict(done), "folder": target.name})
        _publish(aside, target)
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {error.strerror}; give another folder with --out") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return done


def _require_known(run: RunDir) -> None:
    spec = load_spec(run.spec)
    if spec.script is not None:
        raise RequestError(f"run {run.name} is a program of your own, which saves what it trains by itself")
    if spec.model is not None and is_mlp(spec.model.name):
        raise RequestError(
            f"run {run.name}: {spec.model.name} is no model that Hugging Face's libraries know; its weights stand in the checkpoint's model.safetensors"
        )


def _choose(run: RunDir, step: int | None) -> int:
    if step is None:
        return checkpoints.newest(run)[0]
    there = run.checkpoint_steps()
    if step not in there:
        raise RequestError(
            f"run {run.name} has no checkpoint of step {step}; there are: {', '.join(map(str, there)) or 'none'}"
        )
    if problem := checkpoints.wrong_with(run.checkpoint(step), step):
        others = ", ".join(str(s) for s in there if s != step) or "none"
        raise CheckpointError(f"{run.checkpoint(step)}: {problem}; other steps: {others}")
    return step


def _require_free(target: Path, force: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir() or (any(target.iterdir()) and not (target / RECORD).is_file()):
        raise RequestError(f"{target} exists and is no earlier export; give another folder with --out")
    if any(target.iterdir()) and not force:
        raise RequestError(f"{target} exists; --force replaces it once the new one is proved")


def _base(run: RunDir, source: Path) -> str:
    config = read_json(source / ADAPTER)
    named = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    spec = load_spec(run.spec)
    if spec.model is not None and spec.model.name.startswith("tiny:"):
        named = str(run.model)  # moved with the run, if that was moved
    if not isinstance(named, str) or not named:
        raise CheckpointError(f"{source / ADAPTER} names no base model")
    return named


def _worker(what: str, source: Path, aside: Path, base: str | None) -> str:
    """A fresh process: what it reads comes from the files, and torch stays out of this one."""
    command = [sys.executable, "-m", "allranks.export.worker", what, str(source), str(aside), base or ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=_quiet(), check=False)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{source}: {what} took more than {TIMEOUT_S} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return lines[-1]
    text = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    if done.returncode == EXIT_REQUEST:
        raise RequestError(text)
    raise EnvironmentNotAble(text) if done.returncode == EnvironmentNotAble.exit_code else CheckpointError(text)


def _quiet() -> dict[str, str]:
    return {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def _publish(aside: Path, target: Path) -> None:
    for path in aside.rglob("*"):
        if path.is_file():
            path.chmod(0o644)  # safetensors writes for its owner alone; an export is to be passed on
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    aside.rename(target)
    shutil.rmtree(old, ignore_errors=True)
