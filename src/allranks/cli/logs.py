"""``allranks logs``: show a run's logs by rank."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli.options import echo, json_option, print_json, root_option, run_argument
from allranks.cli.streams import is_closed
from allranks.errors import EXIT_OK, RequestError

if TYPE_CHECKING:
    from allranks.rundir.paths import RunDir

PRIVATE_KEY_LINES = 120  # a key of 16384 bits has about as many


@click.command("logs")
@run_argument
@click.option("--rank", type=int, multiple=True, help="Show only this rank; may be repeated.")
@click.option("--node", help="Show only ranks of this host.")
@click.option("--attempt", type=int, help="Attempt number (default: the last).")
@click.option(
    "--tail",
    "last",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Number of last lines to show per file; 0 for all.",
)
@click.option("--follow", "-f", is_flag=True, help="Show new lines until the run ends.")
@root_option
@json_option
def logs_command(
    run: str,
    rank: tuple[int, ...],
    node: str | None,
    attempt: int | None,
    last: int,
    follow: bool,
    run_root: Path,
    as_json: bool,
) -> int:
    """Show the logs of RUN, each line with its rank."""
    from allranks.rundir.paths import find_run

    run_dir = find_run(run, run_root)
    attempts = run_dir.attempts()
    if not attempts:
        raise RequestError(f"run {run_dir.name} has no logs yet")
    if attempt is not None and attempt not in attempts:
        raise RequestError(
            f"run {run_dir.name} has no attempt {attempt}; existing attempts: {', '.join(map(str, attempts))}"
        )
    number = attempt or attempts[-1]
    files = _chosen(run_dir, number, rank, node)
    if as_json:
        rows = [(r, p.name.rsplit(".rank", 1)[0], number, str(p), _lines(p, last)) for r, p in files.items()]
        print_json([dict(zip(("rank", "host", "attempt", "file", "lines"), row, strict=True)) for row in rows])
        return EXIT_OK
    offsets = {path: path.stat().st_size if path.exists() else 0 for path in files.values()}
    for r, path in files.items():
        for line in _lines(path, last):
            echo(f"[rank {r}] {line}")
    if follow:
        _follow(run_dir, number, rank, node, offsets)
    return EXIT_OK


def _chosen(run: RunDir, attempt: int, ranks: tuple[int, ...], node: str | None) -> dict[int, Path]:
    files = run.rank_logs(attempt)
    unknown = [r for r in ranks if r not in files]
    if unknown:
        raise RequestError(
            f"run {run.name}, attempt {attempt} has no log of rank {unknown[0]}; ranks with logs: "
            f"{', '.join(map(str, files)) or 'none'}"
        )
    hosts = sorted({p.name.rsplit(".rank", 1)[0] for p in files.values()})
    if node is not None and node not in hosts:
        raise RequestError(f"run {run.name} had no ranks on {node}; hosts: {', '.join(hosts)}")
    return {
        r: p
        for r, p in files.items()
        if (not ranks or r in ranks) and (node is None or p.name.startswith(f"{node}.rank"))
    }


def _lines(path: Path, last: int) -> list[str]:
    """Return the last lines of a log (0 for all), sanitized for the terminal."""
    from allranks.utils.inputs import read_text
    from allranks.utils.redaction import redact
    from allranks.utils.text import printable

    try:
        lines = read_text(path, errors="replace").splitlines()
    except OSError as error:  # the other logs are still shown
        return [f"(this log cannot be read: {error.strerror})"]
    lines = lines[-last - PRIVATE_KEY_LINES :] if last else lines
    return redact("\n".join(map(printable, lines))).split("\n")[-last:] if lines else []


def _follow(run: RunDir, attempt: int, ranks: tuple[int, ...], node: str | None, offsets: dict[Path, int]) -> None:
    from allranks import api
    from allranks.cli.run_output import LogReader

    reader = LogReader(offsets)
    while True:
        alive = api.running(run)
        for r, path in _chosen(run, attempt, (), node).items():
            for line in reader.new_lines(path) if not ranks or r in ranks else ():
                echo(f"[rank {r}] {line}")
        if not alive or is_closed(sys.stdout):
            return
        time.sleep(0.3)
