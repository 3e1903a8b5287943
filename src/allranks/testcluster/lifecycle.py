"""``cluster up`` and ``cluster down``."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allranks.errors import RequestError, RunFailed
from allranks.testcluster import accounting, daemons, needs, places, procs, render
from allranks.testcluster.box import Box, list_boxes, load_box
from allranks.testcluster.folder import Folder, root
from allranks.testcluster.plan import check_name, free_network, make_plan
from allranks.testcluster.records import BoxOptions, BoxPlan, save

SOCKET_PATH_LIMIT = 107
GONE_TIMEOUT_S = 20.0
LOCK_TIMEOUT_S = 180.0


def up(options: BoxOptions) -> Box:
    """Starts a box and returns once every node is idle. On any failure nothing of it is left."""
    path = root() / check_name(options.name)
    needs.check_able(options.accounting)
    with _alone():
        old = load_box(path)
        _refuse_inside(old)
        if old is not None and old.is_alive():
            raise RequestError(
                f"Box '{options.name}' is already up with {len(old.plan.nodes)} nodes. "
                f"End it with: allranks cluster down --name {options.name}; or give the new one another --name."
            )
        plan = _plan(options, path)
        _remove(Folder(path))
        try:
            return _start(plan, Folder(path))
        except BaseException:
            _remove(Folder(path))
            raise


@contextmanager
def _alone() -> Iterator[None]:
    """One ``up`` or ``down`` of a user at a time. The folder itself is the lock, so that no file is left."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        root().mkdir(parents=True, exist_ok=True)
        handle = os.open(root(), os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink > 0:
                try:
                    yield
                finally:
                    _remove_if_empty(root())
                return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RequestError(f"Another 'cluster up' or 'down' has been at work in {root()} for long.") from None
            time.sleep(0.1)
        finally:
            os.close(handle)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        pass  # boxes are in it


def _plan(options: BoxOptions, path: Path) -> BoxPlan:
    used = needs.used_networks() + [ipaddress.IPv4Network(box.plan.network) for box in list_boxes()]
    plan = make_plan(
        options,
        folder=str(path),
        network=free_network(used, options.network),
        machine=needs.this_machine(),
        slurm_version=needs.slurm_version(),
    )
    for hidden in sorted({hidden for node in plan.nodes for hidden in node.hidden}):
        if not Path(hidden).is_dir():
            raise RequestError(f"--hide {hidden}: there is no such folder on this machine.")
    if len(str(Folder(path).munge_socket)) > SOCKET_PATH_LIMIT:
        raise RequestError(f"{path} is too long for a socket in it. Set XDG_RUNTIME_DIR to a shorter path.")
    return plan


def _start(plan: BoxPlan, folder: Folder) -> Box:
    box = Box(plan, uuid.uuid4().hex)
    _write_files(box, folder)
    login_pid = places.make_login(box)
    daemons.start_munged(box)
    if plan.accounting:
        accounting.start(box)
    daemons.start_slurmctld(box)
    places.make_nodes(box, login_pid, box.node_names)
    for name in box.node_names:
        daemons.start_slurmd(box, name)
    daemons.wait_idle(box, box.node_names)
    return box


def _write_files(box: Box, folder: Folder) -> None:
    plan = box.plan
    places_of_box = [plan.login, *box.node_names]
    folder.path.mkdir()
    folder.identity.write_text(box.identity + "\n")
    save(plan, folder.plan)
    for directory in folder.directories(places_of_box):
        directory.mkdir(parents=True)
    folder.munge.chmod(0o755)
    key = folder.munge / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    folder.slurm_conf.write_text(render.slurm_conf(plan, folder))
    (folder.etc / "cgroup.conf").write_text(render.cgroup_conf(plan))
    (folder.etc / "gres.conf").write_text(render.gres_conf(plan, folder))
    (folder.etc / "nsswitch.conf").write_text(render.nsswitch_conf(needs.nsswitch()))
    (folder.etc / "resolv.conf").write_text("")
    for number in range(max(node.gpus for node in plan.nodes)):
        render.gpu_file(folder, number).symlink_to("/dev/null")
    for name in places_of_box:
        folder.hosts(name).write_text(render.hosts(plan, name))
        folder.enter_script(name).write_text(render.enter_script(plan, folder, name))


def down(name: str) -> bool:
    """Ends a box and removes all that it left, also after a crash; False if there was nothing.

    Interfaces, mounts and namespaces live in the namespaces of the box's processes and end with them; outside
    there is only the folder.
    """
    folder = Folder(root() / check_name(name))
    with _alone():
        _refuse_inside(load_box(folder.path))
        found = folder.path.exists()
        _remove(folder)
    return found


def _remove(folder: Folder) -> None:
    """Ends all processes of a box, then removes its folder; either may be gone already."""
    if folder.identity.exists():
        _end_processes(folder.identity.read_text().strip(), folder.path.name)
    if folder.path.exists():
        shutil.rmtree(folder.path)


def _end_processes(identity: str, name: str) -> None:
    inits = procs.inits(identity)
    spaces = {space for pid in inits.values() if (space := procs.namespace(pid, "net"))}

    def victims() -> set[int]:
        return {*procs.in_namespaces("net", spaces), *procs.marked(identity)}

    # First the first processes: the kernel ends all that is below them, and their parents see them end.
    pid_spaces = {space for pid in inits.values() if (space := procs.namespace(pid, "pid"))}
    below = procs.in_namespaces("pid", pid_spaces)
    procs.kill(inits.values())
    procs.wait_gone(below, GONE_TIMEOUT_S / 5)
    for _ in range(4):
        procs.kill(victims())
        if not procs.wait_gone(victims(), GONE_TIMEOUT_S / 5):
            return
    raise RunFailed(f"Processes of box '{name}' cannot be ended: {sorted(victims())}. They may wait for a disk.")


def _refuse_inside(box: Box | None) -> None:
    """Inside, a box cannot be taken away; and on a node, where its processes cannot be seen, it would look dead."""
    place = box.place() if box is not None else None
    if box is not None and place is not None:
        raise RequestError(f"This runs on '{place}' of box '{box.name}'. Start and end boxes from outside.")
