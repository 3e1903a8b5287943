"""Full disks and folders that are not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from allranks.errors import RequestError
from allranks.testcluster import procs
from allranks.testcluster.box import Box
from allranks.testcluster.command import program, run
from allranks.testcluster.faults.kind import Fault
from allranks.testcluster.plan import checked_hidden_path
from allranks.testcluster.records import FaultRecord

FILLER = ".allranks-filler"
FILLER_BYTES = 1 << 20


def fill_disk(box: Box, node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Nothing more can be written to ``path`` on the node, but ``leave_kb`` KiB.

    The node's file system is shrunk to what it holds, so that filling it costs no memory. Only a file system of the
    node's own is touched (its private /tmp, /dev/shm, a hidden folder), never a disk of this machine.
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
    run([*box.setup_prefix(node), "fallocate", "--length", str(FILLER_BYTES), filler])
    return {"path": target, "bytes": str(room.f_blocks * room.f_frsize)}


def empty_disk(box: Box, record: FaultRecord) -> None:
    """Gives the file system its size back."""
    run([*box.setup_prefix(record.node), "rm", "-f", str(PurePosixPath(record.detail["path"]) / FILLER)])
    _resize(box, record.node, record.detail["path"], int(record.detail["bytes"]))


def _resize(box: Box, node: str, target: str, size_bytes: int) -> None:
    # Only the size is said: a user namespace does not know the owner that /proc shows and mount would repeat.
    words = ["--options-mode", "ignore", "-o", f"remount,size={size_bytes}", target]
    run([*box.setup_prefix(node), program("mount"), *words])


def _own_mount(box: Box, init: int, path: str) -> str | None:
    """The mount point that ``path`` is on, if it is a tmpfs that only the node has."""
    shared = {mount.device for mount in procs.mounts(box.init(box.plan.login))}
    around = [mount for mount in procs.mounts(init) if PurePosixPath(path).is_relative_to(mount.target)]
    if not around:
        return None
    deepest = max(enumerate(around), key=lambda item: (len(item[1].target), item[0]))[1]
    return deepest.target if deepest.kind == "tmpfs" and deepest.device not in shared else None


def hide_folder(box: Box, node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """The node sees an empty folder of its own at ``path``, as if it did not share that file system."""
    path = checked_hidden_path(arguments["path"], box.plan.folder, "fault hide-folder")
    if not Path(f"/proc/{box.init(node)}/root{path}").is_dir():
        raise RequestError(f"fault hide-folder {node} {path}: the node has no such folder.")
    size = f"mode=755,size={box.plan.tmp_mb}m"
    run([*box.setup_prefix(node), program("mount"), "-t", "tmpfs", "-o", size, "hidden", path])
    return {"path": path}


def show_folder(box: Box, record: FaultRecord) -> None:
    """Takes the empty folder away."""
    run([*box.setup_prefix(record.node), program("umount"), "--lazy", record.detail["path"]])


FAULTS = (
    Fault(
        kind="fill-disk",
        summary="Fill a file system that a node has of its own.",
        inject=fill_disk,
        heal=empty_disk,
        in_namespaces=True,
    ),
    Fault(
        kind="hide-folder",
        summary="Show a node an empty folder instead of a shared one.",
        inject=hide_folder,
        heal=show_folder,
        in_namespaces=True,
    ),
)
