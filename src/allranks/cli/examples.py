"""``allranks examples``: list the examples that come with the package, and copy one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from allranks.cli.options import any_path, complete_examples, echo, json_option, print_json, write_new_file
from allranks.errors import EXIT_OK, RequestError
from allranks.spec.examples import describe_example, example_files, example_key, find_example
from allranks.spec.launchers import LAUNCHERS


@click.command("examples")
@click.argument("name", required=False, shell_complete=complete_examples)
@click.option(
    "--output",
    "-o",
    type=any_path,
    metavar="FILE",
    help="File or folder to write to; - prints it (default: NAME.yaml).",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@json_option
def examples_command(name: str | None, output: Path | None, force: bool, as_json: bool) -> int:
    """List the examples that come with allranks, or copy the example NAME. Each can be planned as it is."""
    if name is None:
        if output is not None:
            raise RequestError("--output needs the NAME of an example; `allranks examples` lists them")
        _list(as_json)
        return EXIT_OK
    example = find_example(name)
    text = example.read_text("utf-8")
    key = example_key(name)
    path = output or Path(f"{key.rpartition('/')[2]}.yaml")
    path = path / f"{key.rpartition('/')[2]}.yaml" if path.is_dir() else path
    to_stdout = str(path) == "-"
    if not to_stdout:
        text = text.replace(f"examples/{key}.yaml", str(path))
        write_new_file(path, text, force=force)
    if as_json:
        print_json({"name": key, "file": None if to_stdout else str(path), "text": text})
    elif to_stdout:
        echo(text.rstrip("\n"))
    else:
        echo(f"wrote {path}; next: allranks plan {path}")
    return EXIT_OK


def _list(as_json: bool) -> None:
    rows = [describe_example(name) for name in example_files()]
    rows.sort(key=lambda row: (not LAUNCHERS[row["launcher"]].runs_here, not row["offline"], "/" in row["name"]))
    if as_json:
        print_json(rows)
        return
    from allranks.cli.console import FittedColumn, print_fitted, table_console

    columns = [
        FittedColumn("name", fold_to=30),
        FittedColumn("what", fold_to=44),
        FittedColumn("machine", drop=1),
        FittedColumn("downloads", drop=2),
    ]
    cells = [
        [row["name"], row["summary"], _machine(row), "nothing" if row["offline"] else "model, data"] for row in rows
    ]
    print_fitted(table_console(), columns, cells)
    echo("\ncopy one: allranks examples NAME")


def _machine(row: dict[str, Any]) -> str:
    launcher = LAUNCHERS[row["launcher"]]
    if launcher.runs_here:
        return launcher.summary
    return f"{row['launcher']}, {row['nodes']} nodes"
