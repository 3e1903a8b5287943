"""Rules for the GPUs of a job: requested and not used, fewer than ranks, and what CUDA_VISIBLE_DEVICES says."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON, Option, slurm_options
from allranks.analysis.lint.job import NODE_NAMES, JobDescription, LauncherCall, count_gpus
from allranks.analysis.lint.placement import started_by
from allranks.analysis.lint.records import ProgramCall, Severity, Violation
from allranks.analysis.lint.rules.counts import DEVICE_NAME, LOCAL_VALUE
from allranks.analysis.lint.rules.dataflow import exported_before
from allranks.analysis.lint.rules.steps import STARTER_OPTION
from allranks.utils.text import lazy_regex

IDLE_WHY = "The job pays for all GPUs that it requests."
IDLE_CURE = "set both to the same number"
TOO_MANY_WHY = (
    "Ranks without a GPU stop with 'invalid device ordinal', or two ranks share one and NCCL reports a duplicate GPU."
)
SEVERAL_GPUS = 2
DEVICES_OPTION = lazy_regex(
    r"(?:--?(?:[A-Za-z_]\w*\.)*|\+{0,2}(?:[A-Za-z_]\w*\.)*(?=\w+=))(?:n_?gpus?|num[-_]gpus|gpus?|devices?|gpus[-_]per[-_]node|n[-_]gpus?|ranks[-_]per[-_]node|(?:gpu|device)[-_]?(?:ids?|index|idx|no|nr)|which[-_]gpus?|visible[-_](?:gpus?|devices)|cuda(?:[-_](?:device|id|idx))?)"
    r"(?:=(\S{1,60}))?"
)
"""Options of programs, and keys of Hydra, that say how many GPUs they use, of one process or of several, or which one."""
OWN_OPTION = {
    "-d": lazy_regex(r"(?:\S*/)?exps/\S+\.py|yolox[-_]\w{1,9}"),
    "NUM_GPUS": lazy_regex(r"(?:\S*/)?run_net\.py"),
}
"""How YOLOX and SlowFast are told the number of GPUs, and a word by which they are known."""


LESS = lazy_regex(r"\$(?:\(\(|\[|\(expr\s).*[\w})]\s*-\s*\w+\s*\)*(?:\)\)|\]|\))")
"""A number of ranks that is smaller than another number by calculation: ``$((GPUS - 1))``."""


def idle(job: JobDescription) -> Iterator[Violation]:
    """Report fewer ranks than GPUs, if no other command uses the node at the same time."""
    yield from _counts_nodes(job)
    found = [*_few_ranks(job)] or [*_few_tasks(job)] or [*_hidden(job)]
    yield from found or [*_one_process(job), *_one_task(job)]


def _few_ranks(job: JobDescription) -> Iterator[Violation]:
    """Report launchers of too few ranks."""
    gpus = job.gpus_per_node
    calls = [la for la in job.launches if not la.call.in_function]
    if not gpus or not calls or any(_runs_beside(job, la.call.starter) for la in calls):
        return
    found = [_ranks_of_node(job, la) for la in calls]
    if not all(ranks and ranks < gpus for ranks, _ in found) or not _sees_gpus(job, calls):
        return
    if any("vllm" in a.text.lower() for la in calls for a in la.call.args):
        return  # its engine has GPUs of its own
    launch, (ranks, option) = calls[0], found[0]
    if option is not None and LESS.fullmatch(option.value or ""):
        return  # GPUs left to another program on purpose
    told = f"{ranks} rank{'s' * (ranks != 1)} per node" if option else "no --nproc_per_node: one rank per node"
    # One process of accelerate often distributes the layers of its model over all GPUs.
    severity: Severity = "note" if launch.kind == "accelerate" and ranks == 1 else "warning"
    yield Violation(
        option.arg.offset if option else launch.call.offset,
        f"{told}, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node: the others are idle",
        severity=severity,
    )


SHORT = {
    "wait", "echo", "printf", "date", "sleep", "kill", "trap", "exit", "nvidia-smi", "[", "[[", "test", "true", "set", "seff", "sacct",
}  # fmt: skip
"""Commands that use no GPU while they run."""


def _runs_beside(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether other commands may run at the same time."""
    if not call.in_loop:
        beside = (c for c in job.calls if c.offset > call.offset and c not in call.under and call not in c.under)
        return call.after == "&" and any(c.after == "&" or c.program not in SHORT for c in beside)
    several = any(c.after == "&" for c in job.calls) or re.search(
        r"\b(?:done|wait|parallel|xargs)\b[^\n]*&|\bwait\b", job.text
    )
    return bool(several) or "array" in job.heading


