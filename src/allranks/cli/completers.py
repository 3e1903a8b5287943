"""Complete values in the shell: runs, items of ``--set``, strategies, smoke tests. A completer never fails and imports only when used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from allranks.errors import AllranksError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


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
    from allranks.spec.keys import settable_keys

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
    from click.shell_completion import CompletionItem

    from allranks.spec.keys import settable_keys

    names = _starting(settable_keys()["data.source"], incomplete)
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def complete_strategy(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the strategies."""
    from allranks.spec.strategies import REGISTRY

    return _starting(REGISTRY, incomplete)


def complete_smoke_tests(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of smoke tests."""
    from allranks.lab.smoke.registry import TESTS

    given = ctx.params.get(param.name or "") or ()
    return _starting([*(test.name for test in TESTS if test.name not in given), "all"], incomplete)


def complete_examples(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the examples."""
    from allranks.spec.examples import example_files

    return _starting(example_files(), incomplete)


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
