"""``allranks smoke``: the ladder of smoke tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from rich.console import Console
from rich.markup import escape

from allranks.cli.options import any_path, error_line, json_option, print_json, set_option
from allranks.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from allranks.smoke.climb import Rung
    from allranks.smoke.records import Judged, SmokeTest, TestResult

EVERY = 25  # steps between two lines, as the notes have it


@click.command("smoke")
@click.argument("names", nargs=-1)
@click.option(
    "--on",
    "place",
    default="local",
    show_default=True,
    type=click.Choice(["local", "slurm", "cluster"]),
    help="This machine alone; the Slurm that is here; or a cluster in a box on this machine.",
)
@click.option(
    "--scale",
    default="fit",
    show_default=True,
    type=click.Choice(["fit", "seed", "tiny"]),
    help="Sizes: the largest that fit up to the notes'; the notes' whatever comes; or a few steps of almost nothing.",
)
@click.option("--run-root", default="runs", show_default=True, type=any_path, help="Folder of the runs.")
@click.option("--dry-run", is_flag=True, help="Show each test's settings and batch script; run nothing.")
@set_option
@json_option
def smoke_command(
    names: tuple[str, ...], place: str, scale: str, run_root: Path, dry_run: bool, sets: tuple[str, ...], as_json: bool
) -> int:
    """Run the smoke tests NAMES (such as 01 or 02_ddp; all of them if none is named): each criterion is ticked off, the
    measured value beside its threshold. Exit code 0 only if nothing failed."""
    from allranks.facts import machine_facts
    from allranks.rundir import make_run_root
    from allranks.smoke.climb import Wanted, climb, folder_of, rung
    from allranks.smoke.ladder import chosen
    from allranks.smoke.places import standing
    from allranks.smoke.report import document, write

    wanted = Wanted(place=cast(Any, place), scale=cast(Any, scale), sets=sets, run_root=str(run_root))
    tests, machine = chosen(names), machine_facts()
    ready = [rung(test, wanted, machine) for test in tests]
    if dry_run:
        _show_dry(ready, as_json)
        return EXIT_OK
    make_run_root(run_root)
    console = Console(stderr=as_json, quiet=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, quiet=as_json, width=150)
    watcher = _Watcher(console)
    nodes = max((r.asked.nodes for r in ready if r.asked), default=1)
    with standing(cast(Any, place), nodes, watcher.say):
        ladder = climb(tests, wanted, machine, watcher)
    folder = folder_of(ladder, run_root)
    write(ladder, folder)
    if as_json:
        print_json({**document(ladder), "report": str(folder / "smoke.html")})
    else:
        _show(console, ladder, folder)
    if not ladder.ran:
        return EXIT_ENVIRONMENT
    return EXIT_FAILED if ladder.failed else EXIT_OK


class _Watcher:
    """Lines as the climb goes on."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["rank"] == 0 and event["step"] % EVERY == 0:
            self.say(f"    step {event['step']}, loss {event['loss']:.4f}")
        if event["event"] == "error" and not event.get("echo"):
            self.say(f"    {error_line(event)}")

    def begin(self, test: SmokeTest, setting: str, scaled: list[str]) -> None:
        self._console.print(f"\n[bold]{test.name}[/bold] {escape(test.title)}", highlight=False)
        if setting:
            self.say(f"  {setting}")
        for line in scaled:
            self.say(f"  not as in the notes: {line}")

    def judged(self, criterion: Judged) -> None:
        from allranks.smoke.report import criterion_line

        self._console.print(criterion_line(criterion), highlight=False, soft_wrap=True)

    def end(self, result: TestResult) -> None:
        what = f": {result.message}" if result.message else ""
        self.say(f"  {result.status}{what}")


def _show(console: Console, ladder: Any, folder: Path) -> None:
    from allranks.smoke.report import PLACES, figures_table, figures_title, overview, verdict

    for test in ladder.tests:
        if test.figures:
            console.print()
            console.print(escape(figures_title(test)), style="italic", highlight=False, soft_wrap=True)
            console.print(figures_table(test))
    console.print()
    console.print(
        f"Smoke ladder {PLACES[ladder.place]}: {verdict(ladder)}", style="bold", highlight=False, soft_wrap=True
    )
    console.print(overview(ladder))
    console.print(f"report   {folder}/smoke.html", highlight=False, soft_wrap=True)


def _show_dry(ready: list[Rung], as_json: bool) -> None:
    """Specs and batch scripts."""
    from allranks import asked
    from allranks.spec import spec_to_dict, spec_to_yaml

    if as_json:
        print_json(
            {
                "tests": [
                    {
                        "name": r.test.name,
                        "unable": r.unable or None,
                        "scaled": r.scaled,
                        "spec": spec_to_dict(r.spec) if r.spec else None,
                        "batch_script": asked.batch_script(r.spec) if r.spec else None,
                    }
                    for r in ready
                ]
            }
        )
        return
    for r in ready:
        click.echo(f"# {r.test.name}: {r.test.title}")
        if r.spec is None:
            click.echo(f"# not run: {r.unable}\n")
            continue
        for line in r.scaled:
            click.echo(f"# not as in the notes: {line}")
        click.echo(asked.batch_script(r.spec) or spec_to_yaml(r.spec))
