"""``allranks cluster``: a real Slurm cluster on this machine, for testing multi-node code and injecting faults."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, TypeVar

import click
import msgspec

from allranks.cli.options import FullHelpGroup, echo
from allranks.errors import EXIT_FAILED, AllranksError, RequestError
from allranks.lab.cluster import BoxOptions, HiddenFolder, find_box, need_box
from allranks.lab.cluster.box import BoxStatus, box_names, box_status, default_name, none_running
from allranks.nodes.slurm.endpoints import DEFAULT_NAME, NAME_VARIABLE

Value = TypeVar("Value", int, str)
NAME = click.Option(["--name"], help="Box to use if several are running.")
NODE = click.Argument(["node"])


def per_node(option: str, texts: tuple[str, ...], kind: type[Value]) -> dict[str, Value]:
    """Parse ``4`` or ``n2=8`` into a map from node to value; "" is for all other nodes."""
    values: dict[str, Value] = {}
    for text in texts:
        node, _, value = text.rpartition("=")
        try:
            values[node] = kind(value)
        except ValueError:
            raise RequestError(f"{option} {text}: expected an integer, or NODE=NUMBER such as n2=8.") from None
    return values


def _per_node(option: str, name: str, kind: type[Any], what: str, text: str) -> Any:
    """Return the decorator of an option with a value for each node; `name` is the field of `BoxOptions`."""

    def parse(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
        return per_node(option, texts, kind)

    return click.option(option, name, multiple=True, metavar=f"[NODE=]{what}", callback=parse, help=text)


def _hidden(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[HiddenFolder, ...]:
    parted = (text.partition("=") for text in texts)
    return tuple(HiddenFolder(path=path, nodes=tuple(filter(None, nodes.split(",")))) for path, _, nodes in parted)


@click.group(cls=FullHelpGroup)
def cluster() -> None:
    """Run a real Slurm cluster on this machine: 1 to 16 nodes, each with its own network, host name and /tmp."""


@cluster.command()
@click.option(
    "--name", default=DEFAULT_NAME, envvar=NAME_VARIABLE, show_default=True, help="Name; several boxes can run at once."
)
@click.option("--nodes", default=3, show_default=True, help="Number of nodes, 1 to 16; their names are n1, n2, ...")
@_per_node("--cpus", "cpus", int, "VALUE", "CPUs per node, as declared to Slurm. [this machine's]")
@_per_node(
    "--memory", "memory_mb", int, "MIB", "Memory per node, as declared to Slurm. [an equal share of this machine's]"
)
@_per_node("--gpus", "gpus", int, "VALUE", "GPUs per node, as declared to Slurm; the machine need not have any. [0]")
@_per_node("--interface", "interfaces", str, "NAME", "Name of a node's network interface. [eth0]")
@click.option("--shared-tmp", is_flag=True, help="Nodes share this machine's /tmp instead of having one each.")
@click.option(
    "--tmp-mb",
    default=4096,
    show_default=True,
    help="Size of a node's /tmp; it is a tmpfs and uses memory as it fills.",
)
@click.option(
    "--hide",
    "hidden",
    multiple=True,
    metavar="FOLDER[=NODE,...]",
    callback=_hidden,
    help="A folder that the nodes (or all nodes) do not share.",
)
@click.option(
    "--partition",
    "partitions",
    multiple=True,
    default=("main",),
    help="A partition of all nodes; the first one is the default. [main]",
)
@click.option("--network", help="IPv4 range of the box, such as 10.77.0.0/24. [a free one]")
@click.option("--accounting", is_flag=True, help="Run slurmdbd with MariaDB: accounts (lab), QOS and sacct.")
@click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A line for slurm.conf; it overrides the default.")
@click.option("--json", "as_json", is_flag=True, help="Print the box as one JSON document.")
def up(as_json: bool, **options: Any) -> None:
    """Start a box and return when all its nodes are idle."""
    from allranks.lab.cluster import lifecycle

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was begun is taken back
    box = lifecycle.up(BoxOptions(**options))
    _print(box_status(box), as_json)
    if not as_json:
        echo("Use it: allranks cluster exec -- srun -N2 hostname   (launcher: slurm finds it automatically)", err=True)


@cluster.command()
@click.option("--name", help="Box to use if several are running.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(name: str | None, as_json: bool) -> None:
    """Show the running box; exit 1 if there is none or part of it does not work."""
    now = box_status(find_box(name))
    _print(now, as_json, name)
    sys.exit(0 if now.healthy else EXIT_FAILED)


@cluster.command(name="exec", context_settings={"allow_interspersed_args": False})
@click.option("--name", help="Box to use if several are running.")
@click.option("--node", help="Run on this node without Slurm, instead of on the login node.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def exec_(name: str | None, node: str | None, command: tuple[str, ...]) -> None:
    """Run COMMAND on the login node (or another node) and pass its output and exit code through."""
    box = need_box(name)
    prefix = box.command_prefix() if node is None else box.node_prefix(node)
    sys.stdout.flush()
    os.execv(prefix[0], [*prefix, *command])  # noqa: S606 - the user's own command, no shell in between


@cluster.command()
@click.option("--name", help="Which box. [the running one, or 'box']")
@click.option("--all", "every", is_flag=True, help="Stop all boxes of this user.")
def down(name: str | None, every: bool) -> None:
    """Stop a box and remove its processes, namespaces, interfaces, mounts and files. Also works after a crash."""
    from allranks.lab.cluster import lifecycle

    for one in box_names() if every else [name or default_name()]:
        done = lifecycle.down(one)
        echo(f"Box '{one}' is removed." if done else f"There is no box '{one}': nothing to do.", err=True)


def _print(now: BoxStatus, as_json: bool, name: str | None = None) -> None:
    if as_json:
        echo(msgspec.json.format(msgspec.json.encode(now), indent=2).decode())
    elif not now.up:
        left = [box for box in box_names() if find_box(box) is None]
        crashed = f" Left by a crash: {', '.join(left)}; see: allranks cluster down." if left else ""
        echo(f"{none_running(name)}{crashed}", err=True)
    else:
        _print_table(now)


def _print_table(now: BoxStatus) -> None:
    from allranks.cli.console import FittedColumn, print_fitted, table_console

    columns = [FittedColumn(name) for name in ("node", "address", "interface", "CPUs", "MiB", "GPUs", "state")]
    rows = [
        [str(value) for value in (n.name, n.address, n.interface, n.cpus, n.memory_mb, n.gpus)]
        + [n.state or "?" if n.running else "dead"]
        for n in now.nodes
    ]
    title = f"box '{now.name}', {now.network}, login node {now.login_address}"
    print_fitted(table_console(), columns, rows, title=title)
    for node in now.nodes:
        for label, values in (("hidden", node.hidden), ("faults", node.faults)):
            if values:
                echo(f"{node.name} {label}: {', '.join(values)}")
    if not now.controller:
        echo(f"slurmctld does not answer; its log is in {now.folder}/log.")


@cluster.group(cls=FullHelpGroup)
def fault() -> None:
    """Inject a fault into the box. `cluster status` lists active faults; `fault heal` undoes them."""


@fault.command()
@click.argument("node", required=False)
@click.option("--kind", help="Undo only faults of this kind.")
@click.option("--name", help="Box to use if several are running.")
def heal(node: str | None, kind: str | None, name: str | None) -> None:
    """Undo all faults (of NODE), the latest first."""
    from allranks.lab.cluster.faults import heal as mend

    mended = mend(need_box(name), node, kind)
    for record in mended:
        echo(f"healed: {record.kind} {record.node}".rstrip(), err=True)
    if not mended:
        echo("No active faults.", err=True)


def _fault(kind: str, text: str, *params: click.Parameter, **settings: Any) -> None:
    """Add the command of a kind of fault; `faults.inject` gets its arguments as texts."""

    def command(name: str | None, node: str = "", **arguments: Any) -> None:
        from allranks.lab.cluster.faults import inject

        given = {key: "" if value is None else str(value) for key, value in arguments.items()}
        record = inject(need_box(name), kind, node, **given)
        detail = [f"{key}={value}" for key, value in record.detail.items()]
        echo(" ".join(["injected:", kind, *([node] if node else []), *detail]), err=True)

    fault.add_command(
        click.Command(kind, callback=command, params=[*params, NAME], help=text, context_settings=settings)
    )


_fault(
    "kill-rank",
    "Send a signal to the process of one RANK (torchrun's RANK, otherwise Slurm's task number).",
    click.Argument(["rank"], type=click.IntRange(min=0)),
    click.Option(["--job"], default="", help="Job id; needed only if several jobs are running."),
    click.Option(["--signal"], default="KILL", show_default=True, help="Signal to send; STOP makes the rank hang."),
)
_fault("kill-node", "Kill NODE and everything that runs on it; `fault heal` starts it again.", NODE)
_fault("stop-slurmd", "Stop slurmd on NODE; its jobs keep running, but Slurm loses contact with them.", NODE)
_fault("restart-slurmd", "Restart slurmd on NODE.", NODE)
_fault("stop-slurmctld", "Stop slurmctld; jobs keep running.")
_fault("restart-slurmctld", "Restart slurmctld.")
_fault("cut-link", "Drop all packets to and from NODE silently; its interface stays up.", NODE)
_fault(
    "slow-link",
    "Limit the bandwidth of NODE's link.",
    NODE,
    click.Option(["--rate"], required=True, help="Limit for both directions, such as 500kbit, 10mbit or 1gbit."),
    click.Option(["--delay-ms"], type=click.IntRange(min=1), help="Also delay packets; needs netem in the kernel."),
)
_fault("interface-down", "Take the interface of NODE down.", NODE)
_fault(
    "fill-disk",
    "Fill NODE's own file system at PATH (default /tmp). Uses no memory.",
    NODE,
    click.Argument(["path"], default="/tmp"),  # noqa: S108 - the node's own
    click.Option(["--leave-kb"], type=click.IntRange(min=0), default=0, help="Free space to leave, in KiB. [0]"),
)
_fault(
    "hide-folder",
    "Make PATH an empty folder on NODE, as if NODE did not share that file system.",
    NODE,
    click.Argument(["path"]),
)
_fault("loopback-hosts", "Map NODE's own name to 127.0.1.1 in its /etc/hosts.", NODE)
_fault(
    "wrong-clock",
    "Shift the clock that tasks on NODE use by SECONDS (environment variable ALLRANKS_CLOCK_OFFSET_S).",
    NODE,
    click.Argument(["seconds"]),
    ignore_unknown_options=True,
)

cluster_command = cluster
"""The name that the root command looks for."""


def main() -> None:
    """Run the group as ``python -m allranks.cli.cluster``."""
    try:
        cluster()
    except AllranksError as error:
        echo(f"allranks: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
