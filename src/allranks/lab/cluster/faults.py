"""Inject faults into a box and heal them.

    inject(box, "cut-link", "n2")        injects, and records in the box's folder how to heal it
    heal(box, "n2")                      heals all recorded faults of n2; heal(box) heals all
    with injected(box, "slow-link", "n2", rate="10mbit"): ...

`FAULTS`: ranks, nodes and Slurm daemons stopped, links cut or slow, disks full, folders hidden, names and clocks wrong.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.lab.cluster import config_files, lifecycle, processes
from allranks.lab.cluster.box import Box
from allranks.lab.cluster.config_files import BRIDGE
from allranks.lab.cluster.plan import FaultRecord, NodePlan, checked_hidden_path, require_node, save
from allranks.lab.cluster.processes import check_output, find_program, last_lines, run_command
from allranks.utils.text import nearest_name


class FaultKind(NamedTuple):
    """One kind of fault: how to inject it, which returns the data needed for healing, and how to heal it, if at all.

    Attributes:
        on_node: it needs a node; otherwise it affects the login node or a job.
        in_namespaces: it exists in the node's namespaces, so it ends when the node dies.
        restarts: healing gives the node fresh namespaces.
    """

    inject: Callable[[Box, str, Mapping[str, str]], dict[str, str]]
    heal: Callable[[Box, FaultRecord], object] | None = None
    on_node: bool = True
    in_namespaces: bool = False
    restarts: bool = False


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
    """Return a rank's topmost processes: pid to (job, node). torchrun's RANK takes precedence over Slurm's number."""
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
        run_command([*box.setup_prefix(login), find_program("ip"), "link", "delete", _node_plan(box, record.node).port])
        lifecycle.make_nodes(box, box.init(login), [record.node])
    lifecycle.start_slurmd_and_wait(box, record.node)


def stop(box: Box, place: str, daemon: str) -> dict[str, str]:
    """Stop a Slurm daemon. Jobs continue; Slurm gets no more messages from a node, or answers nothing at all."""
    lifecycle.stop_daemon(box, place, daemon)
    return {}


def restart(box: Box, node: str) -> dict[str, str]:
    """Stop and start a node's slurmd, or without a node the controller."""
    stop(box, node or box.plan.login, "slurmd" if node else "slurmctld")
    if node:
        lifecycle.start_slurmd_and_wait(box, node)
    else:
        lifecycle.start_slurmctld(box)
    return {}


_UNITS = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
_SMALLEST_BURST_BYTES = 16_384


def set_interface(box: Box, node: str, state: str) -> dict[str, str]:
    """Set the node's interface ``down`` (connecting fails at once) or ``up``; its address is unchanged."""
    return _ip(box, node, "link", "set", _node_plan(box, node).interface, state)


def set_port(box: Box, node: str, *master: str) -> dict[str, str]:
    """Take the node's link from the bridge, which drops all packets silently as a broken switch does, or return it."""
    return _ip(box, box.plan.login, "link", "set", _node_plan(box, node).port, *master)


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
    plan = box.plan.node(node)
    assert plan is not None  # `inject` has checked the name
    return plan


def _ends(box: Box, node: str) -> list[tuple[str, str]]:
    plan = _node_plan(box, node)
    return [(node, plan.interface), (box.plan.login, plan.port)]


def _ip(box: Box, place: str, *words: str) -> dict[str, str]:
    check_output([*box.setup_prefix(place), find_program("ip"), *words])
    return {}


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


def write_hosts(box: Box, node: str, *, self_loopback: bool) -> dict[str, str]:
    """Write the node's /etc/hosts, in place because nodes bind-mount the file itself."""
    box.folder.hosts(node).write_text(config_files.hosts(box.plan, node, self_loopback=self_loopback))
    return {}


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


FAULTS: Mapping[str, FaultKind] = {
    "kill-rank": FaultKind(kill_rank, on_node=False),
    "kill-node": FaultKind(kill_node, start_node, restarts=True),
    "stop-slurmd": FaultKind(
        lambda box, node, _: stop(box, node, "slurmd"),
        lambda box, record: lifecycle.start_slurmd_and_wait(box, record.node),
        in_namespaces=True,
    ),
    "restart-slurmd": FaultKind(lambda box, node, _: restart(box, node)),
    "stop-slurmctld": FaultKind(
        lambda box, _, __: stop(box, box.plan.login, "slurmctld"),
        lambda box, _: lifecycle.start_slurmctld(box),
        on_node=False,
    ),
    "restart-slurmctld": FaultKind(lambda box, _, __: restart(box, ""), on_node=False),
    "cut-link": FaultKind(
        lambda box, node, _: set_port(box, node, "nomaster"),
        lambda box, record: set_port(box, record.node, "master", BRIDGE),
        in_namespaces=True,
    ),
    "slow-link": FaultKind(slow_link, remove_rate_limit, in_namespaces=True),
    "interface-down": FaultKind(
        lambda box, node, _: set_interface(box, node, "down"),
        lambda box, record: set_interface(box, record.node, "up"),
        in_namespaces=True,
    ),
    "fill-disk": FaultKind(fill_disk, restore_disk, in_namespaces=True),
    "hide-folder": FaultKind(hide_folder, unhide_folder, in_namespaces=True),
    "loopback-hosts": FaultKind(  # as Debian's installer does
        lambda box, node, _: write_hosts(box, node, self_loopback=True),
        lambda box, record: write_hosts(box, record.node, self_loopback=False),
    ),
    "wrong-clock": FaultKind(wrong_clock, lambda box, record: box.folder.clock(record.node).unlink(missing_ok=True)),
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
