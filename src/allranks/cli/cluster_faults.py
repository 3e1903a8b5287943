"""``allranks cluster fault``: inject faults into a box and undo them."""

from __future__ import annotations

import click

from allranks.cli.options import FullHelpGroup, echo
from allranks.lab.cluster import need_box

NODE = click.argument("node")
NAME = click.option("--name", help="Which box, where several are up.")


@click.group(cls=FullHelpGroup)
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
