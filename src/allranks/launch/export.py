"""Export a checkpoint as a Hugging Face folder with a model card; verify it before publication. No torch here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from allranks.errors import (
    EXIT_ENVIRONMENT,
    EXIT_REQUEST,
    AllranksError,
    CheckpointError,
    EnvironmentNotAble,
    RequestError,
)
from allranks.rundir import checkpoints
from allranks.rundir.checkpoints import MANIFEST
from allranks.rundir.events import read_events
from allranks.rundir.files import read_json, read_record, write_json, write_text_atomic
from allranks.rundir.paths import RunDir
from allranks.spec import load_spec
from allranks.spec.models import is_mlp
from allranks.spec.records import QUANTIZE_NONE, RunSpec
from allranks.utils.filesystem import apply_umask, current_umask, write_error
from allranks.utils.redaction import redact
from allranks.utils.text import format_value
from allranks.version import __version__

ADAPTER = "adapter_config.json"
INTERNAL_FILES = frozenset({MANIFEST, "state", "shards"})  # what no other program reads
TIMEOUT_S = 3600
RECORD = "allranks_export.json"
RESULTS = (
    ("steps", "optimizer steps"),
    ("tokens_trained", "trained tokens"),
    ("train_loss_first", "training loss, first"),
    ("train_loss_last", "training loss, last"),
    ("eval_loss_first", "held-out loss, first"),
    ("eval_loss", "held-out loss, last"),
    ("perplexity", "held-out perplexity"),
    ("accuracy", "held-out accuracy"),
    ("exact_match", "exact match"),
)


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an export."""

    folder: str
    run: str
    step: int
    kind: str  # adapter, merged or model
    base: str | None  # what an adapter needs to be loaded
    difference: float  # largest difference of a logit to those of the checkpoint, over the largest logit


def export_checkpoint(
    run: RunDir, *, step: int | Literal["best"] | None, merge: bool, out: Path | None, force: bool
) -> ExportResult:
    """Write the checkpoint of `step` to `out`; an earlier export there stays until the new folder is verified.

    Args:
        step: None is the newest complete one, ``best`` the one with the lowest held-out loss.

    Raises:
        RequestError: unknown step, nothing to merge, or `out` exists or is not a folder.
        CheckpointError: the checkpoint is damaged, or a new process computes other logits from the exported folder.
        EnvironmentNotAble: torch is missing, the base model cannot be loaded, or the disk cannot be written.
    """
    _require_known(run)
    chosen = choose_checkpoint(run, step)
    source = run.checkpoint(chosen)
    adapted = (source / ADAPTER).is_file()
    if merge and not adapted:
        raise RequestError(f"{source} holds a full model, not an adapter; remove --merge")
    target = (out or run.root / "export" / f"step-{chosen}{'-merged' if merge else ''}").expanduser().absolute()
    base = base_of(run, source) if adapted else None
    kind = "merged" if merge else "adapter" if adapted else "model"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_free(target, force)
        # A folder of its own: another export to the same target does not write into this one.
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            aside = Path(folder) / "new"
            difference = _write_verified(source, aside, kind, base, quantize_of(load_spec(run.spec)))
            done = ExportResult(
                folder=str(target), run=run.name, step=chosen, kind=kind, base=base, difference=difference
            )
            write_json(aside / RECORD, {**msgspec.structs.asdict(done), "folder": target.name})
            write_text_atomic(aside / "README.md", model_card(run, step=chosen, kind=kind, base=base))
            _publish(aside, target)
    except OSError as error:
        raise write_error(target, error, "--out") from error
    return done


def quantize_of(spec: RunSpec) -> str:
    """Return ``model.quantize`` of a run."""
    return spec.model.quantize if spec.model else QUANTIZE_NONE


def _write_verified(source: Path, aside: Path, kind: str, base: str | None, quantize: str) -> float:
    """Write the exported files, and return the largest difference of their logits to those of the checkpoint."""
    if kind == "merged":
        _worker("merge", source, aside, base, quantize)
    else:
        shutil.copytree(
            source, aside, ignore=lambda folder, names: INTERNAL_FILES & set(names) if folder == str(source) else ()
        )
    if kind == "adapter":
        write_json(aside / ADAPTER, {**read_json(aside / ADAPTER), "base_model_name_or_path": base})
    return float(_worker("prove", source, aside, base, quantize))


def _require_known(run: RunDir) -> None:
    spec = load_spec(run.spec)
    if spec.script is not None:
        raise RequestError(f"run {run.name} runs your own program, which saves its model itself")
    if spec.model is not None and is_mlp(spec.model.name):
        raise RequestError(
            f"run {run.name}: {spec.model.name} is not a Hugging Face model; its weights are in the checkpoint's "
            "model.safetensors"
        )


def choose_checkpoint(run: RunDir, step: int | Literal["best"] | None, *, repair: bool = True) -> int:
    """Return the step of a complete checkpoint: of this step, the best one, or (None) the newest.

    Args:
        repair: see `allranks.rundir.checkpoints.newest_checkpoint`.

    Raises:
        RequestError: there is none of this step, or none was evaluated.
        CheckpointError: it is damaged.
    """
    if step is None:
        return checkpoints.newest_checkpoint(run, repair=repair)[0]
    if step == "best":
        return checkpoints.best_checkpoint(run)
    there = run.checkpoint_steps()
    if step not in there:
        raise RequestError(
            f"run {run.name} has no checkpoint of step {step}; existing steps: {', '.join(map(str, there)) or 'none'}"
        )
    if problem := checkpoints.checkpoint_problem(run.checkpoint(step), step):
        others = ", ".join(str(s) for s in there if s != step) or "none"
        raise CheckpointError(f"{run.checkpoint(step)}: {problem}; other steps: {others}")
    return step


