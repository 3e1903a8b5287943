"""Run commands in the namespaces of a box, and find and kill its processes.

Commands enter a box with ``nsenter``, because ``ip netns exec`` would mount a fresh /sys and hide the cgroup tree.

Processes are identified by their own state, never by a stored pid: the first process of the login node and of each node
has a mark in its environment, and all others share their namespaces. So a box can be found and stopped after a crash,
and a reused pid is never killed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from allranks.errors import EnvironmentNotAble, RunFailed
from allranks.lab.cluster.plan import BoxPlan

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_TIMEOUT_S = 30.0


def find_program(name: str) -> str:
    """Return the full path of a system program; the PATH of ordinary users often lacks the sbin folders."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")
    if path is None:
        raise EnvironmentNotAble(
            f"The program '{name}' is not installed. Run scripts/install-slurm.sh, or see the docs."
        )
    return path


def check_output(
    argv: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S, text: str | None = None, what: str = ""
) -> str:
    """Return the output of a command that must succeed; ``text`` is its input, ``what`` its name in the error."""
    done = run_command(argv, timeout_s=timeout_s, text=text)
    if done.returncode != 0:
        raise RunFailed(
            f"{what or repr(_short(argv))} ended with exit code {done.returncode}: "
            f"{last_lines(done.stderr or done.stdout)}"
        )
    return done.stdout


def run_command(
    argv: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail; only a missing program or the time limit raises."""
    try:
        return subprocess.run(
            list(argv),
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise EnvironmentNotAble(f"The program '{argv[0]}' is not installed.") from None
    except subprocess.TimeoutExpired:
        raise RunFailed(f"'{_short(argv)}' did not end within {timeout_s:g} s.") from None


def last_lines(text: str) -> str:
    """Return the last lines of an output, as part of a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-2:]) or "no output"


def _short(argv: Sequence[str]) -> str:
    line = shlex.join(argv)
    return line if len(line) <= 160 else f"{line[:60]} ... {line[-90:]}"


LOGIN_KINDS = ("net", "mount", "uts")
"""No PID namespace, so nsenter does not fork: signals and exit codes reach the command directly."""
DAEMON_KINDS = (*LOGIN_KINDS, "pid")
NODE_KINDS = (*LOGIN_KINDS, "ipc", "pid")


def enter_for_setup(plan: BoxPlan, pid: int, kinds: Sequence[str]) -> list[str]:
    """Return the prefix that enters the namespaces of ``pid`` with the rights to change them."""
    user = ["--user", "--preserve-credentials"] if plan.rootless else []
    return [find_program("nsenter"), f"--target={pid}", *user, *(f"--{kind}" for kind in kinds)]


def enter_as_user(plan: BoxPlan, pid: int, kinds: Sequence[str]) -> list[str]:
    """Return the prefix that enters as the owner of the box: daemons, jobs and users run this way.

    Without root, the box's user namespace shows the user as root, and Slurm would try (and fail) to drop root's groups.
    In a second user namespace inside it the user has his own ID, and Slurm uses its single-user mode.
    """
    prefix = enter_for_setup(plan, pid, kinds)
    if plan.rootless:
        prefix += [find_program("unshare"), "--user", f"--map-user={plan.uid}", f"--map-group={plan.gid}"]
    return prefix


def create_login(plan: BoxPlan) -> list[str]:
    """Return the prefix that creates the login node: the namespaces that contain everything else."""
    user = ["--user", "--map-root-user"] if plan.rootless else []
    spaces = ["--net", "--mount", "--uts", "--pid", "--fork", "--propagation=slave"]
    return [find_program("setsid"), "--fork", find_program("unshare"), *user, *spaces]


def create_node(plan: BoxPlan, login_pid: int) -> list[str]:
    """Return the prefix that creates a node below the login node, so that it ends with it and has no parent outside."""
    spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--propagation=slave"]
    return [
        *enter_for_setup(plan, login_pid, DAEMON_KINDS),
        find_program("setsid"),
        "--fork",
        find_program("unshare"),
        *spaces,
    ]


def set_environment(values: dict[str, str], *, cwd: str | None = None, clean: bool = False) -> list[str]:
    """Return the prefix that changes environment and folder. ``env`` does both after entering the namespaces."""
    folder = [f"--chdir={cwd}"] if cwd is not None else []
    return [
        find_program("env"),
        *(["-i"] if clean else []),
        *folder,
        *(f"{key}={value}" for key, value in values.items()),
    ]


INIT_VARIABLE = "ALLRANKS_BOX_INIT"
"""Environment variable of first processes: <identity of the box>:<node>."""
ID_VARIABLE = "ALLRANKS_BOX_ID"
"""Environment variable of every process that was sent into the box from outside."""
_PROC = Path("/proc")


def all_pids() -> list[int]:
    """Return every visible process."""
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process started; empty if it is gone or not readable."""
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in data.decode(errors="replace").split("\0") if "=" in entry)
    return {key: value for key, _, value in pairs}


def namespace(pid: int | str, kind: str) -> str | None:
    """Return the name of a process's namespace (``kind`` is net, mnt, pid ...); None if it is gone or not readable."""
    try:
        return str((_PROC / str(pid) / "ns" / kind).readlink())
    except OSError:
        return None


def status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty if the process is gone."""
    try:
        text = (_PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def init_processes(identity: str) -> dict[str, int]:
    """Return the first process of the login node and of each node, as pids of this process's namespace."""
    parents: dict[str, int] = {}
    for pid in all_pids():
        mark = environment(pid).get(INIT_VARIABLE, "")
        box, _, name = mark.rpartition(":")
        if box == identity and _is_first(status(pid)):
            parents[name] = pid
    return parents


def _is_first(fields: dict[str, str]) -> bool:
    """Return whether a live process has pid 1 in a PID namespace below ours."""
    numbers = fields.get("NSpid", "").split()
    return len(numbers) > 1 and numbers[-1] == "1" and not fields.get("State", "Z").startswith(("Z", "X"))


class Mount(NamedTuple):
    """One line of a process's mount table."""

    device: str
    target: str
    kind: str


def mounts(pid: int | str) -> list[Mount]:
    """Return the mounts that a process sees, earliest first."""
    rows = []
    for line in (_PROC / str(pid) / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        target = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), left.split()[4])
        rows.append(Mount(left.split()[2], target, right.split()[0]))
    return rows


def in_namespaces(kind: str, wanted: Iterable[str]) -> list[int]:
    """Return every process whose namespace of that kind is one of ``wanted``."""
    names = set(wanted)
    return [pid for pid in all_pids() if namespace(pid, kind) in names]


def marked_processes(identity: str) -> list[int]:
    """Return every process with the box's marks outside of this process's network: marks alone may be inherited."""
    outside = namespace("self", "net")
    marked = [p for p in all_pids() if environment(p).get(ID_VARIABLE) == identity or is_init(p, identity)]
    return [pid for pid in marked if namespace(pid, "net") != outside]


def is_init(pid: int, identity: str) -> bool:
    """Return whether a process is a first process of the box, alive or about to enter its namespaces."""
    return environment(pid).get(INIT_VARIABLE, "").rpartition(":")[0] == identity


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes, some of which may be gone."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return status(pid).get("State", "Z")[:1] not in ("Z", "X")


def wait_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until the processes are gone; return those that are not."""
    deadline = time.monotonic() + timeout_s
    left = list(pids)
    while left := [pid for pid in left if alive(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left
