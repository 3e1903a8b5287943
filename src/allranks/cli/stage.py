"""``allranks stage``: the bundle for nodes that do not see the code, the packages, the model or the data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli.options import any_path, json_option, print_json, set_option
from allranks.errors import EXIT_OK

if TYPE_CHECKING:
    from allranks.stage.bundle import Bundle


@click.command("stage")
@click.argument("spec", type=any_path)
@set_option
@click.option("--no-packages", is_flag=True, help="Leave the Python packages out: the nodes have them.")
@click.option("--to", type=any_path, help="Folder to keep bundles in. [below the cache of the spec]")
@json_option
def stage_command(spec: Path, sets: tuple[str, ...], no_packages: bool, to: Path | None, as_json: bool) -> int:
    """Build and verify the bundle of SPEC: code, packages, model, tokenizer, data at pinned revisions.

    What was packed before and has not changed is verified, not packed again.
    """
    import msgspec

    from allranks import asked
    from allranks.stage.bundle import build

    def say(text: str) -> None:
        click.echo(text, err=True)

    bundle = build(asked.read_spec(spec, sets), to.absolute() if to else None, packages=not no_packages, log=say)
    if as_json:
        print_json({**msgspec.to_builtins(bundle), "bytes": bundle.bytes})
    else:
        _show(bundle)
    return EXIT_OK


def _show(bundle: Bundle) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"bundle {bundle.key}", title_justify="left")
    for name in ("part", "files", "MiB", "SHA-256", "how", "from", "revision"):
        table.add_column(name, overflow="fold")
    for part in bundle.parts:
        size = f"{part.bytes / 2**20:.1f}"
        table.add_row(
            part.name, str(part.files), size, part.sha256[:16], part.how, part.path, (part.revision or "")[:12]
        )
    console = Console()
    console.print(table)
    console.print(
        f"{bundle.bytes / 2**20:.1f} MiB, verified in {bundle.seconds:.1f} s; nodes need Python {bundle.python.version} ({bundle.python.soabi})",
        highlight=False,
    )
    console.print(bundle.file, highlight=False, soft_wrap=True)
