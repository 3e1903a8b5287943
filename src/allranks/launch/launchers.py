"""Define the launcher interface, and the local launcher, which has nearly all of its defaults.

A new launcher is one file with one class, and one line in `allranks.spec.launchers`.

The files of the launchers are imported when they are needed, and load what starts and follows jobs only in `start`:
``allranks plan`` shows what a launcher would do, and must not load all of that.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from allranks.errors import RequestError, SpecError
from allranks.nodes.rank_command import environment_commands, in_environment, program_file
from allranks.planning import network_policy
from allranks.planning.planner import network_job
from allranks.planning.rank_environment import as_variables
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import make_folder, read_record, write_json
from allranks.rundir.paths import RunDir
from allranks.spec.data_sources import parts_of
from allranks.spec.launchers import BUILT_IN, DEFAULT_LAUNCHER, LAUNCHERS, launcher_info
from allranks.spec.records import RunSpec
from allranks.spec.validation import is_container
from allranks.utils.machine import MachineFacts, machine_facts

if TYPE_CHECKING:
    from allranks.launch.supervisor import JobEnd, LaunchedJob
    from allranks.nodes.preflight.runner import TargetNodes


class Launcher(ABC):
    """Start the agents of a run, one per node. Only `start` must be defined; the defaults are for agents that report to
    this process.

    An instance serves one command: it may cache facts about a scheduler.
    """

    needs_follower: ClassVar[bool] = True
    """Whether a detached run needs a process in the background that follows it."""
    restarts_here: ClassVar[bool] = False
    """Whether the process that follows a run starts it again after a failure whose cause allows it."""

    @abstractmethod
    def start(self, run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int, resume: dict[str, Any]) -> LaunchedJob:
        """Start an attempt.

        Args:
            resume: arguments of the attempt, which the ranks read; empty for a run from the beginning.
        """

    # Before the start

    def planning_facts(self, spec: RunSpec) -> MachineFacts:
        """Return the facts that the plan of a spec depends on; by default those of this machine."""
        return machine_facts()

    def batch_script(self, spec: RunSpec, run: RunDir, plan: Callable[[], LaunchPlan]) -> str | None:
        """Return what would be handed to a scheduler, or None; `plan` is called only where there is a script."""
        return None

    def node_commands(self, spec: RunSpec, run: RunDir, plan: Callable[[], LaunchPlan]) -> list[str] | None:
        """Return the commands that users start, one per node; None for launchers that start the nodes themselves."""
        return None

    @contextmanager
    def nodes_to_examine(
        self, spec: RunSpec, *, wait_s: float, say: Callable[[str], None]
    ) -> Iterator[tuple[TargetNodes, list[str]]]:
        """Wait up to `wait_s` for nodes for ``doctor``, hold and yield them with notes; by default this machine."""
        from allranks.nodes.preflight.runner import TargetNodes

        yield TargetNodes(), []

    def require_available(self) -> None:  # noqa: B027 - not every launcher needs it
        """Raise `EnvironmentNotAble` where this launcher cannot be used here; called before anything is written."""

    def write_files(self, run: RunDir, spec: RunSpec, plan: LaunchPlan) -> None:  # noqa: B027 - as above
        """Write the files that this launcher reads from the run folder, besides spec and plan."""

    def prepare(self, run: RunDir, spec: RunSpec) -> list[str]:
        """Do lengthy work before the first start, test whether a scheduler refuses the job, return notes for users."""
        return []

    # While it runs

    def has_records(self, run: RunDir) -> bool:
        """Return whether the run folder has records that only this launcher writes."""
        return False

    def is_running(self, run: RunDir, agents: set[str] | None = None) -> bool:
        """Return whether the run is alive, as far as this machine can tell; by default whether it has an agent here.
        `agents` is the result of `local_agents`, if the caller queries many runs."""
        return str(run.root) in (local_agents() if agents is None else agents)

    def cancel(self, run: RunDir, *, now: bool) -> str:
        """End a run; by default through the control channel of the process that started it.

        Returns:
            A description of what was done.

        Raises:
            RequestError: the run is not running.
        """
        self._send(run, "kill" if now else "stop", "cancel")
        if now:
            return "stopped its ranks"
        grace_s = read_record(run.plan).get("grace_s")  # of a user's own program
        if grace_s is None:
            return (
                "asked its ranks to finish their step, write a checkpoint and exit; to end them at once: allranks "
                "cancel --now"
            )
        return f"sent SIGTERM to its ranks; what still runs after {grace_s:g} s (script.grace_s) is killed"

    def request_checkpoint(self, run: RunDir) -> None:
        """Ask the ranks of a training for a full checkpoint, after which they go on; by default as `cancel`.

        Raises:
            RequestError: it is not running.
        """
        self._send(run, "checkpoint", "save")

    def _send(self, run: RunDir, order: str, verb: str) -> None:
        """Send an order to the process that started a run; `verb` says for messages what is to be done."""
        from allranks.launch.channel import send_request
        from allranks.launch.channel_protocol import ChannelError, Endpoint

        attempt = max(run.attempts(), default=0)
        endpoint = read_record(run.channel(attempt)) if attempt else {}
        if not endpoint:
            elsewhere = " here; it may run on another machine" if self.is_running(run) else ""
            raise RequestError(f"run {run.name} does not run{elsewhere}; there is nothing to {verb}")
        try:
            send_request(msgspec.convert(endpoint, Endpoint), order, "allranks cancel")
        except (OSError, ChannelError, msgspec.ValidationError) as error:
            raise RequestError(
                f"run {run.name} does not run: what started it no longer listens at "
                f"{endpoint.get('address')}:{endpoint.get('port')} ({error}); if it runs on another machine, give the "
                "command there"
            ) from None

    # After the end

    def restart_problem(self, end: JobEnd) -> str:
        """Return why this launcher cannot start a failed run again by itself, from how its agents ended; else empty."""
        return ""

    def commands_to_continue(self, run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int) -> str:
        """Return what users start on the nodes to continue a failed run with this attempt; empty if nothing."""
        return ""

    def describe_lost_driver(self, run: RunDir, end_reason: str) -> str:
        """Describe a driver that did not record its end, from how the scheduler says that the job ended; else empty."""
        return ""

    def describe_end(self, run: RunDir, attempt: int, code: int, end_reason: str) -> tuple[str, Path]:
        """Return a description of the job's end and the log with details, for an end without another explanation, from
        its exit code and how the scheduler says that it ended."""
        logs = run.logs_of(attempt)
        return f"the agent ended with exit code {code}", next(iter(logs.glob("*.agent.log")), logs)


class LocalLauncher(Launcher):
    """``launcher: local``: one agent on this machine, supervised by this process. All else has the defaults."""

    restarts_here = True

    def start(self, run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int, resume: dict[str, Any]) -> LaunchedJob:
        """Start the agent."""
        from allranks.launch.local_job import LocalJob
        from allranks.nodes.network.facts import policy_for_this_machine

        write_attempt_args(run, attempt, resume)
        job, host = network_job(spec, plan.device), plan.nodes[0].host or "localhost"
        network_policy.save_policy(run.network(attempt), policy_for_this_machine(job, host, run.root.parent))
        env = as_variables(plan.environment)
        _, python = agent_command(spec, plan, run, sys.executable)
        python = in_environment(spec.cluster.python, python)
        command = agent_words(python, run, attempt, telemetry_s=spec.observe.telemetry_s)
        return LocalJob(run, plan, attempt, env, command)


def get_launcher(name: str) -> Launcher:
    """Return the launcher that a spec names as ``cluster.launcher``."""
    module, _, class_name = launcher_info(name).target.partition(":")
    return getattr(import_module(module), class_name)()


def launcher_of(run: RunDir) -> Launcher:
    """Return the launcher of a started run, by its records, else by its plan; else the default launcher."""
    launchers = (get_launcher(name) for name in BUILT_IN)
    if recorded := next((launcher for launcher in launchers if launcher.has_records(run)), None):
        return recorded
    planned = read_record(run.plan).get("launcher")
    return get_launcher(planned if isinstance(planned, str) and planned in LAUNCHERS else DEFAULT_LAUNCHER)


def local_agents() -> set[str]:
    """Command-line arguments of all agents on this machine: the folders of their runs are among them."""
    import psutil

    commands = (p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"]) if p.pid != os.getpid())
    return {word for command in commands if "allranks.launch.agent" in command for word in command}


def write_attempt_args(run: RunDir, attempt: int, resume: dict[str, Any], *, by_hand: bool = False) -> None:
    """Write the arguments of an attempt's ranks, and when the attempt began unless its agents are started by hand."""
    make_folder(run.logs_of(attempt))
    write_json(run.attempt_args(attempt), resume if by_hand else {**resume, "began": time.time()})


