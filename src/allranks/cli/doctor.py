"""``allranks doctor``: what would fail, before anything waits in a queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from allranks.cli.options import any_path, json_option, print_json, set_option
from allranks.errors import EXIT_FAILED, EXIT_OK


@click.command("doctor")
@click.argument("spec", required=False, type=any_path)
@set_option
@click.option("--collectives", is_flag=True, help="Also copies and all-reduces between all pairs of ranks.")
@click.option("--exclude-bad", is_flag=True, help="Go on without the nodes that fail, if the spec allows fewer.")
@click.option("--imports/--no-imports", default=True, show_default=True, help="Really import the packages.")
@click.option("--wait-s", default=600.0, show_default=True, help="How long to wait for the nodes to be free.")
@json_option
def doctor_command(
    spec: Path | None,
    sets: tuple[str, ...],
    collectives: bool,
    exclude_bad: bool,
    imports: bool,
    wait_s: float,
    as_json: bool,
) -> int:
    """Check this machine, or every node that SPEC would use: one line a node, and the cure of what fails.

    With a Slurm spec it takes the nodes for a moment (salloc) and gives them back.
    """
    from allranks import asked, preflight
    from allranks.preflight.doctor import Request, doctor
    from allranks.spec.records import RunSpec

    checked = asked.read_spec(spec, sets) if spec else RunSpec()
    if spec:
        preflight.check_request(checked)
    request = Request(collectives=collectives, exclude_bad=exclude_bad, imports=imports, wait_s=wait_s)
    found = doctor(checked, request, say=lambda text: click.echo(text, err=True))
    if as_json:
        print_json(found.as_json())
    else:
        _print(found)
    return EXIT_OK if found.ok else EXIT_FAILED


def _print(found: Any) -> None:
    from allranks.fabric.report import lines as network_lines
    from allranks.preflight.gather import cures, text_line

    for report in found.preflight.reports:
        click.echo(text_line(report))
    network = found.preflight.network
    if network:
        click.echo(f"network {network.network}: {network.reason}")
    for pair in found.pairs:
        click.echo(pair.line())
    if found.pairs:
        click.echo(f"collectives: {found.pairs_verdict}")
    for result in found.copies:
        click.echo(result.line())
    for line in network_lines(found.policy):
        click.echo(line)
    if found.outcome is not None:
        if line := found.outcome.line():
            click.echo(f"the ranks used: {line}")
        for item in found.outcome.findings:
            click.echo(f"{item.host}: network: {item.text}")
    for line in cures(found.preflight.reports):
        click.echo(line)
    for note in found.notes:
        click.echo(note)
