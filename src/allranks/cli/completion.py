"""Print shell completion (``allranks completion``) and the spec's JSON Schema for editors (``allranks schema``)."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from allranks.cli.options import COMPLETE_VARIABLE, add_bash, print_json
from allranks.errors import EXIT_OK


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> int:
    """Print the completion script; add `eval "$(allranks completion bash)"` to your shell's start-up file."""
    from allranks.cli.main import cli

    add_bash()
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "allranks", COMPLETE_VARIABLE).source())
    return EXIT_OK


@click.command("schema")
def schema_command() -> int:
    """Print the JSON Schema of the spec; editors use it to check YAML files."""
    from allranks.spec.loader import json_schema

    print_json(json_schema())
    return EXIT_OK
