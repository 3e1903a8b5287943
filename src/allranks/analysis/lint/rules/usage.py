"""Rules that compare what a job requests with what its programs use: CPUs of many GPUs, programs on the CPU, programs that one node or one task runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

from allranks.analysis.lint.command_options import PYTHON, SHELLS, slurm_options
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, ProgramCall, Violation
from allranks.analysis.lint.rules.requests import PREPARING
from allranks.analysis.lint.rules.sizes import SERVER_SIZES, is_server, option_values
from allranks.analysis.lint.rules.steps import STARTS_ELSEWHERE, runs_script
from allranks.analysis.lint.rules.tasks import cpus_of_task, tasks_of_node
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------------ CPUs of many GPUs

ONE_CPU_WHY = (
    "A task has one CPU unless the site gives more for each GPU: all ranks and their data loaders share it, and with --mem-per-cpu also "
    "the memory of that one CPU."
)
CPU_OPTIONS = {
    "cpus-per-task", "cpus-per-gpu", "mincpus", "cores-per-socket", "sockets-per-node", "threads-per-core", "ntasks-per-core", "ntasks-per-gpu",
    "ntasks-per-socket", "exclusive", "hint", "extra-node-info",
}  # fmt: skip
MANY_GPUS = 4


def one_cpu(job: JobDescription) -> Iterator[Violation]:
    """Report a single task without a number of CPUs for many GPUs."""
    gpus = job.gpus_per_node
    if not job.is_batch or not gpus or gpus < MANY_GPUS or job.heading.keys() & CPU_OPTIONS or job.requests_whole_nodes:
        return
    asked = job.heading.get("ntasks-per-node") or job.heading.get("ntasks")
    if asked is None or asked.late or tasks_of_node(job) != 1 or job.submits or not _works(job):
        return
    steps = [slurm_options(c) for c in job.calls if c.program == "srun"]
    if any(step.keys() & CPU_OPTIONS for step in steps):
        return
    memory = job.heads("mem-per-cpu")
    if not memory:
        return  # cpus-missing notes it: many sites give a number of CPUs with each GPU
    text = f"no --cpus-per-task: the task has one CPU, with {memory} of memory, for {gpus} GPUs"
    yield Violation(asked.offset, text, why=ONE_CPU_WHY)


def _works(job: JobDescription) -> bool:
    """Return whether the script runs anything but preparations."""
    return any(c.program not in PREPARING and not c.in_substitution for c in job.calls)


WORKERS = lazy_regex(
    r"(?:--|\+{0,2}(?:\w+\.)*)(?:(?:data)?loader[-_]?|dataset[-_]?|train[-_]?)?(?:num[-_]?|n[-_]?)?workers(?:[-_]per[-_]gpu)?|--dataloader[-_]num[-_]workers"
)
WORKERS_WHY = "Each worker is a process of its own: torch warns that the loaders may get slow or even freeze, and the GPU waits for data."
MANY_WORKERS = 16
TIMES = 4


def loader_workers(job: JobDescription) -> Iterator[Violation]:
    """Report many more workers of a data loader than CPUs."""
    if not job.is_batch or "exclusive" in job.heading or job.requests_whole_nodes:
        return
    for call in job.work_calls:
        if call.in_function:
            continue
        cpus = cpus_of_task(job, call.srun, call)
        if (
            cpus is None
            and not call.under
            and "cpus-per-task" not in job.heading
            and job.heading.keys() & {"ntasks", "ntasks-per-node"}
        ):
            tasks = tasks_of_node(job)
            cpus = tasks if tasks and tasks > 1 else None
        for arg, following in call.pairs():
            name, equals, value = arg.text.partition("=")
            if not WORKERS.fullmatch(name) or not (equals or name.startswith("--")):
                continue
            count = job.number(value if equals else following.text if following else None)
            if count and cpus and count >= MANY_WORKERS and count >= TIMES * cpus:
                text = f"{count} workers of the data loader, but the task has {cpus} CPU{'s' * (cpus > 1)}"
                yield Violation(arg.offset, text, why=WORKERS_WHY, cure=f"#SBATCH --cpus-per-task={count}")
                return


# --------------------------------------------------------------------------- programs on the CPU

CPU_WHY = "The job waits for GPUs and pays for them, and its program does not use them."
CPU_BUILD_WHY = (
    "This build has no support for GPUs: torch.cuda.is_available() is false, and the program runs on the CPU or stops."
)
CPU_WHEEL = lazy_regex(
    r"download\.pytorch\.org/whl/(?:\w+/)?cpu\b|\A(?:torch|torchvision|jaxlib)==[\w.]+\+cpu|\Atensorflow-cpu\b|\A(?:cpuonly|pytorch-cpu)\b|\+cpu-cp\d"
)
GPU_BUILD = lazy_regex(r"\bcu1[0-3]\d\b|pytorch-cuda|cudatoolkit|tensorflow-gpu|tensorflow\[and-cuda\]|jax\[cuda")
ON_CPU = lazy_regex(
    r"--(?:no[-_]cuda|no[-_]gpu|cpu[-_]only)|(?:--device|--accelerator|device|(?:pl_)?trainer\.accelerator)=(?i:cpu)|"
    r"--(?:use[-_])?(?:cuda|gpu)=(?i:false)"
)
CPU_VALUES = {
    **dict.fromkeys(("--device", "--accelerator"), ("cpu",)),
    **dict.fromkeys(("--use_cuda", "--use-cuda", "--use_gpu", "--use-gpu", "--cuda"), ("False", "false")),
}


def cpu_build(job: JobDescription) -> Iterator[Violation]:
    """Report the installation of a build without GPU support in a job with GPUs."""
    if not job.is_job or not _asks_gpus(job):
        return
    others = re.sub(r"(?m)#.*$", "", job.text)
    if GPU_BUILD.search(others):
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        installer = call.program in ("pip", "pip3", "conda", "mamba", "micromamba", "uv")
        if not installer or "install" not in words[:2] or call.branch or call.in_function or call.in_substitution:
            continue
        found = next((a for a in call.args if CPU_WHEEL.search(a.text)), None)
        if found:
            text = f"{found.text[:60]} is a build for the CPU, but the job requests GPUs"
            yield Violation(found.offset, text, why=CPU_BUILD_WHY, cure="the build for CUDA; or no GPUs for this job")
            return


def on_cpu(job: JobDescription) -> Iterator[Violation]:
    """Report programs that are told to run on the CPU, if the job with GPUs has no others."""
    if not job.is_job or not _asks_gpus(job) or job.submits or not job.work_calls:
        return
    told: list[tuple[int, str]] = []
    for call in job.work_calls:
        found = _told_cpu(call) or _hides_gpus(call)
        if found is None or call.in_function:
            return
        told.append(found)
    others = [c for c in job.calls if not c.in_substitution and not c.under and c.program not in PREPARING]
    known = {c.starter.offset for c in job.work_calls}
    if any(c.offset not in known and (runs_script(c) or c.after == "&" or is_server(c)) for c in others):
        return
    place, text = told[0]
    yield Violation(place, f"{text}, but the job requests GPUs", why=CPU_WHY, cure="remove it; or request no GPUs")


def _told_cpu(call: ProgramCall) -> tuple[int, str] | None:
    for arg, following in call.pairs():
        flag = arg.text.startswith("--no") and (following is None or following.text.startswith("-"))
        if ON_CPU.fullmatch(arg.text) and (flag or "=" in arg.text or "only" in arg.text):
            return arg.offset, arg.text
        if following and following.text in CPU_VALUES.get(arg.text, ()):
            return arg.offset, f"{arg.text} {following.text}"
    return None


def _hides_gpus(call: ProgramCall) -> tuple[int, str] | None:
    """Return the setting in front of a command that leaves it no GPU."""
    own = [a for a in call.prefix if a.name == "CUDA_VISIBLE_DEVICES" and a.value in ("", "-1") and "$" not in a.raw]
    return (own[-1].offset, f"CUDA_VISIBLE_DEVICES={own[-1].value} hides all GPUs") if own else None


def _asks_gpus(job: JobDescription) -> bool:
    """Return whether the job requests GPUs, and not another kind of resource, or none."""
    if job.is_batch:
        return bool(job.gpus_per_node) or bool(
            re.search(r"[1-9]", job.heads("gpus") or job.heads("gpus-per-task") or "")
        )
    return job.requests_gpus


# --------------------------------------------------- programs that one task, or one node, runs

MPI_PROGRAM = lazy_regex(
    r"lmp(?:_(?!serial)\w+)?|vasp_(?:std|gam|ncl)|pw\.x|cp2k\.p(?:smp|opt)|pmemd(?:\.cuda(?:_SPFP)?)?\.MPI|sander\.MPI|xhpl|\w+_perf_mpi"
)
ALONE_WHY = "The batch script runs on one core set of the first node: without srun or mpirun the program is a single process, and the other tasks do not exist."
ASKS_ONLY = {"-h", "-help", "--help", "--version", "-v", "-version"}


def mpi_alone(job: JobDescription) -> Iterator[Violation]:
    """Report a program for MPI that is started once, without srun or mpirun, in a job of several tasks."""
    if not job.is_batch or job.submits or "array" in job.heading:
        return
    tasks = job.number("$SLURM_NTASKS")
    if not tasks or tasks < 2:
        return
    for call in job.calls:
        name = call.written.rpartition("/")[2]
        if not MPI_PROGRAM.fullmatch(name) or call.in_substitution or call.in_function or _starters(call):
            continue
        words = {a.text for a in call.args}
        if words & ASKS_ONLY or call.after == "&":
            continue
        launched = any(
            _starters(c) and (c.written.rpartition("/")[2] == name or c.program in SHELLS) for c in job.calls
        )
        bare = any(c.program in STARTS_ELSEWHERE and not any(c in o.under for o in job.calls) for c in job.calls)
        if not launched and not bare:
            text = f"the job requests {tasks} tasks, but {name} is started as a single process"
            yield Violation(call.offset, text, why=ALONE_WHY, cure=f"srun {name} ...")
            return


def _starters(call: ProgramCall) -> bool:
    return any(c.program in STARTS_ELSEWHERE for c in call.under)


SERVES_ALONE = lazy_regex(
    r"(?i)\bray\b|--nnodes|--node[-_]rank|--headless|--master[-_]addr|--dist-init-addr|--data[-_]parallel"
)


def one_node_programs(job: JobDescription) -> Iterator[Violation]:
    """Report programs that use one node only in a job of several, without a command that starts them on the others."""
    if not job.is_job or (job.nodes or 1) < 2 or job.submits or job.sources_files:
        return
    if any((c.program in STARTS_ELSEWHERE or runs_script(c)) and not c.in_substitution for c in job.calls):
        return
    if SERVES_ALONE.search(re.sub(r"(?m)^\s*#.*$", "", job.text)):
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        threads = call.program in ("gmx", "gmx_d") and "mdrun" in words[:1]
        if (threads or is_server(call)) and not call.in_substitution and not call.in_function and not call.under:
            name = " ".join([call.written, *words[:1]])
            yield Violation(
                call.offset, f"{name} runs on the first of {job.nodes} nodes only", cure="#SBATCH --nodes=1"
            )
            return


ONE_NODE_LAUNCHERS = {"composer": "", "tune": "run", "axolotl": "train", "llamafactory-cli": "train"}
TOLD_NODES = lazy_regex(r"(?i)nnodes|num_?nodes|node_?rank|base_?rank|world_?size|master_?addr|rdzv|\bray\b|hostfile")


def one_node_launchers(job: JobDescription) -> Iterator[Violation]:
    """Report a launcher of one node's ranks that is started once in a job of several nodes and told nothing about them."""
    if not job.is_job or (job.nodes or 1) < 2 or job.submits or job.sources_files:
        return
    if any((c.program in STARTS_ELSEWHERE or runs_script(c)) and not c.in_substitution for c in job.calls):
        return
    for call in job.calls:
        first = ONE_NODE_LAUNCHERS.get(call.program)
        if first is None or (first and [a.text for a in call.args[:1]] != [first]) or call.under:
            continue
        if (
            not call.args
            or call.in_substitution
            or call.in_function
            or call.after == "&"
            or TOLD_NODES.search(job.code)
        ):
            continue
        yield Violation(
            call.offset, f"{call.program} {first}".rstrip() + f" runs on the first of {job.nodes} nodes only"
        )
        return


