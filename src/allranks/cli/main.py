"""The command ``allranks``: verbs are imported only when used, so that ``--help`` starts fast."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.streams import CLOSED_ERRNOS, protect
from allranks.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_REQUEST, AllranksError
from allranks.utils.filesystem import describe_os_error, environment_error
from allranks.version import __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# verb: (module under allranks.cli, what --help says)
VERBS: dict[str, tuple[str, str]] = {
    "init": ("init", "Write a first spec, from a few answers or options."),
    "examples": ("examples", "List the examples that come with allranks, or copy one."),
    "run": ("run", "Plan, check, launch, follow and report one run."),
    "torchrun": ("torchrun", "Start a program with torchrun's own command line; no spec."),
    "sbatch": ("sbatch", "Lint, submit, check, follow and diagnose your own batch script."),
    "plan": ("plan", "Show what would run, without running anything."),
    "data": ("data", "Show the rows that a run would train on, and which tokens are trained."),
    "stage": ("doctor", "Build and verify the bundle for nodes without access to the project or packages."),
    "resume": ("runs", "Resume a stopped run from its newest complete checkpoint."),
    "cancel": ("runs", "Stop a run; it can be resumed."),
    "checkpoint": ("runs", "Save a full checkpoint of a running training, without stopping it."),
    "runs": ("runs", "List runs."),
    "watch": ("watch", "Show a run live: loss, tokens/s and memory by rank, phase, warnings, time left."),
    "logs": ("logs", "Show a run's logs by rank."),
    "report": ("runs", "Show a run's summary and rewrite its page."),
    "export": ("generate", "Write a run's checkpoint as a verified Hugging Face folder."),
    "generate": ("generate", "Try prompts on the model of a run."),
    "compare": ("compare", "Compare strategies on equal work, each verified before it is timed."),
    "sweep": ("sweep", "Run a spec with many settings, and rank the results."),
    "compare-runs": ("compare_runs", "Compare runs: results, losses at equal steps and tokens, and what differs."),
    "smoke": ("smoke", "Run the smoke tests and show each criterion next to its threshold."),
    "trace": ("trace", "Analyse profiler traces: where time was spent, and which ranks waited."),
    "lint": ("lint", "Report problems in your own batch script, shell script or environment."),
    "doctor": ("doctor", "Check this machine, or every node that a spec would use."),
    "topo": ("topo", "Draw how GPUs and network cards are connected, and recommend NCCL settings."),
    "diagnose": ("diagnose", "Find what went wrong, where and why, in logs of any kind, and what to do."),
    "failures": ("diagnose", "List the failures that allranks names, refuses or prevents."),
    "cluster": ("cluster", "Run a real Slurm cluster on this machine for testing and fault injection."),
    "schema": ("completion", "Print the JSON Schema of the spec, for editors."),
    "completion": ("completion", "Print the completion script for bash, zsh or fish."),
}

SYNONYMS = {
    "run": ("train", "start", "launch"),
    "plan": ("fit", "validate", "dry-run"),
    "init": ("new", "create"),
    "runs": ("list", "ls", "ps", "status"),
    "cancel": ("stop", "kill"),
    "resume": ("restart", "continue"),
    "compare": ("benchmark", "bench"),
    "trace": ("profile",),
    "doctor": ("preflight", "check"),
    "diagnose": ("debug",),
    "export": ("save",),
    "cluster": ("box",),
}
"""Words that users try for a verb."""


class LazyGroup(click.Group):
    """Click group that imports a verb only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            if ctx.resilient_parsing:  # completion of a line that is still being written
                return None
            from allranks.utils.text import nearest_name, suggest

            verbs = {word: verb for verb in VERBS for word in (verb, *SYNONYMS.get(verb, ()))}
            near = nearest_name(cmd_name.lower(), verbs)
            hint = suggest(verbs[near]) if near else ""
            raise click.UsageError(f"unknown verb {cmd_name!r}{hint} (allranks --help lists them)", ctx)
        module = import_module(f"allranks.cli.{VERBS[cmd_name][0]}")
        return getattr(module, f"{cmd_name.replace('-', '_')}_command")

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb. Click alone would exit silently on any broken pipe, including one to another process."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            raise environment_error(error) from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return verbs and options without importing any verb."""
        from click.shell_completion import CompletionItem

        verbs = [CompletionItem(name, help=text) for name, (_, text) in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, "-V", "--version", prog_name="allranks")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Bring up, run, compare and diagnose distributed PyTorch training.

    `allranks run SPEC` does everything; each of its stages is also a separate verb.
    """


def main() -> None:
    """Run a verb and exit with its code (0 done, 1 failed, 2 wrong request, 3 machine not able)."""
    atexit.register(gc.freeze)  # else the interpreter, when it ends, searches all modules for garbage several times
    debug = "--debug" in _hoist_debug(sys.argv[1:])[:1]
    outputs = protect()
    try:
        code = _run(debug)
    except SystemExit as end:
        code = end.code
    if sys.stdout is not None:
        sys.stdout.flush()
    failed = outputs["stdout"].error if "stdout" in outputs else None
    if failed is not None and failed.errno not in CLOSED_ERRNOS and not code:
        _print_error(f"standard output cannot be written: {failed.strerror}; the output is incomplete")
        code = EXIT_ENVIRONMENT
    sys.exit(code)


def _run(debug: bool) -> int:
    """Run a verb and return its exit code; report errors on standard error."""
    if "_ALLRANKS_COMPLETE" in os.environ:
        from allranks.cli.completion import add_bash

        add_bash()
    try:
        code = cli.main(args=_hoist_debug(sys.argv[1:]), prog_name="allranks", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        _print_error("interrupted")
        return EXIT_FAILED
    except click.ClickException as error:
        _print_click_error(error)
        return EXIT_REQUEST
    except AllranksError as error:
        if debug:
            raise
        _print_error(str(error))
        return error.exit_code
    except OSError as error:
        if debug:
            raise
        _print_error(describe_os_error(error))
        return EXIT_ENVIRONMENT
    except Exception as error:
        if debug:
            raise
        _print_error(
            f"unexpected {type(error).__name__}: {error}. This is a bug in allranks; run again with --debug to see the "
            "traceback"
        )
        return EXIT_FAILED


def _hoist_debug(args: list[str]) -> list[str]:
    """Move ``--debug`` to the front; it may be anywhere before a ``--``, ``torchrun`` or ``sbatch``."""
    ends = (i for i, word in enumerate(args) if word in ("torchrun", "sbatch", "--"))  # what follows is not ours
    own = args[: next(ends, len(args))]
    return (["--debug"] if "--debug" in own else []) + [a for a in own if a != "--debug"] + args[len(own) :]


def _print_click_error(error: click.ClickException) -> None:
    """Print a click error, sanitized: it may quote an argument, and arguments may be file names."""
    from allranks.cli.options import echo

    text = io.StringIO()
    error.show(text)
    echo(text.getvalue().rstrip("\n"), err=True)


def _print_error(text: str) -> None:
    from allranks.cli.options import echo

    echo(f"allranks: {text}", err=True)


if __name__ == "__main__":
    main()
