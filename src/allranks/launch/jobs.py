"""The launchers: a new one is one file and one line here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from allranks import envpolicy
from allranks.launch import allocation, hosts
from allranks.launch.follow import Job
from allranks.launch.local import LocalJob
from allranks.launch.slurm import SlurmJob
from allranks.planning import LaunchPlan, network_job
from allranks.rundir import RunDir, write_json
from allranks.slurm.commands import find_slurm
from allranks.spec.records import RunSpec

Start = Callable[[RunDir, RunSpec, LaunchPlan, int, dict[str, Any]], Job]


def _local(run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int, resume: dict[str, Any]) -> Job:
    from allranks.fabric import report as network_file
    from allranks.fabric.gather import for_this_machine  # only a launch asks the machine

    _args(run, attempt, resume)
    here = for_this_machine(network_job(spec, plan.device), plan.nodes[0].host or "localhost", run.root.parent)
    network_file.save(run.network(attempt), here)
    env = envpolicy.environment(plan.environment)
    return LocalJob(run, attempt, plan.nodes[0].host or "localhost", env, spec.observe.telemetry_s)


def _slurm(run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int, resume: dict[str, Any]) -> Job:
    # Secrets stand in no script: sbatch hands the environment of its caller on to the job.
    secrets = envpolicy.secrets(plan.environment)
    os.environ.update(secrets)
    os.environ.update(_handed_on(list(secrets), spec.cluster.slurm.extra, os.environ))
    for old in (run.cancelled, run.driver):  # of an earlier job of this run
        old.unlink(missing_ok=True)
    write_json(run.logs / "resume.json", resume)
    if allocation.inside():
        return allocation.AllocationJob(run)
    return SlurmJob.submit(run, find_slurm(Path.cwd()))


def _handed_on(names: list[str], extra: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """SBATCH_EXPORT by which these variables, too, reach a job that is not to get all of its caller's (``NONE``)."""
    given = [option.partition("=")[2] for option in extra if option.startswith("--export=")]
    asked = environment.get("SBATCH_EXPORT") or (given[-1] if given else "ALL")
    if not names or asked.split(",")[0].upper() == "ALL":
        return {}
    kept = [] if asked.upper() in ("NONE", "NIL") else [asked]
    return {"SBATCH_EXPORT": ",".join([*kept, *names])}


def _hosts(run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int, resume: dict[str, Any]) -> Job:
    _args(run, attempt, resume)
    return hosts.start(run, spec, plan, attempt)


def _args(run: RunDir, attempt: int, resume: dict[str, Any]) -> None:
    run.logs_of(attempt).mkdir(parents=True, exist_ok=True)
    write_json(run.logs_of(attempt) / "args.json", resume)


LAUNCHERS: dict[str, Start] = {"local": _local, "slurm": _slurm, "hosts": _hosts}
