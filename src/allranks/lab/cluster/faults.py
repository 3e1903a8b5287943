"""Inject faults into a box and heal them.

    inject(box, "cut-link", "n2")        injects, and records in the box's folder how to heal it
    heal(box, "n2")                      heals all recorded faults of n2; heal(box) heals all
    with injected(box, "slow-link", "n2", rate="10mbit"): ...

`FAULTS` lists the kinds: killed ranks and nodes, stopped Slurm daemons, cut and slow links, full disks, hidden folders,
wrong names and clocks. Each has two small functions, or one if there is nothing to heal.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.lab.cluster import config_files, lifecycle, processes
from allranks.lab.cluster.box import Box
from allranks.lab.cluster.config_files import BRIDGE
from allranks.lab.cluster.plan import FaultRecord, NodePlan, checked_hidden_path, require_node, save
from allranks.lab.cluster.processes import check_output, find_program, last_lines, run_command
from allranks.utils.text import nearest_name


@dataclass(frozen=True, kw_only=True)
class FaultKind:
    """One kind of fault."""

    kind: str
    inject: Callable[[Box, str, Mapping[str, str]], dict[str, str]]
    """Inject it; return the data needed for healing."""
    heal: Callable[[Box, FaultRecord], None] | None = None
    """Heal it; None if there is nothing to heal."""
    on_node: bool = True
    """Whether it needs a node; otherwise it affects the login node or a job."""
    in_namespaces: bool = False
    """It exists in the node's namespaces, so it ends when the node dies."""
    restarts: bool = False
    """Healing gives the node fresh namespaces."""


