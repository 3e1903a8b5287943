"""``allranks cluster``: a real Slurm on this machine, to try multi-node code on and to break."""

from __future__ import annotations

import os
import signal
import sys
from typing import TypeVar

import click
import msgspec

from allranks.cli.cluster_fault import fault
from allranks.cli.options import FullHelpGroup
from allranks.errors import EXIT_FAILED, AllranksError, RequestError
from allranks.testcluster import BoxOptions, Hidden, find_box, need_box
from allranks.testcluster.box import box_names, default_name
from allranks.testcluster.records import DEFAULT_NAME
from allranks.testcluster.status import BoxStatus, box_status

Value = TypeVar("Value", int, str)
PER_NODE = "[NODE=]VALUE"


@click.group(cls=FullHelpGroup)
def cluster() -> None:
    """A real Slurm cluster in a box: one machine, 1 to 16 nodes with a network, host name and /tmp each."""


cluster.add_command(fault)


@cluster.command()
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Several boxes can be up under several names.")
@click.option("--nodes", default=3, show_default=True, help="1 to 16; they are called n1, n2, ...")
@click.option("--cpus", multiple=True, metavar=PER_NODE, help="CPUs a node announces to Slurm. [this machine's]")
@click.option(
    "--memory", multiple=True, metavar="[NODE=]MIB", help="Memory a node announces. [its share of this one's]"
)
@click.option("--gpus", multiple=True, metavar=PER_NODE, help="GPUs a node announces; there need be none. [0]")
@click.option("--interface", multiple=True, metavar="[NODE=]NAME", help="Name of a node's network interface. [eth0]")
@click.option("--shared-tmp", is_flag=True, help="Nodes use this machine's /tmp instead of one each.")
@click.option("--tmp-mb", default=4096, show_default=True, help="Size of a node's /tmp; memory, once it is used.")
@click.option("--hide", multiple=True, metavar="FOLDER[=NODE,...]", help="A folder that nodes (all) do not share.")
@click.option("--partition", "partitions", multiple=True, help="Partition of all nodes; the first is default. [main]")
@click.option("--network", help="IPv4 range of the box, such as 10.77.0.0/24. [a free one]")
@click.option("--accounting", is_flag=True, help="slurmdbd with MariaDB: real accounts (lab), QOS and sacct.")
@click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A line of slurm.conf; it replaces the box's own.")
@click.option("--json", "as_json", is_flag=True, help="Print the box as one JSON document.")
def up(
    *,
    name: str,
    nodes: int,
    cpus: tuple[str, ...],
    memory: tuple[str, ...],
    gpus: tuple[str, ...],
    interface: tuple[str, ...],
    shared_tmp: bool,
    tmp_mb: int,
    hide: tuple[str, ...],
    partitions: tuple[str, ...],
    network: str | None,
    accounting: bool,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Start a box, and return once all its nodes are idle."""
    from allranks.testcluster import lifecycle

    options = BoxOptions(
        name=name,
        nodes=nodes,
        cpus=per_node("--cpus", cpus, int),
        memory_mb=per_node("--memory", memory, int),
        gpus=per_node("--gpus", gpus, int),
        interfaces=per_node("--interface", interface, str),
        shared_tmp=shared_tmp,
        tmp_mb=tmp_mb,
        hidden=tuple(_hidden(text) for text in hide),
        partitions=partitions or ("main",),
        network=network,
        accounting=accounting,
        conf=conf,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was begun is taken back
    box = lifecycle.up(options)
    _print(box_status(box), as_json)
    if not as_json:
        click.echo(
            "Use it: allranks cluster exec -- srun -N2 hostname   (launcher: slurm finds it by itself)", err=True
        )


@cluster.command()
@click.option("--name", help="Which box, where several are up.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(name: str | None, as_json: bool) -> None:
    """Show the box that is up; exit 1 if there is none or not all of it works."""
    now = box_status(find_box(name))
    _print(now, as_json)
    sys.exit(0 if now.healthy else EXIT_FAILED)


@cluster.command(name="exec", context_settings={"allow_interspersed_args": False})
@click.option("--name", help="Which box, where several are up.")
@click.option("--node", help="Run on this node, past Slurm, instead of on the login side.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def exec_(name: str | None, node: str | None, command: tuple[str, ...]) -> None:
    """Run COMMAND once on the login side (or a node); its output and exit code are passed on untouched."""
    box = need_box(name)
    prefix = box.command_prefix() if node is None else box.node_prefix(node)
    sys.stdout.flush()
    os.execv(prefix[0], [*prefix, *command])  # noqa: S606 - the user's own command, no shell in between


@cluster.command()
@click.option("--name", help="Which box. [the one that is up, or 'box']")
@click.option("--all", "every", is_flag=True, help="End every box of this user.")
def down(name: str | None, every: bool) -> None:
    """End a box: no process, namespace, interface, mount or file is left. Also after a crash; twice is no error."""
    from allranks.testcluster import lifecycle

    for one in box_names() if every else [name or default_name()]:
        done = lifecycle.down(one)
        click.echo(f"Box '{one}' is gone." if done else f"There is no box '{one}': nothing to do.", err=True)


def per_node(option: str, texts: tuple[str, ...], kind: type[Value]) -> dict[str, Value]:
    """``4`` or ``n2=8`` to a map from node to value; "" stands for all other nodes."""
    values: dict[str, Value] = {}
    for text in texts:
        node, _, value = text.rpartition("=")
        try:
            values[node] = kind(value)
        except ValueError:
            raise RequestError(f"{option} {text}: give a whole number, or NODE=NUMBER such as n2=8.") from None
    return values


def _hidden(text: str) -> Hidden:
    path, _, nodes = text.partition("=")
    return Hidden(path=path, nodes=tuple(name for name in nodes.split(",") if name))


def _print(now: BoxStatus, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(now), indent=2).decode())
    elif not now.up:
        crashed = f" Left by a crash: {', '.join(box_names())}; see: allranks cluster down." if box_names() else ""
        click.echo(f"No box is up. Start one with: allranks cluster up.{crashed}", err=True)
    else:
        _print_table(now)


def _print_table(now: BoxStatus) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"box '{now.name}', {now.network}, login side {now.login_address}", title_justify="left")
    for column in ("node", "address", "interface", "CPUs", "MiB", "GPUs", "state"):
        table.add_column(column, no_wrap=True)
    for node in now.nodes:
        table.add_row(
            *(node.name, node.address, node.interface, str(node.cpus), str(node.memory_mb), str(node.gpus)),
            node.state or "?" if node.running else "dead",
        )
    Console().print(table)
    for node in now.nodes:
        for label, values in (("hidden", node.hidden), ("faults", node.faults)):
            if values:
                click.echo(f"{node.name} {label}: {', '.join(values)}")
    if not now.controller:
        click.echo(f"slurmctld does not answer; its log is in {now.folder}/log.")


cluster_command = cluster
"""The name that the root command looks for."""


def main() -> None:
    """For ``python -m allranks.cli.cluster``."""
    try:
        cluster()
    except AllranksError as error:
        click.echo(f"allranks: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
