"""``allranks logs``: a run's logs by rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli.options import json_option, print_json, root_option, run_argument
from allranks.errors import EXIT_OK, RequestError

if TYPE_CHECKING:
    from allranks.rundir import RunDir


@click.command("logs")
@run_argument
@click.option("--rank", type=int, multiple=True, help="Only these ranks; may be repeated.")
@click.option("--node", help="Only ranks of this host.")
@click.option("--attempt", type=int, help="Which attempt; default the last.")
@click.option(
    "--tail", "last", type=click.IntRange(min=0), default=20, show_default=True, help="Lines of each file; 0 for all."
)
@click.option("--follow", "-f", is_flag=True, help="Go on showing what is added, until the run ends.")
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
    from allranks.rundir import find_run

    found = find_run(run, run_root)
    attempts = found.attempts()
    if not attempts:
        raise RequestError(f"run {found.name} has no logs yet")
    if attempt is not None and attempt not in attempts:
        raise RequestError(f"run {found.name} has no attempt {attempt}; there are: {', '.join(map(str, attempts))}")
    number = attempt or attempts[-1]
    files = _chosen(found, number, rank, node)
    if as_json:
        print_json(
            [
                {
                    "rank": r,
                    "host": p.name.rsplit(".rank", 1)[0],
                    "attempt": number,
                    "file": str(p),
                    "lines": _lines(p, last),
                }
                for r, p in files.items()
            ]
        )
        return EXIT_OK
    offsets = {}
    for r, path in files.items():
        offsets[r] = path.stat().st_size
        for line in _lines(path, last):
            click.echo(f"[rank {r}] {line}")
    if follow:
        _follow(found, number, rank, node, offsets)
    return EXIT_OK


def _chosen(run: RunDir, attempt: int, ranks: tuple[int, ...], node: str | None) -> dict[int, Path]:
    files = run.rank_logs(attempt)
    unknown = [r for r in ranks if r not in files]
    if unknown:
        raise RequestError(
            f"run {run.name}, attempt {attempt} has no log of rank {unknown[0]}; ranks with logs: {', '.join(map(str, files)) or 'none'}"
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
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-last:] if last else lines


def _follow(run: RunDir, attempt: int, ranks: tuple[int, ...], node: str | None, offsets: dict[int, int]) -> None:
    from allranks import api

    while True:
        alive = api.running(run)
        for r, path in _chosen(run, attempt, (), node).items():
            if ranks and r not in ranks:
                continue
            with path.open("rb") as file:
                file.seek(offsets.get(r, 0))
                data = file.read()
            end = data.rfind(b"\n") + 1
            offsets[r] = offsets.get(r, 0) + end
            for line in data[:end].decode("utf-8", "replace").splitlines():
                click.echo(f"[rank {r}] {line}")
        if not alive:
            return
        time.sleep(0.3)
