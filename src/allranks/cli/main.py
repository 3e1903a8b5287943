"""The command ``allranks``: verbs are loaded only when used, so that ``--help`` starts fast."""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module

import click

from allranks import __version__
from allranks.errors import EXIT_REQUEST, AllranksError

# verb: (module under allranks.cli, what --help says)
VERBS: dict[str, tuple[str, str]] = {
    "run": ("run", "Plan, check, launch, follow and report one run."),
    "plan": ("plan", "Show what would run; touches nothing."),
    "stage": ("stage", "Build and verify the bundle for nodes that see neither project nor packages."),
    "resume": ("resume", "Go on after a stop, from the newest whole checkpoint."),
    "cancel": ("cancel", "End a run; it can be resumed."),
    "runs": ("runs", "List what ran."),
    "logs": ("logs", "Show a run's logs by rank."),
    "report": ("report", "Show a run's summary and write its page anew."),
    "export": ("export", "Write a run's checkpoint as a plain Hugging Face folder, proved."),
    "compare": ("compare", "Run strategies in turns on equal work, each proved before its time counts."),
    "smoke": ("smoke", "Climb the ladder of smoke tests; each criterion ticked off beside its threshold."),
    "trace": ("trace", "Analyse profiler traces: where the time went, and who waited for whom."),
    "lint": ("lint", "Report the traps in your own batch script, shell script or environment."),
    "doctor": ("doctor", "Check this machine, or every node that a spec would use."),
    "topo": ("topo", "Draw how GPUs and network cards are wired, and advise on NCCL."),
    "diagnose": ("diagnose", "Say what went wrong, where, why and what to do, from logs of any kind."),
    "failures": ("failures", "List the failures that are named, refused or prevented."),
    "cluster": ("cluster", "A real Slurm on this machine, to try multi-node code on and to break."),
    "schema": ("schema", "Print the JSON Schema of the spec, for editors."),
    "completion": ("completion", "Print the shell completion for bash, zsh or fish."),
}


class LazyGroup(click.Group):
    """A group whose verbs are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            near = difflib.get_close_matches(cmd_name, VERBS, n=1)
            raise click.UsageError(
                f"there is no verb {cmd_name!r}{f'; did you mean {near[0]}?' if near else ''} (allranks --help lists them)",
                ctx,
            )
        module = import_module(f"allranks.cli.{VERBS[cmd_name][0]}")
        return getattr(module, f"{cmd_name}_command")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="allranks")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Bring up, run, compare and diagnose distributed PyTorch training.

    `allranks run SPEC` goes the whole way; every stage of it is a verb of its own.
    """


def main() -> None:
    """Entry point: runs a verb and ends with the exit code of its outcome (0 done, 1 failed, 2 request, 3 machine)."""
    debug = "--debug" in _hoist_debug(sys.argv[1:])[:1]
    try:
        code = cli.main(args=_hoist_debug(sys.argv[1:]), prog_name="allranks", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        _say("interrupted")
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_REQUEST)
    except AllranksError as error:
        if debug:
            raise
        _say(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except KeyboardInterrupt:
        _say("interrupted")
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        _say(
            f"unexpected {type(error).__name__}: {error}. This is a defect in allranks; run again with --debug to see where"
        )
        sys.exit(1)


def _hoist_debug(args: list[str]) -> list[str]:
    """``--debug`` may stand anywhere before a ``--``."""
    own = args[: args.index("--")] if "--" in args else args
    return (["--debug"] if "--debug" in own else []) + [a for a in own if a != "--debug"] + args[len(own) :]


def _say(text: str) -> None:
    click.echo(f"allranks: {text}", err=True)


if __name__ == "__main__":
    main()
