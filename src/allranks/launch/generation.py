"""Try prompts on a checkpoint of a run, in a new process. No torch in this process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, cast

import msgspec

from allranks.errors import CheckpointError, RequestError
from allranks.launch.export import (
    ADAPTER,
    base_of,
    choose_checkpoint,
    data_event,
    error_of_child,
    quantize_of,
    quiet_environment,
)
from allranks.planning.memory.model_config import find_files
from allranks.planning.model_checks import has_absolute_positions, max_positions
from allranks.rundir.checkpoints import read_manifest
from allranks.rundir.files import read_record
from allranks.rundir.paths import RunDir
from allranks.spec import load_spec
from allranks.spec.models import is_mlp
from allranks.spec.records import RunSpec
from allranks.utils.redaction import redact


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How to reply."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    raw: bool = False
    device: str = "auto"


class ChosenModel(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that replies."""

    run: str
    step: int
    checkpoint: str
    eval_loss: float | None
    template: str


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the model says to one prompt. Secrets are hidden.

    ``finish`` is ``end`` (the model ended its reply) or ``length``. A classifier has ``labels`` with their
    probabilities, the most probable one first, and no ``reply``.
    """

    prompt: str
    reply: str | None = None
    tokens: int | None = None
    finish: str | None = None
    labels: dict[str, float] | None = None


@contextmanager
def generate(
    run: RunDir,
    prompts: Sequence[str | dict[str, Any]],
    request: GenerationRequest,
    *,
    checkpoint: int | str | None = None,
) -> Iterator[tuple[ChosenModel, Iterator[Reply]]]:
    """Start a process with the model, and yield the checkpoint and an iterator of the replies, in the order of the
    prompts.

    Args:
        prompts: texts, or rows without their response, as columns and values.
        checkpoint: a step, ``best``, or None for the newest complete one.

    Raises:
        RequestError: there is no such checkpoint, the run has no language model or classifier, or a prompt does not
        suit it.
        CheckpointError: the checkpoint is damaged.
        EnvironmentNotAble: torch is missing, or the base model cannot be loaded.
    """
    spec = load_spec(run.spec)
    _require_replies(run, spec)
    step = choose_checkpoint(run, cast('int | Literal["best"] | None', checkpoint), repair=False)
    folder = run.checkpoint(step)
    data = data_event(run)
    template = "raw" if request.raw else str(data.get("template") or "text")
    loss = read_manifest(run, step).get("eval_loss")
    chosen = ChosenModel(run=run.name, step=step, checkpoint=str(folder), eval_loss=loss, template=template)
    started_in = Path(str(read_record(run.run_args).get("folder", ".")))
    order = {
        **msgspec.to_builtins(request),
        "folder": str(folder.absolute()),
        "base": base_of(run, folder) if (folder / ADAPTER).is_file() else "",
        "template": template,
        "template_file": str(started_in / Path(spec.data.template).expanduser()) if spec.data else "",
        "columns": dict(spec.data.columns) if spec.data else {},
        "labels": data.get("labels") or {},
        "max_length": spec.data.max_length if spec.data else None,
        "positions": _positions(spec),
        "dtype": read_record(run.plan).get("dtype", "auto"),
        "quantize": quantize_of(spec),
        "prompts": list(prompts),
    }
    with _worker(order) as (process, errors):
        yield chosen, _replies(process, errors, folder)


def _require_replies(run: RunDir, spec: RunSpec) -> None:
    if spec.script is not None:
        raise RequestError(f"run {run.name} runs your own program, whose model allranks does not know")
    if run.compare.exists():
        raise RequestError(f"run {run.name} is a comparison of strategies, which saves no model")
    if spec.model is not None and is_mlp(spec.model.name):
        raise RequestError(f"run {run.name}: {spec.model.name} is trained on noise and reads no text")
    if run.checkpoint_steps():
        return
    unsaved = "none has been saved yet (checkpoint.every, checkpoint.at_end)"
    why = "checkpoint.mode is none" if spec.checkpoint.mode == "none" else unsaved
    raise RequestError(f"run {run.name} has no checkpoint to try: {why}")


def _positions(spec: RunSpec) -> int | None:
    """Return the number of positions of a model that has no more than a table of them."""
    files = find_files(spec)
    return max_positions(files.config) if files is not None and has_absolute_positions(files.config) else None


@contextmanager
def _worker(order: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Start the process, yield it and its standard error, and end it with the context, also at Ctrl-C."""
    command = [sys.executable, "-m", "allranks.train.generate"]
    with (
        tempfile.TemporaryDirectory(prefix="allranks-generate-") as elsewhere,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env=quiet_environment(),
            cwd=elsewhere,
        ) as popen,
    ):
        try:
            assert popen.stdin is not None
            try:
                popen.stdin.write(msgspec.json.encode(order).decode())
                popen.stdin.close()
            except BrokenPipeError:
                pass  # it has ended; `_replies` says why
            yield popen, errors
        finally:
            popen.kill()


def _replies(process: subprocess.Popen[str], errors: IO[str], folder: Path) -> Iterator[Reply]:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            reply = msgspec.json.decode(line, type=Reply)
        except msgspec.DecodeError:
            continue  # a library's own line
        yield msgspec.structs.replace(reply, prompt=redact(reply.prompt), reply=reply.reply and redact(reply.reply))
    if code := process.wait():
        if not folder.is_dir():
            raise CheckpointError(f"{folder} was removed while it was read (checkpoint.keep); try again")
        errors.seek(0)
        raise error_of_child(code, errors.read())
