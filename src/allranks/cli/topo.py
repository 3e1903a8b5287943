"""``allranks topo``: how the GPUs and network cards of a machine are wired, and what NCCL should be told."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.options import any_path, json_option, print_json
from allranks.errors import EXIT_OK, EXIT_REQUEST, RequestError

if TYPE_CHECKING:
    from allranks.fabric.decision import EnvVar
    from allranks.fabric.facts import NodeFacts
    from allranks.topo.records import Topology


MAX_OTHERS = 3
"""Lines of a pasted log that are shown one by one; what the matrix itself lacks is always shown."""


@click.command("topo")
@click.argument("file", required=False, type=any_path)
@click.option("--svg", type=any_path, metavar="OUT", help="Also write the picture as SVG.")
@json_option
def topo_command(file: Path | None, svg: Path | None, as_json: bool) -> int:
    """Read `nvidia-smi topo -m` of this machine, or from FILE (- is standard input); draw it and advise on NCCL.

    Exit code 2 if the matrix is cut off, so that the link of some pair of GPUs is not known.
    """
    from allranks.topo.advise import advise
    from allranks.topo.parse import parse
    from allranks.topo.source import from_driver, read_source

    topology = parse(from_driver() if file is None else read_source(file))
    advice = advise(topology, _live(topology) if file is None else None)
    if svg is not None:
        _write_svg(svg, topology)
    if as_json:
        print_json(as_document(topology, advice))
    else:
        _print(topology, advice)
    missing = topology.missing_pairs()
    if missing:
        click.echo(
            f"allranks: the matrix is not whole: the link of {len(missing)} pairs of GPUs is not in it (such as "
            f"{missing[0][0]}-{missing[0][1]}); print it again with `nvidia-smi topo -m`",
            err=True,
        )
        return EXIT_REQUEST
    return EXIT_OK


def _live(topology: Topology) -> NodeFacts:
    """What this machine says beside its matrix: IOMMU, ACS, an earlier copy test."""
    from allranks.fabric.gather import this_node
    from allranks.facts import host_name

    return this_node(host_name(), Path("runs"), topology)


def as_document(topology: Topology, advice: list[EnvVar]) -> dict[str, Any]:
    """What ``--json`` prints."""
    import msgspec

    keep = ("gpus", "nics", "links", "unread", "p2p")
    document = {key: msgspec.to_builtins(getattr(topology, key)) for key in keep}
    return {**document, "advice": [item.advice() for item in advice]}


def _write_svg(out: Path, topology: Topology) -> None:
    from allranks.topo.svg import svg

    try:
        out.write_text(svg(topology), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--svg {out} cannot be written: {error.strerror or error}") from None


def _print(topology: Topology, advice: list[EnvVar]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from allranks.topo.draw import draw
    from allranks.topo.parse import OTHER

    console = Console()
    console.print(draw(topology), soft_wrap=True)
    console.print("NCCL", style="bold")
    for item in advice:
        console.print(
            f"  [bold]{item.name}[/bold] {'left alone' if item.value is None else '= ' + escape(item.value)}",
            highlight=False,
        )
        for part in textwrap.wrap(
            f"{item.reason}. Risk: {item.risk}", max(console.width - 6, 30), break_on_hyphens=False
        ):
            console.print(f"      [dim]{escape(part)}[/dim]", highlight=False)
    if advice:
        console.print(f"source: {advice[0].documentation.partition('#')[0]}", highlight=False)
    if topology.unread:
        console.print("\nNot understood:", highlight=False)
    others = [item for item in topology.unread if item.why == OTHER]
    hidden = others[MAX_OTHERS:]
    for item in [item for item in topology.unread if item not in hidden]:
        where = f"line {item.line}: " if item.line else ""
        text = f" ({item.text})" if item.text else ""
        console.print(escape(f"  {where}{item.why}{text}"), highlight=False, soft_wrap=True)
    if hidden:
        console.print(
            f"  {len(hidden)} more lines that are no part of the matrix, to line {hidden[-1].line}", highlight=False
        )
