"""The Slurm launcher: a batch script whose driver starts the agents; in an allocation, the driver in the foreground."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from allranks.errors import EXIT_ENVIRONMENT, AllranksError, EnvironmentNotAble, RequestError
from allranks.launch.launchers import Launcher
from allranks.launch.slurm.script import render_batch_script, render_environment_test
from allranks.nodes.rank_command import environment_commands, in_environment
from allranks.planning import rank_environment
from allranks.planning.records import LaunchPlan
from allranks.planning.slurm_request import gpus_requested, partition_requested
from allranks.rundir.files import open_append, read_record, write_json, write_text_atomic
from allranks.rundir.paths import RunDir
from allranks.spec.records import RunSpec
from allranks.utils.machine import MachineFacts, machine_facts

if TYPE_CHECKING:
    from allranks.launch.supervisor import LaunchedJob
    from allranks.nodes.preflight.runner import TargetNodes
    from allranks.nodes.slurm.commands import Slurm

ENVIRONMENT_TIMEOUT_S = 120.0
PARTITION_TIMEOUT_S = 5.0
"""Time limit for the Slurm queries of `plan`."""


def inside_allocation() -> bool:
    """Return whether this is an allocation's shell; False in an srun task, whose nodes belong to another program."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ


class SlurmLauncher(Launcher):
    """``launcher: slurm``."""

    needs_follower = False

    def __init__(self) -> None:
        self._found: Slurm | None = None

    def _slurm(self) -> Slurm:
        from allranks.nodes.slurm.commands import find_slurm  # most plans ask no Slurm

        self._found = self._found or find_slurm(Path.cwd())
        return self._found

    def planning_facts(self, spec: RunSpec) -> MachineFacts:
        """Return the facts of this machine, and the GPUs of the partition if none are requested.

        Slurm is queried only if its answer matters, for at most seconds; without one, the nodes decide the device.
        """
        from allranks.nodes.slurm.commands import find_slurm

        facts, cluster = machine_facts(), spec.cluster
        given = cluster.procs_per_node is not None or cluster.device == "cpu"
        if gpus_requested(cluster) is not None or (cluster.device != "auto" and given):
            return facts
        variable = None if partition_requested(cluster) else os.environ.get("SBATCH_PARTITION") or None
        try:
            slurm = find_slurm(Path.cwd(), timeout_s=PARTITION_TIMEOUT_S)
        except AllranksError:
            return facts
        gpus = slurm.partition_gpus(partition_requested(cluster) or variable, timeout_s=PARTITION_TIMEOUT_S)
        return msgspec.structs.replace(facts, partition=variable, partition_gpus=gpus)

    def batch_script(self, spec: RunSpec, run: RunDir, plan: Callable[[], LaunchPlan]) -> str | None:
        return render_batch_script(spec, plan(), run, sys.executable)

    @contextmanager
    def nodes_to_examine(
        self, spec: RunSpec, *, wait_s: float, say: Callable[[str], None]
    ) -> Iterator[tuple[TargetNodes, list[str]]]:
        """Allocate the nodes that the spec asks for; inside a job, take its nodes.

        Raises:
            SpecError: Slurm refuses account, partition or resources.
            EnvironmentNotAble: no Slurm answers, or the nodes are not free.
        """
        from allranks.nodes.preflight.runner import TargetNodes
        from allranks.nodes.slurm.allocations import allocate_nodes, inside_job, test_only

        slurm = self._slurm()
        if not inside_job(slurm):
            say(test_only(slurm, spec.cluster))
        with allocate_nodes(slurm, spec.cluster, wait_s=wait_s) as job:
            where = TargetNodes(
                prefix=slurm.prefix,
                hosts=list(job.nodes),
                slurm_job=job.job_id,
                job_id=job.job_id,
                cpus=spec.cluster.slurm.cpus_per_task or 1,
            )
            _require_environment(where, spec)
            yield where, [f"no other Slurm answers: {slurm.label} is used"] if slurm.prefix else []

    def require_available(self) -> None:
        self._slurm()

    def write_files(self, run: RunDir, spec: RunSpec, plan: LaunchPlan) -> None:
        """Write ``job.sbatch``, and make the job's log."""
        script = render_batch_script(spec, plan, run, sys.executable)
        write_text_atomic(run.sbatch, script)
        os.close(open_append(run.logs / "slurm.log"))  # Slurm appends to it, and would make it with the job's umask

    def prepare(self, run: RunDir, spec: RunSpec) -> list[str]:
        """Pack files that nodes may lack; let Slurm check the script, so that a refusal does not wait in the queue."""
        from allranks.nodes.slurm.allocations import test_only, waiting_note

        if spec.cluster.stage != "never":
            from allranks.nodes.staging.broadcast import pack_ahead

            pack_ahead(spec, run)
        if inside_allocation():
            return []
        test_only(self._slurm(), spec.cluster)
        with self._refusals_explained(spec):
            self._slurm().submit(run.sbatch, test_only=True)
        note = waiting_note(self._slurm(), spec.cluster)
        return [note] if note else []

    def submit_array(self, script: Path, spec: RunSpec) -> str:
        """Submit a batch script with tasks, and return the job's number; raise `RequestError` if Slurm refuses it."""
        from allranks.nodes.slurm.allocations import test_only

        test_only(self._slurm(), spec.cluster)
        with self._refusals_explained(spec):
            return self._slurm().submit(script)

    def start(self, run: RunDir, spec: RunSpec, plan: LaunchPlan, attempt: int, resume: dict[str, Any]) -> LaunchedJob:
        """Submit the batch script; inside an allocation, start the driver here."""
        from allranks.launch.slurm.job import AllocationJob, SlurmJob

        # The script contains no secrets: sbatch passes the environment of its caller to the job.
        secrets = rank_environment.secret_variables(plan.environment)
        os.environ.update(secrets)
        os.environ.update(_sbatch_export(list(secrets), spec.cluster.slurm.extra, os.environ))
        for old in (run.cancelled, run.driver):  # of an earlier job of this run
            old.unlink(missing_ok=True)
        write_json(run.logs / "resume.json", resume)
        if inside_allocation():
            _, python = environment_commands(spec.cluster.python, sys.executable)
            return AllocationJob(run, in_environment(spec.cluster.python, python))
        with self._refusals_explained(spec):
            return SlurmJob.submit(run, self._slurm())

    @contextmanager
    def _refusals_explained(self, spec: RunSpec) -> Iterator[None]:
        """Name the key of the spec if Slurm refuses the job, with the same message as `doctor`."""
        from allranks.nodes.slurm.allocations import refusal
        from allranks.nodes.slurm.commands import SubmissionRefused

        try:
            yield
        except SubmissionRefused as error:
            raise refusal(self._slurm(), spec.cluster, str(error)) from None

    def has_records(self, run: RunDir) -> bool:
        return run.job.exists() or run.driver.exists()

    def is_running(self, run: RunDir, agents: set[str] | None = None) -> bool:
        """Return whether the job is in Slurm's queue; before and after its driver: whether an agent is here."""
        driver = read_record(run.driver)
        if driver.get("state") not in ("running", "requeued"):
            return super().is_running(run, agents)
        try:
            return self._slurm().state(driver["job"]).alive
        except EnvironmentNotAble:
            return False

    def cancel(self, run: RunDir, *, now: bool) -> str:
        """Cancel or signal the job; ask a driver in an allocation, which has no separate job, over its channel."""
        from allranks.launch.slurm.job import SlurmJob

        job, driver = read_record(run.job), read_record(run.driver)
        if job and (not driver or driver.get("state") in ("running", "requeued") or driver.get("job") != job["job"]):
            state = self._slurm().state(job["job"])
            if state.alive:
                slurm_job, at_once = SlurmJob(run, self._slurm(), job["job"]), now or state.state == "PENDING"
                slurm_job.kill() if at_once else slurm_job.request_stop("allranks cancel")
                return f"job {job['job']} ({state.state.lower()}) " + (
                    "is cancelled" if at_once else "is asked to stop"
                )
        return super().cancel(run, now=now)

    def request_checkpoint(self, run: RunDir) -> None:
        """Signal the job's driver through Slurm, as `cancel` does: a login node may not reach its channel."""
        job = read_record(run.job).get("job")
        state = self._slurm().state(job) if job else None
        if state is None or not state.alive:
            super().request_checkpoint(run)
        elif state.state != "RUNNING" or read_record(run.driver).get("state") != "running":
            raise RequestError(f"run {run.name}: job {job} is {state.state.lower()} and trains nothing yet")
        else:
            self._slurm().cancel(str(job), "--signal=URG", "--batch")

    def describe_lost_driver(self, run: RunDir, end_reason: str) -> str:
        """Return that the driver ended without a record, and how Slurm says that its job ended."""
        driver = read_record(run.driver)
        if driver.get("state") != "running" or end_reason in ("", "unknown") or driver.get("end"):
            return ""
        return (
            f"the driver of job {driver.get('job', '?')} on {driver.get('host', '?')} ended without a record: "
            f"Slurm says {end_reason}"
        )

    def describe_end(self, run: RunDir, attempt: int, code: int, end_reason: str) -> tuple[str, Path]:
        return f"the job ended as {end_reason}", run.logs / "slurm.log"


