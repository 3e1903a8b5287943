"""Start and stop a box (``cluster up``, ``cluster down``): namespaces, Slurm daemons, slurmdbd and MariaDB."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from allranks.errors import EnvironmentNotAble, RequestError, RunFailed
from allranks.lab.cluster import config_files, processes, requirements
from allranks.lab.cluster.box import Box, daemon_pids, list_boxes, load_box, node_states
from allranks.lab.cluster.plan import BoxOptions, BoxPaths, BoxPlan, check_name, free_network, make_box_plan, save
from allranks.lab.cluster.processes import SYSTEM_PATH, check_output, find_program, last_lines, run_command
from allranks.nodes.slurm.endpoints import state_root

POLL_S = 0.05
START_TIMEOUT_S = 30.0
ACCOUNTING_TIMEOUT_S = 120.0
# A database for tests: small files, and no waiting for disk writes.
SMALL_DATABASE_OPTIONS = (
    "--innodb-log-file-size=8M",
    "--innodb-buffer-pool-size=32M",
    "--innodb-flush-log-at-trx-commit=0",
    "--skip-log-bin",
    "--skip-name-resolve",
)
SOCKET_PATH_LIMIT = 107
GONE_TIMEOUT_S = 20.0
LOCK_TIMEOUT_S = 180.0
READY_TIMEOUT_S = 30.0


def up(options: BoxOptions) -> Box:
    """Start a box and return once every node is idle. After a failure everything is removed."""
    path = state_root() / check_name(options.name)
    requirements.check_requirements(options.accounting)
    with _exclusive_lock():
        old = load_box(path)
        _refuse_inside(old)
        if old is not None and old.is_alive():
            raise RequestError(
                f"Box '{options.name}' is already running with {len(old.plan.nodes)} nodes. "
                f"Stop it with: allranks cluster down --name {options.name}; or use another --name."
            )
        plan = _plan_box(options, path)
        _remove_box(BoxPaths(path))
        try:
            return _start_box(plan, BoxPaths(path))
        except BaseException:
            _remove_box(BoxPaths(path))
            raise


@contextmanager
def _exclusive_lock() -> Iterator[None]:
    """Allow one ``up`` or ``down`` per user at a time. The folder itself is the lock, so that no file is left."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        state_root().mkdir(parents=True, exist_ok=True)
        handle = os.open(state_root(), os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # 0: the holder before has removed the folder, and whoever comes next makes another
            if os.fstat(handle).st_nlink > 0:
                try:
                    yield
                finally:
                    with suppress(OSError):  # it contains boxes
                        state_root().rmdir()
                return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RequestError(
                    f"Another 'cluster up' or 'down' has held the lock of {state_root()} for too long."
                ) from None
            time.sleep(0.1)
        finally:
            os.close(handle)


def _plan_box(options: BoxOptions, path: Path) -> BoxPlan:
    used = requirements.used_networks() + [ipaddress.IPv4Network(box.plan.network) for box in list_boxes()]
    plan = make_box_plan(
        options,
        folder=str(path),
        network=free_network(used, options.network),
        machine=requirements.this_machine(),
        slurm_version=requirements.slurm_version(),
    )
    for hidden in sorted({hidden for node in plan.nodes for hidden in node.hidden}):
        if not Path(hidden).is_dir():
            raise RequestError(f"--hide {hidden}: no such folder on this machine.")
    if len(str(BoxPaths(path).munge_socket)) > SOCKET_PATH_LIMIT:
        raise RequestError(f"{path} is too long for a socket path. Set XDG_RUNTIME_DIR to a shorter path.")
    return plan


def _start_box(plan: BoxPlan, folder: BoxPaths) -> Box:
    box = Box(plan, uuid.uuid4().hex)
    _write_files(box, folder)
    login_pid = make_login(box)
    start_munged(box)
    if plan.accounting:
        start_accounting(box)
    start_slurmctld(box)
    make_nodes(box, login_pid, box.node_names)
    for name in box.node_names:
        start_slurmd(box, name)
    wait_idle(box, box.node_names)
    save(box.endpoint(), folder.client, mode=0o600)
    return box


def _write_files(box: Box, folder: BoxPaths) -> None:
    plan = box.plan
    places_of_box = [plan.login, *box.node_names]
    folder.path.mkdir()
    folder.identity.write_text(box.identity + "\n")
    save(plan, folder.plan)
    fixed = (folder.etc, folder.log, folder.munge, folder.controller, folder.database, folder.spool)
    for directory in (*fixed, *map(folder.node, places_of_box)):
        directory.mkdir(parents=True)
    folder.munge.chmod(0o755)
    key = folder.munge / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    folder.slurm_conf.write_text(config_files.slurm_conf(plan, folder))
    (folder.etc / "cgroup.conf").write_text(config_files.cgroup_conf(plan))
    (folder.etc / "gres.conf").write_text(config_files.gres_conf(plan, folder))
    (folder.etc / "nsswitch.conf").write_text(config_files.nsswitch_conf(requirements.nsswitch()))
    (folder.etc / "resolv.conf").write_text("")
    for number in range(max(node.gpus for node in plan.nodes)):
        config_files.gpu_file(folder, number).symlink_to("/dev/null")
    for name in places_of_box:
        folder.hosts(name).write_text(config_files.hosts(plan, name))
        (folder.node(name) / "enter.sh").write_text(config_files.enter_script(plan, folder, name))


def down(name: str) -> bool:
    """Stop a box and remove everything that it left, also after a crash; return False if there was nothing.

    Interfaces and mounts exist in namespaces, which end with the box's processes; only the folder is outside.
    """
    folder = BoxPaths(state_root() / check_name(name))
    with _exclusive_lock():
        _refuse_inside(load_box(folder.path))
        existed = folder.path.exists()
        _remove_box(folder)
    return existed


def _remove_box(folder: BoxPaths) -> None:
    """End all processes of a box, then remove its folder; either may already be gone."""
    folder.client.unlink(missing_ok=True)  # first, so that no new process enters the box
    if folder.identity.exists():
        _end_processes(folder.identity.read_text().strip(), folder.path.name)
    if folder.path.exists():
        shutil.rmtree(folder.path)


def _end_processes(identity: str, name: str) -> None:
    inits = processes.init_processes(identity)
    spaces = {space for pid in inits.values() if (space := processes.namespace(pid, "net"))}

    def victims() -> set[int]:
        return {*processes.in_namespaces("net", spaces), *processes.marked_processes(identity)}

    # First the init processes: the kernel ends everything below them.
    pid_spaces = {space for pid in inits.values() if (space := processes.namespace(pid, "pid"))}
    below = processes.in_namespaces("pid", pid_spaces)
    processes.kill(inits.values())
    processes.wait_gone(below, GONE_TIMEOUT_S / 5)
    # a process may fork while it is looked for
    for _ in range(4):
        processes.kill(victims())
        if not processes.wait_gone(victims(), GONE_TIMEOUT_S / 5):
            return
    raise RunFailed(f"Processes of box '{name}' cannot be killed: {sorted(victims())}. They may be waiting for a disk.")


def _refuse_inside(box: Box | None) -> None:
    """Refuse to run inside a box: it cannot remove itself, and on a node, which hides its processes, it looks dead."""
    place = box.place() if box is not None else None
    if box is not None and place is not None:
        raise RequestError(f"This process runs on '{place}' of box '{box.name}'. Start and stop boxes from outside.")


def run_ip_batch(box: Box, pid: int, commands: str) -> None:
    """Run ``ip`` commands in ``pid``'s network namespace, but no PID namespace: their process IDs are outside IDs."""
    check_output(
        [*processes.enter_for_setup(box.plan, pid, ("net",)), find_program("ip"), "-batch", "-"], text=commands
    )


def make_login(box: Box) -> int:
    """Create the login node with its bridge; return its first process."""
    login = box.plan.login
    _start_init(box, login, processes.create_login(box.plan))
    pid = _wait_ready(box, [login])[login]
    run_ip_batch(box, pid, config_files.bridge_batch(box.plan))  # the bridge is the login node's own interface, too
    return pid


def make_nodes(box: Box, login_pid: int, names: Iterable[str]) -> None:
    """Create nodes and connect them."""
    wanted = list(names)
    for name in wanted:
        _start_init(box, name, processes.create_node(box.plan, login_pid))
    pids = _wait_ready(box, wanted)
    run_ip_batch(box, login_pid, config_files.cable_batch(box.plan, pids))
    for name, pid in pids.items():
        run_ip_batch(box, pid, config_files.node_batch(box.plan, name))


def _start_init(box: Box, name: str, prefix: list[str]) -> None:
    box.folder.ready(name).unlink(missing_ok=True)
    with box.folder.enter_log(name).open("wb") as log:
        subprocess.run(
            [*prefix, "/bin/sh", str(box.folder.node(name) / "enter.sh")],
            env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", processes.INIT_VARIABLE: f"{box.identity}:{name}"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=READY_TIMEOUT_S,
            check=False,
        )


def _wait_ready(box: Box, names: list[str]) -> dict[str, int]:
    """Return the first processes, once each has set up its mounts."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    waiting = list(names)
    while waiting := [name for name in waiting if not box.folder.ready(name).exists()]:
        name = waiting[0]
        dead = not any(processes.is_init(pid, box.identity) for pid in processes.all_pids())
        if dead or time.monotonic() > deadline:
            log = box.folder.enter_log(name)
            said = last_lines(log.read_text(errors="replace"))
            raise EnvironmentNotAble(f"'{name}' of box '{box.name}' could not be set up on this machine: {said}.")
        time.sleep(0.02)
    # A process that is calling exec shows no environment for a moment, and therefore no mark.
    while missing := [name for name in names if name not in (inits := box.inits())]:
        if time.monotonic() > deadline:
            raise EnvironmentNotAble(f"'{missing[0]}' of box '{box.name}' was set up, but its first process is gone.")
        time.sleep(0.02)
    return {name: inits[name] for name in names}


def daemon_prefix(box: Box, name: str) -> list[str]:
    """Return the prefix of a daemon's command: it enters its node with a clean environment."""
    kinds = processes.DAEMON_KINDS if name == box.plan.login else processes.NODE_KINDS
    values = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "HOME": "/", "SLURM_CONF": str(box.folder.slurm_conf)}
    return [
        *processes.enter_as_user(box.plan, box.init(name), kinds),
        *processes.set_environment(values, cwd="/", clean=True),
    ]


