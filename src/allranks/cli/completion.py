"""Print shell completion (``allranks completion``) and the spec's JSON Schema for editors (``allranks schema``)."""

from __future__ import annotations

import re
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, get_completion_class

from allranks.cli.options import COMPLETE_VARIABLE, print_json
from allranks.errors import EXIT_OK

_BREAKS = re.compile("[=:]+")
"""Characters of COMP_WORDBREAKS at which bash divides a word such as ``data.source=builtin:news``."""


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> int:
    """Print the completion script; add `eval "$(allranks completion bash)"` to your shell's start-up file."""
    add_bash()
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(click.get_current_context().find_root().command, {}, "allranks", COMPLETE_VARIABLE).source())
    return EXIT_OK


@click.command("schema")
def schema_command() -> int:
    """Print the JSON Schema of the spec; editors use it to check YAML files."""
    from allranks.spec.loader import json_schema

    print_json(json_schema())
    return EXIT_OK


class JoinedBashComplete(BashComplete):
    """Complete words that contain ``=`` and ``:``, and add no blank behind ``key=`` and behind a list's comma."""

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)", "COMPREPLY+=($value); [[ $value == *= ]] && compopt -o nospace"
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._typed = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the current one, and the current one, as they were typed."""
        words, current = super().get_completion_args()
        joined: list[str] = []
        glued = False
        for word in [*words, current] if current else words:
            is_break = _BREAKS.fullmatch(word) is not None
            if joined and (is_break or glued):
                joined[-1] += word
            else:
                joined.append(word)
            glued = is_break
        typed = joined.pop() if current else ""
        self._typed = typed.partition("=")[2] if typed.startswith("--") else typed
        return joined, typed

    def format_completion(self, item: CompletionItem[Any]) -> str:
        """Return the part behind the last ``=`` or ``:``, which is what bash replaces."""
        kept = max(self._typed.rfind("="), self._typed.rfind(":")) + 1
        value = str(item.value)
        return f"{item.type},{value[kept:] if value.startswith(self._typed[:kept]) else value}"


def add_bash() -> None:
    """Make click use this bash completion."""
    add_completion_class(JoinedBashComplete)
