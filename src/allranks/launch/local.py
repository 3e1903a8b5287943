"""The launcher for this machine: one agent process, which this process supervises."""

from __future__ import annotations

import sys
from typing import Any

from allranks.launch.launchers import LaunchedJob, Launcher, agent_command, write_attempt_args
from allranks.planning import env_vars as network_file
from allranks.planning import rank_environment
from allranks.planning.planner import network_job
from allranks.planning.rank_environment import in_environment
from allranks.planning.records import LaunchPlan
from allranks.rundir.paths import RunDir
from allranks.spec.records import RunSpec


class LocalLauncher(Launcher):
    """``launcher: local``. Everything else has the defaults."""

    def start(self, run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int, resume: dict[str, Any]) -> LaunchedJob:
        """Start the agent."""
        from allranks.launch.local_job import LocalJob
        from allranks.nodes.preflight.network_policy import policy_for_this_machine

        write_attempt_args(run, attempt, resume)
        job, host = network_job(spec, plan.device), plan.nodes[0].host or "localhost"
        network_file.save_policy(run.network(attempt), policy_for_this_machine(job, host, run.root.parent))
        env = rank_environment.as_variables(plan.environment)
        _, python = agent_command(spec, plan, run, sys.executable)
        return LocalJob(run, plan, attempt, env, spec.observe.telemetry_s, in_environment(spec.cluster.python, python))