def start_munged(box: Box) -> None:
    """Start one munged for the whole box: its socket is a path, which every node sees."""
    folder = box.folder
    options = {
        "key-file": folder.munge / "key",
        "socket": folder.munge_socket,
        "pid-file": folder.munge / "pid",
        "log-file": folder.log / "munged.log",
        "seed-file": folder.munge / "seed",
        "origin": box.plan.login_address,
    }
    words = [f"--{key}={value}" for key, value in options.items()]
    check_output([*daemon_prefix(box, box.plan.login), find_program("munged"), "--force", *words], what="munged")
    wait_until(folder.munge_socket.exists, "munged", folder.log / "munged.log")


def start_slurmctld(box: Box) -> None:
    """Start the controller on the login node; return once it answers."""
    check_output([*daemon_prefix(box, box.plan.login), find_program("slurmctld")], what="slurmctld")
    ping = [*box.command_prefix("/"), "scontrol", "ping"]
    wait_until(lambda: " is UP" in run_command(ping).stdout, "slurmctld", box.folder.log / "slurmctld.log")


def start_slurmd(box: Box, name: str) -> None:
    """Start the slurmd of a node; Slurm registers it a moment later."""
    check_output([*daemon_prefix(box, name), find_program("slurmd")], what=f"slurmd of {name}")