def agent_command(spec: RunSpec, plan: LaunchPlan, run: RunDir, python: str) -> tuple[list[str], list[str]]:
    """Return srun options and the Python command for the agents, which run inside the container.

    The run folder and paths in the spec are mounted there under the same paths.
    """
    wanted = spec.cluster.python
    if wanted is None or not is_container(wanted):
        return [], environment_commands(wanted, python)[1]
    mounts = _mounts(spec, run)
    if wanted.startswith("pyxis:"):
        image = wanted.removeprefix("pyxis:")
        return [f"--container-image={image}", f"--container-mounts={','.join(f'{m}:{m}' for m in mounts)}"], ["python"]
    gpus = ["--nv"] if plan.device == "cuda" else []
    return [], ["apptainer", "exec", *gpus, *(f"--bind={m}" for m in mounts), wanted, "python"]


def agent_words(python: list[str], run: RunDir, attempt: int, **options: object) -> list[str]:
    """Return the command of an agent."""
    words = [*python, "-m", "allranks.launch.agent", str(run.root), "--attempt", str(attempt)]
    return words + [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _mounts(spec: RunSpec, run: RunDir) -> list[str]:
    sources = [part.source for part in parts_of(spec.data)] if spec.data else []
    named = [program_file(spec.script) if spec.script else None, *sources, spec.eval.source]
    folders = [Path(p).expanduser().absolute().parent for p in named if p and Path(p).expanduser().is_file()]
    if spec.script is not None and spec.script.workdir is not None:
        folders.append(Path(spec.script.workdir).expanduser().absolute())
    if spec.model is not None and Path(spec.model.name).expanduser().is_dir():
        folders.append(Path(spec.model.name).expanduser().absolute())
    if spec.cluster.cache:
        folders.append(Path(spec.cluster.cache).expanduser().absolute())
    mounts = list(dict.fromkeys(map(str, [run.root, *folders])))
    for path in mounts:
        if "," in path or ":" in path:
            raise SpecError(
                f"{path}: a path with ',' or ':' cannot be mounted in a container; move it or give it another name"
            )
    return mounts