def few_parts(job: JobDescription) -> Iterator[Violation]:
    """Report a server of a model as the only program of a job, whose parts are fewer than the job's GPUs."""
    gpus = job.gpus_per_node
    servers = [c for c in job.calls if is_server(c) and not c.in_substitution]
    if not job.is_job or not gpus or gpus < 2 or job.nodes != 1 or len(servers) != 1 or "array" in job.heading:
        return
    call = servers[0]
    others = [c for c in job.calls if c.program not in PREPARING and c is not call and c not in call.under]
    busy = any(
        not c.in_substitution and (c.program in STARTS_ELSEWHERE or runs_script(c) or c in job.work_calls)
        for c in others
    )
    if (
        busy
        or call.in_loop
        or call.in_function
        or call.branch
        or call.has_open_options
        or job.has("CUDA_VISIBLE_DEVICES")
    ):
        return
    values = list(option_values(call))
    names = {name for name, _, _ in values}
    if names & {"--config", "--data-parallel-size-local", "--nnodes", "--headless"} or call.srun is not None:
        return
    needed, place = 1, call.offset
    for name, value, arg in values:
        if name in SERVER_SIZES:
            size = job.number(value)
            if size is None:
                return
            needed, place = needed * size, arg.offset
    if needed < gpus:
        text = f"the server uses {needed} GPU{'s' * (needed > 1)}, but the job requests {gpus}: the others are idle"
        yield Violation(place, text, cure=f"--tensor-parallel-size {gpus}, or fewer GPUs")


