"""Prepare nodes for a job: find what would fail, pack what they lack (``allranks doctor``, ``stage``)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.options import any_path, echo, json_option, print_json, set_option
from allranks.errors import EXIT_FAILED, EXIT_OK
from allranks.utils.text import format_bytes

if TYPE_CHECKING:
    from allranks.nodes.staging.bundles import Bundle


@click.command("doctor")
@click.argument("spec", required=False, type=any_path)
@set_option
@click.option(
    "--collectives",
    is_flag=True,
    help="Also measure collectives by size, and copies and all-reduces between pairs of ranks.",
)
@click.option("--exclude-bad", is_flag=True, help="Continue without nodes that fail, if the spec allows fewer.")
@click.option("--imports/--no-imports", default=True, show_default=True, help="Also import the packages.")
@click.option("--wait-s", default=600.0, show_default=True, help="Seconds to wait for the nodes to become free.")
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
    """Check this machine, or every node that SPEC would use, and show how to fix what fails.

    With a Slurm spec, the nodes are allocated with salloc for the check and then released.
    """
    from allranks.launch.doctor import DoctorOptions, doctor
    from allranks.launch.preview import PreparedRun, prepare
    from allranks.spec.records import RunSpec

    run = prepare(spec, sets) if spec else PreparedRun(RunSpec())
    request = DoctorOptions(collectives=collectives, exclude_bad=exclude_bad, imports=imports)
    say = partial(echo, err=True)
    nodes = run.launcher.nodes_to_examine(run.spec, wait_s=wait_s, say=say)
    report = doctor(run, request, nodes, say)
    if as_json:
        print_json(report.as_json())
    else:
        _print(report)
    return EXIT_OK if report.ok else EXIT_FAILED


def _print(doctor: Any) -> None:
    from allranks.nodes.preflight.runner import failure_lines
    from allranks.planning.network_policy import policy_lines as network_lines

    for report in doctor.preflight.reports:
        echo(report.line(), message=True)
    network = doctor.preflight.network
    if network:
        echo(f"network {network.network}: {network.reason}")
    for text in (*(one.line() for one in doctor.sweep), *doctor.bandwidth, *(pair.line() for pair in doctor.pairs)):
        echo(text, message=True)
    if doctor.pairs:
        echo(f"collectives: {doctor.pairs_verdict}")
    for one in doctor.copies:
        echo(one.line())
    for line in network_lines(doctor.policy):
        echo(line)
    if doctor.outcome is not None:
        if line := doctor.outcome.line():
            echo(f"the ranks used: {line}")
        for item in doctor.outcome.findings:
            echo(f"{item.host}: network: {item.text}")
    for line in failure_lines(doctor.preflight.reports):
        echo(line)
    for note in doctor.notes:
        echo(note)


@click.command("stage")
@click.argument("spec", type=any_path)
@set_option
@click.option("--no-packages", is_flag=True, help="Leave out the Python packages, because the nodes have them.")
@click.option("--to", type=any_path, help="Folder for bundles. [a subfolder of the spec's cache]")
@json_option
def stage_command(spec: Path, sets: tuple[str, ...], no_packages: bool, to: Path | None, as_json: bool) -> int:
    """Build and verify the bundle of SPEC: code, packages, model, tokenizer and data at pinned revisions.

    Parts that are already packed and unchanged are verified, not packed again.
    """
    import msgspec

    from allranks.launch import preview
    from allranks.nodes.staging.bundles import build

    def say(text: str) -> None:
        echo(text, err=True)

    bundle = build(preview.read_spec(spec, sets), to.absolute() if to else None, packages=not no_packages, log=say)
    if as_json:
        print_json({**msgspec.to_builtins(bundle), "bytes": bundle.bytes})
    else:
        _show_bundle(bundle)
    return EXIT_OK


def _show_bundle(bundle: Bundle) -> None:
    from allranks.cli.console import FittedColumn, print_fitted, table_console

    console = table_console()
    columns = [FittedColumn("part"), FittedColumn("files", right=True), FittedColumn("size", right=True)]
    columns += [FittedColumn("SHA-256", drop=1), FittedColumn("how", fold_to=10)]
    columns += [FittedColumn("from", fold_to=16), FittedColumn("revision", drop=2)]
    rows = [
        [p.name, str(p.files), format_bytes(p.bytes), p.sha256[:16], p.how, p.path, (p.revision or "")[:12]]
        for p in bundle.parts
    ]
    print_fitted(console, columns, rows, "; --json has all", title=f"bundle {bundle.key}")
    python = f"{bundle.python.version} ({bundle.python.soabi})"
    console.say(f"{format_bytes(bundle.bytes)}, verified in {bundle.seconds:.1f} s; nodes need Python {python}")
    console.print(bundle.file, highlight=False, markup=False, soft_wrap=True)