def _require_environment(where: TargetNodes, spec: RunSpec) -> None:
    """Load the environment on the first node as the job will."""
    script = render_environment_test(spec)
    if script is None:
        return
    first = where.hosts[0]
    done = where.run(["bash", "-c", script], ENVIRONMENT_TIMEOUT_S, None, [first])
    if done.returncode is None:
        raise EnvironmentNotAble(
            f"cluster.modules, cluster.setup and cluster.python did not end within {ENVIRONMENT_TIMEOUT_S:g} s on "
            f"{first}"
        )
    if done.returncode:
        said = [line for line in done.said.splitlines() if not line.startswith("srun:")]
        last = done.lines[-1].text if done.lines and done.returncode == EXIT_ENVIRONMENT else ""
        why = f"ended with exit code {done.returncode} on {first}: {(said or ['no output'])[-1].strip()}"
        raise EnvironmentNotAble(last or f"cluster.python {spec.cluster.python}: its activation {why}")


def _sbatch_export(names: list[str], extra: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return SBATCH_EXPORT plus these variables, for jobs that do not inherit the full environment (``NONE``)."""
    given = [option.partition("=")[2] for option in extra if option.startswith("--export=")]
    exported = environment.get("SBATCH_EXPORT") or (given[-1] if given else "ALL")
    if not names or exported.split(",")[0].upper() == "ALL":
        return {}
    kept = [] if exported.upper() in ("NONE", "NIL") else [exported]
    return {"SBATCH_EXPORT": ",".join([*kept, *names])}