# ------------------------------------------------------------------------ GPUs that programs name

GPU_LIST = lazy_regex(
    r"--?(?:gpus?|gpu[-_]?(?:ids?|list|devices?)|devices?|cuda(?:[-_]devices?)?|device[-_]ids?|visible[-_](?:gpus|devices))"
)


def listed_more(job: JobDescription) -> Iterator[Violation]:
    """Report a program's list of GPUs that names more than the job has."""
    gpus = job.gpus_per_node
    if not gpus or job.nodes != 1 or job.submits or job.has("CUDA_VISIBLE_DEVICES"):
        return
    for call in job.work_calls:
        if not PYTHON.match(call.program) or call.in_function:
            continue
        for arg, following in call.pairs():
            name, equals, value = arg.text.partition("=")
            value = value if equals else following.text if following else ""
            if not equals and value.isdecimal():
                start = call.args.index(arg) + 1
                value = ",".join(
                    a.text for a in takewhile(lambda a: re.fullmatch(r"\d{1,2}", a.text), call.args[start:])
                )
            if GPU_LIST.fullmatch(name) and re.fullmatch(r"\d{1,2}(?:,\d{1,2}){1,15}", value):
                numbers = {int(n) for n in value.split(",")}
                if len(numbers) > gpus and max(numbers) >= gpus:
                    text = f"{name} lists {len(numbers)} GPUs, but the job requests {gpus}"
                    yield Violation(arg.offset, text)
                    return