def _few_tasks(job: JobDescription) -> Iterator[Violation]:
    """Report tasks of srun or mpirun that are the ranks of one group, and fewer than the GPUs of their node."""
    gpus, launch = job.gpus_per_node, _only_tasks(job)
    started = started_by(job, launch) if launch else None
    if not gpus or launch is None or started is None or not started.per_node or started.per_node >= gpus:
        return
    own = slurm_options(started.starter) if started.starter.program == "srun" else {}
    if (own.keys() | job.heading.keys()) & SHARING_OPTIONS or own.keys() & {"gres", "gpus", "gpus-per-node"}:
        return
    option = _told_devices(job, launch.call, gpus)
    if not _is_group(job, launch.call) or (started.per_node == 1 and option is None) or job.has("CUDA_VISIBLE_DEVICES"):
        return
    told = f" with {option}" if option else ""
    many = f"{started.per_node} task{'s' * (started.per_node > 1)} per node"
    text = f"{many}{told}, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node: the others are idle"
    asked = job.heading.get("ntasks-per-node") or job.heading.get("ntasks")
    in_heading = (
        asked is not None and started.starter.program == "srun" and not own.keys() & {"ntasks", "ntasks-per-node"}
    )
    place = asked.offset if asked and in_heading and not option else launch.call.offset
    yield Violation(place, text, cure="#SBATCH --ntasks-per-node=<GPUs per node>")


SHARING_OPTIONS = {"gpus-per-task", "gpu-bind", "ntasks-per-gpu", "tres-per-task", "gpus-per-socket"}
GROUP_OPTION = lazy_regex(
    r"--?(?:dist[-_.]?)?(?:world[-_]?size|init[-_]?method|dist[-_]?url|dist[-_]?backend|ranks[-_]per[-_]node|ddp|distributed)(?:=.*)?"
)
GROUP_PROGRAM = lazy_regex(r"(?:hvd|horovod|(?:\A|[/_.-])ddp|distributed)[^/]*\.py\Z", re.IGNORECASE)


