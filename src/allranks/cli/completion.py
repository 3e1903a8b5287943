"""``allranks completion``: for bash, zsh and fish."""

from __future__ import annotations

import click

from allranks.errors import EXIT_OK


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> int:
    """Print the completion script; put `eval "$(allranks completion bash)"` into your shell's start-up file."""
    from click.shell_completion import get_completion_class

    from allranks.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "allranks", "_ALLRANKS_COMPLETE").source())
    return EXIT_OK