# ------------------------------------------------------------------------------ nothing to do

NOTHING_WHY = "The job starts, does nothing and is reported as COMPLETED."
COMMAND = lazy_regex(
    r"#+[ \t]*(?:srun|mpirun|mpiexec|torchrun|deepspeed|accelerate[ \t]+launch|python[\d.]*[ \t]+-?\S|"
    r"(?:singularity|apptainer)[ \t]+(?:exec|run)|bash[ \t]+\S+\.sh|\./\S)"
)
QUIET = PREPARING - {"source", ".", "eval", "sleep", "tail"}


def nothing(job: JobDescription) -> Iterator[Violation]:
    """Report a batch script all whose commands are comments."""
    if not job.is_batch or job.placeholders or job.submits or job.reading.trouble:
        return
    own = [c for c in job.calls if not c.in_substitution]
    if any(c.program not in QUIET and not _activates(c) for c in own) or any(c.in_function for c in own):
        return
    last = job.directives[-1].offset
    commands = [
        c
        for c in job.reading.comments
        if c.offset > last and COMMAND.match(c.text) and job.lines.place(c.offset)[1] == 1
    ]
    if commands:
        yield Violation(commands[-1].offset, "the commands of the job are comments: it does nothing", why=NOTHING_WHY)


COMMAND_IN_VARIABLE = lazy_regex(
    r"\A\s*(?:srun|mpirun|mpiexec|torchrun|deepspeed|accelerate\s+launch|(?:\S*/)?python[\d.]*\s+\S|(?:singularity|apptainer)\s+exec)\b"
)


