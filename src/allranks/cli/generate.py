"""Use a checkpoint of a run: try prompts on it, or write it as a Hugging Face model (``allranks generate``,
``export``)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.options import echo, json_option, print_json, root_option, run_argument
from allranks.errors import EXIT_OK, RequestError

if TYPE_CHECKING:
    from allranks.launch.generation import Reply

MAX_INPUT_BYTES = 16 << 20


@click.command("generate")
@run_argument
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt; may be repeated.")
@click.option(
    "--row",
    "rows",
    multiple=True,
    metavar="JSON",
    help="A prompt as columns of the data, for templates of several columns; may be repeated.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    metavar="N",
    help="Maximum number of tokens of a reply.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.0,
    show_default=True,
    metavar="T",
    help="0 is greedy; with a higher value tokens are sampled.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, metavar="N", help="Seed for sampling."
)
@click.option(
    "--checkpoint",
    metavar="STEP|best",
    help="Step of the checkpoint, or the best one (default: the newest complete one).",
)
@click.option(
    "--raw", is_flag=True, help="Pass the prompt to the model unchanged, without the template of the run's data."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto is a GPU if there is one.",
)
@root_option
@json_option
def generate_command(
    run: str,
    prompts: tuple[str, ...],
    rows: tuple[str, ...],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    checkpoint: str | None,
    raw: bool,
    device: str,
    run_root: Path,
    as_json: bool,
) -> int:
    """Try prompts on the model of RUN: those of --prompt, or the lines of standard input.

    A prompt is put into the template of the run's data, as for the sample answers of an evaluation. RUN may still be
    running. For a classifier the labels and their probabilities are shown.
    """
    import msgspec

    from allranks.launch.generation import GenerationRequest, generate
    from allranks.rundir.paths import find_run

    run_dir = find_run(run, run_root)
    request = GenerationRequest(
        max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, raw=raw, device=device
    )
    given = [*(_prompts(prompts) if prompts or not rows else []), *map(_row, rows)]
    if raw and rows:
        raise RequestError("--row is put into the template of the run's data, so it cannot be given with --raw")
    with generate(run_dir, given, request, checkpoint=_checkpoint(checkpoint)) as (chosen, replies):
        if as_json:
            print_json({**msgspec.to_builtins(chosen), "replies": [msgspec.to_builtins(reply) for reply in replies]})
            return EXIT_OK
        loss = "" if chosen.eval_loss is None else f", held-out loss {chosen.eval_loss:.4f}"
        echo(f"model   step {chosen.step} of {chosen.run}{loss}; template {chosen.template}")
        for reply in replies:
            echo()
            _show(reply)
    return EXIT_OK


def _show(reply: Reply) -> None:
    echo(f"prompt  {_indented(reply.prompt)}")
    if reply.labels is not None:
        echo(f"labels  {', '.join(f'{label} {share:.1%}' for label, share in reply.labels.items())}")
        return
    cut = " [cut at --max-new-tokens]" if reply.finish == "length" else ""
    echo(f"reply   {_indented(reply.reply or '')}{cut}")


def _indented(text: str) -> str:
    return text.strip("\n").replace("\n", "\n        ")


def _checkpoint(wanted: str | None) -> int | str | None:
    if wanted is None or wanted == "best":
        return wanted
    if not wanted.isascii() or not wanted.isdigit():
        raise RequestError(f"--checkpoint {wanted}: expected the step of a checkpoint, or best")
    return int(wanted)


def _row(text: str) -> dict[str, Any]:
    """Return the columns of a row.

    Raises:
        RequestError: it is not a JSON object.
    """
    try:
        row = json.loads(text)
    except ValueError as error:
        raise RequestError(f"--row: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RequestError(f'--row: expected a JSON object such as {{"column": "value"}}, found a {type(row).__name__}')
    return row


def _prompts(given: tuple[str, ...]) -> list[str]:
    """Return the prompts of the command line, or the lines of standard input that are not blank.

    Raises:
        RequestError: there is none, or one is not UTF-8 text.
    """
    prompts = list(given)
    if not given and sys.stdin is not None and not sys.stdin.isatty():
        content = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
        if len(content) > MAX_INPUT_BYTES:
            raise RequestError(f"standard input has more than {MAX_INPUT_BYTES >> 20} MiB of prompts")
        try:
            lines = content.decode("utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            wrong = f"byte {error.start} is {content[error.start]:#04x}"
            raise RequestError(f"standard input is not UTF-8 text: {wrong}") from None
        prompts = [line.removesuffix("\r") for line in lines if line.strip()]
    if not prompts:
        raise RequestError("no prompt: give --prompt TEXT, or prompts on standard input, one per line")
    for i, prompt in enumerate(prompts, 1):
        if not prompt.strip() or re.search("[\ud800-\udfff]", prompt):
            raise RequestError(f"prompt {i} {'is not UTF-8 text' if prompt.strip() else 'is empty'}")
    return prompts


@click.command("export")
@run_argument
@click.option("--step", type=int, metavar="N", help="Step of the checkpoint (default: the newest complete one).")
@click.option("--best", is_flag=True, help="The checkpoint with the lowest held-out loss, instead of the newest.")
@click.option("--merge", is_flag=True, help="Merge the adapter into its base model; the result does not need PEFT.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Output folder (default: export/step-N in the run folder).",
)
@click.option("--force", is_flag=True, help="Replace an earlier export in the output folder.")
@root_option
@json_option
def export_command(
    run: str, step: int | None, best: bool, merge: bool, out: Path | None, force: bool, run_root: Path, as_json: bool
) -> int:
    """Write RUN's checkpoint as a Hugging Face folder: a PEFT adapter or a full model.

    Before the folder gets its final name, a new process loads it and compares its logits with the checkpoint's.
    """
    import msgspec

    from allranks.launch.export import export_checkpoint
    from allranks.rundir.paths import find_run

    if best and step is not None:
        raise RequestError("--step and --best both name a checkpoint; give one of them")
    done = export_checkpoint(find_run(run, run_root), step="best" if best else step, merge=merge, out=out, force=force)
    if as_json:
        print_json(msgspec.to_builtins(done))
        return EXIT_OK
    what = {"adapter": "adapter", "merged": "model with its adapter merged", "model": "model"}[done.kind]
    echo(f"{what} of step {done.step} of {done.run}")
    if done.kind == "adapter":
        echo(f"base    {done.base}")
    same = "bitwise equal" if done.difference == 0.0 else f"within {done.difference:.1e} of the largest"
    echo(f"proof   loaded by a new process, logits {same}")
    echo(f"wrote   {done.folder}")
    return EXIT_OK
