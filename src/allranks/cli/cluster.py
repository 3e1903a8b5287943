"""``allranks cluster``: a real Slurm cluster on this machine, for testing multi-node code and injecting faults."""

from __future__ import annotations

import os
import signal
import sys
from typing import TypeVar

import click
import msgspec

from allranks.cli.options import FullHelpGroup, echo
from allranks.errors import EXIT_FAILED, AllranksError, RequestError
from allranks.lab.cluster import BoxOptions, HiddenFolder, find_box, need_box
from allranks.lab.cluster.box import BoxStatus, box_names, box_status, default_name
from allranks.nodes.slurm.endpoints import DEFAULT_NAME

Value = TypeVar("Value", int, str)
PER_NODE = "[NODE=]VALUE"
NODE = click.argument("node")
NAME = click.option("--name", help="Box to use if several are running.")


@click.group(cls=FullHelpGroup)
def cluster() -> None:
    """Run a real Slurm cluster on this machine: 1 to 16 nodes, each with its own network, host name and /tmp."""


@cluster.command()
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the box; several boxes can run at once.")
@click.option("--nodes", default=3, show_default=True, help="Number of nodes, 1 to 16; their names are n1, n2, ...")
@click.option("--cpus", multiple=True, metavar=PER_NODE, help="CPUs per node, as declared to Slurm. [this machine's]")
@click.option(
    "--memory",
    multiple=True,
    metavar="[NODE=]MIB",
    help="Memory per node, as declared to Slurm. [an equal share of this machine's]",
)
@click.option(
    "--gpus",
    multiple=True,
    metavar=PER_NODE,
    help="GPUs per node, as declared to Slurm; the machine need not have any. [0]",
)
@click.option("--interface", multiple=True, metavar="[NODE=]NAME", help="Name of a node's network interface. [eth0]")
@click.option("--shared-tmp", is_flag=True, help="Nodes share this machine's /tmp instead of having one each.")
@click.option(
    "--tmp-mb",
    default=4096,
    show_default=True,
    help="Size of a node's /tmp; it is a tmpfs and uses memory as it fills.",
)
@click.option(
    "--hide", multiple=True, metavar="FOLDER[=NODE,...]", help="A folder that the nodes (or all nodes) do not share."
)
@click.option(
    "--partition", "partitions", multiple=True, help="A partition of all nodes; the first one is the default. [main]"
)
@click.option("--network", help="IPv4 range of the box, such as 10.77.0.0/24. [a free one]")
@click.option("--accounting", is_flag=True, help="Run slurmdbd with MariaDB: accounts (lab), QOS and sacct.")
@click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A line for slurm.conf; it overrides the default.")
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
    """Start a box and return when all its nodes are idle."""
    from allranks.lab.cluster import lifecycle

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
        echo("Use it: allranks cluster exec -- srun -N2 hostname   (launcher: slurm finds it automatically)", err=True)