def not_run(job: JobDescription) -> Iterator[Violation]:
    """Report a job that only puts its command into a variable, and perhaps prints it."""
    if not job.is_job or job.work or job.submits or job.reading.trouble or job.placeholders:
        return
    own = [c for c in job.calls if not c.in_substitution]
    busy = [
        c for c in own if c.program not in QUIET and not _activates(c) and [a.text for a in c.args] != ["--version"]
    ]
    if busy or any(c.in_function for c in own):
        return
    for item in reversed(job.assignments):
        used = any(u.name == item.name and u.program not in ("echo", "printf") for u in job.uses)
        if used or item.under or item.in_substitution or item.in_function or item.removed:
            continue
        if COMMAND_IN_VARIABLE.match(item.value) and not any(c.is_piped or c.redirects for c in own):
            text = f"{item.name} holds the command of the job, and nothing runs it"
            yield Violation(item.offset, text, why=NOTHING_WHY, cure=f"eval ${item.name}, or the command itself")
            return


def _activates(call: ProgramCall) -> bool:
    return call.program in ("source", ".") and any(
        re.search(r"activate|conda\.sh|bashrc|profile", a.text) for a in call.args
    )


# ------------------------------------------------------------------------ threads of MPI's tasks


def threads_of_tasks(job: JobDescription) -> Iterator[Violation]:
    """Report OpenMP threads for each task of srun in a job whose tasks have one CPU."""
    if not job.is_batch or job.heading.keys() & CPU_OPTIONS or job.requests_whole_nodes:
        return
    if job.launches and (job.requests_gpus or any(la.kind != "python" for la in job.launches)):
        return  # many sites give CPUs with each GPU
    items = list(job.set_values("OMP_NUM_THREADS"))
    threads, tasks = job.number(items[0].value) if len(items) == 1 else None, tasks_of_node(job)
    if not threads or not tasks or threads < 2 or tasks < 2 or items[0].under or items[0].in_function:
        return
    steps = [c for c in job.calls if c.program == "srun" and not c.in_substitution]
    if len(steps) != 1 or steps[0].has_open_options or steps[0].offset < items[0].offset:
        return
    if slurm_options(steps[0]).keys() & (CPU_OPTIONS | {"ntasks", "ntasks-per-node", "overcommit", "nodes"}):
        return
    text = f"{tasks} tasks x {threads} threads per node, but the job has {tasks} CPUs on it"
    yield Violation(items[0].offset, text, cure=f"#SBATCH --cpus-per-task={threads}; or OMP_NUM_THREADS=1")


def one_after_another(job: JobDescription) -> Iterator[Violation]:
    """Report programs that run one after another, each on one GPU, in a job of several."""
    gpus = job.gpus_per_node
    if not gpus or gpus < 2 or not job.work or job.launches or "array" in job.heading or job.submits:
        return
    if len(job.work) < 2 and not job.work[0].in_loop:
        return
    values: set[str] = set()
    for call in job.work:
        own = [a for a in call.prefix if a.name == "CUDA_VISIBLE_DEVICES"]
        if not own or call.under or call.in_function or not PYTHON.match(call.program) or job.runs_in_background(call):
            return
        values.add(own[-1].value)
    counted = len(list(job.set_values("CUDA_VISIBLE_DEVICES"))) == len(job.work)
    if not counted or not all(re.fullmatch(r"\d|\$\{?\w+\}?", value) for value in values):
        return
    if re.search(r"(?m)^[^#\n]*(?:[^&>|]&[ \t]*(?:#.*)?$|\bxargs\b|\bparallel\b)", job.text):
        return
    one = next(iter(values)) if len(values) == 1 else ""
    on = f"on GPU {one}" if one.isdecimal() else "each on one GPU"
    text = f"all programs run one after another {on}, but the job requests {gpus}: the others are idle"
    yield Violation(job.work[0].prefix[0].offset, text)


RANK_GB = 1
SMALL_WHY = "The limit is for all processes of the node together: each rank with torch and CUDA takes more than that, and the job is killed with out of memory."


def memory_of_ranks(job: JobDescription) -> Iterator[Violation]:
    """Report an amount of memory per node that is too small for the ranks on it."""
    found = re.fullmatch(r"(\d{1,3})[gG][bB]?", job.heads("mem") or "")
    if not found:
        return
    for launch in job.launches:
        ranks = job.number(launch.local_ranks) if launch.kind not in ("python", "accelerate") else None
        if ranks and ranks >= 2 and int(found[1]) <= RANK_GB * ranks:
            text = f"--mem={job.heads('mem')} is for all {ranks} ranks of the node together"
            yield Violation(job.heading["mem"].offset, text, why=SMALL_WHY, cure="--mem=<GB per rank x ranks>G")
            return


