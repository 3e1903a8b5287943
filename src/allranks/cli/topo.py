"""``allranks topo``: show how a machine's GPUs and network cards are connected, and recommend NCCL settings."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli.options import any_path, json_option, print_json
from allranks.errors import EXIT_OK

if TYPE_CHECKING:
    from allranks.planning.env_vars import EnvVar
    from allranks.planning.records import Topology


MAX_OTHERS = 3
"""Limit on lines outside of the matrix that are listed."""


@click.command("topo")
@click.argument("file", required=False, type=any_path)
@click.option("--svg", type=any_path, metavar="OUT", help="Also write the drawing as SVG.")
@json_option
def topo_command(file: Path | None, svg: Path | None, as_json: bool) -> int:
    """Read `nvidia-smi topo -m` from this machine or FILE (- is standard input), draw it and recommend NCCL
    settings."""
    import msgspec

    from allranks.nodes.topology.advice import advise_nccl, machine_notes
    from allranks.nodes.topology.nvidia_smi import parse_topology, query_driver, read_matrix

    topology = parse_topology(query_driver() if file is None else read_matrix(file))
    live = None
    if file is None:  # IOMMU, ACS, the result of an earlier copy test
        from allranks.nodes.network.facts import this_machine_facts
        from allranks.utils.machine import host_name

        live = this_machine_facts(host_name(), Path("runs"), topology)
    advice = advise_nccl(topology, live)
    if svg is not None:
        from allranks.nodes.topology.drawings import draw_svg
        from allranks.utils.filesystem import write_error

        try:
            svg.write_text(draw_svg(topology), encoding="utf-8")
        except OSError as error:
            raise write_error(svg, error, "--svg") from None
    notes = machine_notes(topology, advice)
    if as_json:
        known = {key: getattr(topology, key) for key in ("gpus", "nics", "links", "unread", "p2p")}
        print_json({**msgspec.to_builtins(known), "advice": [item.advice() for item in advice], "notes": notes})
    else:
        _print(topology, advice, notes)
    return EXIT_OK


def _print(topology: Topology, advice: list[EnvVar], notes: list[str]) -> None:
    from rich.markup import escape

    from allranks.cli.console import SafeConsole
    from allranks.nodes.topology.drawings import draw_text

    console = SafeConsole()
    console.print(draw_text(topology), soft_wrap=True)
    wide = max(console.width - 6, 30)
    console.print("On this machine", style="bold")
    alike = "nothing special" + (": all GPUs are connected in the same way" if len(topology.gpus) > 1 else "")
    for note in notes or [alike]:
        for number, part in enumerate(textwrap.wrap(note[0].upper() + note[1:], wide, break_on_hyphens=False)):
            console.print(escape(f"{'  - ' if number == 0 else '    '}{part}"), highlight=False)
    unset = [item for item in advice if item.value is None]
    if unset:
        console.print("\nNCCL variables to leave unset", style="bold")
    for item in unset:
        lines = textwrap.wrap(f"{item.name}: {item.reason}", wide, break_on_hyphens=False)
        console.print(f"  {escape(lines[0])}", highlight=False)
        for part in lines[1:]:
            console.print(f"      [dim]{escape(part)}[/dim]", highlight=False)
    if advice:
        console.print(f"source: {advice[0].documentation.partition('#')[0]}", highlight=False)
    if topology.unread:
        console.print("\nNot part of the matrix:", highlight=False)
    for item in topology.unread[:MAX_OTHERS]:
        console.print(escape(f"  line {item.line}: {item.text}"), highlight=False, soft_wrap=True)
    if hidden := topology.unread[MAX_OTHERS:]:
        console.print(f"  {len(hidden)} more lines, up to line {hidden[-1].line}", highlight=False)
