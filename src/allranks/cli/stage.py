"""``allranks stage``: build the bundle for nodes without access to the code, packages, model or data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli.options import any_path, echo, json_option, print_json, set_option
from allranks.errors import EXIT_OK
from allranks.utils.text import format_bytes

if TYPE_CHECKING:
    from allranks.nodes.staging.bundles import Bundle


@click.command("stage")
@click.argument("spec", type=any_path)
@set_option
@click.option("--no-packages", is_flag=True, help="Leave out the Python packages, because the nodes have them.")
@click.option("--to", type=any_path, help="Folder for bundles. [a subfolder of the spec's cache]")
@json_option
def stage_command(spec: Path, sets: tuple[str, ...], no_packages: bool, to: Path | None, as_json: bool) -> int:
    """Build and verify the bundle of SPEC: code, packages, model, tokenizer and data at pinned revisions.

    Parts that are already packed and unchanged are verified, not packed again.
    """
    import msgspec

    from allranks.launch import preview
    from allranks.nodes.staging.bundles import build

    def say(text: str) -> None:
        echo(text, err=True)

    bundle = build(preview.read_spec(spec, sets), to.absolute() if to else None, packages=not no_packages, log=say)
    if as_json:
        print_json({**msgspec.to_builtins(bundle), "bytes": bundle.bytes})
    else:
        _show(bundle)
    return EXIT_OK


def _show(bundle: Bundle) -> None:
    from rich.table import Table
    from rich.text import Text

    from allranks.cli.console import SafeConsole

    table = Table(title=f"bundle {bundle.key}", title_justify="left")
    for name in ("part", "files", "MiB", "SHA-256", "how", "from", "revision"):
        table.add_column(name, overflow="fold")
    for part in bundle.parts:
        size = f"{part.bytes / 2**20:.1f}"
        table.add_row(
            part.name,
            str(part.files),
            size,
            part.sha256[:16],
            part.how,
            Text(part.path),
            Text((part.revision or "")[:12]),
        )
    console = SafeConsole()
    console.print(table)
    console.print(
        f"{format_bytes(bundle.bytes)}, verified in {bundle.seconds:.1f} s; nodes need Python {bundle.python.version} ({bundle.python.soabi})",
        highlight=False,
    )
    console.print(bundle.file, highlight=False, markup=False, soft_wrap=True)
