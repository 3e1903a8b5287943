"""Options and output that several verbs share, and what the shell completes: runs, items of ``--set``, strategies,
smoke tests.

A completer never fails. How words reach bash is in `allranks.cli.completion`, which loads what verbs do not need.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.errors import AllranksError, RequestError, RunNotFound
from allranks.rundir.files import replace_non_finite, write_text_atomic
from allranks.utils.text import printable, sanitize, wrapped

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMPLETE_VARIABLE = "_ALLRANKS_COMPLETE"
"""Set by the shell's completion function."""
# json.dumps escapes the control characters below a blank; these it does not, and halves of surrogate pairs cannot be
# printed
_UNPRINTABLE = "[\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"


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


def complete_values(key: str, *, or_files: bool = False) -> Callable[..., list[CompletionItem]]:
    """Return a completer of the values that a key of the spec can have; without one, the shell completes files, if it
    may."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from allranks.spec.validation import settable_keys

        items = [CompletionItem(name) for name in _starting(settable_keys()[key], incomplete)]
        return items or [CompletionItem(incomplete, type="file")] * or_files

    return complete


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


any_path = click.Path(path_type=Path, readable=False)
"""Path type without click's existence check: the verb itself reports unreadable files and reads the others."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on standard output and nothing else."
)
set_only_option = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="A.B=V",
    shell_complete=complete_set,
    help="Override a value of the spec; may be repeated.",
)
root_option = click.option(
    "--run-root", default="runs", show_default=True, type=any_path, help="Folder that contains the runs."
)


def set_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--set``, and ``--run-root``, which is short for ``--set run_root=FOLDER``, to a verb with a spec."""

    @wraps(function)
    def with_root(*args: Any, run_root: str | None, sets: tuple[str, ...], **options: Any) -> Any:
        return function(
            *args, sets=sets if run_root is None else (*sets, f"run_root={json.dumps(run_root)}"), **options
        )

    root = click.option("--run-root", metavar="FOLDER", help="Folder for the runs (default: run_root of the spec).")
    return set_only_option(root(with_root))


class FullHelpGroup(click.Group):
    """Click group whose help shows the full first sentence of each command; click truncates it."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, _first_sentence(command.help or "")) for name, command in commands if command]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _first_sentence(text: str) -> str:
    flat = " ".join(text.split())
    end = flat.find(". ")
    return flat if end < 0 else flat[: end + 1]


def run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument RUN: a path, a name, a prefix of a name, or ``latest``."""
    return click.argument("run", default="latest", shell_complete=complete_runs)(function)


def error_line(event: dict[str, Any]) -> str:
    """Return a rank's error event as one line, without terminal control sequences."""
    first = (sanitize(event.get("message") or "").splitlines() or [""])[0]
    return f"rank {event.get('rank')}: {sanitize(event.get('type') or 'error')}: {first[:200]}"


def echo(text: str = "", *, err: bool = False, styled: bool = False, message: bool = False) -> None:
    """Print a line on the terminal, without control sequences.

    All verbs print through this or `cli.console.SafeConsole`: a line may quote a log, a script, a spec or a folder's
    name.

    Args:
        err: print to standard error.
        message: break it between words on a terminal, as all text on standard error; not for scripts and tables.
        styled: keep colours; the caller has already passed quoted text through `printable`.
    """
    text = printable(text, styled=styled)
    stream = sys.stderr if err else sys.stdout
    if (err or message) and not styled and stream is not None and stream.isatty():
        text = wrapped(text, shutil.get_terminal_size().columns)
    click.echo(text, err=err)


def warn(warnings: Iterable[str]) -> None:
    """Print warnings on standard error, where nothing else is printed with --json."""
    for text in warnings:
        echo(f"allranks: warning: {text}", err=True)


def check_new_file(path: Path, *, force: bool) -> None:
    """Check that a file that the user asked for can be written.

    Raises:
        RequestError: it exists and `force` is not set, it is a folder, or its folder does not exist.
    """
    if path.is_dir():
        raise RequestError(f"{path}: this is a folder; give a file name")
    if not path.parent.is_dir():
        raise RequestError(f"{path}: the folder {path.parent} does not exist")
    if os.path.lexists(path) and not force:
        raise RequestError(f"{path} exists; give another name with --output, or overwrite it with --force")


def write_new_file(path: Path, text: str, *, force: bool) -> None:
    """Write a file after `check_new_file`."""
    check_new_file(path, force=force)
    write_text_atomic(path, text)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    click.echo(json_text(value))


def json_text(value: Any) -> str:
    """Return a value as JSON, with control characters written as JSON escapes."""
    text = json.dumps(replace_non_finite(value), indent=2, ensure_ascii=False)
    return re.sub(_UNPRINTABLE, lambda match: f"\\u{ord(match.group()):04x}", text)


def resolve_run_path(path: Path, run_root: Path) -> Path:
    """Return a path unchanged; resolve `latest` or a run's name to that run's folder below `run_root`."""
    if os.path.lexists(path) or len(path.parts) != 1:
        return path
    from allranks.rundir.paths import find_run

    try:
        return find_run(str(path), run_root).root
    except RunNotFound:
        return path
