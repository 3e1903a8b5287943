"""Run system commands with a time limit, and build the command lines that create and enter namespaces.

Commands enter a box with ``nsenter``, because ``ip netns exec`` would mount a fresh /sys and hide the cgroup tree.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from allranks.errors import EnvironmentNotAble, RunFailed
from allranks.lab.cluster.records import BoxPlan

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
            f"{what or repr(_short(argv))} ended with exit code {done.returncode}: {last_lines(done.stderr or done.stdout)}"
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


def last_lines(text: str, count: int = 2) -> str:
    """Return the last lines of an output, as part of a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-count:]) or "no output"


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

    Without root, the box's user namespace shows the user as root, and Slurm would then try (and fail) to drop
    root's groups. A second user namespace inside the first shows the user under his own ID, and Slurm uses its
    single-user mode.
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
    """Return the prefix that changes the environment and the folder. ``env`` does both after entering the namespaces."""
    folder = [f"--chdir={cwd}"] if cwd is not None else []
    return [
        find_program("env"),
        *(["-i"] if clean else []),
        *folder,
        *(f"{key}={value}" for key, value in values.items()),
    ]