def kill_rank(box: Box, _node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Send ``signal`` (default KILL) to the process of ``rank``, of ``job`` if given."""
    rank, job = arguments["rank"], arguments.get("job", "")
    name = arguments.get("signal", "KILL").upper().removeprefix("SIG")
    number = getattr(signal, f"SIG{name}", None)
    if not isinstance(number, signal.Signals):
        raise RequestError(f"--signal {name}: no such signal. Use KILL, TERM, STOP, CONT, USR1 or the like.")
    processes_of_rank = find_rank(box, rank, job)
    where = f" of job {job}" if job else ""
    if not processes_of_rank:
        raise RequestError(f"No process of rank {rank}{where} runs on the nodes. See: allranks cluster exec -- squeue.")
    jobs = {owner for owner, _ in processes_of_rank.values()}
    if len(jobs) > 1:
        raise RequestError(f"Rank {rank} runs in several jobs: {', '.join(sorted(jobs))}. Select one with --job.")
    processes.kill(processes_of_rank, number)
    return {"rank": rank, "nodes": ",".join(sorted({node for _, node in processes_of_rank.values()})), "signal": name}


def find_rank(box: Box, rank: str, job: str = "") -> dict[int, tuple[str, str]]:
    """Return the topmost processes of a rank: pid to (job, node). RANK, set by torchrun, takes precedence over Slurm's
    number."""
    spaces = {processes.namespace(pid, "pid"): name for name, pid in box.inits().items() if name != box.plan.login}
    tasks: dict[int, tuple[dict[str, str], str]] = {}
    for pid in processes.in_namespaces("pid", [space for space in spaces if space]):
        values = processes.environment(pid)
        if not job or values.get("SLURM_JOB_ID") == job:
            tasks[pid] = (values, spaces[processes.namespace(pid, "pid")])
    by_torch = {pid for pid, (values, _) in tasks.items() if "RANK" in values}
    matches = {
        pid: (values.get("SLURM_JOB_ID", ""), node)
        for pid, (values, node) in tasks.items()
        # A batch script has a task number too, but it is not a rank and has no step.
        if values.get("RANK" if by_torch else "SLURM_PROCID") == rank and (by_torch or "SLURM_STEP_ID" in values)
    }
    return {pid: value for pid, value in matches.items() if int(processes.status(pid).get("PPid", "0")) not in matches}


def kill_node(box: Box, node: str, _arguments: Mapping[str, str]) -> dict[str, str]:
    """End every process of the node at once, and with them its namespaces and its link."""
    init = box.init(node)
    space = processes.namespace(init, "pid")
    victims = processes.in_namespaces("pid", [space] if space else [])
    processes.kill([init])
    processes.wait_gone(victims, 10)
    return {}


def start_node(box: Box, record: FaultRecord) -> None:
    """Start the node again: fresh namespaces, an empty /tmp, its slurmd."""
    if record.node not in box.inits():
        login = box.plan.login
        port = next(node.port for node in box.plan.nodes if node.name == record.node)
        run_command([*box.setup_prefix(login), find_program("ip"), "link", "delete", port])
        lifecycle.make_nodes(box, box.init(login), [record.node])
    lifecycle.start_slurmd_and_wait(box, record.node)


def stop_slurmd(box: Box, node: str, _arguments: Mapping[str, str]) -> dict[str, str]:
    """Stop slurmd. The node and its jobs continue; Slurm gets no more messages from it."""
    lifecycle.stop_daemon(box, node, "slurmd")
    return {}


def start_slurmd(box: Box, record: FaultRecord) -> None:
    """Start the node's slurmd, and wait until Slurm has registered it."""
    lifecycle.start_slurmd_and_wait(box, record.node)


def restart_slurmd(box: Box, node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Stop and start a node's slurmd."""
    stop_slurmd(box, node, arguments)
    lifecycle.start_slurmd_and_wait(box, node)
    return {}


def stop_slurmctld(box: Box, _node: str, _arguments: Mapping[str, str]) -> dict[str, str]:
    """Stop the controller. Jobs continue; nothing can be submitted, queried or cancelled."""
    lifecycle.stop_daemon(box, box.plan.login, "slurmctld")
    return {}


def start_slurmctld(box: Box, _record: FaultRecord) -> None:
    """Start the controller, which loads its saved jobs."""
    lifecycle.start_slurmctld(box)


def restart_slurmctld(box: Box, node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Stop and start the controller."""
    stop_slurmctld(box, node, arguments)
    lifecycle.start_slurmctld(box)
    return {}


_UNITS = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
_SMALLEST_BURST_BYTES = 16_384


def cut_link(box: Box, node: str, _arguments: Mapping[str, str]) -> dict[str, str]:
    """Drop all packets silently: the interface stays up, as behind a broken switch or a dropping firewall."""
    _ip(box, box.plan.login, "link", "set", _node_plan(box, node).port, "nomaster")
    return {}


def restore_link(box: Box, record: FaultRecord) -> None:
    """Connect the link to the bridge again."""
    _ip(box, box.plan.login, "link", "set", _node_plan(box, record.node).port, "master", BRIDGE)


def interface_down(box: Box, node: str, _arguments: Mapping[str, str]) -> dict[str, str]:
    """Set the node's interface down, visibly for the node: connecting fails at once."""
    _ip(box, node, "link", "set", _node_plan(box, node).interface, "down")
    return {}


def interface_up(box: Box, record: FaultRecord) -> None:
    """Set the interface up again; its address is unchanged."""
    _ip(box, record.node, "link", "set", _node_plan(box, record.node).interface, "up")


def slow_link(box: Box, node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Limit both directions to ``rate`` (tbf); ``delay_ms`` needs netem, which not every kernel has."""
    rate, delay_ms = arguments["rate"], arguments.get("delay_ms", "")
    burst = max(_SMALLEST_BURST_BYTES, bits_per_s(rate) // 8 // 100)
    shape = ["tbf", "rate", rate, "burst", str(burst), "latency", "200ms"]
    if delay_ms:
        shape = ["netem", "delay", f"{delay_ms}ms", "rate", rate]
    for place, device in _ends(box, node):
        done = run_command(
            [*box.setup_prefix(place), find_program("tc"), "qdisc", "replace", "dev", device, "root", *shape]
        )
        if done.returncode != 0:
            raise EnvironmentNotAble(
                f"fault slow-link {node}: this kernel does not support '{shape[0]}' ({last_lines(done.stderr)})."
                + (" Omit --delay-ms: limiting the rate alone needs only tbf." if delay_ms else "")
            )
    return {"rate": rate} | ({"delay_ms": delay_ms} if delay_ms else {})


def remove_rate_limit(box: Box, record: FaultRecord) -> None:
    """Remove the limits."""
    for place, device in _ends(box, record.node):
        run_command([*box.setup_prefix(place), find_program("tc"), "qdisc", "delete", "dev", device, "root"])


def bits_per_s(rate: str) -> int:
    """Parse a rate such as 10mbit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) <= 0:
        raise RequestError(f"--rate {rate}: give a number and a unit, such as 500kbit, 10mbit or 1gbit.")
    return int(float(match[1]) * _UNITS[match[2]])


def _node_plan(box: Box, node: str) -> NodePlan:
    return next(plan for plan in box.plan.nodes if plan.name == node)


def _ends(box: Box, node: str) -> list[tuple[str, str]]:
    plan = _node_plan(box, node)
    return [(node, plan.interface), (box.plan.login, plan.port)]


def _ip(box: Box, place: str, *words: str) -> None:
    check_output([*box.setup_prefix(place), find_program("ip"), *words])


FILLER = ".allranks-filler"
FILLER_BYTES = 1 << 20


def fill_disk(box: Box, node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Fill the file system of ``path`` on the node, except ``leave_kb`` KiB.

    The node's file system is shrunk to its content, so that filling it needs no memory. Only a file system of the
    node itself is changed (its private /tmp, /dev/shm, a hidden folder), never a disk of this machine.
    """
    path, leave = arguments.get("path", "/tmp"), int(arguments.get("leave_kb", "0"))  # noqa: S108 - the node's own
    init = box.init(node)
    target = _own_mount(box, init, path)
    if target is None:
        raise RequestError(
            f"fault fill-disk {node} {path}: the node shares this disk with this machine, so it is not filled. "
            "Fill the node's private /tmp, /dev/shm, or a folder hidden from it (cluster up --hide)."
        )
    room = os.statvfs(f"/proc/{init}/root{target}")
    used = (room.f_blocks - room.f_bfree) * room.f_frsize
    _resize(box, node, target, used + leave * 1024 + FILLER_BYTES)
    filler = str(PurePosixPath(target) / FILLER)
    check_output([*box.setup_prefix(node), "fallocate", "--length", str(FILLER_BYTES), filler])
    return {"path": target, "bytes": str(room.f_blocks * room.f_frsize)}


def restore_disk(box: Box, record: FaultRecord) -> None:
    """Restore the size of the file system."""
    check_output([*box.setup_prefix(record.node), "rm", "-f", str(PurePosixPath(record.detail["path"]) / FILLER)])
    _resize(box, record.node, record.detail["path"], int(record.detail["bytes"]))


def _resize(box: Box, node: str, target: str, size_bytes: int) -> None:
    # Only the size is passed: a user namespace does not know the owner that /proc shows and mount would repeat.
    words = ["--options-mode", "ignore", "-o", f"remount,size={size_bytes}", target]
    check_output([*box.setup_prefix(node), find_program("mount"), *words])


def _own_mount(box: Box, init: int, path: str) -> str | None:
    """Return the mount point of ``path``, if it is a tmpfs of this node only."""
    shared = {mount.device for mount in processes.mounts(box.init(box.plan.login))}
    around = [mount for mount in processes.mounts(init) if PurePosixPath(path).is_relative_to(mount.target)]
    if not around:
        return None
    deepest = max(enumerate(around), key=lambda item: (len(item[1].target), item[0]))[1]
    return deepest.target if deepest.kind == "tmpfs" and deepest.device not in shared else None


def hide_folder(box: Box, node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Show the node an empty folder at ``path``, as if it did not share that file system."""
    path = checked_hidden_path(arguments["path"], box.plan.folder, "fault hide-folder")
    if not Path(f"/proc/{box.init(node)}/root{path}").is_dir():
        raise RequestError(f"fault hide-folder {node} {path}: the node has no such folder.")
    size = f"mode=755,size={box.plan.tmp_mb}m"
    check_output([*box.setup_prefix(node), find_program("mount"), "-t", "tmpfs", "-o", size, "hidden", path])
    return {"path": path}


def unhide_folder(box: Box, record: FaultRecord) -> None:
    """Remove the empty folder."""
    check_output([*box.setup_prefix(record.node), find_program("umount"), "--lazy", record.detail["path"]])


def loopback_hosts(box: Box, node: str, _arguments: Mapping[str, str]) -> dict[str, str]:
    """Map the node's own name to 127.0.1.1 in its /etc/hosts, as Debian's installer does."""
    box.folder.hosts(node).write_text(config_files.hosts(box.plan, node, self_loopback=True))
    return {}


def restore_hosts(box: Box, record: FaultRecord) -> None:
    """Restore the node's address in its hosts file. The file is written in place, because nodes bind-mount the file
    itself."""
    box.folder.hosts(record.node).write_text(config_files.hosts(box.plan, record.node))


def wrong_clock(box: Box, node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Report a clock offset of ``seconds`` to tasks on the node; a namespace cannot have its own clock."""
    text = arguments["seconds"]
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise RequestError(f"fault wrong-clock {node} {text}: give a number of seconds, such as 300 or -2.5.")
    box.folder.clock(node).write_text(f"{seconds!r}\n")
    return {"seconds": repr(seconds)}


def restore_clock(box: Box, record: FaultRecord) -> None:
    """Remove the reported clock offset."""
    box.folder.clock(record.node).unlink(missing_ok=True)


FAULTS: Mapping[str, FaultKind] = {
    fault.kind: fault
    for fault in (
        FaultKind(kind="kill-rank", inject=kill_rank, on_node=False),
        FaultKind(kind="kill-node", inject=kill_node, heal=start_node, restarts=True),
        FaultKind(kind="stop-slurmd", inject=stop_slurmd, heal=start_slurmd, in_namespaces=True),
        FaultKind(kind="restart-slurmd", inject=restart_slurmd),
        FaultKind(kind="stop-slurmctld", inject=stop_slurmctld, heal=start_slurmctld, on_node=False),
        FaultKind(kind="restart-slurmctld", inject=restart_slurmctld, on_node=False),
        FaultKind(kind="cut-link", inject=cut_link, heal=restore_link, in_namespaces=True),
        FaultKind(kind="slow-link", inject=slow_link, heal=remove_rate_limit, in_namespaces=True),
        FaultKind(kind="interface-down", inject=interface_down, heal=interface_up, in_namespaces=True),
        FaultKind(kind="fill-disk", inject=fill_disk, heal=restore_disk, in_namespaces=True),
        FaultKind(kind="hide-folder", inject=hide_folder, heal=unhide_folder, in_namespaces=True),
        FaultKind(kind="loopback-hosts", inject=loopback_hosts, heal=restore_hosts),
        FaultKind(kind="wrong-clock", inject=wrong_clock, heal=restore_clock),
    )
}
"""Every kind of fault, by its name on the command line."""


def inject(box: Box, kind: str, node: str = "", **arguments: str) -> FaultRecord:
    """Inject a fault now; one that can be healed is recorded, and `Box.faults` lists it."""
    fault = FAULTS.get(kind)
    if fault is None:
        near = nearest_name(kind, FAULTS, 0)
        raise RequestError(f"Unknown fault '{kind}'. Did you mean {near}? All: {', '.join(FAULTS)}.")
    if fault.on_node:
        require_node(node, box.node_names, f"fault {kind}")
    noted = box.faults()
    if any(_same(record, kind, node, arguments) for record in noted):
        raise RequestError(f"fault {kind}: it is already active on '{node or box.plan.login}'. Heal it first.")
    record = FaultRecord(kind, node, fault.inject(box, node, arguments))
    if fault.heal is not None:
        kept = [old for old in noted if not (fault.restarts and old.node == node and FAULTS[old.kind].in_namespaces)]
        save([*kept, record], box.folder.faults)
    return record


def _same(record: FaultRecord, kind: str, node: str, arguments: Mapping[str, str]) -> bool:
    same_place = record.detail.get("path") == arguments.get("path") if "path" in arguments else True
    return (record.kind, record.node) == (kind, node) and same_place


def heal(box: Box, node: str | None = None, kind: str | None = None) -> list[FaultRecord]:
    """Heal recorded faults (of one node, of one kind), latest first; return the healed ones."""
    if node is not None:
        require_node(node, [*box.node_names, box.plan.login], "fault heal")
    mended: list[FaultRecord] = []
    for record in reversed(box.faults()):
        if node not in (None, record.node or box.plan.login) or kind not in (None, record.kind):
            continue
        mend = FAULTS[record.kind].heal
        if mend is not None:
            mend(box, record)
        mended.append(record)
        save([other for other in box.faults() if other != record], box.folder.faults)
    return mended


@contextmanager
def injected(box: Box, kind: str, node: str = "", **arguments: str) -> Iterator[FaultRecord]:
    """Inject a fault for the duration of a ``with`` block."""
    record = inject(box, kind, node, **arguments)
    try:
        yield record
    finally:
        heal(box, node or box.plan.login, kind)