def start_slurmd_and_wait(box: Box, name: str) -> None:
    """Start the slurmd of a known node; return once Slurm has registered it again."""
    since = datetime.now()
    start_slurmd(box, name)
    wait_registered(box, name, since)


def stop_daemon(box: Box, name: str, command: str) -> None:
    """Stop a daemon and wait until it has ended."""
    pids = daemon_pids(box, name, command)
    processes.kill(pids, signal.SIGTERM)
    left = processes.wait_gone(pids, 10)
    processes.kill(left)
    if processes.wait_gone(left, 5):
        raise RunFailed(f"{command} on '{name}' cannot be stopped.")


def wait_idle(box: Box, names: Iterable[str], timeout_s: float = 60.0) -> None:
    """Wait until Slurm reports these nodes as idle."""
    wanted = list(names)

    def all_idle() -> bool:
        states = node_states(box)
        return all(states.get(name) == "idle" for name in wanted)

    try:
        wait_until(all_idle, "slurmd", box.folder.log / f"slurmd.{wanted[0]}.log", timeout_s)
    except RunFailed as error:
        raise RunFailed(f"{error} Slurm's node states: {node_states(box)}.") from None


def wait_registered(box: Box, name: str, since: datetime, timeout_s: float = 60.0) -> None:
    """Wait until a slurmd started after ``since`` is registered, and its node is not down."""

    def registered() -> bool:
        shown = run_command([*box.command_prefix("/"), "scontrol", "--oneliner", "show", "node", name]).stdout
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        try:
            started = datetime.fromisoformat(fields.get("SlurmdStartTime", ""))
        except ValueError:
            return False
        return started >= since.replace(microsecond=0) and not re.search(r"DOWN|[*]", fields.get("State", "DOWN"))

    wait_until(registered, "slurmd", box.folder.log / f"slurmd.{name}.log", timeout_s)


