"""``allranks diagnose``: what went wrong, where, why, and what to do."""

from __future__ import annotations

from pathlib import Path

import click

from allranks.cli.options import any_path, json_option, print_json, run_or_path
from allranks.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEST


@click.command("diagnose")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=any_path)
@click.option("--workers", type=click.IntRange(min=1), help="Processes that read in parallel (default: one a core).")
@json_option
def diagnose_command(paths: tuple[Path, ...], workers: int | None, as_json: bool) -> int:
    """Say what went wrong: from run folders, folders of logs, or any log files, packed or not.

    Reads Slurm output, torchrun, NCCL, kernel and system logs, sacct tables, py-spy and faulthandler dumps. Exit code 1 if
    there are findings, 0 if not, 2 if nothing there could be read.
    """
    import msgspec

    from allranks.diagnose import diagnose

    diagnosis = diagnose([run_or_path(path) for path in paths], workers=workers)
    if as_json:
        print_json(msgspec.to_builtins(diagnosis))
    else:
        from allranks.diagnose.show import show

        show(diagnosis)
    if diagnosis.findings:
        return EXIT_FAILED
    return EXIT_OK if diagnosis.readable else EXIT_REQUEST