INDEX_NAME = lazy_regex(
    r"--?(?:gpu[-_]?(?:id|index|idx)|device[-_]?(?:id|index)|cuda[-_]?(?:id|device)|local[-_]rank)|(?:\w+\.)?(?:gpu_id|device_id)"
)
EITHER_NAME = lazy_regex(r"--?(?:gpu|device|cuda)|(?:\w+\.)?(?:device|gpu)")
BEYOND_WHY = "Slurm hides the other GPUs of the node, and those of the job count from 0: CUDA stops with 'invalid device ordinal', or finds no GPU."


def beyond_job(job: JobDescription) -> Iterator[Violation]:
    """Report the number of a GPU that the job does not have."""
    gpus = job.gpus_per_node
    if (
        not job.is_batch
        or not gpus
        or job.nodes != 1
        or job.submits
        or job.requests_whole_nodes
        or job.has("CUDA_VISIBLE_DEVICES")
    ):
        return
    for call in job.work_calls:
        own = (
            slurm_options(call.srun).keys() & {"gres", "gpus", "gpus-per-task", "gpus-per-node"} if call.srun else set()
        )
        if not PYTHON.match(call.program) or call.in_function or own or any(c.program == "ssh" for c in call.under):
            continue
        for arg, following in call.pairs():
            name, equals, value = arg.text.partition("=")
            value = value if equals else following.text if following else ""
            number = re.fullmatch(r"(cuda:|gpu:)?(\d)", value)
            if number is None or not (equals or name.startswith("-")):
                continue
            index = bool(number[1]) or INDEX_NAME.fullmatch(name) is not None
            if (index and re.search(r"gpu|cuda|device|rank", name)) or EITHER_NAME.fullmatch(name):
                # Without cuda: in front it may be the number of GPUs.
                if int(number[2]) >= gpus + (0 if index else 1):
                    text = f"{name} {value}: the job has {gpus} GPU{'s' * (gpus > 1)}, numbered from 0"
                    yield Violation(arg.offset, text, why=BEYOND_WHY, cure=f"{name} 0; or request more GPUs")
                    return


OPENMMLAB = lazy_regex(r"(?:\S*/)?dist_(train|test)\.sh")


def openmmlab(job: JobDescription) -> Iterator[tuple[ProgramCall, Argument, int]]:
    """Yield the calls of OpenMMLab's ``dist_train.sh CONFIG GPUS`` and ``dist_test.sh CONFIG CHECKPOINT GPUS`` with their GPUs."""
    for call in job.calls:
        words = list(call.args)
        if call.program in SHELLS and words:
            found, words = OPENMMLAB.fullmatch(words[0].text), words[1:]
        else:
            found = OPENMMLAB.fullmatch(call.written)
        place = 1 if found and found[1] == "train" else 2
        plain = len(words) > place and not any(w.is_open or w.text.startswith("-") for w in words[: place + 1])
        count = job.number(words[place].text) if found and plain else None
        if found and count and not call.in_substitution and not call.in_function and call.srun is None:
            yield call, words[place], count


def openmmlab_more(job: JobDescription) -> Iterator[Violation]:
    """Report ``dist_train.sh`` with more ranks than the job has GPUs."""
    gpus = job.gpus_per_node
    if gpus and job.nodes == 1 and job.is_job:
        for _, arg, count in openmmlab(job):
            if count > gpus:
                yield Violation(arg.offset, f"{count} ranks, but the job requests {gpus} GPU{'s' * (gpus > 1)}")
                return


def openmmlab_fewer(job: JobDescription) -> Iterator[Violation]:
    """Report ``dist_train.sh`` with fewer ranks than the job has GPUs, as the only work of the job."""
    gpus, calls = job.gpus_per_node, list(openmmlab(job))
    if not gpus or job.nodes != 1 or not job.is_job or not calls or job.work or "array" in job.heading:
        return
    others = [
        c
        for c in job.calls
        if c.program not in PREPARING and not c.in_substitution and c not in [call for call, _, _ in calls]
    ]
    if any(runs_script(c) or c.program in STARTS_ELSEWHERE or c.after == "&" for c in others) or job.has(
        "CUDA_VISIBLE_DEVICES"
    ):
        return
    if all(count < gpus and call.after != "&" and not job.runs_in_background(call) for call, _, count in calls):
        _, arg, count = calls[0]
        yield Violation(arg.offset, f"{count} ranks, but the job requests {gpus} GPUs: the others are idle")