def _require_free(target: Path, force: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir() or (any(target.iterdir()) and not (target / RECORD).is_file()):
        raise RequestError(f"{target} exists and is not an earlier export; choose another folder with --out")
    if any(target.iterdir()) and not force:
        raise RequestError(f"{target} exists; --force replaces it after the new export is verified")


def base_of(run: RunDir, source: Path) -> str:
    """Return what an adapter of this run needs as its base: a hub name, or the absolute path of a folder.

    Raises:
        CheckpointError: the adapter does not name it.
    """
    config = read_json(source / ADAPTER)
    named = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    spec = load_spec(run.spec)
    if spec.model is not None and spec.model.name.startswith("tiny:"):
        named = str(run.model)  # moved with the run, if that was moved
    if not isinstance(named, str) or not named:
        raise CheckpointError(f"{source / ADAPTER} does not name a base model")
    folder = Path(named).expanduser()
    if not folder.is_absolute() and not folder.is_dir():
        started_in = Path(
            str(read_record(run.run_args).get("folder", "."))
        )  # a relative path is relative to where the run began
        folder = started_in / folder
    return str(folder.absolute()) if folder.is_dir() else named


def _worker(what: str, source: Path, aside: Path, base: str | None, quantize: str) -> str:
    """Run a new process, so that it reads only the files and this process does not import torch."""
    command = [sys.executable, "-m", "allranks.train.export", what, str(source.absolute()), str(aside)]
    command += [base or "", quantize]
    try:
        with tempfile.TemporaryDirectory(prefix="allranks-export-") as elsewhere:  # relative paths must not help
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                env=quiet_environment(),
                check=False,
                cwd=elsewhere,
            )
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{source}: {what} took more than {TIMEOUT_S} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return lines[-1]
    raise error_of_child(done.returncode, done.stderr)


def error_of_child(code: int, errors: str) -> AllranksError:
    """Return the error that a process of allranks printed on its last line, by its exit code."""
    text = (errors.strip().splitlines() or [f"the process with the model ended with {code}"])[-1]
    return {EXIT_REQUEST: RequestError, EXIT_ENVIRONMENT: EnvironmentNotAble}.get(code, CheckpointError)(text)


def quiet_environment() -> dict[str, str]:
    """Return this environment for a process in another folder, without the notices of transformers and the hub."""
    paths = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    own = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return {**os.environ, **own, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def _publish(aside: Path, target: Path) -> None:
    apply_umask(aside)  # safetensors writes for its owner alone; an export is to be passed on
    for folder in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
        folder.chmod(0o777 & ~current_umask())
    if target.exists():
        target.rename(aside.with_name("replaced"))
    aside.rename(target)


def model_card(run: RunDir, *, step: int, kind: str, base: str | None) -> str:
    """Return the card as Markdown with the YAML header that the Hugging Face hub reads. What is unknown is left out.

    Args:
        step: of the exported checkpoint.
        kind: ``adapter``, ``merged`` or ``model``.
        base: what an adapter needs to be loaded.
    """
    spec, metrics = load_spec(run.spec), read_record(run.metrics)
    base = base or (spec.model.name if spec.model else None)
    kinds = {"adapter": "A LoRA adapter", "merged": "A model with its LoRA adapter merged"}
    lines = ["---", *([f"base_model: {base}"] if base else [])]
    lines += [f"library_name: {'peft' if kind == 'adapter' else 'transformers'}", "tags: [allranks]", "---", ""]
    what = kinds.get(kind, "A fine-tuned model")
    lines += [f"# {run.name}", "", f"{what}, trained by allranks {__version__}; the checkpoint of step {step}."]
    if metrics.get("eval_loss_first") == metrics.get("eval_loss"):  # evaluated once, at the end
        metrics.pop("eval_loss_first", None)
    lines += _table("Results", ((name, metrics.get(key)) for key, name in RESULTS))
    if metrics.get("steps") != step:
        lines += ["", f"The figures are those of the whole run, the weights those of step {step}."]
    data = data_event(run)
    known = ("source", "template", "rows_train", "rows_eval", "rows_empty", "rows_truncated", "rows_without_target")
    lines += _table("Data", ((key, data.get(key) or None) for key in known))
    versions = [("torch", metrics.get("torch")), ("python", read_record(run.run_args).get("python"))]
    lines += _table("Versions", [*versions, ("allranks", __version__)])
    lines += ["", "## Settings", "", "```yaml", run.spec.read_text(encoding="utf-8").rstrip(), "```", ""]
    return redact("\n".join(lines))


def _table(title: str, rows: Iterable[tuple[str, Any]]) -> list[str]:
    cells = [(name, f"{value:.4f}" if isinstance(value, float) else value) for name, value in rows if value is not None]
    return [
        "",
        f"## {title}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {format_value(text)} |" for name, text in cells),
    ]


def data_event(run: RunDir) -> dict[str, Any]:
    """Return the newest facts of the run's data: rows, template and labels."""
    events = [event for event in read_events(run.events_of(0)) if event["event"] == "data"]
    return events[-1] if events else {}
