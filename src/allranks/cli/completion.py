"""Complete values in the shell, print shell completion (``allranks completion``), and the spec's JSON Schema for editors (``allranks schema``).

Completed are runs, items of ``--set`` (which bash divides into words), strategies, smoke tests. A completer never fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, get_completion_class

from allranks.errors import EXIT_OK, AllranksError

COMPLETE_VARIABLE = "_ALLRANKS_COMPLETE"
"""Set by the shell's completion function."""
_BREAKS = re.compile("[=:]+")
"""Characters of COMP_WORDBREAKS at which bash divides a word such as ``data.source=builtin:news``."""


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of runs."""
    from allranks.rundir.paths import list_runs

    try:
        names = [run.name for run in list_runs(ctx.params.get("run_root") or "runs")]
    except (AllranksError, OSError):
        names = []
    return _starting([*names, "latest"], incomplete)


def complete_set(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return ``key=`` for each key of the spec; behind the equals sign, the values that the key can have."""
    from allranks.spec.validation import settable_keys

    key, eq, value = incomplete.partition("=")
    keys = settable_keys()
    if not eq:
        return _starting([f"{name}=" for name in keys], incomplete)
    return [f"{key}={choice}" for choice in _starting(keys.get(key, ()), value)]


def complete_strategies(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return names for a list that is separated by commas, without those that it has already."""
    from allranks.spec.strategies import REGISTRY

    before, comma, last = incomplete.rpartition(",")
    given = before.split(",")
    names = [name for name, known in REGISTRY.items() if not known.single_process and name not in given]
    return [f"{before}{comma}{name}" for name in _starting([*names, *([] if comma else ["all"])], last)]


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the tiny models."""
    from allranks.spec.models import tiny_names

    return _starting(tiny_names(), incomplete)


def complete_data(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the built-in sets; without one, let the shell complete files."""
    from allranks.spec.validation import settable_keys

    names = _starting(settable_keys()["data.source"], incomplete)
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def complete_strategy(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the strategies."""
    from allranks.spec.strategies import REGISTRY

    return _starting(REGISTRY, incomplete)


def complete_smoke_tests(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of smoke tests."""
    from allranks.lab.smoke import TESTS

    given = ctx.params.get(param.name or "") or ()
    return _starting([*(test.name for test in TESTS if test.name not in given), "all"], incomplete)


def complete_examples(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the examples."""
    from allranks.spec.examples import example_files

    return _starting(example_files(), incomplete)


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


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
    from allranks.cli.options import print_json
    from allranks.spec.loader import json_schema

    print_json(json_schema())
    return EXIT_OK
