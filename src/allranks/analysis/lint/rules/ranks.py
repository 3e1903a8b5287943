"""Rules for ranks that a script sets by hand, and for launchers that start launchers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placement import MPI, TOTAL, count_of
from allranks.analysis.lint.records import Assignment, ProgramCall, Violation

EQUAL_WHY = "Two processes with one rank wait for the ranks that are missing until the timeout, or the last one takes the place of the others."
DEVICE_WHY = "LOCAL_RANK is the process's number on its node, by which it takes its GPU: from the second node on these GPUs do not exist."
OF_SLURM = {
    "RANK": re.compile(r"\$\{?SLURM_(NODEID|LOCALID)\}?"),
    "LOCAL_RANK": re.compile(r"\$\{?SLURM_(NODEID|PROCID)\}?"),
}
MEANT = {"RANK": "$SLURM_PROCID", "LOCAL_RANK": "$SLURM_LOCALID"}


def wrong_ranks(job: JobDescription) -> Iterator[Violation]:
    """Report RANK and LOCAL_RANK that the tasks of srun take from a number which is not theirs."""
    for launch in job.launches:
        srun = launch.srun
        if launch.kind != "python" or srun is None or launch.open_srun:
            continue
        nodes, each = job.srun_nodes(srun), job.tasks_per_node(srun)
        for item in [*launch.call.prefix, *(a for a in job.assignments if srun in a.under)]:
            pattern = OF_SLURM.get(item.name)
            found = pattern.fullmatch(item.value) if pattern and not item.removed else None
            if found is None or not _written_in_task(job, item, srun):
                continue
            several_tasks, several_nodes = bool(each and each > 1), bool(nodes and nodes > 1)
            wrong = several_tasks if found[1] == "NODEID" else several_nodes
            if wrong:
                text = f"{item.name}={item.value} with {each or 'several'} tasks on each of {nodes} nodes"
                why = DEVICE_WHY if item.name == "LOCAL_RANK" and found[1] == "PROCID" else EQUAL_WHY
                yield Violation(item.offset, text, why=why, cure=f"{item.name}={MEANT[item.name]}")


def _written_in_task(job: JobDescription, item: Assignment, srun: ProgramCall) -> bool:
    """Return whether the task's own shell expands the value, and not the batch shell."""
    places = set(item.source.at)
    return any(u.offset in places and srun in u.under for u in job.uses)


def constant_rank(job: JobDescription) -> Iterator[Violation]:
    """Report RANK=0 that a batch script exports to several tasks of srun."""
    set_ranks = [a for a in job.set_values("RANK") if a.exported]
    if len(set_ranks) != 1 or not re.fullmatch(r"\d", set_ranks[0].value) or set_ranks[0].under:
        return
    for launch in job.launches:
        srun = launch.srun
        if launch.kind != "python" or srun is None or launch.open_srun or srun.in_loop or srun.in_function:
            continue
        nodes, each = job.srun_nodes(srun) or 1, job.tasks_per_node(srun) or 1
        if nodes * each > 1 and not srun.has_open_options and srun.after != "&" and set_ranks[0].offset < srun.offset:
            if any(a.name == "RANK" for a in launch.call.prefix) or set_ranks[0].in_function or job.multi_node is False:
                continue
            text = f"RANK is {set_ranks[0].value} in all {nodes * each} tasks"
            yield Violation(
                set_ranks[0].offset, text, why=EQUAL_WHY, cure="srun bash -c 'RANK=$SLURM_PROCID ... python train.py'"
            )
            return


STARTS_ALL_WHY = "Each process starts the launcher once more, and every launcher starts all ranks: they meet on the same GPUs and ports."


def launchers_by_mpirun(job: JobDescription) -> Iterator[Violation]:
    """Report mpirun on one machine with several processes each of which is a launcher, and srun with tasks that are mpirun or horovodrun."""
    for launch in job.launches:
        starter = next((c for c in reversed(launch.call.under) if c.program in MPI), None)
        local = "nproc_per_node" if launch.kind in ("torchrun", "torch.distributed.launch") else "num_processes"
        ranks = job.number(launch.value(local if launch.kind != "deepspeed" else "num_gpus"))
        if starter is None or launch.kind == "python" or not ranks or ranks < 2 or job.is_job or launch.srun:
            continue
        total = count_of(job, starter, TOTAL)
        spread = any(
            re.match(r"-+(?:H|hosts?|hostfile|machinefile|f|ppn|npernode|N|map-by)\b", a.text) for a in starter.args
        )
        if total and total > 1 and not spread and launch.value("nnodes", "num_machines") in (None, "1"):
            text = f"{starter.program} starts {total} processes, and each starts {launch.kind} with {ranks} ranks"
            yield Violation(starter.offset, text, why=STARTS_ALL_WHY, cure=f"{launch.kind} without {starter.program}")
    for call in job.calls:
        if call.program not in MPI | {"horovodrun"} or call.srun is None or call.in_substitution:
            continue
        tasks = (job.tasks_per_node(call.srun) or 1) * (job.srun_nodes(call.srun) or 1)
        total = count_of(job, call, TOTAL)
        if tasks > 1 and total and total > 1 and not call.srun.has_open_options:
            text = f"srun starts {tasks} tasks, and each starts {call.program} with {total} processes"
            yield Violation(
                call.offset,
                text,
                why=STARTS_ALL_WHY,
                cure=f"{call.program} without srun, or srun without {call.program}",
            )


def listed_gpus(job: JobDescription) -> Iterator[Violation]:
    """Compare the processes of accelerate with the GPUs of its own ``--gpu_ids``."""
    for launch in job.launches:
        chosen, option = launch.option("gpu_ids"), launch.option("num_processes")
        value = (chosen.value or "").strip("\"'") if chosen else ""
        if launch.kind != "accelerate" or option is None or not re.fullmatch(r"\d{1,2}(?:,\d{1,2})*", value):
            continue
        total, listed = job.number(option.value), len(value.split(","))
        if total and total > listed and launch.value("num_machines") in (None, "1"):
            yield Violation(
                option.arg.offset, f"{total} ranks, but --gpu_ids {value} leaves {listed} GPU{'s' * (listed > 1)}"
            )
