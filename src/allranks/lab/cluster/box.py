"""Access a running box: its login node, its nodes, and their status."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import msgspec

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.lab.cluster import processes
from allranks.lab.cluster.plan import BoxPaths, BoxPlan, FaultRecord, NodePlan, check_name, require_node
from allranks.lab.cluster.processes import DEFAULT_TIMEOUT_S, find_program, run_command
from allranks.nodes.slurm import endpoints
from allranks.nodes.slurm.srun import CLOCK_VARIABLE


class Box:
    """A box that was started; `find_box` and `up` return one."""

    def __init__(self, plan: BoxPlan, identity: str) -> None:
        self.plan = plan
        self.identity = identity
        self.folder = BoxPaths(Path(plan.folder))

    @property
    def name(self) -> str:
        """Return the name given to ``cluster up``."""
        return self.plan.name

    @property
    def node_names(self) -> list[str]:
        """Return all nodes, in order."""
        return [node.name for node in self.plan.nodes]

    def inits(self) -> dict[str, int]:
        """Return the first process of the login node and of each running node, by name."""
        return processes.init_processes(self.identity)

    def is_alive(self) -> bool:
        """Return whether the login node, and therefore the box, exists."""
        # Without root, the login node has no permission to inspect the first processes.
        return self.plan.login in self.inits() or (self.plan.rootless and self.place() == self.plan.login)

    def place(self) -> str | None:
        """Return the node, or the login node, that this process runs on; None outside the box.

        Only in the box a file system is mounted on the spool folder. The environment is not reliable: jobs may lose it.
        """
        inside = any(mount.target == str(self.folder.spool) for mount in processes.mounts("self"))
        return socket.gethostname() if inside else None

    def init(self, name: str) -> int:
        """Return the first process of a node or of the login node; raise an error if it is dead."""
        pid = self.inits().get(name)
        if pid is None and self.plan.rootless and self.place() is not None:
            raise RequestError("Without root, this command only works outside of the box.")
        if pid is None and name == self.plan.login:
            raise self._not_up()
        if pid is None:
            raise EnvironmentNotAble(
                f"Node '{name}' of box '{self.name}' is not running. "
                f"Start it with: allranks cluster fault heal {name}; or remove the box: allranks cluster down."
            )
        return pid

    def _not_up(self) -> EnvironmentNotAble:
        return EnvironmentNotAble(f"Box '{self.name}' is no longer running. Clean up with: allranks cluster down.")

    def env(self) -> dict[str, str]:
        """Return the environment of a Slurm command for this box."""
        return {
            "SLURM_CONF": str(self.folder.slurm_conf),
            endpoints.NAME_VARIABLE: self.name,
            processes.ID_VARIABLE: self.identity,
        }

    def endpoint(self) -> endpoints.SlurmEndpoint:
        """Return what Slurm's clients need to enter the box; published once it is running."""
        login = self.init(self.plan.login)
        ticks = endpoints.start_ticks(login)
        if ticks is None:
            raise self._not_up()
        return endpoints.SlurmEndpoint(
            version=endpoints.VERSION,
            name=self.name,
            boot_id=endpoints.boot_id(),
            pid=login,
            start_ticks=ticks,
            enter=processes.enter_as_user(self.plan, login, processes.LOGIN_KINDS),
            inside=str(self.folder.spool),
            environment=self.env(),
        )

    def command_prefix(self, cwd: Path | str | None = None) -> list[str]:
        """Return the prefix of a command that runs on the box's login node: ``[*prefix, "sbatch", ...]``.

        The command keeps the caller's user, environment (plus `env`), standard streams, process id and ``cwd``
        (default: the caller's), and sees the same files. It receives signals and returns exit codes directly, because
        there is no process in between. It sees the box's network, host name and /etc/hosts.
        """
        published = endpoints.read_endpoint(self.folder.path)
        if published is None or published.environment != self.env():  # not yet, or by a later box of the same name
            published = self.endpoint()
        return published.command_prefix(cwd or Path.cwd())

    def node_prefix(self, name: str, cwd: Path | str | None = None) -> list[str]:
        """Return the prefix of a command that runs on one node, without Slurm.

        A node has its own process IDs, so ``nsenter`` stays the command's parent: it passes on the exit code, and the
        command gets SIGTERM when it is killed. ``cwd`` must exist on the node (default: the caller's, or else /).
        """
        require_node(name, self.node_names, "--node")
        values = self.env()
        clock = self.folder.clock(name)
        if clock.exists():
            values[CLOCK_VARIABLE] = clock.read_text().strip()
        into = processes.enter_as_user(self.plan, self.init(name), processes.NODE_KINDS)
        guard = [find_program("setpriv"), "--pdeathsig", "TERM"]
        if cwd is None:
            there = run_command([*into, "test", "-d", str(Path.cwd())]).returncode == 0
            cwd = Path.cwd() if there else "/"
        return [*into, *guard, *processes.set_environment(values, cwd=str(cwd))]

    def setup_prefix(self, name: str) -> list[str]:
        """Return the prefix of a command that changes a node or the login node: mounts, interfaces."""
        kinds = processes.DAEMON_KINDS if name == self.plan.login else processes.NODE_KINDS
        return processes.enter_for_setup(self.plan, self.init(name), kinds)

    def run(
        self, argv: list[str], *, node: str | None = None, cwd: Path | str | None = None, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node or a node; return its output and exit code."""
        prefix = self.command_prefix(cwd) if node is None else self.node_prefix(node, cwd)
        return run_command([*prefix, *argv], timeout_s=timeout_s or DEFAULT_TIMEOUT_S)

    def faults(self) -> list[FaultRecord]:
        """Return the active faults."""
        if not self.folder.faults.exists():
            return []
        return msgspec.json.decode(self.folder.faults.read_bytes(), type=list[FaultRecord])


def load_box(path: Path) -> Box | None:
    """Return the box whose state is in that folder, running or not; None if it never had a plan."""
    folder = BoxPaths(path)
    try:
        plan = msgspec.json.decode(folder.plan.read_bytes(), type=BoxPlan)
        return Box(plan, folder.identity.read_text().strip())
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def list_boxes() -> list[Box]:
    """Return this user's running boxes."""
    folder = endpoints.state_root()
    if not folder.is_dir():
        return []
    boxes = [load_box(path) for path in sorted(folder.iterdir())]
    return [box for box in boxes if box is not None and box.is_alive()]


def find_box(name: str | None = None) -> Box | None:
    """Return the running box, or None.

    Without a name: the box in ``ALLRANKS_BOX``; else the only one; else the one with the default name.
    """
    name = name or os.environ.get(endpoints.NAME_VARIABLE) or None
    if name is not None:
        box = load_box(endpoints.state_root() / check_name(name))
        return box if box is not None and box.is_alive() else None
    boxes = {box.name: box for box in list_boxes()}
    chosen = endpoints.select(list(boxes), None)
    return boxes[chosen] if chosen is not None else None


def box_names() -> list[str]:
    """Return every box of this user with files left, running or not."""
    folder = endpoints.state_root()
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def default_name() -> str:
    """Return the default box of ``down``: the running one, or the only one that crashed."""
    box = find_box()
    left = box_names()
    if box is not None:
        return box.name
    return os.environ.get(endpoints.NAME_VARIABLE) or (left[0] if len(left) == 1 else endpoints.DEFAULT_NAME)


def need_box(name: str | None = None) -> Box:
    """Return the running box, or raise an error that says how to start one."""
    box = find_box(name)
    if box is None:
        raise EnvironmentNotAble(none_running(name))
    return box


def none_running(name: str | None) -> str:
    """Return the message for a box that is not running; others may be, if one was named."""
    wanted = name or os.environ.get(endpoints.NAME_VARIABLE)
    others = "".join(f"; {box.name} is" for box in list_boxes())
    which = f"No box named '{wanted}' is running{others}" if wanted else "No box is running"
    return f"{which}. Start one with: allranks cluster up."


HEALTHY_STATES = ("idle", "mix", "alloc", "comp")
"""States of a working node; a trailing * (it does not answer), ``drain`` and ``down`` are not among them."""


class NodeStatus(NodePlan, frozen=True, kw_only=True):
    """One node: its plan and its state."""

    running: bool
    """Whether the node itself is running; its slurmd may not be."""
    state: str
    """Slurm's state of the node, empty if Slurm does not answer."""
    faults: tuple[str, ...]


class BoxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a box, or that there is none."""

    up: bool
    healthy: bool = False
    """The controller answers, and every node works."""
    name: str = ""
    folder: str = ""
    slurm_conf: str = ""
    network: str = ""
    login: str = ""
    login_address: str = ""
    partitions: tuple[str, ...] = ()
    rootless: bool = False
    shared_tmp: bool = False
    accounting: bool = False
    controller: bool = False
    nodes: tuple[NodeStatus, ...] = ()


def box_status(box: Box | None) -> BoxStatus:
    """Return the current state of a box."""
    if box is None:
        return BoxStatus(up=False)
    plan = box.plan
    controller = " is UP" in run_command([*box.command_prefix("/"), "scontrol", "ping"]).stdout
    states = node_states(box) if controller else {}
    # Without root, the login node has no permission to inspect the first processes.
    alive = set(box.inits() or box.node_names)
    faults = box.faults()
    nodes = tuple(
        NodeStatus(
            **msgspec.structs.asdict(node),
            running=node.name in alive,
            state=states.get(node.name, ""),
            faults=tuple(fault.kind for fault in faults if fault.node == node.name),
        )
        for node in plan.nodes
    )
    planned = {name: getattr(plan, name) for name in BoxStatus.__struct_fields__ if hasattr(plan, name)}
    return BoxStatus(
        **{**planned, "nodes": nodes},
        up=True,
        healthy=controller and all(node.running and node.state in HEALTHY_STATES for node in nodes),
        slurm_conf=str(box.folder.slurm_conf),
        controller=controller,
    )


def node_states(box: Box) -> dict[str, str]:
    """Return Slurm's state of each node, such as idle, mixed, down* (the star: it does not answer)."""
    done = run_command([*box.command_prefix("/"), "sinfo", "--noheader", "--Node", "--format=%N %t"])
    if done.returncode != 0:
        return {}
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)


def daemon_pids(box: Box, name: str, command: str) -> list[int]:
    """Return the processes of that name in the PID namespace of a node or of the login node."""
    space = processes.namespace(box.init(name), "pid")
    return [
        pid
        for pid in processes.in_namespaces("pid", [space] if space else [])
        if processes.status(pid).get("Name") == command
    ]
