"""``allranks smoke``: run the smoke tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from rich.markup import escape

from allranks.cli.console import SafeConsole, table_console
from allranks.cli.options import (
    complete_smoke_tests,
    echo,
    error_line,
    json_option,
    print_json,
    root_option,
    set_only_option,
)
from allranks.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from allranks.lab.smoke.records import TestResult
    from allranks.lab.smoke.runner import PreparedTest

STEPS_PER_LINE = 25  # steps between two lines, as the notes have it


@click.command("smoke")
@click.argument("names", nargs=-1, shell_complete=complete_smoke_tests)
@click.option(
    "--on",
    "place",
    default="local",
    show_default=True,
    type=click.Choice(["local", "slurm", "cluster"]),
    help="Where to run: only this machine, its Slurm cluster, or a cluster in a box.",
)
@click.option(
    "--scale",
    default="fit",
    show_default=True,
    type=click.Choice(["fit", "seed", "tiny"]),
    help="Sizes: the largest that fits up to the reference size; the reference size; or a toy run.",
)
@root_option
@click.option("--dry-run", is_flag=True, help="Show each test's settings and batch script without running anything.")
@set_only_option
@json_option
def smoke_command(
    names: tuple[str, ...], place: str, scale: str, run_root: Path, dry_run: bool, sets: tuple[str, ...], as_json: bool
) -> int:
    """Run the smoke tests NAMES (such as 01 or 02_ddp, or all) and show each criterion, the measured value next to
    its threshold. Exit code 0 only if nothing failed. Without NAMES, list the tests."""
    from allranks.lab.smoke import TESTS, select_tests
    from allranks.lab.smoke.report import as_document, write_report
    from allranks.lab.smoke.runner import SmokeOptions, cluster_for_tests, prepare_test, run_tests
    from allranks.rundir.paths import make_run_root
    from allranks.utils.machine import machine_facts

    if not names:
        if as_json:
            print_json({"tests": [{"name": test.name, "title": test.title} for test in TESTS]})
        else:
            for test in TESTS:
                echo(f"{test.name:<22} {test.title}")
            echo("\nrun some of them with: allranks smoke NAME...; all of them with: allranks smoke all", message=True)
        return EXIT_OK
    wanted = SmokeOptions(place=cast(Any, place), scale=cast(Any, scale), sets=sets, run_root=str(run_root))
    machine = machine_facts()
    ready = [prepare_test(test, wanted, machine) for test in select_tests(names)]
    if dry_run:
        _show_dry(ready, as_json)
        return EXIT_OK
    make_run_root(run_root)
    console = table_console(150, stderr=as_json, quiet=as_json)
    watcher = _ProgressPrinter(console)
    nodes = max((r.placement.nodes for r in ready if r.placement), default=1)
    with cluster_for_tests(wanted.place, nodes, watcher.say):
        results = run_tests(ready, wanted, machine, watcher)
    folder = run_root.absolute() / results.name
    write_report(results, folder)
    if as_json:
        print_json({**as_document(results), "report": str(folder / "smoke.html")})
    else:
        _show(console, results, folder)
    if not results.ran:
        return EXIT_ENVIRONMENT
    return EXIT_FAILED if results.failed else EXIT_OK


class _ProgressPrinter:
    """Print progress lines while the tests run."""

    def __init__(self, console: SafeConsole) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.say(text)

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["rank"] == 0 and event["step"] % STEPS_PER_LINE == 0:
            self.say(f"    step {event['step']}, loss {event['loss']:.4f}")
        if event["event"] == "error" and not event.get("echo"):
            self.say(f"    {error_line(event)}")

    def begin(self, ready: PreparedTest) -> None:
        self._console.print(f"\n[bold]{ready.test.name}[/bold] {escape(ready.test.title)}", highlight=False)
        if ready.setting:
            self.say(f"  {ready.setting}")
        for line in ready.scaled:
            self.say(f"  differs from the reference: {line}")

    def end(self, result: TestResult) -> None:
        from allranks.lab.smoke.report import criterion_line

        for judged in result.criteria:
            self._console.print(criterion_line(judged), highlight=False, soft_wrap=True)
        self.say(f"  {result.status}{f': {result.message}' if result.message else ''}")


def _show(console: SafeConsole, results: Any, folder: Path) -> None:
    from allranks.lab.smoke.report import PLACES, figures_table, figures_title, overview_table, verdict

    for test in results.tests:
        if test.figures:
            console.print()
            console.print(escape(figures_title(test)), style="italic", highlight=False, soft_wrap=True)
            console.print(figures_table(test))
    console.print()
    console.print(
        f"Smoke tests {PLACES[results.place]}: {verdict(results)}", style="bold", highlight=False, soft_wrap=True
    )
    console.print(overview_table(results))
    console.print(f"report   {folder}/smoke.html", highlight=False, markup=False, soft_wrap=True)


def _show_dry(ready: list[PreparedTest], as_json: bool) -> None:
    """Show specs and batch scripts."""
    from allranks.launch.preview import PreparedRun
    from allranks.spec import spec_to_dict, spec_to_yaml

    scripts = [PreparedRun(r.spec).batch_script if r.spec else None for r in ready]
    if as_json:
        rows = [
            {
                "name": r.test.name,
                "unable": r.unable or None,
                "scaled": r.scaled,
                "spec": spec_to_dict(r.spec) if r.spec else None,
                "batch_script": script,
            }
            for r, script in zip(ready, scripts, strict=True)
        ]
        print_json({"tests": rows})
        return
    for r, script in zip(ready, scripts, strict=True):
        echo(f"# {r.test.name}: {r.test.title}")
        for line in r.scaled:
            echo(f"# differs from the reference: {line}")
        echo(f"# not run: {r.unable}\n" if r.spec is None else script or spec_to_yaml(r.spec))