@cluster.command()
@click.option("--name", help="Box to use if several are running.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(name: str | None, as_json: bool) -> None:
    """Show the running box; exit 1 if there is none or part of it does not work."""
    now = box_status(find_box(name))
    _print(now, as_json)
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


def _hidden(text: str) -> HiddenFolder:
    path, _, nodes = text.partition("=")
    return HiddenFolder(path=path, nodes=tuple(name for name in nodes.split(",") if name))


def _print(now: BoxStatus, as_json: bool) -> None:
    if as_json:
        echo(msgspec.json.format(msgspec.json.encode(now), indent=2).decode())
    elif not now.up:
        crashed = f" Left by a crash: {', '.join(box_names())}; see: allranks cluster down." if box_names() else ""
        echo(f"No box is running. Start one with: allranks cluster up.{crashed}", err=True)
    else:
        _print_table(now)


def _print_table(now: BoxStatus) -> None:
    from rich.table import Table

    from allranks.cli.console import SafeConsole

    table = Table(title=f"box '{now.name}', {now.network}, login node {now.login_address}", title_justify="left")
    for column in ("node", "address", "interface", "CPUs", "MiB", "GPUs", "state"):
        table.add_column(column, no_wrap=True)
    for node in now.nodes:
        table.add_row(
            *(node.name, node.address, node.interface, str(node.cpus), str(node.memory_mb), str(node.gpus)),
            node.state or "?" if node.running else "dead",
        )
    SafeConsole().print(table)
    for node in now.nodes:
        for label, values in (("hidden", node.hidden), ("faults", node.faults)):
            if values:
                echo(f"{node.name} {label}: {', '.join(values)}")
    if not now.controller:
        echo(f"slurmctld does not answer; its log is in {now.folder}/log.")


@cluster.group(cls=FullHelpGroup)
def fault() -> None:
    """Inject a fault into the box. `cluster status` lists active faults; `fault heal` undoes them."""


def _inject(name: str | None, kind: str, node: str = "", **arguments: str) -> None:
    from allranks.lab.cluster.faults import inject

    record = inject(need_box(name), kind, node, **arguments)
    detail = [f"{key}={value}" for key, value in record.detail.items()]
    echo(" ".join(["injected:", kind, *([node] if node else []), *detail]), err=True)


@fault.command()
@click.argument("node", required=False)
@click.option("--kind", help="Undo only faults of this kind.")
@NAME
def heal(node: str | None, kind: str | None, name: str | None) -> None:
    """Undo all faults (of NODE), the latest first."""
    from allranks.lab.cluster.faults import heal as mend

    mended = mend(need_box(name), node, kind)
    for record in mended:
        echo(f"healed: {record.kind} {record.node}".rstrip(), err=True)
    if not mended:
        echo("No active faults.", err=True)


@fault.command("kill-rank")
@click.argument("rank", type=click.IntRange(min=0))
@click.option("--job", default="", help="Job id; needed only if several jobs are running.")
@click.option("--signal", default="KILL", show_default=True, help="Signal to send; STOP makes the rank hang.")
@NAME
def kill_rank(rank: int, job: str, signal: str, name: str | None) -> None:
    """Send a signal to the process of one RANK (torchrun's RANK, otherwise Slurm's task number)."""
    _inject(name, "kill-rank", rank=str(rank), job=job, signal=signal)


@fault.command("kill-node")
@NODE
@NAME
def kill_node(node: str, name: str | None) -> None:
    """Kill NODE and everything that runs on it; `fault heal` starts it again."""
    _inject(name, "kill-node", node)


@fault.command("stop-slurmd")
@NODE
@NAME
def stop_slurmd(node: str, name: str | None) -> None:
    """Stop slurmd on NODE; its jobs keep running, but Slurm loses contact with them."""
    _inject(name, "stop-slurmd", node)


@fault.command("restart-slurmd")
@NODE
@NAME
def restart_slurmd(node: str, name: str | None) -> None:
    """Restart slurmd on NODE."""
    _inject(name, "restart-slurmd", node)


@fault.command("stop-slurmctld")
@NAME
def stop_slurmctld(name: str | None) -> None:
    """Stop slurmctld; jobs keep running."""
    _inject(name, "stop-slurmctld")


@fault.command("restart-slurmctld")
@NAME
def restart_slurmctld(name: str | None) -> None:
    """Restart slurmctld."""
    _inject(name, "restart-slurmctld")


@fault.command("cut-link")
@NODE
@NAME
def cut_link(node: str, name: str | None) -> None:
    """Drop all packets to and from NODE silently; its interface stays up."""
    _inject(name, "cut-link", node)


@fault.command("slow-link")
@NODE
@click.option("--rate", required=True, help="Limit for both directions, such as 500kbit, 10mbit or 1gbit.")
@click.option("--delay-ms", type=click.IntRange(min=1), help="Also delay packets; needs netem in the kernel.")
@NAME
def slow_link(node: str, rate: str, delay_ms: int | None, name: str | None) -> None:
    """Limit the bandwidth of NODE's link."""
    _inject(name, "slow-link", node, rate=rate, delay_ms=str(delay_ms or ""))


@fault.command("interface-down")
@NODE
@NAME
def interface_down(node: str, name: str | None) -> None:
    """Take the interface of NODE down."""
    _inject(name, "interface-down", node)


@fault.command("fill-disk")
@NODE
@click.argument("path", default="/tmp")  # noqa: S108 - the node's own
@click.option("--leave-kb", type=click.IntRange(min=0), default=0, help="Free space to leave, in KiB. [0]")
@NAME
def fill_disk(node: str, path: str, leave_kb: int, name: str | None) -> None:
    """Fill NODE's own file system at PATH (default /tmp). Uses no memory."""
    _inject(name, "fill-disk", node, path=path, leave_kb=str(leave_kb))


@fault.command("hide-folder")
@NODE
@click.argument("path")
@NAME
def hide_folder(node: str, path: str, name: str | None) -> None:
    """Make PATH an empty folder on NODE, as if NODE did not share that file system."""
    _inject(name, "hide-folder", node, path=path)


@fault.command("loopback-hosts")
@NODE
@NAME
def loopback_hosts(node: str, name: str | None) -> None:
    """Map NODE's own name to 127.0.1.1 in its /etc/hosts."""
    _inject(name, "loopback-hosts", node)


@fault.command("wrong-clock", context_settings={"ignore_unknown_options": True})
@NODE
@click.argument("seconds")
@NAME
def wrong_clock(node: str, seconds: str, name: str | None) -> None:
    """Shift the clock that tasks on NODE use by SECONDS (environment variable ALLRANKS_CLOCK_OFFSET_S)."""
    _inject(name, "wrong-clock", node, seconds=seconds)


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
