"""GPUs, CPUs, threads, memory and time that a job requests and its ranks use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from allranks.analysis.lint.command_options import PYTHON, Option, slurm_options
from allranks.analysis.lint.job import JobDescription, LauncherCall, count_gpus
from allranks.analysis.lint.records import Argument, ProgramCall, Severity, Violation
from allranks.analysis.lint.rules import (
    FIRST_WITH_CPUS_AGAIN,
    FIRST_WITHOUT_CPUS,
    SPREADING,
    _launching,
    error,
    note,
    started_by,
    tasks_of_node,
    warning,
)
from allranks.utils.text import lazy_regex

SEVERAL_GPUS = 2
LESS = lazy_regex(r"\$(?:\(\(|\[|\(expr\s).*[\w})]\s*-\s*\w+\s*\)*(?:\)\)|\]|\))")
"""A number of ranks that is smaller than another number by calculation: ``$((GPUS - 1))``."""


@warning(
    "idle-gpus",
    why="The job pays for all GPUs that it requests.",
    cure="set both to the same number",
    source="torch/distributed/run.py",
    bad="#SBATCH --gres=gpu:4\ntorchrun --standalone --nproc_per_node=2 train.py",
    good="#SBATCH --gres=gpu:4\ntorchrun --standalone --nproc_per_node=gpu train.py",
)
def idle(job: JobDescription) -> Iterator[Violation]:
    yield from [*_few_ranks(job)] or _one_process(job)


def _few_ranks(job: JobDescription) -> Iterator[Violation]:
    """Report launchers of too few ranks."""
    gpus = job.gpus_per_node
    calls = [la for la in job.launches if not la.call.in_function]
    if not gpus or not calls or any(_runs_beside(job, la.call.starter) for la in calls):
        return
    counts = [_ranks_of_node(job, la) for la in calls]
    if not all(ranks and ranks < gpus for ranks, _ in counts) or not _sees_gpus(job, calls):
        return
    if any("vllm" in a.text.lower() for la in calls for a in la.call.args):
        return  # its engine has GPUs of its own
    launch, (ranks, option) = calls[0], counts[0]
    if option is not None and LESS.fullmatch(option.value or ""):
        return  # GPUs left to another program on purpose
    started = f"{ranks} rank{'s' * (ranks != 1)} per node" if option else "no --nproc_per_node: one rank per node"
    # One process of accelerate often distributes the layers of its model over all GPUs.
    severity: Severity = "note" if launch.kind == "accelerate" and ranks == 1 else "warning"
    text = f"{started}, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node: the others are idle"
    yield Violation(option.arg.offset if option else launch.call.offset, text, severity=severity)


SHORT = {
    "wait", "echo", "printf", "date", "sleep", "kill", "trap", "exit", "nvidia-smi", "[", "[[", "test", "true", "set",
    "seff", "sacct",
}  # fmt: skip
"""Commands that use no GPU while they run."""


def _runs_beside(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether other commands may run at the same time."""
    if not call.in_loop:
        beside = (c for c in job.calls if c.offset > call.offset and c not in call.under and call not in c.under)
        return call.after == "&" and any(c.after == "&" or c.program not in SHORT for c in beside)
    several = "array" in job.heading or any(c.after == "&" for c in job.calls)
    return several or bool(re.search(r"\b(?:done|wait|parallel|xargs)\b[^\n]*&|\bwait\b", job.text))


GROUP_OPTION = lazy_regex(
    r"--?(?:dist[-_.]?)?(?:world[-_]?size|init[-_]?method|dist[-_]?url|dist[-_]?backend|ranks[-_]per[-_]node|ddp|distributed)(?:=.*)?"
)
GROUP_PROGRAM = lazy_regex(r"(?:hvd|horovod|(?:\A|[/_.-])ddp|distributed)[^/]*\.py\Z", re.IGNORECASE)