def wait_until(condition: Callable[[], bool], what: str, log: Path, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait for a daemon to be ready; the error contains the end of its log."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            said = last_lines(log.read_text(errors="replace")) if log.exists() else "there is no log"
            raise RunFailed(f"{what} is not ready after {timeout_s:g} s. The end of {log}: {said}")
        time.sleep(POLL_S)


def start_accounting(box: Box) -> None:
    """Start both, and create the cluster, one account, and the box's user in it."""
    password = secrets.token_hex(16)
    _start_database(box, password)
    _start_slurmdbd(box, password)
    _create_accounts(box)


def _start_database(box: Box, password: str) -> None:
    """Start MariaDB on the login node's loopback interface, which is not reachable from outside the box."""
    folder = box.folder.database
    prefix = daemon_prefix(box, box.plan.login)
    log = box.folder.log / "mariadbd.log"
    words = ["--no-defaults", f"--datadir={folder / 'data'}", *SMALL_DATABASE_OPTIONS]
    words += [] if box.plan.rootless else ["--user=root"]
    install = ["--skip-test-db", "--auth-root-authentication-method=normal"]
    check_output(
        [*prefix, find_program("mariadb-install-db"), *words, *install],
        timeout_s=ACCOUNTING_TIMEOUT_S,
        what="mariadb-install-db",
    )
    script = folder / "init.sql"
    script.touch(mode=0o600)
    script.write_text(
        "CREATE DATABASE IF NOT EXISTS slurm;\n"
        f"CREATE OR REPLACE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm.* TO 'slurm'@'127.0.0.1';\n"
    )
    serve = [
        f"--socket={folder / 'socket'}",
        f"--pid-file={folder / 'pid'}",
        f"--port={config_files.DATABASE_PORT}",
        "--bind-address=127.0.0.1",
        f"--init-file={script}",
    ]
    with log.open("wb") as output:
        subprocess.run(
            [*prefix, find_program("setsid"), "--fork", find_program("mariadbd"), *words, *serve],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=ACCOUNTING_TIMEOUT_S,
            check=True,
        )
    wait_until(lambda: "ready for connections" in log.read_text(errors="replace"), "MariaDB", log, ACCOUNTING_TIMEOUT_S)


def _start_slurmdbd(box: Box, password: str) -> None:
    conf = box.folder.etc / "slurmdbd.conf"
    conf.touch(mode=0o600)
    conf.write_text(config_files.slurmdbd_conf(box.plan, box.folder, password))
    check_output([*daemon_prefix(box, box.plan.login), find_program("slurmdbd")], what="slurmdbd")
    ask = [*box.command_prefix("/"), "sacctmgr", "--noheader", "list", "cluster"]
    wait_until(
        lambda: run_command(ask).returncode == 0, "slurmdbd", box.folder.log / "slurmdbd.log", ACCOUNTING_TIMEOUT_S
    )


def _create_accounts(box: Box) -> None:
    """Add our user and make it the default. slurmdbd itself creates root's associations with Slurm's account "root"."""
    sacctmgr = [*box.command_prefix("/"), "sacctmgr", "--immediate", "--quiet"]
    user = box.plan.user
    run_command([*sacctmgr, "add", "cluster", box.name])
    run_command([*sacctmgr, "add", "account", config_files.ACCOUNT, "description=box", "organization=box"])
    run_command([*sacctmgr, "add", "user", user, f"account={config_files.ACCOUNT}"])
    run_command([*sacctmgr, "modify", "user", user, "set", f"defaultaccount={config_files.ACCOUNT}"])
    listed = check_output([*sacctmgr, "--noheader", "--parsable2", "list", "user", user, "format=user,defaultaccount"])
    if f"{user}|{config_files.ACCOUNT}" not in listed:
        raise RunFailed(
            f"slurmdbd did not accept the account '{config_files.ACCOUNT}' for '{user}': it lists {listed!r}."
        )