def _is_group(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the processes are the ranks of one group, by what the script sets, or passes, or the program's name."""
    told = any(GROUP_OPTION.fullmatch(a.text) or GROUP_PROGRAM.search(a.text) for a in call.args)
    return told or job.has("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")


def _only_tasks(job: JobDescription) -> LauncherCall | None:
    """Return the launch whose tasks are all that the job runs."""
    if len(job.launches) != 1 or len(job.work) != 1:
        return None
    launch = job.launches[0]
    apart = launch.call.in_loop or launch.call.in_function or launch.call.starter.after == "&" or launch.open_srun
    return launch if launch.kind == "python" and not apart else None


def _hidden(job: JobDescription) -> Iterator[Violation]:
    """Report a list of GPUs that hides others of the job from all its programs."""
    gpus = job.gpus_per_node
    listed = [a for a in job.set_values("CUDA_VISIBLE_DEVICES") if a.value]
    if not gpus or len({a.value for a in listed}) != 1 or not job.work or not NUMBERS.fullmatch(listed[0].value):
        return
    if job.sources_files:
        return  # they may start a server on the other GPUs
    item, seen = listed[0], {int(n[:6]) for n in listed[0].value.split(",")}
    if item.under or item.in_function or item.in_substitution or max(seen) >= gpus or len(seen) >= gpus:
        return
    fronts = {a.offset for c in job.calls for a in c.prefix}
    have = [any(a.name == CUDA_DEVICES for a in c.prefix) for c in job.work]
    if len(job.work) > 1 and any(a.offset in fronts for a in listed) and not all(have):
        return  # only some of the programs have it
    # Slurm sets the variable again for the tasks of srun.
    if any(c.offset < item.offset for c in job.work) or any(c.program == "srun" for c in job.calls):
        return
    left = "one" if len(seen) == 1 else str(len(seen))
    text = (
        f"CUDA_VISIBLE_DEVICES={item.value} leaves {left} of the {gpus} GPUs that the job requests: the others are idle"
    )
    yield Violation(item.offset, text, cure="remove it: Slurm sets CUDA_VISIBLE_DEVICES; or request fewer GPUs")


def _ranks_of_node(job: JobDescription, launch: LauncherCall) -> tuple[int, Option | None]:
    """Return the ranks that a launcher starts per node, 0 if unknown, and the option that says so."""
    tasks = job.tasks_per_node(launch.srun) if launch.srun else 1
    if launch.kind in ("torchrun", "torch.distributed.launch"):
        option = launch.option("nproc_per_node")
        alone = not (launch.open_ended or job.has("PET_NPROC_PER_NODE"))
        ranks = job.number(option.value) if option else 1 if alone else None
    elif launch.kind == "deepspeed":
        option = launch.option("num_gpus", "include", "i")
        listed = list(included(option.value if option else None).values())
        ranks = len(listed[0]) if len(listed) == 1 and listed[0] else job.number(option.value) if option else None
    elif launch.kind == "accelerate":
        option = launch.option("num_processes")
        machines = _machines(job, launch)
        ranks = job.number(option.value) if option else None
        ranks = ranks // machines if ranks and machines and tasks == 1 else None
    else:
        return 0, None
    return (ranks or 0) * (tasks or 0), option


def _machines(job: JobDescription, launch: LauncherCall) -> int | None:
    """Return the machines that accelerate is told; a configuration file may name others than one."""
    told = launch.value("num_machines")
    return job.number(told or "1") if told or not launch.option("config_file") else None


def _sees_gpus(job: JobDescription, calls: list[LauncherCall]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES is not set, or is a list for the only command that does work."""
    listed = [a.value for a in job.set_values("CUDA_VISIBLE_DEVICES")]
    literal = all(re.fullmatch(r"\d+(?:,\d+)*", value) for value in listed)
    alone = len(calls) == 1 and len(job.work) == 1
    in_turn = len({*listed}) == 1 and not any(w.after == "&" or w.in_loop or w.in_function for w in job.work[:-1])
    return not listed or (literal and (alone or in_turn))


def _one_task(job: JobDescription) -> Iterator[Violation]:
    """Report a single task of srun in a job of several GPUs; it may use them all itself."""
    gpus = job.gpus_per_node
    if not gpus or gpus < SEVERAL_GPUS or len(job.launches) != 1 or len(job.work) != 1:
        return
    launch = job.launches[0]
    if launch.kind != "python" or launch.srun is None or launch.call.in_loop or launch.call.in_function:
        return
    if job.tasks_per_node(launch.srun) == 1 and launch.srun.after != "&" and not launch.open_srun:
        own = job.has("CUDA_VISIBLE_DEVICES") or _starts_more(job, launch.call, gpus)
        by_task = re.search(r"--launcher[= ]slurm\b", " ".join(a.text for a in launch.call.args))  # OpenMMLab's ranks
        option = by_task[0] if by_task else None if own else _told_devices(job, launch.call, gpus)
        told = f" with {option}" if option else ""
        text = f"one task per node{told}, but the job requests {gpus} GPUs per node: the others are idle"
        rest = "" if option else " unless the program uses them"
        yield Violation(launch.call.offset, text + rest, severity="warning" if option else "note")


def _told_devices(job: JobDescription, call: ProgramCall, gpus: int) -> str | None:
    """Return the program's option that names one GPU, or fewer GPUs than the job has."""
    own = {name for name, known in OWN_OPTION.items() if any(known.fullmatch(a.text) for a in call.args)}
    for arg, following in call.pairs():
        found = DEVICES_OPTION.fullmatch(arg.text)
        value = found[1] if found else None
        text = value or (following.text if following and (found or arg.text in own) else "")
        count = job.number(text.removeprefix("cuda:"))
        listed = {int(n) for n in text.strip("[]").split(",")} if LISTED.fullmatch(text) else set[int]()
        rest = {str(n) for n in range(gpus) if listed and n not in listed}
        few = rest and max(listed) < gpus and not any(a.text in rest for a in call.args)  # --ids 0,1,2 --render_id 3
        if few or (count is not None and count < gpus):
            return arg.text if value else f"{arg.text} {text}"
    return None


LISTED = lazy_regex(r"\[?\d{1,2}(?:,\d{1,2})+\]?")
"""The GPUs of one process, by their numbers."""


DATA_PARALLEL = lazy_regex(r"--?(?:use[-_])?(?:data[-_]?parallel|dp|multi[-_]?gpus?)(?:=(?i:true|1|yes))?")
"""Options with which one process uses several GPUs itself."""
LAUNCHING = lazy_regex(
    r"(?:^|[/_-])(?:dp|data_?parallel)\.py\Z|(?:^|/)(?:deepy|\w*launch\w*|\w*spawn\w*|\w*multiproc\w*|\w*submit\w*)\.py\Z|vllm|\bray\b"
)
"""Programs that start further processes, or use all GPUs themselves."""


def _uses_all(job: JobDescription, call: ProgramCall, gpus: int) -> bool:
    """Return whether the program is told all GPUs of the job, or starts a process for each itself."""
    words = [a.text for a in call.args]
    program = next((w for w in words if w.endswith(".py")), "")
    told = False
    for arg, following in call.pairs():
        found = DEVICES_OPTION.fullmatch(arg.text)
        value = (found[1] or (following.text if following else "")) if found else ""
        told = told or job.number(value) == gpus or len(value.split(",")) == gpus
        told = told or bool(DATA_PARALLEL.fullmatch(arg.text))
    return told or LAUNCHING.search(program) is not None


def _counts_nodes(job: JobDescription) -> Iterator[Violation]:
    """Report the number of nodes where the ranks of a node are meant."""
    for launch in job.launches:
        repeated = [option for name, option in launch.repeated if name == "nproc_per_node"]
        for option in [*repeated, *([o] if (o := launch.option("nproc_per_node", "num_gpus")) else [])]:
            name = (option.value or "").strip("${}\"'")
            if name in NODE_NAMES and job.gpus_per_node != job.nodes:
                text = f"{option.written}=${name} is the number of nodes, not of the ranks on each"
                yield Violation(option.arg.offset, text, cure="the GPUs per node")


def _tasks_are_ranks(job: JobDescription, gpus: int) -> bool:
    """Return whether the job requests a task of several CPUs for each GPU: the tasks are to be ranks."""
    if "gpus-per-task" in job.heading:
        return False  # on some sites the usual way to request GPUs, also for one process that uses them all
    return job.number(job.heads("ntasks-per-node")) == gpus and (job.number(job.heads("cpus-per-task")) or 1) > 1


STARTS_JOBS = lazy_regex(r"(?i)smartsim|submitit|parsl")
"""Libraries with which a program starts processes through Slurm itself."""


ELSEWHERE = {"ssh", "pdsh", "clush", "pssh", "parallel", "xargs", "ray", "blaunch", "pbsdsh"}


def _one_process(job: JobDescription) -> Iterator[Violation]:
    """Report Python processes, one after another, in a job of several GPUs; each may use them all itself, unless it sees or takes one."""
    gpus = job.gpus_per_node
    if not gpus or gpus < SEVERAL_GPUS or job.launches or not job.work or job.submits or job.chooses_launcher:
        return
    call = job.work[0]
    if any(c.after == "&" or c.under or c.in_function for c in job.work):
        return
    seen = [a.value for a in call.prefix if a.name == "CUDA_VISIBLE_DEVICES"]
    one = bool(seen) and all(re.fullmatch(r"\d", value) for value in seen)
    inner = job.work_calls  # in a container, and behind numactl, the options are those of the inner program
    options = [_told_devices(job, c, gpus) for c in inner if not any(o.program in ELSEWHERE for o in c.under)] or [None]
    elsewhere = any(c.written.startswith(("./", "../")) for c in job.calls) or _starts_more(job, call, gpus)
    tasks, option = _tasks_are_ranks(job, gpus) and not elsewhere, options[0]
    if len(job.work) > 1 or call.in_loop:
        tasks = one = False
        if not all(options):
            return
    elif job.has("CUDA_VISIBLE_DEVICES") and not one:
        return
    told = " without srun, which starts the requested tasks" if tasks else f" with {option}" if option else ""
    yield Violation(
        call.offset,
        f"one process{told}, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node: "
        + (
            "it sees one of them"
            if one
            else "the others are idle" + ("" if option else " unless the program uses them")
        ),
        severity="warning" if one or tasks or option else "note",
    )


def _starts_more(job: JobDescription, call: ProgramCall, gpus: int) -> bool:
    """Return whether the program, or another one of the job, may use the other GPUs: it starts workers, or is told all GPUs."""
    workers = any(c.program == "ray" or re.match(r"dask\b|spark", c.program) for c in job.calls)
    told = any(_uses_all(job, c, gpus) for c in job.work_calls)
    return (
        workers
        or told
        or any(
            STARTER_OPTION.search(a.text) or STARTS_JOBS.search(a.text) for c in [call, *job.work_calls] for a in c.args
        )
    )


PARTS = lazy_regex(r"(?i)\bpvc\b|xpu|\bZE_AFFINITY_MASK\b")
"""Intel's GPUs are often used as two: a rank for each of their tiles."""


def too_many(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        if launch.kind == "python":
            started = started_by(job, launch)
            tasks, gpus = started.per_node if started else None, job.gpus_per_node
            if gpus and PARTS.search(job.text):
                gpus *= 2
            if tasks and gpus and tasks > gpus and _is_group(job, launch.call):
                # The interpreter may be a variable, which stands further up.
                place = max(launch.call.offset, started.starter.offset) if started else launch.call.offset
                yield Violation(
                    place, f"{tasks} ranks per node, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node"
                )
            elif tasks:
                yield from _see_one_list(job, launch, tasks)
            continue
        if launch.kind == "accelerate":
            yield from _too_many_processes(job, launch)
            continue
        if launch.kind == "deepspeed":
            yield from _too_many_included(job, launch)
            yield from _wrong_slots(job, launch)
        option = launch.option("nproc_per_node", "num_gpus")
        ranks = job.number(option.value) if option else None
        gpus = job.gpus_per_node
        per_task = job.number(job.heads("gpus-per-task"))
        if per_task and launch.srun:
            gpus = per_task * (job.tasks_per_node(launch.srun) or 1)
        if option and ranks and gpus and ranks > gpus:
            yield Violation(
                option.arg.offset, f"{ranks} ranks per node, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node"
            )
        elif option and ranks:
            yield from _sees_fewer(job, launch, option, ranks)


def _too_many_processes(job: JobDescription, launch: LauncherCall) -> Iterator[Violation]:
    """Compare the processes of accelerate on each machine with its GPUs."""
    option, machines = launch.option("num_processes"), _machines(job, launch)
    total, gpus = job.number(option.value) if option else None, job.gpus_per_node
    if option and total and machines and gpus and total > machines * gpus and not launch.option("cpu", "use_cpu"):
        each = -(-total // machines)
        yield Violation(
            option.arg.offset, f"{each} ranks per node, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node"
        )


SLOTS = lazy_regex(r"\bslots=(\d{1,3})\b")


def _wrong_slots(job: JobDescription, launch: LauncherCall) -> Iterator[Violation]:
    """Compare the slots in a host file that the script writes with the GPUs of a node."""
    gpus = job.gpus_per_node
    if not gpus or launch.option("hostfile", "H") is None or launch.option("num_gpus", "include", "i"):
        return
    for call in job.calls:
        words = " ".join(a.text for a in call.args)
        found = SLOTS.search(words) if call.program in ("echo", "printf", "awk", "sed") else None
        if found and int(found[1]) > gpus:
            yield Violation(
                call.offset, f"{found[1]} slots per node, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node"
            )
            return


def _too_many_included(job: JobDescription, launch: LauncherCall) -> Iterator[Violation]:
    """Report numbers of GPUs in ``deepspeed --include`` that the job does not have: they count from 0."""
    option, gpus = launch.option("include", "i"), job.gpus_per_node
    numbers = [int(n) for part in included(option.value if option else None).values() for n in part]
    if option and gpus and numbers and max(numbers) >= gpus:
        text = f"{option.written} names GPU {max(numbers)}, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node"
        yield Violation(option.arg.offset, text)


def included(value: str | None) -> dict[str, list[str]]:
    """Return the GPUs by host of ``host1:0,1@host2:2``; a host without numbers has an empty list."""
    found: dict[str, list[str]] = {}
    for part in (value or "").strip("\"'").split("@"):
        host, colon, numbers = part.partition(":")
        found[host] = numbers.split(",") if colon and re.fullmatch(r"\d{1,3}(?:,\d{1,3})*", numbers) else []
    return found


def _see_one_list(job: JobDescription, launch: LauncherCall, tasks: int) -> Iterator[Violation]:
    """Report tasks of a node that all see the same list of fewer GPUs: each takes the one of its local rank."""
    listed = [a for a in job.set_values("CUDA_VISIBLE_DEVICES") if a.value]
    if launch.srun is not None:
        return  # Slurm sets the variable again for the tasks of a step
    if len(listed) != 1 or listed[0].under or listed[0].in_function or listed[0].offset > launch.call.offset:
        return
    seen = len(listed[0].value.split(",")) if re.fullmatch(r"\d+(?:,\d+)*", listed[0].value) else tasks
    if tasks > 1 and seen < tasks:
        text = f"{tasks} tasks per node, but CUDA_VISIBLE_DEVICES={listed[0].value} leaves {seen} GPU{'s' * (seen > 1)}"
        yield Violation(launch.call.offset, text)


def _sees_fewer(job: JobDescription, launch: LauncherCall, option: Option, ranks: int) -> Iterator[Violation]:
    """Compare the ranks with the GPUs that CUDA_VISIBLE_DEVICES or the options of srun leave."""
    own = [a for a in launch.call.prefix if a.name == "CUDA_VISIBLE_DEVICES"]
    listed = own or [a for a in job.set_values_at_top() if a.name == "CUDA_VISIBLE_DEVICES" and a.exported]
    # Slurm sets the variable again for the tasks of a step.
    inside = launch.srun.offset if launch.srun else -1
    before = [a for a in listed if (a.offset <= launch.call.offset or own) and a.offset > inside]
    if before and re.fullmatch(r"\d+(?:,\d+)*", before[-1].value) and not launch.call.in_function:
        seen = len(before[-1].value.split(","))
        if ranks > seen:
            text = f"{ranks} ranks, but CUDA_VISIBLE_DEVICES={before[-1].value} leaves {seen} GPU{'s' * (seen > 1)}"
            yield Violation(option.arg.offset, text)
            return
    options = slurm_options(launch.srun) if launch.srun else {}
    values = [found.value if (found := options.get(name)) else None for name in ("gpus-per-node", "gres")]
    step, known = count_gpus(*values)
    if known and step and ranks > step:
        yield Violation(option.arg.offset, f"{ranks} ranks, but srun requests {step} GPU{'s' * (step > 1)} per node")


# ----------------------------------------------------------------------------- CUDA_VISIBLE_DEVICES

VISIBLE_WHY = "Inside of a job the GPUs are numbered from 0. Other numbers name no GPU, or on a cluster without cgroups that of another job."
VISIBLE_CURE = "remove it: Slurm sets CUDA_VISIBLE_DEVICES"


NOT_OF_JOB = {"ssh", "pdsh", "clush", "pssh", "docker", "podman", "sbatch", "qsub", "bsub", "salloc", "kubectl", "ray"}


def visible_devices(job: JobDescription) -> Iterator[Violation]:
    """Compare a literal list of GPUs with what the job requests: Slurm numbers the GPUs of a job from 0."""
    gpus = job.gpus_per_node or (job.number(job.heads("gpus")) if job.nodes == 1 else None)
    said: set[str] = set()
    for item in job.assignments:
        elsewhere = any(c.program in NOT_OF_JOB for c in item.under) or item.removed or item.in_substitution
        if item.name == "CUDA_VISIBLE_DEVICES" and not elsewhere and gpus and re.fullmatch(r"\d+(?:,\d+)*", item.value):
            numbers = [int(n[:6]) for n in item.value.split(",")]
            if max(numbers) >= gpus and item.value not in said:
                said.add(item.value)
                text = f"CUDA_VISIBLE_DEVICES={item.value}, but the job requests {gpus} GPU{'s' * (gpus > 1)}"
                yield Violation(item.offset, text)


CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
NUMBERS = lazy_regex(r"\d{1,2}(?:,\d{1,2})*")
ONE_WHY = "CUDA counts the visible GPUs from 0: with one of them, every other number is an invalid device ordinal."
SHARED_WHY = "Both programs run on this GPU at the same time: they share its memory and take turns."


def beyond_visible(job: JobDescription) -> Iterator[Violation]:
    """Report a device number that the program's own CUDA_VISIBLE_DEVICES leaves out."""
    for call in job.calls:
        if call.in_substitution or not PYTHON.match(call.program):
            continue
        own = [a for a in call.prefix if a.name == CUDA_DEVICES]
        own = own or [a for a in exported_before(job, CUDA_DEVICES, call) if a.under == call.under]
        if not own or len({a.value for a in job.set_values(CUDA_DEVICES)}) > 1:
            continue
        value = own[-1].value
        count = len(value.split(",")) if NUMBERS.fullmatch(value) else 1 if LOCAL_VALUE.fullmatch(value) else 0
        for arg, following in call.pairs():
            name, equals, given = arg.text.partition("=")
            given = given if equals else following.text if following else ""
            number = re.fullmatch(r"cuda:(\d{1,2})", given)
            local = count == 1 and LOCAL_VALUE.fullmatch(value) and LOCAL_VALUE.fullmatch(given)
            if not DEVICE_NAME.fullmatch(name) or not count or not (local or (number and int(number[1]) >= count)):
                continue
            if not given.startswith("cuda:"):
                continue  # the program may set the list itself, from this number
            numbers = f"numbers 0 to {count - 1}" if count > 1 else "number 0"
            text = f"{name} is {given}, but {CUDA_DEVICES}={value} leaves {count} GPU{'s' * (count > 1)}, {numbers}"
            yield Violation(arg.offset, text, why=ONE_WHY, cure="cuda:0", severity="error")
            break


def of_all_ranks(job: JobDescription) -> Iterator[Violation]:
    """Report a list that depends on the rank in the whole job, or is the same for all tasks of a node."""
    for item in job.set_values(CUDA_DEVICES):
        srun = next((c for c in item.under if c.program == "srun"), None)
        if srun is None or item.offset < srun.offset or item.in_function:
            continue
        tasks, nodes = job.tasks_per_node(srun), job.srun_nodes(srun)
        if not tasks or tasks < 2:
            continue
        if re.fullmatch(r"\$\{?(?:SLURM_PROCID|RANK)\}?", item.value) and (nodes or 1) > 1:
            text = (
                f"{CUDA_DEVICES}={item.value} counts through all {nodes} nodes: from the second node on it names no GPU"
            )
            yield Violation(item.offset, text, cure=f"{CUDA_DEVICES}=$SLURM_LOCALID", severity="error")
        elif re.fullmatch(r"\d{1,2}", item.value) and job.has("MASTER_ADDR", "WORLD_SIZE", "MASTER_PORT"):
            text = f"{tasks} tasks per node all get {CUDA_DEVICES}={item.value}"
            yield Violation(
                item.offset,
                text,
                why="NCCL refuses two ranks on one GPU ('Duplicate GPU detected').",
                cure=f"{CUDA_DEVICES}=$SLURM_LOCALID",
            )


LOOP = lazy_regex(r"^[ \t]*for\s+(\w+)\s+in\s+((?:\d{1,2}[ \t]*)+|\{\d{1,2}\.\.\d{1,2}\})[ \t]*(?:;|$)", re.MULTILINE)


def of_loops(job: JobDescription) -> Iterator[Violation]:
    """Report a loop whose numbers, as GPUs, go beyond those of the job."""
    gpus = job.gpus_per_node
    if not gpus:
        return
    loops = {m[1]: m for m in LOOP.finditer(job.text)}
    for item in job.assignments:
        name = re.fullmatch(r"\$\{?(\w+)\}?", item.value)
        found = loops.get(name[1]) if name and item.name == CUDA_DEVICES else None
        if found is None or found.start() > item.offset or len(LOOP.findall(job.text)) > len(loops):
            continue
        ends = [int(n) for n in re.findall(r"\d+", found[2])]
        if max(ends) >= gpus:
            text = f"{CUDA_DEVICES} becomes {max(ends)}, but the job's {gpus} GPU{'s' * (gpus > 1)} have the numbers 0 to {gpus - 1}"
            yield Violation(item.offset, text, cure=f"for {found[1]} in {{0..{gpus - 1}}}")


def overlapping(job: JobDescription) -> Iterator[Violation]:
    """Report launchers side by side whose lists of GPUs overlap in part."""
    before: list[tuple[set[str], str, int]] = []
    for call in sorted(job.calls, key=lambda c: c.offset):
        if call.program == "wait":
            before = []
        own = [a for a in call.prefix if a.name == CUDA_DEVICES]
        if not own or call.under or call.in_loop or call.in_function or call.in_substitution or call.branch:
            continue
        value = own[-1].value
        if not NUMBERS.fullmatch(value):
            continue
        mine = set(value.split(","))
        for other, text, place in before:
            both = mine & other
            if both and mine != other and place != own[-1].offset:
                message = f"GPU {min(both)} is in {CUDA_DEVICES}={value}, and in {text} of line {job.lines.place(place)[0]}, which still runs"
                yield Violation(own[-1].offset, message, why=SHARED_WHY, cure="lists without a common GPU")
                return
        if call.after == "&":
            before.append((mine, value, own[-1].offset))


def few_visible(job: JobDescription) -> Iterator[Violation]:
    """Compare the processes of accelerate on one machine with the GPUs that it sees."""
    for launch in job.launches:
        option, machines = launch.option("num_processes"), launch.value("num_machines")
        if (
            launch.kind != "accelerate"
            or option is None
            or machines not in (None, "1")
            or launch.call.in_function
            or launch.call.under
        ):
            continue
        own = [a for a in launch.call.prefix if a.name == CUDA_DEVICES] or exported_before(
            job, CUDA_DEVICES, launch.call
        )
        total = job.number(option.value)
        if (
            not own
            or not NUMBERS.fullmatch(own[-1].value)
            or launch.option("cpu", "use_cpu", "gpu_ids", "config_file")
            or not total
        ):
            continue
        seen = len(own[-1].value.split(","))
        if total > seen:
            text = f"{total} ranks, but {CUDA_DEVICES}={own[-1].value} leaves {seen} GPU{'s' * (seen > 1)}"
            yield Violation(option.arg.offset, text)
