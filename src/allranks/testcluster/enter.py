"""Command lines that run something inside a box. Pure: pids in, argv out.

``nsenter`` and not ``ip netns exec``, which would mount a fresh /sys and so hide the cgroup tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from allranks.testcluster.command import program
from allranks.testcluster.records import BoxPlan

LOGIN_KINDS = ("net", "mount", "uts")
"""No PID namespace, so nsenter need not fork: signals and exit codes reach the command itself."""
DAEMON_KINDS = (*LOGIN_KINDS, "pid")
NODE_KINDS = (*LOGIN_KINDS, "ipc", "pid")


def as_setup(plan: BoxPlan, pid: int, kinds: Sequence[str]) -> list[str]:
    """Prefix that enters the namespaces of ``pid`` with the rights to change them."""
    user = ["--user", "--preserve-credentials"] if plan.rootless else []
    return [program("nsenter"), f"--target={pid}", *user, *(f"--{kind}" for kind in kinds)]


def as_user(plan: BoxPlan, pid: int, kinds: Sequence[str]) -> list[str]:
    """Prefix that enters as the user the box belongs to: what daemons, jobs and people run as.

    Without root, the box's user namespace shows the user as root, and Slurm would then try (and fail) to drop
    root's groups. A second user namespace inside the first shows the user as himself, and Slurm runs in the
    single-user way it has for that.
    """
    prefix = as_setup(plan, pid, kinds)
    if plan.rootless:
        prefix += [program("unshare"), "--user", f"--map-user={plan.uid}", f"--map-group={plan.gid}"]
    return prefix


def new_login(plan: BoxPlan) -> list[str]:
    """Prefix that creates the login side: the namespaces that hold everything else."""
    user = ["--user", "--map-root-user"] if plan.rootless else []
    spaces = ["--net", "--mount", "--uts", "--pid", "--fork", "--propagation=slave"]
    return [program("setsid"), "--fork", program("unshare"), *user, *spaces]


def new_node(plan: BoxPlan, login_pid: int) -> list[str]:
    """Prefix that creates a node below the login side, so that it ends with it, and leaves no parent outside."""
    spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--propagation=slave"]
    return [*as_setup(plan, login_pid, DAEMON_KINDS), program("setsid"), "--fork", program("unshare"), *spaces]


def with_environment(values: dict[str, str], *, cwd: str | None = None, clean: bool = False) -> list[str]:
    """Prefix that changes the environment and the folder. ``env`` does both after the namespaces were entered."""
    folder = [f"--chdir={cwd}"] if cwd is not None else []
    return [program("env"), *(["-i"] if clean else []), *folder, *(f"{key}={value}" for key, value in values.items())]
