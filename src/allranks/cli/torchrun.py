"""``allranks torchrun``: start a program with torchrun's command line, show its output as torchrun does, and say at the
end which rank failed, where and why. Nothing else is printed, except one line with the run folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.log_follower import LogFollower
from allranks.cli.options import echo
from allranks.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEST, AllranksError, RequestError
from allranks.launch.torchrun.options import TorchrunOptions, parse, shown_ranks
from allranks.rundir.paths import RunDir
from allranks.utils.inputs import read_appended

if TYPE_CHECKING:
    from allranks.launch.outcome import RunResult
    from allranks.planning.records import LaunchPlan

LOOK_S = 0.1
OPTIONS = {
    "--set run_root=": "--log-dir ",
    "run_root": "--log-dir",
    "script.grace_s": "--shutdown-timeout",
    "cluster.restarts.max": "--max-restarts",
}
PREFIX = "[${role_name}${local_rank}]:"  # torchrun's


class _Verbatim(click.Command):
    """A command whose words are all its own, also ``--help`` and ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["words"] = list(args)
        return []


class RankOutput(LogFollower):
    """Copy what ranks of this node write to standard output, as it is; as a context manager around an attempt.

    Args:
        shown: local ranks, and whether each of their lines gets a prefix.
    """

    def __init__(self, run: RunDir, ranks: list[int], shown: dict[int, bool], role: str) -> None:
        super().__init__(LOOK_S)
        self._run = run
        template = Template(os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", PREFIX))
        self._prefixes = {
            ranks[r]: template.safe_substitute(role_name=role, local_rank=r, rank=ranks[r]).encode()
            if prefixed
            else b""
            for r, prefixed in shown.items()
        }
        self._offsets: dict[Path, int] = {}
        self._rests: dict[Path, bytes] = {}

    def _look(self, *, last: bool = False) -> None:
        for attempt in self._run.attempts():
            logs = self._run.rank_logs(attempt)
            for rank, prefix in self._prefixes.items():
                if rank in logs:
                    self._copy(logs[rank], prefix, last)
        sys.stdout.flush()

    def _copy(self, log: Path, prefix: bytes, last: bool) -> None:
        try:
            data = read_appended(log, self._offsets.get(log, 0)).data
        except OSError:
            return
        first = log not in self._offsets
        if first and b"\n" not in data:
            return
        self._offsets[log] = self._offsets.get(log, 0) + len(data)
        if first:  # the line with which allranks begins the log
            data = data.partition(b"\n")[2]
        if prefix:
            *lines, self._rests[log] = (self._rests.get(log, b"") + data).split(b"\n")
            if last and self._rests[log]:
                lines.append(self._rests.pop(log))
            data = b"".join(prefix + line + b"\n" for line in lines)
        sys.stdout.buffer.write(data)


class TorchrunView:
    """Observer of a run: prints what the user must know, and starts the output of the ranks."""

    def __init__(self, options: TorchrunOptions) -> None:
        self._options = options
        self._output: RankOutput | None = None

    def __enter__(self) -> TorchrunView:
        return self

    def __exit__(self, *error: object) -> None:
        if self._output is not None:
            self._output.__exit__(*error)

    def start(self, run_dir: RunDir, launch_plan: LaunchPlan) -> None:
        """Show the ranks of the first node, which is this one."""
        self.show(run_dir, launch_plan.nodes[0].ranks)

    def show(self, run_dir: RunDir, ranks: list[int]) -> None:
        """Show the ranks of this node, as far as the options say so."""
        shown = shown_ranks(self._options, len(ranks), first_node=0 in ranks)
        self._output = RankOutput(run_dir, ranks, shown, self._options.role).__enter__()

    def event(self, event: dict[str, Any]) -> None:
        """Ignore an event: the end of the run names the failed rank."""

    def say(self, text: str) -> None:
        """Print a message of the launcher."""
        _say(text)


def _say(text: str, by: str = "allranks") -> None:
    """Print a message, which names keys of a spec where torchrun has options."""
    for key, option in OPTIONS.items():
        text = text.replace(key, option)
    echo(f"{by}: {text}", err=True)


@click.command("torchrun", cls=_Verbatim, add_help_option=False)
def torchrun_command(words: list[str]) -> int:
    """Start PROGRAM with torchrun's command line."""
    try:
        options = parse(words, os.environ)
    except RequestError as error:
        echo(f"allranks torchrun: {error} (allranks torchrun --help)", err=True)
        return EXIT_REQUEST
    try:
        return _run(options)
    except AllranksError as error:
        _say(str(error), "allranks torchrun")
        return EXIT_FAILED


def _run(options: TorchrunOptions) -> int:
    from allranks.launch.torchrun.start import start

    with TorchrunView(options) as view:
        result = start(options, view, view.show)
    if not isinstance(result, tuple):
        return _report(result)
    code, message = result
    if message:
        _say(message)
    return code


def _report(result: RunResult) -> int:
    """Say how the run ended, and return torchrun's exit code."""
    if result.status != "succeeded":
        _say(result.message)
    elif "loss_not_finite" in result.metrics:
        _say(f"warning: {result.message}")
    folder = Path(result.folder)
    shown_folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    more = "" if result.status == "succeeded" else f"; more: allranks diagnose {shown_folder}"
    echo(f"allranks: run folder {shown_folder}{more}", err=True)
    return EXIT_OK if result.status == "succeeded" else EXIT_FAILED
