"""``allranks export``: write a run's checkpoint as a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

import click

from allranks.cli.options import echo, json_option, print_json, root_option, run_argument
from allranks.errors import EXIT_OK, RequestError


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
