"""A box that is up: how to reach its login side and its nodes."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import msgspec

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.lab.cluster import commands, processes
from allranks.lab.cluster.commands import DEFAULT_TIMEOUT_S, find_program, run_command
from allranks.lab.cluster.plan import check_name, require_node
from allranks.lab.cluster.records import BoxPaths, BoxPlan, FaultRecord
from allranks.nodes.slurm.endpoints import (
    DEFAULT_NAME,
    NAME_VARIABLE,
    VERSION,
    SlurmEndpoint,
    boot_id,
    read_endpoint,
    select,
    start_ticks,
    state_root,
)
from allranks.nodes.srun import CLOCK_VARIABLE


class Box:
    """A box that was started; get one with `find_box` or `up`."""

    def __init__(self, plan: BoxPlan, identity: str) -> None:
        self.plan = plan
        self.identity = identity
        self.folder = BoxPaths(Path(plan.folder))

    @property
    def name(self) -> str:
        """The name given to ``cluster up``."""
        return self.plan.name

    @property
    def node_names(self) -> list[str]:
        """All nodes, in order."""
        return [node.name for node in self.plan.nodes]

    def inits(self) -> dict[str, int]:
        """First process of the login side and of each node that is alive, by name."""
        return processes.init_processes(self.identity)

    def is_alive(self) -> bool:
        """Whether the login side, and with it the box, exists."""
        # Without root, the login side may not look at the first processes.
        return self.plan.login in self.inits() or (self.plan.rootless and self.place() == self.plan.login)

    def place(self) -> str | None:
        """The node, or the login side, that this process runs on; None outside the box.

        Inside, and only there, something is mounted on the spool. The environment would not do: jobs may lose it.
        """
        inside = any(mount.target == str(self.folder.spool) for mount in processes.mounts("self"))
        return socket.gethostname() if inside else None

    def init(self, name: str) -> int:
        """The first process of a node or of the login side; an error if it is dead."""
        pid = self.inits().get(name)
        if pid is None and self.plan.rootless and self.place() is not None:
            raise RequestError("Without root, a box is changed and its nodes are entered from outside of it only.")
        if pid is None and name == self.plan.login:
            raise self._not_up()
        if pid is None:
            raise EnvironmentNotAble(
                f"Node '{name}' of box '{self.name}' is not running. "
                f"Start it with: allranks cluster fault heal {name}; or begin anew: allranks cluster down."
            )
        return pid

    def _not_up(self) -> EnvironmentNotAble:
        return EnvironmentNotAble(f"Box '{self.name}' is not up any more. Clean up with: allranks cluster down.")

    def env(self) -> dict[str, str]:
        """What a Slurm command needs in its environment to talk to this box."""
        return {
            "SLURM_CONF": str(self.folder.slurm_conf),
            NAME_VARIABLE: self.name,
            processes.ID_VARIABLE: self.identity,
        }

    def endpoint(self) -> SlurmEndpoint:
        """What Slurm's clients need to enter the box; published once it is up."""
        login = self.init(self.plan.login)
        ticks = start_ticks(login)
        if ticks is None:
            raise self._not_up()
        return SlurmEndpoint(
            version=VERSION,
            name=self.name,
            boot_id=boot_id(),
            pid=login,
            start_ticks=ticks,
            enter=commands.enter_as_user(self.plan, login, commands.LOGIN_KINDS),
            inside=str(self.folder.spool),
            environment=self.env(),
        )

    def command_prefix(self, cwd: Path | str | None = None) -> list[str]:
        """Words to put before a command so that it runs on the box's login side: ``[*prefix, "sbatch", ...]``.

        The command keeps the caller's user, environment (plus `env`), standard streams, process id and ``cwd``
        (default: the caller's), and sees the same files. It gets signals and gives exit codes itself, because
        nothing stands between it and the caller. It sees the box's network, host name and /etc/hosts.
        """
        published = read_endpoint(self.folder.path)
        if published is None or published.environment != self.env():  # not yet, or by a later box of the same name
            published = self.endpoint()
        return published.command_prefix(cwd or Path.cwd())

    def node_prefix(self, name: str, cwd: Path | str | None = None) -> list[str]:
        """Words to put before a command so that it runs on one node, past Slurm.

        A node has its own process ids, so ``nsenter`` stays as the command's parent; it passes the exit code on,
        and the command gets SIGTERM when it is killed. ``cwd`` must exist on the node (default: the caller's, if
        it is there, else /).
        """
        require_node(name, self.node_names, "--node")
        values = self.env()
        clock = self.folder.clock(name)
        if clock.exists():
            values[CLOCK_VARIABLE] = clock.read_text().strip()
        into = commands.enter_as_user(self.plan, self.init(name), commands.NODE_KINDS)
        guard = [find_program("setpriv"), "--pdeathsig", "TERM"]
        if cwd is None:
            there = run_command([*into, "test", "-d", str(Path.cwd())]).returncode == 0
            cwd = Path.cwd() if there else "/"
        return [*into, *guard, *commands.set_environment(values, cwd=str(cwd))]

    def setup_prefix(self, name: str) -> list[str]:
        """Words to put before a command that changes a node or the login side: mounts, interfaces."""
        kinds = commands.DAEMON_KINDS if name == self.plan.login else commands.NODE_KINDS
        return commands.enter_for_setup(self.plan, self.init(name), kinds)

    def run(
        self, argv: list[str], *, node: str | None = None, cwd: Path | str | None = None, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the login side or a node, and gives its output and exit code."""
        prefix = self.command_prefix(cwd) if node is None else self.node_prefix(node, cwd)
        return run_command([*prefix, *argv], timeout_s=timeout_s or DEFAULT_TIMEOUT_S)

    def faults(self) -> list[FaultRecord]:
        """The faults that are in force."""
        if not self.folder.faults.exists():
            return []
        return msgspec.json.decode(self.folder.faults.read_bytes(), type=list[FaultRecord])


def load_box(path: Path) -> Box | None:
    """The box whose state is in that folder, alive or not; None if there is none that got as far as a plan."""
    folder = BoxPaths(path)
    try:
        plan = msgspec.json.decode(folder.plan.read_bytes(), type=BoxPlan)
        return Box(plan, folder.identity.read_text().strip())
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def list_boxes() -> list[Box]:
    """This user's boxes that are alive."""
    folder = state_root()
    if not folder.is_dir():
        return []
    boxes = [load_box(path) for path in sorted(folder.iterdir())]
    return [box for box in boxes if box is not None and box.is_alive()]


def find_box(name: str | None = None) -> Box | None:
    """The box that is up, or None.

    Without a name: the one that ``ALLRANKS_BOX`` names; else the only one; else the one with the default name.
    """
    name = name or os.environ.get(NAME_VARIABLE) or None
    if name is not None:
        box = load_box(state_root() / check_name(name))
        return box if box is not None and box.is_alive() else None
    boxes = {box.name: box for box in list_boxes()}
    chosen = select(list(boxes), None)
    return boxes[chosen] if chosen is not None else None


def box_names() -> list[str]:
    """Every box of this user that left something, alive or not."""
    folder = state_root()
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def default_name() -> str:
    """The box that ``down`` means without a name: the one that is up, or the only one that crashed."""
    box = find_box()
    left = box_names()
    if box is not None:
        return box.name
    return os.environ.get(NAME_VARIABLE) or (left[0] if len(left) == 1 else DEFAULT_NAME)


def need_box(name: str | None = None) -> Box:
    """The box that is up, or an error that says how to get one."""
    box = find_box(name)
    if box is None:
        which = f"No box named '{name}' is up" if name else "No box is up"
        raise EnvironmentNotAble(f"{which}. Start one with: allranks cluster up.")
    return box
