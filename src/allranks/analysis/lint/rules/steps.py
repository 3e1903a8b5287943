"""Rules for steps and nodes: steps that the job cannot give, units of requests, processes that use a part of the job, and idle nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON, SHELLS, Option, slurm_options
from allranks.analysis.lint.job import USUAL_GPUS, JobDescription, LauncherCall, count_gpus
from allranks.analysis.lint.placement import MPI, Started, sources_unknown, started_by
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.tasks import SEVERAL_WHY
from allranks.utils.text import lazy_regex

# --------------------------------------------------------------------- steps larger than the job

EXCEEDS_WHY = "srun refuses the step: it waits for resources that the job does not have, or stops with 'More processors requested than permitted'."
EXCEEDS_CURE = "request the same in #SBATCH"
MEMORY = lazy_regex(r"(\d{1,9})([kKmMgGtT]?)[bB]?")
MB = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024 * 1024}


def exceeds(job: JobDescription) -> Iterator[Violation]:
    """Compare the nodes, tasks, GPUs and memory of each srun with those of the job."""
    if not job.is_batch or job.submits or any(c.program == "salloc" for c in job.calls):
        return
    for call in job.calls:
        if call.program != "srun" or call.in_substitution or call.has_open_options:
            continue
        options = slurm_options(call)
        if options.keys() & {"jobid", "het-group", "pack-group", "overcommit"} or any(a.text == ":" for a in call.args):
            continue
        hit = _nodes(job, options) or _gpus(job, options) or _memory(job, options) or _cpus(job, options)
        if hit:
            option, text = hit
            yield Violation(option.arg.offset if option.arg.offset > call.offset else call.offset, text)


Hit = tuple[Option, str] | None


def _nodes(job: JobDescription, options: dict[str, Option]) -> Hit:
    option = options.get("nodes")
    asked, have = job.number(option.value) if option else None, job.number(job.heads("nodes"))
    if option and asked and have and asked > have:
        return option, f"srun asks for {asked} nodes, but the job has {have}"
    return None


def _gpus(job: JobDescription, options: dict[str, Option]) -> Hit:
    have, nodes = job.gpus_per_node, job.nodes
    if not have or "exclusive" in job.heading:
        return None
    for name in ("gpus-per-node", "gres"):
        option = options.get(name)
        value = _filled(job, option.value) if option else None
        counted, known = (
            count_gpus(*((value, None) if name == "gpus-per-node" else (None, value))) if value else (None, False)
        )
        if option and known and counted and counted > have:
            return option, f"srun asks for {counted} GPUs per node, but the job has {have}"
    option = options.get("gpus")
    total = re.search(r"\d{1,6}\Z", _filled(job, option.value) or "") if option else None
    if option and total and nodes and int(total[0]) > have * nodes:
        return option, f"srun asks for {total[0]} GPUs, but the job has {have * nodes}"
    return None


def _filled(job: JobDescription, value: str | None) -> str | None:
    """Return a value whose last part is replaced by its number: ``gpu:$N``."""
    head, colon, last = (value or "").rpartition(":")
    number = job.number(last)
    return value if number is None else f"{head}{colon}{number}"


def _memory(job: JobDescription, options: dict[str, Option]) -> Hit:
    option = options.get("mem")
    asked, have = _megabytes(option.value) if option else None, _megabytes(job.heads("mem"))
    if option and asked and have and asked > have:
        return option, f"srun asks for {option.value} of memory per node, but the job has {job.heads('mem')}"
    return None


def _megabytes(value: str | None) -> float | None:
    found = MEMORY.fullmatch(value or "")
    return int(found[1]) * MB[(found[2] or "m").lower()] if found and int(found[1]) else None


def _cpus(job: JobDescription, options: dict[str, Option]) -> Hit:
    """Compare the CPUs of all tasks of the step; whole nodes may have more CPUs than the job asked for."""
    explicit = job.heading.keys() & {"ntasks", "ntasks-per-node"}
    if (
        job.whole_nodes
        or not explicit
        or job.heading.keys() & {"exclusive", "cpus-per-gpu", "mincpus", "ntasks-per-gpu", "hint"}
    ):
        return None
    total, each = job.number("$SLURM_NTASKS"), job.number(job.heads("cpus-per-task") or "1")
    option, own = options.get("ntasks"), options.get("cpus-per-task")
    count = job.number(option.value) if option else total
    if own is not None and count and total and count <= total and "cpus-per-task" in job.heading:
        asked = job.number(own.value)
        # Slurm gives whole cores: with two threads each, a task may have one CPU more than it asked for.
        if asked and each and asked * count > (each + 1) * total:
            of_step = f"{asked} CPUs" if count == 1 else f"{count} tasks of {asked} CPUs"
            return own, f"srun asks for {of_step}, but the job has {total * each}"
    if option is None or not total or not each:
        return None
    tasks, own = (
        job.number(option.value),
        job.number(options["cpus-per-task"].value) if "cpus-per-task" in options else 1,
    )
    if tasks and own and tasks > total and tasks * own > total * each:
        cpus = f"{tasks} tasks" if own == 1 else f"{tasks} tasks of {own} CPUs"
        return option, f"srun asks for {cpus}, but the job has {total * each} CPU{'s' * (total * each > 1)}"
    return None


# ---------------------------------------------------------------------------- jobs inside of a job

INNER_WHY = "salloc waits for another allocation and starts a shell in it; sbatch under srun is called once in every task, and submits as many jobs."
INNER_CURE = "start the program in this job; or call sbatch without srun"


def allocates(job: JobDescription) -> Iterator[Violation]:
    """Report an allocation inside of a job, and a submission in every task of a step."""
    if not job.is_batch:
        return
    for call in job.calls:
        if call.program == "sbatch" and any(c.program == "srun" for c in call.under) and not call.in_substitution:
            yield Violation(call.offset, "srun submits a job in every task")
        elif call.program == "salloc" and not call.in_substitution and not call.under:
            yield Violation(call.offset, "salloc inside of a batch job asks for another allocation")
        elif call.program == "srun" and not call.in_substitution:
            inner = next((a for a in call.args if a.text == "sbatch"), None)
            if inner and not any(call in c.under for c in job.calls):
                yield Violation(inner.offset, "srun submits a job in every task")
            other = slurm_options(call).get("jobid")
            if other and (other.value or "").isdecimal():
                text = f"srun starts a step of job {other.value}, not of this one"
                yield Violation(other.arg.offset, text, why=OTHER_JOB_WHY, cure="remove --jobid")
    yield from _nodes_of_cluster(job)


OTHER_JOB_WHY = "The nodes and GPUs of this job are idle, and srun fails as soon as that job has ended."
CLUSTER_WHY = "sinfo lists nodes of the cluster: the job has others, and srun refuses them ('Requested node configuration is not available')."
CLUSTER_CURE = 'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))'
OF_SINFO = lazy_regex(r"[$(`]\s*(?:/\S*/)?sinfo\b")


def _nodes_of_cluster(job: JobDescription) -> Iterator[Violation]:
    """Report steps on nodes that sinfo names."""
    if re.search(r"SLURM_(?:JOB_)?NODELIST|scontrol\s+show\s+hostname", job.text) or job.submits:
        return
    listed = [a for a in job.assignments if OF_SINFO.search(a.value) and not a.removed]
    chosen = [c for c in job.calls if c.program == "srun" and "nodelist" in slurm_options(c)]
    if listed and any("$" in (slurm_options(c)["nodelist"].value or "") for c in chosen):
        text = f"{listed[0].name} is a list of nodes of the cluster, not of the job"
        yield Violation(listed[0].offset, text, why=CLUSTER_WHY, cure=CLUSTER_CURE)


# --------------------------------------------------------------------- requests in another unit

HOURS = {24, 36, 48, 72, 96, 120, 144, 168}
TIME_WHY = (
    "Two numbers are minutes and seconds, a single number is minutes: the job is ended long before it has finished."
)
IN_HOURS = lazy_regex(r"(?i)\b\d*\s*-?(?:hours?|hrs?|days?)\b|\b\d+\s*h\b")
FORMATS = lazy_regex(r"(?i)HH|hh:mm|minutes|format|hrs?:min|hours?:min|days?-")
SMALL_MB = 1024
TOO_SMALL_MB = 128


def minutes(job: JobDescription) -> Iterator[Violation]:
    """Report a time limit in minutes where hours were meant."""
    item = job.heading.get("time")
    value = item.value if item else None
    if item is None or not value or not job.directives:
        return
    found = re.fullmatch(r"(\d{1,3})(?::(\d\d))?", value)
    comment = item.text.partition("#")[2]
    in_hours = bool(IN_HOURS.search(comment)) and not FORMATS.search(comment)
    if found is None or (found[2] is None and (int(found[1]) < 1 or re.search(r"(?i)\bmin(?:ute)?s?\b", comment))):
        return
    first, second = int(found[1]), int(found[2] or 0)
    likely = first in HOURS - {36, 120} and second == 0
    if first == 0 and second:
        text, cure = f"--time={value} is {second} seconds", f"--time={value}:00"
    elif likely or (in_hours and str(first) in comment):
        text, cure = f"--time={value} is {first} minutes", f"--time={first}:00:00"
    else:
        return
    yield Violation(item.offset, text, why=TIME_WHY, cure=cure)


def small_memory(job: JobDescription) -> Iterator[Violation]:
    """Report an amount of memory with a unit that is too small for Python and torch."""
    if not job.work:
        return
    for name in ("mem", "mem-per-gpu", "mem-per-cpu"):
        value = job.heads(name) or ""
        size = _megabytes(value)
        if size is None or not re.search(r"[kKmM][bB]?\Z", value):
            continue
        each = job.number(job.heads("cpus-per-task") or "1") if name == "mem-per-cpu" else 1
        tasks = job.number(job.heads("ntasks-per-node") or job.heads("ntasks") or "1") if name == "mem-per-cpu" else 1
        if each and tasks and size * each * tasks < SMALL_MB:
            each *= tasks
            rest = f" for each of {each} CPUs" if each > 1 else ""
            text = f"--{name}={value} is {size:.0f} MB{rest}: {size * each:.0f} MB per node"
            # A small program without CUDA runs in some hundred megabytes.
            severity = None if job.requests_gpus or size * each < TOO_SMALL_MB else "note"
            yield Violation(job.heading[name].offset, text, cure=f"--{name}=<n>G", severity=severity)


# ---------------------------------------------------------------------------- parts of the job

PART_WHY = "The job pays for all GPUs and nodes that it requests."
ONE_GPU_CONFIG = lazy_regex(r"(?:\A|[/_.-])(?:single_?-?gpu|one_?-?gpu|1_?-?gpus?)(?=[/_.-]|\Z)", re.IGNORECASE)


SPAWNS = lazy_regex(r"--oversubscribe|pmix_server|orte_abort|-usize\b")


def few_started(job: JobDescription) -> Iterator[Violation]:
    """Report horovodrun and mpirun with fewer processes than nodes, or than the GPUs of the job."""
    if len(job.launches) != 1 or len(job.work) != 1 or not job.is_job:
        return
    launch = job.launches[0]
    started = started_by(job, launch) if launch.kind == "python" else None
    if (
        started is None
        or started.starter.program not in MPI | {"horovodrun"}
        or not started.total
        or "array" in job.heading
    ):
        return
    starter = started.starter
    if starter.after == "&" or starter.in_loop or starter.in_function or not job.nodes or starter.tested:
        return
    horovod = starter.program == "horovodrun" or any(re.search(r"hvd|horovod", a.text) for a in launch.call.args)
    gpus = (job.gpus_per_node or 0) * job.nodes
    if started.total == 1 and SPAWNS.search(" ".join(a.text for a in starter.args)):
        return  # the program starts more processes itself, on the other slots
    if started.total < job.nodes:
        text = f"{starter.program} starts {started.total} process{'es' * (started.total > 1)}, but the job has {job.nodes} nodes"
        yield Violation(starter.offset, text)
    elif horovod and started.total < gpus and not job.has("CUDA_VISIBLE_DEVICES"):
        text = f"{starter.program} starts {started.total} process{'es' * (started.total > 1)}, but the job has {gpus} GPUs: the others are idle"
        yield Violation(starter.offset, text)


def too_many_started(job: JobDescription) -> Iterator[Violation]:
    """Report horovodrun, whose processes each take a GPU, with more processes than the job has GPUs; and tasks of srun in a job of few."""
    for launch in job.launches:
        started = started_by(job, launch) if launch.kind == "python" else None
        gpus, nodes = job.gpus_per_node, job.nodes
        by_horovod = started is not None and started.starter.program == "horovodrun"
        if started and by_horovod and gpus and nodes and (started.total or 0) > gpus * nodes:
            text = f"{started.total} ranks, but the job requests {gpus * nodes} GPUs"
            yield Violation(started.starter.offset, text)
        elif started and started.starter.program == "srun" and gpus and (started.per_node or 0) > gpus:
            told = DISTRIBUTED.search(job.heads("job-name") or "") and not any(
                RANKED.search(a.text) for a in launch.call.args
            )
            shared = re.fullmatch(r"single:(\d{1,3})", job.heads("gpu-bind") or "")
            if shared and int(shared[1]) * gpus >= (started.per_node or 0):
                continue  # so many tasks per GPU are wanted
            if told and not job.has("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
                text = f"{started.per_node} ranks per node, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node"
                yield Violation(started.starter.offset, text)
        elif started and started.starter.program in ("mpirun", "mpiexec") and gpus:
            yield from _by_mpirun(job, launch, started, gpus)


def _by_mpirun(job: JobDescription, launch: LauncherCall, started: Started, gpus: int) -> Iterator[Violation]:
    """Report mpirun, which starts as many processes as the job has tasks if it is told no number."""
    starter = started.starter
    options = any(a.text.startswith("-") for a in starter.args[: len(starter.args) - len(launch.call.args)])
    per_node = started.per_node or (job.number(job.heads("ntasks-per-node")) if not options else None)
    names = " ".join(job.heads(name) or "" for name in ("job-name", "output"))
    if per_node and per_node > gpus and DISTRIBUTED.search(names.replace("_", " ")):
        text = f"{per_node} ranks per node, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node"
        yield Violation(starter.offset, text)


DISTRIBUTED = lazy_regex(r"(?i)distribut|ddp|multi[-_]?gpu|horovod|hvd")
RANKED = lazy_regex(
    r"(?i)world_?-?size|init_?-?method|dist_?-?url|dist_?-?backend|(?:hvd|horovod|ddp|distributed)[^/]*\.py\Z"
)
ONE_LAUNCHER = {"colossalai": "run", "composer": "", "tune": "run", "llamafactory-cli": "train", "axolotl": "train"}


def launchers_in_tasks(job: JobDescription) -> Iterator[Violation]:
    """Report more launchers that start all ranks of a node themselves, in several tasks of a node."""
    for call in job.calls:
        words = [a.text for a in call.args]
        module = words[words.index("-m") + 1 : words.index("-m") + 2] if "-m" in words[:4] else []
        own = PYTHON.match(call.program) is not None and module == ["deepspeed.launcher.launch"]
        first = ONE_LAUNCHER.get(call.program)
        tasks = job.tasks_per_node(call.srun) if call.srun else None
        if (
            call.in_substitution
            or not tasks
            or tasks < 2
            or not (own or (first is not None and first in ("", *words[:1])))
        ):
            continue
        name = module[0] if own else call.program
        yield Violation(call.offset, f"srun starts {tasks} tasks per node, and each starts {name}")


def one_gpu_config(job: JobDescription) -> Iterator[Violation]:
    """Report a configuration for one GPU, by its name, in a job of several whose launches run one after another."""
    gpus, found = job.gpus_per_node, job.launches
    if not gpus or gpus < 2 or not found or len(found) != len(job.work) or "array" in job.heading:
        return
    for launch in found:
        option = launch.option("config_file")
        outer = launch.call.under[0] if launch.call.under else launch.call
        if (
            launch.kind != "accelerate"
            or option is None
            or launch.option("num_processes")
            or outer.after == "&"
            or outer.in_function
        ):
            return
        if not ONE_GPU_CONFIG.search(option.value or ""):
            return
    option = found[0].option("config_file")
    if option:
        text = f"{option.value} is a configuration for one GPU, but the job requests {gpus}: the others are idle"
        yield Violation(option.arg.offset, text)


def listed_twice(job: JobDescription) -> Iterator[Violation]:
    """Report a GPU that CUDA_VISIBLE_DEVICES lists twice: CUDA then sees no GPU from there on."""
    for item in job.assignments:
        if item.name != "CUDA_VISIBLE_DEVICES" or item.removed or not re.fullmatch(r"\d{1,3}(?:,\d{1,3})+", item.value):
            continue
        numbers = item.value.split(",")
        twice = next((n for n in numbers if numbers.count(n) > 1), None)
        if twice:
            yield Violation(item.offset, f"CUDA_VISIBLE_DEVICES={item.value} lists GPU {twice} twice",
                            why="CUDA takes such a list as empty, and no GPU is found.", cure="each GPU once")  # fmt: skip


# ------------------------------------------------------------------- launchers of one group

DISAGREE_WHY = (
    "The nodes of one group must have the same address and port, and each its own rank: they never find each other."
)


def disagree(job: JobDescription) -> Iterator[Violation]:
    """Report launchers of one group, started side by side, whose ports or ranks do not fit together."""
    group = []
    for launch in job.launches:
        rank, nodes = launch.value("node_rank", "machine_rank"), launch.value("nnodes", "num_machines")
        outer = launch.call.under[0] if launch.call.under else launch.call
        several = (job.number(nodes) or 1) > 1
        if (
            several
            and rank is not None
            and rank.isdecimal()
            and not launch.call.in_loop
            and not launch.call.in_function
        ):
            group.append((launch, rank, outer))
    if (
        len(group) < 2
        or any(o.after != "&" for _, _, o in group[:-1])
        or any(o.instead_of(group[0][2]) for _, _, o in group[1:])
    ):
        return
    programs = {next((a.text for a in la.call.args if a.text.endswith(".py")), "") for la, _, _ in group}
    if len(programs) != 1:
        return
    first = group[0][0]
    for name in ("master_port", "main_process_port", "master_addr", "main_process_ip", "rdzv_endpoint"):
        for launch, _, _ in group[1:]:
            option, value = launch.option(name), first.value(name)
            if option and value and option.value != value and "$" not in f"{option.value}{value}":
                yield Violation(
                    option.arg.offset,
                    f"--{name}={option.value}, but {value} in line {job.lines.place(first.call.offset)[0]}",
                )
                return
    ranks = [rank for _, rank, _ in group]
    again = next((i for i, r in enumerate(ranks) if r in ranks[:i]), None)
    ports = {la.value("master_port", "main_process_port", "rdzv_endpoint") for la, _, _ in group}
    nodes = job.number(group[0][0].value("nnodes", "num_machines"))
    if again is not None and nodes == len(group) and len(ports) == 1:
        option = group[again][0].option("node_rank", "machine_rank")
        if option:
            yield Violation(option.arg.offset, f"rank {ranks[again]} is given twice", why=DISAGREE_WHY)


def per_gpu_tasks(job: JobDescription) -> Iterator[Violation]:
    """Report a launcher of all ranks in every task of ``--ntasks-per-gpu``."""
    each, gpus = job.number(job.heads("ntasks-per-gpu")), job.gpus_per_node
    if not each or not gpus or each * gpus < 2 or job.heading.keys() & {"ntasks", "ntasks-per-node"}:
        return
    for launch in job.launches:
        own = slurm_options(launch.srun).keys() & {"ntasks", "ntasks-per-node", "nodes"} if launch.srun else set()
        if (
            launch.kind != "python"
            and launch.srun
            and not own
            and launch.value("nproc_per_node", "num_processes") != "1"
        ):
            text = f"srun starts {each * gpus} tasks per node, and each starts {launch.kind}"
            yield Violation(launch.call.offset, text, why=SEVERAL_WHY)


# ----------------------------------------------------------------------- nodes that no program uses

NODES_WHY = "The batch script runs on the first node only; the other nodes are idle, and paid for."
NODES_CURE = "srun python ..., or #SBATCH --nodes=1"
SEQUENCE_WHY = (
    "The first launcher waits for the others, which start only after it has ended; it stops at the rendezvous timeout."
)
SEQUENCE_CURE = "srun --ntasks-per-node=1 without --nodelist starts all nodes at once; or end the line with & and add wait after the loop"


def sequence(job: JobDescription) -> Iterator[Violation]:
    """Report launchers that a loop starts on one node after another."""
    yield from _ranks_in_sequence(job)
    for launch, srun in ((la, la.srun) for la in job.launches):
        yield from _by_ssh(job, launch)
        if srun is None or not srun.in_loop or srun.in_function or job.runs_in_background(launch.call.under[0]):
            continue
        node = slurm_options(srun).get("nodelist")
        rank = launch.value("node_rank", "machine_rank")
        counted = re.fullmatch(r"\"?\$\{?(?!SLURM)\w+\}?\"?", rank or "")
        one = (counted and job.srun_nodes(srun) == 1) or (node and "$" in (node.value or ""))
        if one and launch.value("nnodes", "num_machines") not in (None, "1"):
            yield Violation(srun.offset, f"the loop starts {launch.kind} on one node after another")


NODE_RANK_OPTION = lazy_regex(r"--(?:node[-_]rank|machine[-_]rank)(?:=\S*|\Z)")


def _ranks_in_sequence(job: JobDescription) -> Iterator[Violation]:
    """Report a loop of srun in the foreground, each on a node and with a rank of its own, whose program is no known launcher."""
    starts = {launch.srun.offset for launch in job.launches if launch.srun is not None}
    for call in job.calls:
        srun = call.under[-1] if call.under else None
        if srun is None or srun.program != "srun" or srun.offset in starts or not srun.in_loop or srun.in_function:
            continue
        node = slurm_options(srun).get("nodelist")
        ranked = any(
            NODE_RANK_OPTION.match(a.text) and "$" in f"{a.text} {b.text if b else ''}" for a, b in call.pairs()
        )
        if node and "$" in (node.value or "") and ranked and call.under[0].after not in ("&", "|", "|&"):
            yield Violation(srun.offset, f"the loop starts {call.written} on one node after another")
            return


def _by_ssh(job: JobDescription, launch: LauncherCall) -> Iterator[Violation]:
    """Report a loop over nodes whose ssh waits for the launcher, which waits for the next node."""
    ssh = next((c for c in launch.call.under if c.program == "ssh"), None)
    if ssh is None or not ssh.in_loop or ssh.in_function or launch.call.after == "&":
        return
    if job.runs_in_background(ssh):
        return
    detached = any(a.text.startswith("-") and "f" in a.text and a.text[1:].isalpha() for a in ssh.args)
    host = next((a.text for a in ssh.args if "$" in a.text and not a.text.startswith("-")), None)
    several = launch.value("nnodes", "num_machines") not in (None, "1")
    if (
        host
        and several
        and not detached
        and not re.search(r"\b(?:nohup|setsid|tmux|screen)\b|&\s*[\"']?\s*$", ssh.args[-1].text)
    ):
        yield Violation(
            ssh.offset,
            f"the loop starts {launch.kind} on one node after another: ssh returns when it has ended",
            cure='ssh "$node" ... & in the loop, and wait after it; or srun, which starts all at once',
        )


STARTER_OPTION = lazy_regex(r"=[\"']?(?:srun|slurm|mpirun|mpiexec|aprun)\b")
"""Tells the program what it should start its own processes with."""
SPREADS_ITSELF = lazy_regex(
    r"(?:^|/)(?:\w*launch\w*|deepy)\.py$|--mpi[-_]\w+|--hosts?\b|^scoop$|submitit|smartsim|dask|\bray\b|parsl|mpi4py|spark|hostfile|horovod|pip$|venv$|--\w+[-_]nodes=|"
    rf"NODELIST|NODEFILE|{STARTER_OPTION.pattern}|^(?:mpirun|mpiexec|horovodrun|setup\.py)$"
)
TOTAL = lazy_regex(r"--(?:n|num)[-_]?gpus=(\d{1,6})")


def idle_nodes(job: JobDescription) -> Iterator[Violation]:
    """Report a job of several nodes whose programs all run in the batch script, on the first node."""
    yield from _small_step(job)
    yield from _head_only(job)
    yield from _beside_steps(job)
    if not job.is_job or (job.nodes or 1) < 2 or job.launches or not job.work or sources_unknown(job):
        return
    others = [c for c in job.calls if not c.in_substitution]
    if job.chooses_launcher or re.search(r"\bRADICAL_|\bradical\b", job.text):
        return
    if any(c.program in STARTS_ELSEWHERE or runs_script(c) for c in others):
        return
    told = [int(n[1]) for c in job.work for a in c.args for n in [TOTAL.fullmatch(a.text)] if n]
    work = next((c for c in job.work if not any(SPREADS_ITSELF.search(a.text) for a in c.args)), None)
    if work is None or max(told, default=0) > max(job.gpus_per_node or 0, USUAL_GPUS):
        return  # it is told to use more GPUs than a node has, and starts the others itself
    yield Violation(work.offset, f"{work.program} runs on the first of {job.nodes} nodes only")


TRAINS = lazy_regex(r"(?:\S*/)?(?:\w*_)?(?:pre_?)?train(?:_\w+)?\.py\Z")
CLUSTERS = lazy_regex(r"(?i)\b(?:ray|dask|spark|mpi4py|submitit)\b")


def _beside_steps(job: JobDescription) -> Iterator[Violation]:
    """Report a training without srun in a job of several nodes whose other programs srun starts, one after another."""
    if not job.is_batch or (job.nodes or 1) < 2 or job.launches or len(job.work) != 1:
        return
    call, own = job.work[0], [c for c in job.calls if not c.in_substitution and not c.under]
    steps = [c for c in own if c.program in STARTS_ELSEWHERE]
    if call.under or call.in_loop or call.in_function or call.branch or call.after not in ("\n", ";", ""):
        return
    if not steps or any(c.program != "srun" or c.after == "&" for c in steps) or CLUSTERS.search(job.text):
        return
    plain = not any(SPREADS_ITSELF.search(a.text) for a in call.args) and not any(runs_script(c) for c in own)
    if plain and call.args and TRAINS.match(call.args[0].text):
        text = f"{call.program} runs on the first of {job.nodes} nodes only: srun does not start it"
        yield Violation(call.offset, text)


def _small_step(job: JobDescription) -> Iterator[Violation]:
    """Report a job whose only step takes fewer nodes than the job has."""
    if not job.is_batch or (job.nodes or 1) < 2 or len(job.launches) != 1 or len(job.work) != 1:
        return
    launch, steps = job.launches[0], [c for c in job.calls if c.program == "srun" and not c.in_substitution]
    srun = launch.srun
    if srun is None or len(steps) != 1 or srun.in_loop or srun.in_function or srun.after == "&" or launch.open_srun:
        return
    options = slurm_options(srun)
    asked, tasks = options.get("nodes"), options.get("ntasks")
    nodes = job.number(asked.value) if asked else None
    counted = job.number(tasks.value) if tasks else None
    if options.keys() & {"nodelist", "relative", "nodefile", "exact", "overlap"} or any(
        SPREADS_ITSELF.search(a.text) for a in launch.call.args
    ):
        return
    used, option = (nodes, asked) if nodes else (counted, tasks)
    if option and used and used < (job.nodes or 0) and launch.value("nnodes", "num_machines") in (None, "1"):
        text = f"the only step of the job takes {used} of its {job.nodes} nodes"
        cure = f"srun without {option.written}, or #SBATCH --nodes={used}"
        yield Violation(option.arg.offset, text, why="The job waits for, and pays for, all its nodes.", cure=cure)


def _head_only(job: JobDescription) -> Iterator[Violation]:
    """Report a head of Ray in a job of several nodes, none of which joins it."""
    if not job.is_job or (job.nodes or 1) < 2 or job.sources_files:
        return
    heads = [c for c in job.calls if is_ray_start(c) and any(a.text == "--head" for a in c.args)]
    own = [c for c in job.calls if not c.in_substitution]
    joins = any(is_ray_start(c) and c not in heads for c in own) or any(
        "symmetric-run" in a.text for c in own for a in c.args
    )
    unknown = any(
        runs_script(c) or c.program in ("sbatch", "pdsh", "clush", "pbsdsh", "mpirun", "mpiexec") for c in own
    )
    mentioned = re.search(
        r"ray\s+start(?![^\n]*--head)|symmetric-run",
        "\n".join(ln for ln in job.text.splitlines() if not ln.lstrip().startswith("#")),
    )
    if heads and not joins and not unknown and not mentioned:
        text = f"ray has its head on one of {job.nodes} nodes, and no other node joins it"
        yield Violation(
            heads[0].offset, text, cure='srun ... ray start --address="$head:6379" --block & on the other nodes'
        )


def is_ray_start(call: ProgramCall) -> bool:
    return call.program == "ray" and [a.text for a in call.args[:1]] == ["start"]


STARTS_ELSEWHERE = {
    "srun", "mpirun", "mpiexec", "mpiexec.hydra", "ssh", "pdsh", "parallel", "sbatch", "ray", "pbsdsh", "clush", "jsrun", "aprun", "horovodrun",
    "orterun", "blaunch", "flux", "lrun", "ddlrun", "runjob", "dask-ssh", "dask-mpi",
    "ibrun", "prun", "mpirun_rsh", "likwid-mpirun",
}  # fmt: skip


def runs_script(call: ProgramCall) -> bool:
    """Return whether the call runs another script, which may start programs on the other nodes."""
    first = call.args[0].text if call.args else ""
    shell = call.program in SHELLS and not first.startswith("-")
    return shell or call.written.startswith(("./", "../", "$")) or call.written.endswith((".sh", ".bash"))
