"""Rules for GPUs that a job requests and no rank uses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import Option
from allranks.analysis.lint.job import NODE_NAMES, JobDescription, LauncherCall
from allranks.analysis.lint.records import ProgramCall, Severity, Violation

IDLE_WHY = "The job pays for all GPUs that it requests."
IDLE_CURE = "set both to the same number"
SEVERAL_GPUS = 2
DEVICES_OPTION = re.compile(
    r"--?(?:n_?gpus?|num[-_]gpus|gpus|devices|gpus[-_]per[-_]node|n[-_]gpus?|ranks[-_]per[-_]node)(?:=(\d{1,3}))?"
)
"""Options of programs that say how many GPUs they use, of one process or of several."""


def idle(job: JobDescription) -> Iterator[Violation]:
    """Report fewer ranks than GPUs, if no other command uses the node at the same time."""
    yield from _one_process(job)
    yield from _one_task(job)
    yield from _counts_nodes(job)
    gpus = job.gpus_per_node
    calls = [la for la in job.launches if not la.call.in_function]
    if not gpus or not calls or any(la.call.in_loop or _outer(la).after == "&" for la in calls):
        return
    found = [_ranks_of_node(job, la) for la in calls]
    if not all(ranks and ranks < gpus for ranks, _ in found) or not _sees_gpus(job, calls):
        return
    launch, (ranks, option) = calls[0], found[0]
    told = f"{ranks} rank{'s' * (ranks != 1)} per node" if option else "no --nproc_per_node: one rank per node"
    # One process of accelerate often distributes the layers of its model over all GPUs.
    severity: Severity = "note" if launch.kind == "accelerate" and ranks == 1 else "warning"
    yield Violation(
        option.arg.offset if option else launch.call.offset,
        f"{told}, but the job requests {gpus} GPUs per node: the others are idle",
        severity=severity,
    )


def _outer(launch: LauncherCall) -> ProgramCall:
    return launch.call.under[0] if launch.call.under else launch.call


def _ranks_of_node(job: JobDescription, launch: LauncherCall) -> tuple[int, Option | None]:
    """Return the ranks that a launcher starts per node, 0 if unknown, and the option that says so."""
    tasks = job.tasks_per_node(launch.srun) if launch.srun else 1
    if launch.kind in ("torchrun", "torch.distributed.launch"):
        option = launch.option("nproc_per_node")
        alone = not (launch.open_ended or job.has("PET_NPROC_PER_NODE"))
        ranks = job.number(option.value) if option else 1 if alone else None
    elif launch.kind == "deepspeed":
        option = launch.option("num_gpus")
        ranks = job.number(option.value) if option else None
    elif launch.kind == "accelerate":
        option = launch.option("num_processes")
        machines = job.number(launch.value("num_machines") or "1")
        ranks = job.number(option.value) if option else None
        ranks = ranks // machines if ranks and machines and tasks == 1 else None
    else:
        return 0, None
    return (ranks or 0) * (tasks or 0), option


def _sees_gpus(job: JobDescription, calls: list[LauncherCall]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES is not set, or is a list for the only command that does work."""
    listed = [a.value for a in job.set_values("CUDA_VISIBLE_DEVICES")]
    literal = all(re.fullmatch(r"\d+(?:,\d+)*", value) for value in listed)
    return not listed or (literal and len(calls) == 1 and len(job.work) == 1)


def _one_task(job: JobDescription) -> Iterator[Violation]:
    """Report a single task of srun in a job of several GPUs; it may use them all itself."""
    gpus = job.gpus_per_node
    if not gpus or gpus < SEVERAL_GPUS or len(job.launches) != 1 or len(job.work) != 1:
        return
    launch = job.launches[0]
    if launch.kind != "python" or launch.srun is None or launch.call.in_loop or launch.call.in_function:
        return
    if job.tasks_per_node(launch.srun) == 1 and launch.srun.after != "&" and not launch.open_srun:
        text = f"one task per node, but the job requests {gpus} GPUs per node: the others are idle unless the program uses them"
        yield Violation(launch.call.offset, text, severity="note")


def _told_devices(call: ProgramCall, gpus: int) -> str | None:
    """Return the program's option that names fewer GPUs than the job has."""
    for arg, following in zip(call.args, [*call.args[1:], None], strict=True):
        found = DEVICES_OPTION.fullmatch(arg.text)
        count = (found[1] or (following.text if following else "")) if found else ""
        if count.isdecimal() and int(count[:4]) < gpus:
            return arg.text if found and found[1] else f"{arg.text} {count}"
    return None


def _counts_nodes(job: JobDescription) -> Iterator[Violation]:
    """Report the number of nodes where the ranks of a node are meant."""
    for launch in job.launches:
        repeated = [option for name, option in launch.repeated if name == "nproc_per_node"]
        for option in [*repeated, *([o] if (o := launch.option("nproc_per_node", "num_gpus")) else [])]:
            name = (option.value or "").strip("${}\"'")
            if name in NODE_NAMES and job.gpus_per_node != job.nodes:
                text = f"{option.arg.text.split('=')[0]}=${name} is the number of nodes, not of the ranks on each"
                yield Violation(option.arg.offset, text, cure="the GPUs per node")


def _tasks_are_ranks(job: JobDescription, gpus: int) -> bool:
    """Return whether the job requests a task of several CPUs for each GPU: the tasks are to be ranks."""
    return job.number(job.heads("ntasks-per-node")) == gpus and (job.number(job.heads("cpus-per-task")) or 1) > 1


def _one_process(job: JobDescription) -> Iterator[Violation]:
    """Report a single Python process in a job of several GPUs; it may use them all itself, unless it sees only one."""
    gpus = job.gpus_per_node
    if not gpus or gpus < SEVERAL_GPUS or job.launches or len(job.work) != 1 or job.work[0].in_loop:
        return
    call = job.work[0]
    seen = [
        a.value for a in (*call.prefix, *job.set_values("CUDA_VISIBLE_DEVICES")) if a.name == "CUDA_VISIBLE_DEVICES"
    ]
    one = bool(seen) and all(re.fullmatch(r"\d", value) for value in seen)
    option = _told_devices(call, gpus)
    tasks = _tasks_are_ranks(job, gpus)
    told = " without srun, which starts the requested tasks" if tasks else f" with {option}" if option else ""
    if (one or not seen) and call.after != "&" and not call.under and not call.in_function:
        yield Violation(
            call.offset,
            f"one process{told}, but the job requests {gpus} GPUs per node: "
            + ("it sees one of them" if one else "the others are idle unless the program uses them"),
            severity="warning" if one or tasks else "note",
        )
