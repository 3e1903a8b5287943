"""Launcher for manual start, without scheduler or SSH: print one command per node and wait until all have ended.

The run folder must be on a file system that all nodes share: from it the agents read the plan, and where this process
listens for their reports. They keep their ranks for `hosts_job.KEEP_S` without it, then end them with a checkpoint.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.launch.launchers import Launcher, agent_command, agent_words, write_attempt_args
from allranks.nodes.rank_command import environment_commands
from allranks.planning.rank_environment import SCRIPT_ARGS, public_variables, secret_variables
from allranks.planning.records import LaunchPlan
from allranks.rundir.paths import RunDir
from allranks.spec.records import RunSpec

if TYPE_CHECKING:
    from allranks.launch.supervisor import JobEnd, LaunchedJob
    from allranks.nodes.preflight.runner import TargetNodes

HIDDEN_VALUE_HINT = "a secret, not contained in the commands"
HIDDEN_ARGUMENTS_HINT = "script.args as a JSON list; one of them is a secret, not contained in the commands"
DOCTOR_NOTE = "launcher hosts: this machine only, because --wait-s is 0"


class HostsLauncher(Launcher):
    """``launcher: hosts``."""

    restarts_here = True

    def __init__(self) -> None:
        self._starts = 0

    def start(self, run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int, resume: dict[str, Any]) -> LaunchedJob:
        from allranks.launch.hosts_job import commands_text, start_on_hosts

        write_attempt_args(run, attempt, resume, by_hand=True)
        text = commands_text("node", node_commands(spec, run, plan, attempt), manual_steps(spec, plan))
        if self._starts:
            text = f"the nodes start attempt {attempt} by themselves; only where that does not happen, {text}"
        self._starts += 1
        return start_on_hosts(run, spec, plan, attempt, text)

    def restart_problem(self, end: JobEnd) -> str:
        """Return that nodes are gone, which only their users can start again."""
        gone = ", ".join(f"node {lost.node} ({lost.host})" for lost in end.lost)
        return gone and f"the agent of {gone} is gone, and launcher hosts cannot start it"

    def commands_to_continue(self, run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int) -> str:
        from allranks.launch.hosts_job import commands_text
        from allranks.launch.restarts import resume_args  # with the catalogue of failures, which a plan does not need

        if resume_args(run, spec)[0].get("resume_step") is None:  # a program of the user's own, or no full checkpoint
            return f"to start again: allranks run {shlex.quote(str(run.spec))}; it prints the command of each node"
        text = commands_text("node", node_commands(spec, run, plan, attempt), manual_steps(spec, plan))
        return f"to continue: allranks resume {run.argument}; then {text}"

    def node_commands(self, spec: RunSpec, run: RunDir, plan: Callable[[], LaunchPlan]) -> list[str] | None:
        return node_commands(spec, run, plan())

    @contextmanager
    def nodes_to_examine(
        self, spec: RunSpec, *, wait_s: float, say: Callable[[str], None]
    ) -> Iterator[tuple[TargetNodes, list[str]]]:
        """Give every host on which the printed command was started; without time to wait, this machine only."""
        from allranks.launch.hosts_job import examine_hosts

        if wait_s > 0:
            with examine_hosts(spec, wait_s=wait_s, say=say) as examined:
                yield examined
            return
        with super().nodes_to_examine(spec, wait_s=wait_s, say=say) as (where, notes):
            yield where, [*notes, DOCTOR_NOTE]


def manual_steps(spec: RunSpec, plan: LaunchPlan) -> list[str]:
    """Return what the commands cannot contain: secrets, and steps that the shell must run before."""
    said = [
        f"export {name}=...  ({HIDDEN_ARGUMENTS_HINT if name == SCRIPT_ARGS else HIDDEN_VALUE_HINT})"
        for name in sorted(secret_variables(plan.environment))
    ]
    said += [f"module load {shlex.quote(name)}" for name in spec.cluster.modules]
    return said + spec.cluster.setup


def node_commands(
    spec: RunSpec,
    run: RunDir,
    plan: LaunchPlan,
    attempt: int = 1,
    *,
    python: str = sys.executable,
    folder: Path | None = None,
) -> list[str]:
    """Return the command of each node, in node order.

    Args:
        python: the interpreter's path, which must exist on every node, if ``cluster.python`` names no other.
        folder: folder to start them in; default: the current one.
    """
    lines, _ = environment_commands(spec.cluster.python, python)
    _, words = agent_command(spec, plan, run, python)
    before = [f"cd {shlex.quote(str(folder or Path.cwd()))}", *lines]
    return [" && ".join([*before, _agent_words(run, plan, attempt, n.node, words)]) for n in plan.nodes]


def _agent_words(run: RunDir, plan: LaunchPlan, attempt: int, node: int, python: list[str]) -> str:
    exports = [f"{name}={shlex.quote(value)}" for name, value in public_variables(plan.environment).items()]
    return " ".join([*exports, *map(shlex.quote, agent_words(python, run, attempt, node=node))])
