"""``allranks export``: a plain Hugging Face model from a run."""

from __future__ import annotations

from pathlib import Path

import click

from allranks.cli.options import json_option, print_json, root_option, run_argument
from allranks.errors import EXIT_OK


@click.command("export")
@run_argument
@click.option("--step", type=int, metavar="N", help="The checkpoint of this step (default: the newest whole one).")
@click.option("--merge", is_flag=True, help="Merge the adapter into its base: one model that needs no PEFT.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where to (default: export/step-N in the run folder).",
)
@click.option("--force", is_flag=True, help="Replace an earlier export there.")
@root_option
@json_option
def export_command(
    run: str, step: int | None, merge: bool, out: Path | None, force: bool, run_root: Path, as_json: bool
) -> int:
    """Write RUN's checkpoint as a plain Hugging Face folder: an adapter in PEFT's form, or a whole model.

    A fresh process reads what was written and compares its logits with the checkpoint's before the folder gets its name.
    """
    import msgspec

    from allranks.export import export
    from allranks.rundir import find_run

    done = export(find_run(run, run_root), step=step, merge=merge, out=out, force=force)
    if as_json:
        print_json(msgspec.to_builtins(done))
        return EXIT_OK
    what = {"adapter": "adapter", "merged": "model with its adapter merged", "model": "model"}[done.kind]
    click.echo(f"{what} of step {done.step} of {done.run}")
    if done.kind == "adapter":
        click.echo(f"base    {done.base}")
    same = "equal to the bit" if done.difference == 0.0 else f"within {done.difference:.1e} of the largest"
    click.echo(f"proof   read again by a fresh process, logits {same}")
    click.echo(f"wrote   {done.folder}")
    return EXIT_OK