def _is_group(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the processes are ranks of one group, by what the script sets or passes, or the program's name."""
    is_named = any(GROUP_OPTION.fullmatch(a.text) or GROUP_PROGRAM.search(a.text) for a in call.args)
    return is_named or job.has("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")


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
        machines = _machines(job, launch)
        ranks = job.number(option.value) if option else None
        ranks = ranks // machines if ranks and machines and tasks == 1 else None
    else:
        return 0, None
    return (ranks or 0) * (tasks or 0), option


def _machines(job: JobDescription, launch: LauncherCall) -> int | None:
    """Return the machines that accelerate is told; a configuration file may name others than one."""
    machines = launch.value("num_machines")
    return job.number(machines or "1") if machines or not launch.option("config_file") else None


def _sees_gpus(job: JobDescription, calls: list[LauncherCall]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES is not set, or is a list for the only command that does work."""
    listed = [a.value for a in job.set_values("CUDA_VISIBLE_DEVICES")]
    literal = all(re.fullmatch(r"\d+(?:,\d+)*", value) for value in listed)
    alone = len(calls) == 1 and len(job.work) == 1
    in_turn = len({*listed}) == 1 and not any(w.after == "&" or w.in_loop or w.in_function for w in job.work[:-1])
    return not listed or (literal and (alone or in_turn))


def _tasks_are_ranks(job: JobDescription, gpus: int) -> bool:
    """Return whether the job requests a task of several CPUs for each GPU: the tasks are to be ranks."""
    if "gpus-per-task" in job.heading:
        return False  # on some sites the usual way to request GPUs, also for one process that uses them all
    return job.number(job.heads("ntasks-per-node")) == gpus and (job.number(job.heads("cpus-per-task")) or 1) > 1


def _one_process(job: JobDescription) -> Iterator[Violation]:
    """Report a single Python process in a job of several GPUs; it may use them all itself, unless it sees only one."""
    gpus = job.gpus_per_node
    if not gpus or gpus < SEVERAL_GPUS or job.launches or len(job.work) != 1 or job.submits or job.chooses_launcher:
        return
    call = job.work[0]
    seen = [a.value for a in call.prefix if a.name == "CUDA_VISIBLE_DEVICES"]
    apart = call.after == "&" or call.under or call.in_function or call.in_loop
    if apart or (job.has("CUDA_VISIBLE_DEVICES") and not seen):
        return
    one = bool(seen) and all(re.fullmatch(r"\d", value) for value in seen)
    tasks = _tasks_are_ranks(job, gpus) and not any(c.written.startswith(("./", "../")) for c in job.calls)
    hint = " without srun, which starts the requested tasks" if tasks else ""
    rest = "it sees one of them" if one else "the others are idle unless the program uses them"
    text = f"one process{hint}, but the job requests {gpus} GPUs per node: {rest}"
    yield Violation(call.offset, text, severity="warning" if one or tasks else "note")


PARTS = lazy_regex(r"(?i)\bpvc\b|xpu|\bZE_AFFINITY_MASK\b")
"""Intel's GPUs are often used as two: a rank for each of their tiles."""


@error(
    "more-ranks-than-gpus",
    why="Ranks without a GPU stop with 'invalid device ordinal', or two ranks share one and NCCL reports a duplicate "
    "GPU.",
    cure="set both to the same number",
    source="torch/distributed/run.py",
    bad="#SBATCH --gres=gpu:2\ntorchrun --standalone --nproc_per_node=4 train.py",
    good="#SBATCH --gres=gpu:4\ntorchrun --standalone --nproc_per_node=4 train.py",
)
def too_many(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        option, gpus = launch.option("nproc_per_node", "num_gpus", "num_processes"), job.gpus_per_node
        ranks, place = job.number(option.value) if option else None, option.arg.offset if option else launch.call.offset
        if launch.kind == "python":
            started = started_by(job, launch) if _is_group(job, launch.call) else None
            ranks = started.per_node if started else None
            place = max(launch.call.offset, started.starter.offset) if started else place
            gpus = gpus * 2 if gpus and PARTS.search(job.text) else gpus
        elif launch.kind == "accelerate":
            machines = _machines(job, launch)
            ranks = -(-ranks // machines) if ranks and machines and not launch.option("cpu", "use_cpu") else None
        elif (per_task := job.number(job.heads("gpus-per-task"))) and launch.srun:
            gpus = per_task * (job.tasks_per_node(launch.srun) or 1)
        if ranks and gpus and ranks > gpus:
            text = f"{ranks} ranks per node, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node"
            yield Violation(place, text)
        elif option and ranks and launch.kind != "accelerate":
            yield from _sees_fewer(job, launch, option, ranks)


def _sees_fewer(job: JobDescription, launch: LauncherCall, option: Option, ranks: int) -> Iterator[Violation]:
    """Compare the ranks with the GPUs that CUDA_VISIBLE_DEVICES or the options of srun leave."""
    own = [a for a in launch.call.prefix if a.name == "CUDA_VISIBLE_DEVICES"]
    # Slurm sets the variable again for the tasks of a step.
    inside = launch.srun.offset if launch.srun else -1
    listed = [
        a for a in job.set_values("CUDA_VISIBLE_DEVICES") if a.exported and inside < a.offset <= launch.call.offset
    ]
    value = (own or listed)[-1].value if own or listed else ""
    written = re.findall(r"\$\{?(\w+)", job.line_of(launch.call.offset))
    if any(len({a.value for a in job.by_name.get(name, ())}) > 1 for name in written):
        return  # one of several numbers, which go with another list each
    options = slurm_options(launch.srun) if launch.srun else {}
    values = [setting.value if (setting := options.get(name)) else None for name in ("gpus-per-node", "gres")]
    if re.fullmatch(r"\d+(?:,\d+)*", value) and not launch.call.in_function:
        seen, by = len(value.split(",")), f"CUDA_VISIBLE_DEVICES={value} leaves"
    else:
        seen, by = count_gpus(*values)[0] or ranks, "srun requests"
    if ranks > seen:
        yield Violation(option.arg.offset, f"{ranks} ranks, but {by} {seen} GPU{'s' * (seen > 1)}")


HOURS = {24, 48, 72, 96, 144, 168}


@warning(
    "time-unit",
    why="Two numbers are minutes and seconds, a single number is minutes: the job is ended long before it has "
    "finished.",
    cure="--time=<hours>:00:00",
    source="Slurm's sbatch and srun manuals",
    bad="#SBATCH --time=48:00\npython train.py",
    good="#SBATCH --time=48:00:00\npython train.py",
)
def minutes(job: JobDescription) -> Iterator[Violation]:
    item = job.heading.get("time")
    match = re.fullmatch(r"(\d{1,3})(?::(\d\d))?", item.value or "") if item else None
    if item is None or match is None or (match[2] is None and re.search(r"(?i)#.*\bmin(?:ute)?s?\b", item.text)):
        return
    first, second = int(match[1]), int(match[2] or 0)
    if first == 0 and second:
        yield Violation(item.offset, f"--time={item.value} is {second} seconds", cure=f"--time={item.value}:00")
    elif first in HOURS and second == 0:
        yield Violation(item.offset, f"--time={item.value} is {first} minutes", cure=f"--time={first}:00:00")


LOCAL_VALUE = lazy_regex(
    r"(?:cuda:)?\$\{?(?:SLURM_LOCALID|LOCAL_RANK|OMPI_COMM_WORLD_LOCAL_RANK|MPI_LOCALRANKID|PMI_LOCAL_RANK)(?::-0)?\}?"
)
DEVICE_NAME = lazy_regex(
    r"--?(?:gpu|gpu[-_]?(?:id|index|idx|num)|device|device[-_]?(?:id|index|num)|cuda|cuda[-_]?(?:id|device)|local[-_]?rank)|(?:\w+\.)?(?:device|gpu|gpu_id|device_id)"
)


ONE_GPU = {
    "why": "Each task sees only its own GPU, as number 0: cuda:LOCAL_RANK fails from the second rank on, and copies "
    "between GPUs may not work.",
    "cure": "--gpus-per-node=<n>, so that every task sees all GPUs of its node and uses the one of its local rank",
}


@error(
    "device-of-one-gpu",
    **ONE_GPU,
    source="Slurm's sbatch and srun manuals",
    bad="#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-task=1\nsrun bash -c 'python train.py --gpu $SLURM_LOCALID'",
    good="#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\nsrun bash -c 'python train.py --gpu $SLURM_LOCALID'",
)
def device_of_one(job: JobDescription) -> Iterator[Violation]:
    for call in job.calls:
        srun = call.srun
        if srun is None or call.in_substitution or not PYTHON.match(call.program):
            continue
        if (job.tasks_per_node(srun) or 1) < 2 or not _one_each(job, srun):
            continue
        for arg, following in call.pairs():
            name, equals, value = arg.text.partition("=")
            value = value if equals else following.text if following else ""
            if DEVICE_NAME.fullmatch(name) and (equals or name.startswith("-")) and LOCAL_VALUE.fullmatch(value):
                text = f"{name} gets the local rank, but each task sees one GPU, whose number is 0"
                yield Violation(arg.offset, text)
                break


def _one_each(job: JobDescription, srun: ProgramCall) -> bool:
    """Return whether each task sees one GPU only."""
    options = slurm_options(srun)
    each = options["gpus-per-task"].value if "gpus-per-task" in options else job.heads("gpus-per-task")
    bound = (options["gpu-bind"].value if "gpu-bind" in options else job.heads("gpu-bind")) or ""
    if srun.has_open_options or _shares_gpus(job, srun):
        return False
    return re.search(r"(?:\A|:)1\Z", each or "") is not None or bound in ("single:1", "per_task:1")


def _shares_gpus(job: JobDescription, srun: ProgramCall) -> bool:
    """Return whether an option lets a task see all GPUs of its node."""
    options = slurm_options(srun)
    flags, bind = options.get("gres-flags"), options.get("gpu-bind")
    shared = [job.heads("gres-flags"), flags.value if flags else ""]
    shared += [a.value for a in job.set_values("SLURM_GRES_FLAGS")]
    bound = [bind.value if bind else job.heads("gpu-bind"), *(a.value for a in job.set_values("SLURM_GPU_BIND"))]
    return any("allow-task-sharing" in (f or "") for f in shared) or "none" in bound


# Megatron-LM and what is built on it, NeMo, torchtitan
SIZE = lazy_regex(
    r"(?:--|\+{0,2}(?:\w+\.)*model\.|--(?:parallelism|training|experimental)\.)"
    r"(tensor|pipeline|context)[-_](?:model[-_])?parallel[-_](?:size|degree)"
)
NAMES = ("tensor", "pipeline", "context")


def option_values(call: ProgramCall) -> Iterator[tuple[str, str, Argument]]:
    """Yield name, value and place of the options ``--name value``, ``--name=value`` and ``name=value``."""
    for arg, following in call.pairs():
        name, equals, value = arg.text.partition("=")
        if equals:
            yield name, value, arg
        elif name.startswith("-") and following is not None:
            yield name, following.text, arg


def _numbers(job: JobDescription, call: ProgramCall) -> dict[str, tuple[int, Argument] | None]:
    """Return a program's options that have a number, None if the number is unknown. The last of a name counts."""
    numbers: dict[str, tuple[int, Argument] | None] = {}
    for name, value, arg in option_values(call):
        number = job.number(value)
        numbers[name.replace("_", "-") if name.startswith("--") else name] = (
            (number, arg) if number is not None else None
        )
    return numbers


def _place(arg: Argument) -> int:
    """Return where the option itself stands: in an array further up, perhaps."""
    return arg.source.where(0)


def _parallel_sizes(job: JobDescription, call: ProgramCall) -> dict[str, tuple[int, Argument] | None]:
    sizes: dict[str, tuple[int, Argument] | None] = {}
    for name, value, arg in option_values(call):
        size = SIZE.fullmatch(name)
        if size:
            number = job.number(value)
            sizes[size[1]] = (number, arg) if number else None
    return sizes


def ranks_of(job: JobDescription, launch: LauncherCall) -> int | None:
    """Return the ranks that a launch starts in all; None if the file does not show it."""
    if launch.open_ended or launch.open_srun:
        return None
    if launch.kind == "python":
        started = started_by(job, launch)
        return started.total if started else None
    if launch.kind == "accelerate":
        return None if launch.option("config_file") else job.number(launch.value("num_processes"))
    if launch.kind == "deepspeed":
        each, nodes = launch.value("num_gpus"), launch.value("num_nodes")
        if nodes is None and launch.option("hostfile", "H", "include", "i", "exclude", "e"):
            return None
    else:
        each, nodes = launch.value("nproc_per_node"), launch.value("nnodes")
    ranks, machines = job.number(each), job.number(nodes) if nodes is not None else 1
    return ranks * machines if ranks and machines else None


@error(
    "parallel-sizes",
    why="The program checks these numbers when it starts, and stops.",
    cure="ranks = tensor x pipeline x context x data parallel size",
    source="Megatron-LM's arguments; torchtitan's ParallelDims",
    bad="srun --nodes=1 --ntasks=1 torchrun --standalone --nproc_per_node=2 pretrain_gpt.py "
    "--tensor-model-parallel-size 4",
    good="srun --nodes=1 --ntasks=1 torchrun --standalone --nproc_per_node=2 pretrain_gpt.py "
    "--tensor-model-parallel-size 2",
)
def parallel_sizes(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        sizes = _parallel_sizes(job, launch.call)
        if not sizes or None in sizes.values():
            continue
        given = {name: size for name in NAMES if (size := sizes.get(name)) is not None}
        model, ranks = prod(number for number, _ in given.values()), ranks_of(job, launch)
        place = _place(next(iter(given.values()))[1])
        if ranks and model > 1 and ranks % model:
            shown = " x ".join(f"{name} {number}" for name, (number, _) in given.items())
            equals = f" = {model} ranks" if len(given) > 1 else ""
            yield Violation(place, f"{shown}{equals} {'do' if equals else 'does'} not divide the {ranks} ranks")
            continue
        yield from _batches(_numbers(job, launch.call), ranks // model if ranks else None)


def _batches(numbers: dict[str, tuple[int, Argument] | None], replicas: int | None) -> Iterator[Violation]:
    """Compare Megatron's global batch with the micro batches of all replicas."""
    whole, micro = numbers.get("--global-batch-size"), numbers.get("--micro-batch-size")
    if not replicas or not whole or not micro or not micro[0] or "--rampup-batch-size" in numbers:
        return
    if whole[0] % (micro[0] * replicas):
        by = f"{micro[0]} x {replicas} replicas" if replicas > 1 else f"{micro[0]}"
        text = f"--global-batch-size {whole[0]} is no multiple of --micro-batch-size {by}"
        yield Violation(_place(whole[1]), text, cure="a multiple of micro batch size x data parallel size")


@note(
    "cpus-not-inherited",
    why="From Slurm 22.05 to 23.02 srun does not read --cpus-per-task of the job: each task may get one CPU, which its "
    "data loaders share.",
    cure='srun --cpus-per-task="$SLURM_CPUS_PER_TASK", or export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    source="release notes of Slurm 22.05, Lightning#18650",
    bad="#SBATCH --ntasks-per-node=8\n#SBATCH --cpus-per-task=8\nsrun python train.py",
    good=(
        '#SBATCH --ntasks-per-node=8\n#SBATCH --cpus-per-task=8\nsrun --cpus-per-task="$SLURM_CPUS_PER_TASK" python '
        "train.py"
    ),
)
def inherited(job: JobDescription) -> Iterator[Violation]:
    cpus = job.number(job.heads("cpus-per-task"))
    version = job.slurm_version
    affected = version is None or FIRST_WITHOUT_CPUS <= version < FIRST_WITH_CPUS_AGAIN
    if cpus is None or cpus < 2 or job.has("SRUN_CPUS_PER_TASK") or not affected:
        return
    for srun in _launching(job):
        if slurm_options(srun).keys() & {"cpus-per-task", "exclusive", "cpus-per-gpu", "cpu-bind"}:
            continue
        certain = version is not None and (job.tasks_per_node(srun) or 2) > 1
        text = f"srun has no --cpus-per-task, which the job sets to {cpus}"
        yield Violation(srun.offset, text, severity="warning" if certain else "note")


@note(
    "cpus-missing",
    why="Without --cpus-per-task a task has one CPU, which all ranks and data loaders of the node share.",
    cure="#SBATCH --cpus-per-task=<CPUs of a node / tasks per node>, and the same for srun; or --exclusive, or "
    "--cpus-per-gpu",
    source="Slurm's sbatch and srun manuals",
    bad="#SBATCH --nodes=1\n#SBATCH --gres=gpu:2\ntorchrun --standalone --nproc_per_node=2 train.py",
    good="#SBATCH --nodes=1\n#SBATCH --gres=gpu:2\n#SBATCH --cpus-per-task=16\ntorchrun --standalone "
    "--nproc_per_node=2 train.py",
)
def missing(job: JobDescription) -> Iterator[Violation]:
    names = {"cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus", "cores-per-socket", "threads-per-core"}
    if not job.heading or not job.launches or job.whole_nodes or job.heading.keys() & (names | {"ntasks-per-core"}):
        return
    if any(slurm_options(s).keys() & names for s in _launching(job)):
        return
    launch = next((one for one in job.launches if one.srun is not None), job.launches[0])
    tasks = job.number(job.heads("ntasks-per-node")) or job.number(job.heads("ntasks")) or 1
    if launch.srun is not None or tasks == 1:  # else the task has all CPUs of the batch script
        text = (
            f"the job requests no CPUs: {launch.kind} and its ranks get one per task, unless the site has another "
            "default"
        )
        yield Violation(launch.call.offset, text)


@warning(
    "fewer-cpus-than-ranks",
    why="Ranks and the workers of their data loaders take turns on the CPUs: the GPUs wait for data.",
    cure="#SBATCH --cpus-per-task=<ranks per task x (1 + loader workers)>",
    source="Slurm's sbatch and srun manuals",
    bad="#SBATCH --nodes=1\n#SBATCH --gres=gpu:4\n#SBATCH --cpus-per-task=1\ntorchrun --standalone --nproc_per_node=4 "
    "train.py",
    good="#SBATCH --nodes=1\n#SBATCH --gres=gpu:4\n#SBATCH --cpus-per-task=32\ntorchrun --standalone "
    "--nproc_per_node=4 train.py",
)
def few_cpus(job: JobDescription) -> Iterator[Violation]:
    option = job.heading.get("cpus-per-task")
    for launch in job.launches if option is not None and "exclusive" not in job.heading else ():
        ranks, cpus = _ranks_of_task(job, launch), cpus_of_task(job, launch.srun, launch.call)
        if ranks and cpus and ranks > cpus:
            text = f"{ranks} ranks share {cpus} CPU{'s' * (cpus > 1)}, and so do their data loaders"
            yield Violation(option.offset if option else 0, text, severity="warning" if ranks >= 2 * cpus else "note")
            return


def cpus_of_task(job: JobDescription, srun: ProgramCall | None, call: ProgramCall) -> int | None:
    """Return the CPUs of a task of srun, or of the shell that runs the job's script."""
    own = slurm_options(srun) if srun else {}
    if any(c.program in SPREADING for c in call.under if c.program != "srun"):
        return None
    if "cpus-per-task" in own and "SLURM_CPUS_PER_TASK" not in (own["cpus-per-task"].value or ""):
        return job.number(own["cpus-per-task"].value)
    if own.keys() & {"exclusive", "cpus-per-gpu", "overlap"} or "cpus-per-gpu" in job.heading:
        return None
    cpus, tasks = job.number(job.heads("cpus-per-task")), tasks_of_node(job)
    # the batch shell has those of its node
    return cpus if srun is not None else cpus * tasks if cpus and tasks else None


def _ranks_of_task(job: JobDescription, launch: LauncherCall) -> int | None:
    if launch.kind == "python":
        return 1
    procs = launch.value("nproc_per_node", "num_gpus")
    if procs in ("gpu", "auto") or (launch.kind == "deepspeed" and procs is None):
        return job.gpus_per_node
    if launch.kind == "accelerate":
        total, machines = job.number(launch.value("num_processes")), job.number(launch.value("num_machines")) or 1
        if launch.option("config_file") and not launch.option("num_machines"):
            return None
        return total // machines if total else 1  # at least
    return 1 if procs is None and not launch.open_ended else job.number(procs)


@note(
    "threads-missing",
    why="torchrun and accelerate set OMP_NUM_THREADS=1 if it is missing; with other launchers every rank starts a "
    "thread for each core.",
    cure="export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / <ranks per task>))",
    source="torch/distributed/run.py",
    bad="torchrun --nproc_per_node=2 train.py",
    good="export OMP_NUM_THREADS=8\ntorchrun --nproc_per_node=2 train.py",
)
def threads(job: JobDescription) -> Iterator[Violation]:
    passed = any(
        a.text.startswith(("--export=ALL,OMP_NUM_THREADS", "OMP_NUM_THREADS=")) for c in job.calls for a in c.args
    )
    if job.has("OMP_NUM_THREADS") or job.sources_files or passed:
        return
    for launch in job.launches:
        if not job.is_batch and launch.srun is None:
            continue  # the caller of this script may have set it
        per_node = job.number(launch.value("nproc_per_node", "num_gpus"))
        options = slurm_options(launch.srun) if launch.srun else {}
        tasks = job.tasks_per_node(launch.srun) if launch.srun else None
        if launch.kind == "python" and tasks and tasks > 1 and not options.keys() & {"cpus-per-task", "cpu-bind"}:
            sets = f"each of the {tasks} ranks per node starts a thread for every visible core"
        elif (
            launch.kind != "python"
            and per_node != 1
            and (per_node or launch.value("nproc_per_node", "num_gpus", "num_processes"))
        ):
            sets = (
                "all cores for every rank" if launch.kind == "deepspeed" else f"{launch.kind} gives every rank 1 thread"
            )
        else:
            continue
        yield Violation(launch.call.offset, f"no OMP_NUM_THREADS: {sets}")
        return


@note(
    "gpus-for-the-job",
    why="--gpus counts GPUs of the whole job; Slurm may distribute them unevenly, 7 and 1, while the launcher expects "
    "the same number on every node.",
    cure="--gpus-per-node=<n>",
    source="Slurm's sbatch and srun manuals",
    bad="#SBATCH --nodes=2\n#SBATCH --gpus=7\nsrun python train.py",
    good="#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\nsrun python train.py",
)
def gpus_total(job: JobDescription) -> Iterator[Violation]:
    option = job.heading.get("gpus")
    count = job.number((option.value or "").rpartition(":")[2]) if option else None
    if option and count and job.nodes and job.nodes > 1:
        text = f"--gpus={option.value} is the total for all {job.nodes} nodes"
        yield Violation(option.offset, text, severity="warning" if count % job.nodes else "note")


@note(
    "gpu-per-task",
    **ONE_GPU,
    source="Slurm's sbatch and srun manuals",
    bad="#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-task=1\nsrun python train.py",
    good="#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-task=1\nsrun --gres-flags=allow-task-sharing python train.py",
)
def gpu_per_task(job: JobDescription) -> Iterator[Violation]:
    setting = job.heading.get("gpus-per-task")
    for launch in job.launches:
        srun = launch.srun
        if launch.kind != "python" or srun is None or (job.tasks_per_node(srun) or 1) < 2:
            continue
        option = slurm_options(srun).get("gpus-per-task")
        if (setting or option) and not launch.open_srun and not _shares_gpus(job, srun):
            place = option.arg.offset if option else setting.offset if setting else 0
            yield Violation(place, "one GPU per task with several tasks per node")
            return


SURELY_GB = {"mem": 100, "mem-per-gpu": 100, "mem-per-cpu": 25}
"""Fewer megabytes are too few for any program; more may be meant by a job without GPUs."""


@warning(
    "memory-unit",
    why="Slurm takes a number without a unit as megabytes: the job is killed with out of memory when it loads its "
    "first library.",
    cure="--mem=64G",
    source="Slurm's sbatch and srun manuals",
    bad="#SBATCH --nodes=1\n#SBATCH --mem=64\nsrun torchrun train.py",
    good="#SBATCH --nodes=1\n#SBATCH --mem=64G\nsrun torchrun train.py",
)
def megabytes(job: JobDescription) -> Iterator[Violation]:
    for name in ("mem", "mem-per-gpu", "mem-per-cpu"):
        value = job.heads(name) or ""
        # Whoever writes 1000 or more counts in megabytes.
        if re.fullmatch(r"[1-9]\d{0,2}", value) and int(value) < (125 if name == "mem-per-cpu" else 1000):
            option = job.heading[name]
            meant = not job.requests_gpus or re.search(r"(?i)#.*(?:\bMB\b|mega)", option.text)
            severity = "note" if meant and int(value) >= SURELY_GB[name] else None
            text = f"--{name}={value} is {value} MB"
            yield Violation(option.offset, text, cure=f"--{name}={value}G", severity=severity)
