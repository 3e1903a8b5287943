"""``allranks cluster fault``: break the box on purpose, and mend it."""

from __future__ import annotations

import click

from allranks.cli.options import FullHelpGroup
from allranks.testcluster import need_box

NODE = click.argument("node")
NAME = click.option("--name", help="Which box, where several are up.")


@click.group(cls=FullHelpGroup)
def fault() -> None:
    """Break the box on purpose. What can be mended is noted: see `cluster status`, and `fault heal`."""


def _inject(name: str | None, kind: str, node: str = "", **arguments: str) -> None:
    from allranks.testcluster.faults import inject

    record = inject(need_box(name), kind, node, **arguments)
    detail = [f"{key}={value}" for key, value in record.detail.items()]
    click.echo(" ".join(["injected:", kind, *([node] if node else []), *detail]), err=True)


@fault.command()
@click.argument("node", required=False)
@click.option("--kind", help="Only faults of this kind.")
@NAME
def heal(node: str | None, kind: str | None, name: str | None) -> None:
    """Mend all faults (of NODE), the latest first."""
    from allranks.testcluster.faults import heal as mend

    mended = mend(need_box(name), node, kind)
    for record in mended:
        click.echo(f"healed: {record.kind} {record.node}".rstrip(), err=True)
    if not mended:
        click.echo("There is nothing to heal.", err=True)


@fault.command("kill-rank")
@click.argument("rank", type=click.IntRange(min=0))
@click.option("--job", default="", help="The job's id, where several run.")
@click.option("--signal", default="KILL", show_default=True, help="STOP makes it hang instead.")
@NAME
def kill_rank(rank: int, job: str, signal: str, name: str | None) -> None:
    """Send a signal to the process of one RANK (RANK of torchrun, else the number of Slurm's task)."""
    _inject(name, "kill-rank", rank=str(rank), job=job, signal=signal)


@fault.command("kill-node")
@NODE
@NAME
def kill_node(node: str, name: str | None) -> None:
    """Kill NODE with all that runs on it; healing starts it anew."""
    _inject(name, "kill-node", node)


@fault.command("stop-slurmd")
@NODE
@NAME
def stop_slurmd(node: str, name: str | None) -> None:
    """Stop the slurmd of NODE; its jobs run on unheard."""
    _inject(name, "stop-slurmd", node)


@fault.command("restart-slurmd")
@NODE
@NAME
def restart_slurmd(node: str, name: str | None) -> None:
    """Stop and start the slurmd of NODE."""
    _inject(name, "restart-slurmd", node)


@fault.command("stop-slurmctld")
@NAME
def stop_slurmctld(name: str | None) -> None:
    """Stop Slurm's controller; jobs run on."""
    _inject(name, "stop-slurmctld")


@fault.command("restart-slurmctld")
@NAME
def restart_slurmctld(name: str | None) -> None:
    """Stop and start Slurm's controller."""
    _inject(name, "restart-slurmctld")


@fault.command("cut-link")
@NODE
@NAME
def cut_link(node: str, name: str | None) -> None:
    """Drop all packets to and from NODE, in silence: its interface stays up."""
    _inject(name, "cut-link", node)


@fault.command("slow-link")
@NODE
@click.option("--rate", required=True, help="Such as 500kbit, 10mbit or 1gbit; both directions.")
@click.option("--delay-ms", type=click.IntRange(min=1), help="Also delay packets; needs netem in the kernel.")
@NAME
def slow_link(node: str, rate: str, delay_ms: int | None, name: str | None) -> None:
    """Limit the rate of NODE's cable."""
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
@click.option("--leave-kb", type=click.IntRange(min=0), default=0, help="KiB that can still be written. [0]")
@NAME
def fill_disk(node: str, path: str, leave_kb: int, name: str | None) -> None:
    """Fill the file system of PATH (default /tmp) that NODE has of its own. Costs no memory."""
    _inject(name, "fill-disk", node, path=path, leave_kb=str(leave_kb))


@fault.command("hide-folder")
@NODE
@click.argument("path")
@NAME
def hide_folder(node: str, path: str, name: str | None) -> None:
    """Show NODE an empty folder at PATH, as if it did not share that file system."""
    _inject(name, "hide-folder", node, path=path)


@fault.command("loopback-hosts")
@NODE
@NAME
def loopback_hosts(node: str, name: str | None) -> None:
    """Let /etc/hosts of NODE map its own name to 127.0.1.1."""
    _inject(name, "loopback-hosts", node)


@fault.command("wrong-clock", context_settings={"ignore_unknown_options": True})
@NODE
@click.argument("seconds")
@NAME
def wrong_clock(node: str, seconds: str, name: str | None) -> None:
    """Tell the tasks of NODE that their clock is SECONDS wrong (environment ALLRANKS_CLOCK_OFFSET_S)."""
    _inject(name, "wrong-clock", node, seconds=seconds)
