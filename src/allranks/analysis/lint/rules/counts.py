"""Rules for numbers of nodes, tasks and devices that contradict each other, and for processes that meet on one GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON, slurm_options
from allranks.analysis.lint.job import JobDescription, LauncherCall, count_gpus
from allranks.analysis.lint.placement import (
    EACH,
    MPI,
    count_of,
    is_one_of_several,
    is_placed,
    slots_of_node,
    started_by,
)
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.ports import backend
from allranks.analysis.lint.rules.steps import SPREADS_ITSELF, STARTS_ELSEWHERE, runs_script
from allranks.analysis.lint.rules.tasks import WORLD_OPTION
from allranks.utils.text import lazy_regex

# ---------------------------------------------------------------------------- named nodes

NAMED_WHY = (
    "--nodelist asks for all the hosts that it names, not for some of them: with --nodes sbatch refuses the job ('invalid number of nodes'), "
    "with --ntasks it cuts the list to its first hosts."
)
NAMED_CURE = "name as many hosts as the job has nodes; --exclude=<hosts> leaves the choice to Slurm"
MOST_HOSTS = 4096


def named_nodes(job: JobDescription) -> Iterator[Violation]:
    """Compare the hosts of ``--nodelist`` with the nodes of the job, and with those that it excludes."""
    found = job.heading.get("nodelist")
    hosts = hosts_of(found.value) if found else None
    if found is None or found.late or not hosts:
        return
    asked = job.heads("nodes") or ""
    most = job.number(asked.rpartition("-")[2]) if "nodes" in job.heading else None
    if most and len(set(hosts)) > most:
        text = f"--nodelist names {len(set(hosts))} hosts, but the job asks for {most} node{'s' * (most > 1)}"
        yield Violation(found.offset, text, severity="error")
    elif "nodes" not in job.heading and (tasks := job.number(job.heads("ntasks"))) and len(set(hosts)) > tasks:
        text = f"--nodelist names {len(set(hosts))} hosts, but the job has {tasks} task{'s' * (tasks > 1)}"
        yield Violation(found.offset, text)
    both = set(hosts) & set(hosts_of(job.heads("exclude")) or ())
    if both:
        text = f"--nodelist and --exclude both name {min(both)}"
        yield Violation(
            found.offset,
            text,
            why="sbatch refuses the job: 'Invalid node name specified'.",
            cure="name it once",
            severity="error",
        )


def hosts_of(text: str | None) -> list[str] | None:
    """Return the hosts of a list in Slurm's form, ``a[1-3,7],b``; None if it is not a list of literal names."""
    if not text or not re.fullmatch(r"[A-Za-z0-9_.,\[\]-]+", text):
        return None
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            numbers = [plain] if plain else list(_numbers(ranges))
            names = [name + number for name in names for number in numbers][:MOST_HOSTS]
        found += names
    return found[:MOST_HOSTS]


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last) < int(first) + MOST_HOSTS:
            yield from (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
        else:
            yield part


# ------------------------------------------------------------------------ tasks that contradict

TASKS_WHY = "--ntasks counts the tasks of the whole job and takes precedence; --ntasks-per-node is then only the most that a node may have."
REFUSED_WHY = "sbatch refuses the job: 'Requested node configuration is not available'."
TASKS_CURE = "#SBATCH --ntasks-per-node=<n> without --ntasks"


def contradicting_tasks(job: JobDescription) -> Iterator[Violation]:
    """Report ``--ntasks`` that is not the nodes times ``--ntasks-per-node``, where srun starts these tasks."""
    total, each = job.number(job.heads("ntasks")), job.number(job.heads("ntasks-per-node"))
    nodes = job.number(job.heads("nodes"))
    if not total or not each or not nodes or total == nodes * each or total < nodes:
        return
    found = job.heading["ntasks"]
    for launch in job.launches:
        own = slurm_options(launch.srun).keys() if launch.srun else set[str]()
        if launch.srun is None or launch.open_srun or own & {"ntasks", "nodes", "ntasks-per-node", "overcommit"}:
            continue
        if launch.srun.in_loop or launch.srun.in_function or (total < nodes * each and launch.kind != "python"):
            continue
        if total > nodes * each:
            break
        text = f"--ntasks={found.value} with --nodes={nodes} and --ntasks-per-node={each}: srun starts {total} task{'s' * (total > 1)}, not {nodes * each}"
        yield Violation(found.offset, text)
        return
    if total < nodes * each:
        return
    text = f"--ntasks={found.value} does not fit on --nodes={nodes} with --ntasks-per-node={each}"
    yield Violation(found.offset, text, why=REFUSED_WHY, severity="error")


GPUS_WHY = "sbatch refuses the job: 'Failed to validate job spec', or 'Requested node configuration is not available'."
GPUS_CURE = "omit --gpus-per-task: every task then sees all GPUs of its node; or make the numbers equal"


def gpus_of_tasks(job: JobDescription) -> Iterator[Violation]:
    """Report ``--gpus-per-task`` times the tasks that is not the GPUs of the job, or of a node."""
    each, total = job.number(job.heads("gpus-per-task")), job.number(job.heads("ntasks"))
    on_node, nodes = job.number(job.heads("ntasks-per-node")), job.number(job.heads("nodes"))
    if not each:
        return
    found = job.heading["gpus-per-task"]
    whole = job.number((job.heads("gpus") or "").rpartition(":")[2])
    have, known = count_gpus(job.heads("gpus-per-node"), job.heads("gres"))
    here = on_node or (total if nodes == 1 else None)
    if whole and total and each * total != whole:
        text = f"{total} tasks with --gpus-per-task={each} are {each * total} GPUs, but --gpus={whole}"
        yield Violation(found.offset, text, why=GPUS_WHY, cure=GPUS_CURE, severity="error")
    elif known and have and here and each * here != have and not whole:
        text = f"{here} task{'s' * (here > 1)} per node with --gpus-per-task={each} are {each * here} GPUs, but the job requests {have} per node"
        yield Violation(found.offset, text, why=GPUS_WHY, cure=GPUS_CURE, severity="error")


def step_of_one_task(job: JobDescription) -> Iterator[Violation]:
    """Report srun with ``--ntasks`` that is smaller than its own ``--ntasks-per-node``."""
    for launch in job.launches:
        options = slurm_options(launch.srun) if launch.srun else {}
        if not {"ntasks", "ntasks-per-node"} <= options.keys() or launch.kind != "python":
            continue
        total, each = job.number(options["ntasks"].value), job.number(options["ntasks-per-node"].value)
        if total and each and total < each:
            text = f"srun --ntasks={total} with --ntasks-per-node={each} starts {total} task{'s' * (total > 1)}"
            yield Violation(options["ntasks"].arg.offset, text)


# ---------------------------------------------------------------------------- idle nodes

ONE_PROCESS_WHY = "The job waits for, and pays for, all its nodes."
SHORT_WORK = {
    "hostname", "echo", "nvidia-smi", "rocm-smi", "date", "env", "mkdir", "cp", "rm", "ls", "true", "cat", "tar", "rsync",
}  # fmt: skip


def few_processes(job: JobDescription) -> Iterator[Violation]:
    """Report jsrun, aprun and mpirun with fewer processes than the job has nodes, if they are all that it starts."""
    nodes = job.nodes or 1
    if not job.is_job or nodes < 2 or job.submits or job.chooses_launcher:
        return
    outer = [c for c in job.calls if not c.under and not c.in_substitution]
    starters = [c for c in outer if c.program in STARTS_ELSEWHERE]
    works = [c for c in starters if not any(a.text in SHORT_WORK for a in c.args)]
    if len(works) != 1 or any(c.program in ("ssh", "pdsh", "ray", "pbsdsh", "clush", "blaunch") for c in starters):
        return
    call = works[0]
    if re.search(r"(?i)rmpi|\b(?:Rscript|R)\s[^\n]*(?:--slave|--no-echo)", job.code):
        return  # Rmpi starts the others
    if call.after == "&" or call.in_loop or call.in_function or call.tested or call.branch:
        return
    spreads = any(SPREADS_ITSELF.search(a.text) for a in call.args) or any(runs_script(c) for c in outer)
    if spreads or any(a.is_open for a in call.args[:1]):
        return
    used, count = _nodes_used(job, call)
    if used and used < nodes:
        text = f"{call.program} starts {count} process{'es' * (count > 1)} on {used} of the job's {nodes} nodes: the others are idle"
        cure = "as many processes as the job asks for, or fewer nodes"
        yield Violation(call.offset, text, why=ONE_PROCESS_WHY, cure=cure)


def _nodes_used(job: JobDescription, call: ProgramCall) -> tuple[int, int]:
    """Return the most nodes on which the processes can be, and their number; zeros if the file does not show it."""
    if call.program == "jsrun":
        sets, tasks = count_of(job, call, {"-n", "--nrs"}), count_of(job, call, {"-a", "--tasks_per_rs"}) or 1
        each = count_of(job, call, {"-r", "--rs_per_host"})
        return (-(-sets // each) if each else sets, sets * tasks) if sets else (0, 0)
    total = count_of(job, call, {"-n", "-np", "--np", "--pes"})
    if not total or any(a.text == ":" for a in call.args):
        return 0, 0
    if call.program == "aprun":
        each = count_of(job, call, {"-N", "--pes-per-node"})
        return (-(-total // each) if each else total), total
    each = count_of(job, call, EACH)
    if each and call.program in MPI:
        return -(-total // each), total
    slots = slots_of_node(job)
    if slots and slots > 1 and call.program in MPI and total > (job.nodes or 1) and not is_placed(call):
        several = is_one_of_several(job, call)  # else the first nodes are filled before the others get any
        return (0, 0) if several else (-(-total // slots), total)
    counted = any(call in la.call.under for la in job.launches)  # idle-gpus compares these
    return (total, total) if call.program in MPI and not counted else (0, 0)


# ------------------------------------------------------------------------ processes on one GPU

PARALLEL_WHY = "Each program sees all GPUs of the job, and takes the first one unless it is told another: they share it, and the other GPUs are idle."
PARALLEL_CURE = "CUDA_VISIBLE_DEVICES=0 python a.py & CUDA_VISIBLE_DEVICES=1 python b.py & wait"
CHOOSES = lazy_regex(
    r"(?i)gpu|device|cuda|rank|port|local|config|cfg|yaml|yml|json|server|client|worker|role|host|addr|url|actor|\bps\b|ray|dask|cpu|parallel|node|world|dist"
)


SEVERAL_ROUNDS = lazy_regex(
    r"\bfor\s+\w+\s+in\s+(?:[\w.-]+\s+[\w.-]+[^\n;]*|\{\d+\.\.\d+\}|\$\(seq\s[^)\n]+\)|\"?\$\{\w+\[@\]\}\"?)[ \t]*(?:;|\n)|\bfor[ \t]*\(\("
)


def _all_at_once(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether a loop of several rounds starts the command again before the one of the round before has ended."""
    before, behind = job.code[: call.offset], job.code[call.offset :]
    loops = [m.start() for m in re.finditer(r"\b(?:for|while|until)\b", before)]
    end = re.search(r"(?:^|[;&\n])\s*done\b", behind)
    if not loops or end is None or re.search(r"\bwait\b|\bsleep\b", job.code[loops[-1] : call.offset + end.end()]):
        return False
    return SEVERAL_ROUNDS.match(job.code, loops[-1]) is not None


def same_gpu(job: JobDescription) -> Iterator[Violation]:
    """Report several runs of one program side by side, none of which gets a GPU of its own."""
    gpus = job.gpus_per_node
    if not gpus or gpus < 2 or job.launches or job.submits or job.sources_files or "array" in job.heading:
        return
    if re.search(r"(?i)VISIBLE_DEVICES|\bmps\b|gpu-bind|nvidia-cuda-mps", job.text):
        return
    side = [c for c in job.work if c.after == "&" and not c.in_function and not c.branch]
    looped = any(c.in_loop for c in side) and len(side) == 1 and _all_at_once(job, side[0])
    if (len(side) < 2 and not looped) or len(side) != len(job.work) or any(c.in_loop for c in side) != looped:
        return
    programs: list[str] = []
    for call in job.work_calls:
        if not PYTHON.match(call.program) or any(c.program in STARTS_ELSEWHERE for c in call.under):
            return
        words = [a.text for a in call.args if a.text.startswith("-") or "=" in a.text]
        plain = [a.text for a in call.args if not a.text.startswith("-")]
        # A word that belongs to no option may be the number of the GPU.
        own = [n for a, n in call.pairs() if n and not a.text.startswith("-") and not n.text.startswith("-")]
        if any(CHOOSES.search(w) for w in words) or any(re.fullmatch(r"(?:cuda:)?\d|.*\$.*", n.text) for n in own):
            return
        programs.append(next((w for w in plain if w.endswith(".py")), ""))
    if len(set(programs)) != 1 or not programs[0] or CHOOSES.search(programs[0]):
        return
    many = "the runs" if looped else f"{len(side)} runs"
    text = f"{many} of {programs[0]} side by side in a job of {gpus} GPUs, and none gets a GPU of its own"
    yield Violation(side[0].offset, text, why=PARALLEL_WHY, cure=PARALLEL_CURE)


# ------------------------------------------------------------------------ steps that wait

STEPS_WHY = (
    "A step takes all GPUs of the job unless it asks for fewer: the next one waits ('step creation temporarily disabled, retrying') until "
    "it has ended."
)
STEPS_CURE = "srun --exact --gpus=1 ... for each; or --overlap, if they are to share the GPUs"
FIRST_EXCLUSIVE_STEPS = (20, 11)
OWN_GPUS = {
    "gres",
    "gpus",
    "gpus-per-node",
    "gpus-per-task",
    "gpus-per-socket",
    "tres-per-task",
    "overlap",
    "oversubscribe",
    "jobid",
    "nodelist",
}


def waiting_steps(job: JobDescription) -> Iterator[Violation]:
    """Report steps in the background, each of which takes all GPUs of the only node."""
    if (
        not job.is_batch
        or not job.gpus_per_node
        or job.nodes != 1
        or job.has("SLURM_OVERLAP", "SLURM_STEP_GRES", "SLURM_GRES")
    ):
        return
    version = job.slurm_version
    if (version is not None and version < FIRST_EXCLUSIVE_STEPS) or job.heading.keys() & {
        "gpus-per-task",
        "tres-per-task",
    }:
        return
    steps = [
        c for c in job.calls if c.program == "srun" and not c.in_substitution and not c.under and not c.in_function
    ]
    if any(c.has_open_options for c in steps):
        return
    side = [c for c in steps if c.after == "&" and not slurm_options(c).keys() & OWN_GPUS and not c.branch]
    later = [
        c
        for c in steps
        if side and c.offset > side[0].offset and c not in side and not slurm_options(c).keys() & OWN_GPUS
    ]
    if not side or (len(side) + len(later) < 2 and not side[0].in_loop):
        return
    second = (side[1:2] or later[:1] or side)[0]
    between = [c for c in job.calls if c.program == "wait" and side[0].offset < c.offset < second.offset]
    if between:
        return
    text = f"the job's {job.gpus_per_node} GPUs go to one step at a time: this one waits for the one above it"
    yield Violation(second.offset, text, why=STEPS_WHY, cure=STEPS_CURE)


# --------------------------------------------------------------- counts that options repeat

NODES_OPTION = lazy_regex(r"(?:--|\+{0,2})(?:trainer\.|train\.|pl_trainer\.)?num[-_]nodes")
DEVICES_COUNT = lazy_regex(
    r"(?:--|\+{0,2})(?:trainer\.|train\.|pl_trainer\.)?(?:devices|gpus|num[-_]devices|gpus[-_]per[-_]node)"
)
NODES_WHY = "Under Slurm Lightning refuses a number of nodes that is not that of the job, and other programs wait for nodes that do not exist."
WORLD_WORDS = lazy_regex(
    r"(?:--|\+{0,2})(?:\w+\.)*(?:distributed|dist|ddp)[-_]?[.]?world[-_]?size|(?:\w+\.)+world_size"
)


def told_nodes(job: JobDescription) -> Iterator[Violation]:
    """Compare the nodes that a program is told beside its devices with those on which srun starts it."""
    for launch in job.launches:
        if launch.kind != "python" or launch.srun is None or launch.open_srun or launch.srun.in_loop:
            continue
        told = {"nodes": _told(job, launch.call, NODES_OPTION), "devices": _told(job, launch.call, DEVICES_COUNT)}
        started, each = job.srun_nodes(launch.srun), job.tasks_per_node(launch.srun)
        nodes, devices = told["nodes"], told["devices"]
        if (nodes and devices and started and each and each > 1 and devices[0] == each and nodes[0] != started) or (
            nodes and devices and each == 1 and "nodes" in job.heading and started and started < nodes[0] <= MOST_NODES
        ):
            yield _wrong_nodes(nodes, started)
        elif not devices and started and (each or 0) > 1 and (of_trainer := _told(job, launch.call, TRAINER_NODES)):
            if of_trainer[0] != started and "array" not in job.heading:
                yield _wrong_nodes(of_trainer, started)


MOST_NODES = 64
TRAINER_NODES = lazy_regex(r"(?:--|\+{0,2})(?:pl_)?trainer\.num[-_]nodes")


def _wrong_nodes(told: tuple[int, int, str], started: int) -> Violation:
    text = f"{told[2]}: the program is told {told[0]} node{'s' * (told[0] > 1)}, but srun starts it on {started}"
    return Violation(told[1], text, why=NODES_WHY, cure="the number of nodes of the job, $SLURM_JOB_NUM_NODES")


def _told(job: JobDescription, call: ProgramCall, pattern: re.Pattern[str]) -> tuple[int, int, str] | None:
    """Return the count that an option gives, its place, and the option as written."""
    for arg, following in call.pairs():
        name, equals, value = arg.text.partition("=")
        if pattern.fullmatch(name) and (equals or name.startswith("--") or name.isupper()):
            count = job.number(value if equals else following.text if following else None)
            if count:
                return count, arg.offset, arg.text if equals else f"{arg.text} {following.text if following else ''}"
    return None


def told_world(job: JobDescription) -> Iterator[Violation]:
    """Compare the number of ranks that a program's own option gives with the tasks that are started."""
    known = {la.call.offset for la in job.launches}
    others = [
        c for c in job.work_calls if c.offset not in known and any(u.program in ("jsrun", "aprun") for u in c.under)
    ]
    # world-size compares the usual spellings for srun and mpirun.
    for launch in [*job.launches, *(LauncherCall("python", c, {}) for c in others)]:
        if launch.kind != "python" or launch.call.in_loop or launch.call.in_function:
            continue
        started = started_by(job, launch)
        told = _told(job, launch.call, WORLD_WORDS)
        if told is None and launch.call.offset not in known:
            told = _told(job, launch.call, WORLD_OPTION)
        if told and started and started.total and (started.per_node or 1) > 1 and told[0] != started.total:
            text = f"{told[2]}, but {started.starter.program} starts {started.total} ranks"
            yield Violation(told[1], text, cure="the number of tasks, $SLURM_NTASKS")


IMAGENET_WHY = "With --multiprocessing-distributed --world-size counts nodes: the program starts a process for each GPU, and waits for nodes that never join."


def spawned_world(job: JobDescription) -> Iterator[Violation]:
    """Compare ``--world-size`` of a program that starts a process for each GPU with the nodes of the job: it counts these."""
    if not job.is_job or not job.nodes:
        return
    for call in job.work_calls:
        if not any(a.text == "--multiprocessing-distributed" for a in call.args) or call.in_loop or call.in_function:
            continue
        told = _told(job, call, re.compile(r"--world-size"))
        if told and told[0] > job.nodes:
            text = f"{told[2]} with --multiprocessing-distributed counts nodes, but the job has {job.nodes}"
            yield Violation(told[1], text, why=IMAGENET_WHY, cure=f"--world-size {job.nodes}")


GPUS_WORDS = lazy_regex(
    r"(?:--(?:num[-_]?)?(?:gpus|devices)|--n[-_]?gpus?|--gpus[-_]per[-_]node|--ngpus[-_]per[-_]node|(?:\+{0,2})(?:pl_)?trainer\.(?:devices|gpus))"
)
SLOWFAST = lazy_regex("NUM_GPUS")


def told_more(job: JobDescription) -> Iterator[Violation]:
    """Report a single program on one node that is told more GPUs than the job has."""
    gpus = job.gpus_per_node
    if not gpus or job.nodes != 1 or job.submits:
        return
    for call in job.work_calls:
        elsewhere = any(c.program in STARTS_ELSEWHERE - {"srun"} for c in call.under)
        own = slurm_options(call.srun).keys() & OWN_GPUS if call.srun else set()
        if not PYTHON.match(call.program) or elsewhere or call.in_function or own:
            continue
        slowfast = any(a.text.rpartition("/")[2] == "run_net.py" for a in call.args)
        told = _told(job, call, SLOWFAST if slowfast else GPUS_WORDS)
        if told and gpus < told[0] <= 16 and not job.has("CUDA_VISIBLE_DEVICES"):
            yield Violation(told[1], f"{told[2]}, but the job requests {gpus} GPU{'s' * (gpus > 1)}")


# ------------------------------------------------------------------ one visible GPU per task

LOCAL_VALUE = lazy_regex(
    r"(?:cuda:)?\$\{?(?:SLURM_LOCALID|LOCAL_RANK|OMPI_COMM_WORLD_LOCAL_RANK|MPI_LOCALRANKID|PMI_LOCAL_RANK)(?::-0)?\}?"
)
DEVICE_NAME = lazy_regex(
    r"--?(?:gpu|gpu[-_]?(?:id|index|idx|num)|device|device[-_]?(?:id|index|num)|cuda|cuda[-_]?(?:id|device)|local[-_]?rank)|(?:\w+\.)?(?:device|gpu|gpu_id|device_id)"
)
BY_LOCAL_RANK = {"mace_run_train": "--distributed"}
"""Programs that take the GPU of SLURM_LOCALID if they get this option: mace/tools/slurm_distributed.py."""


def device_of_one(job: JobDescription) -> Iterator[Violation]:
    """Report a local rank as the device of a task that sees one GPU only, whose number is 0."""
    for call in job.calls:
        srun = call.srun
        if srun is None or call.in_substitution or (job.tasks_per_node(srun) or 1) < 2 or not _one_each(job, srun):
            continue
        known = BY_LOCAL_RANK.get(call.program)
        if known and any(a.text == known for a in call.args):
            text = f"each task sees one GPU, but {call.program} {known} takes that of its local rank"
            own, asked = slurm_options(srun).get("gpus-per-task"), job.heading.get("gpus-per-task")
            yield Violation(own.arg.offset if own else asked.offset if asked else call.offset, text)
            continue
        if not PYTHON.match(call.program):
            continue
        for arg, following in call.pairs():
            name, equals, value = arg.text.partition("=")
            value = value if equals else following.text if following else ""
            if DEVICE_NAME.fullmatch(name) and (equals or name.startswith("-")) and LOCAL_VALUE.fullmatch(value):
                yield Violation(
                    arg.offset, f"{name} gets the local rank, but each task sees one GPU, whose number is 0"
                )
                break


def _one_each(job: JobDescription, srun: ProgramCall) -> bool:
    """Return whether each task sees one GPU only."""
    options = slurm_options(srun)
    flags = options.get("gres-flags")
    shared = f"{job.heads('gres-flags')}{flags.value if flags else ''}{[a.value for a in job.set_values('SLURM_GRES_FLAGS')]}"
    bound = (options["gpu-bind"].value if "gpu-bind" in options else job.heads("gpu-bind")) or ""
    if (
        "allow-task-sharing" in shared
        or bound == "none"
        or any(a.value == "none" for a in job.set_values("SLURM_GPU_BIND"))
    ):
        return False
    if srun.has_open_options:
        return False
    each = options["gpus-per-task"].value if "gpus-per-task" in options else job.heads("gpus-per-task")
    count = re.search(r"(?:\A|:)(\d{1,4})\Z", each or "")
    return bool(count and int(count[1]) == 1) or bound in ("single:1", "per_task:1")


# ------------------------------------------------------------ settings that cannot have an effect

ALWAYS_SET = {
    "SLURM_JOB_NAME", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_SUBMIT_DIR", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "LSB_JOBNAME", "LSB_JOBID",
    "LS_SUBCWD", "PBS_JOBID", "PBS_JOBNAME", "PBS_O_WORKDIR", "SLURM_JOB_NODELIST",
}  # fmt: skip
DEFAULT_WHY = "The batch system always sets the first variable in a job, so the second one is never read."
NESTED_DEFAULT = lazy_regex(r"\$\{(\w+):?-\$\{?([A-Za-z_]\w*)")


def never_default(job: JobDescription) -> Iterator[Violation]:
    """Report a setting that the script's comments promise, but that only replaces a variable which the batch system always sets."""
    prefix = "SLURM_" if job.is_batch else "PBS_" if job.pbs else "LS"
    if not job.is_job:
        return
    for number, line in enumerate(job.text.splitlines(), 1):
        found = None if line.lstrip().startswith("#") else NESTED_DEFAULT.search(line)
        if found is None or found[1] not in ALWAYS_SET or not found[1].startswith(prefix) or found[2] in ALWAYS_SET:
            continue
        promised = re.search(rf"^#.*\b{found[2]}=\S", job.text, re.MULTILINE)
        if promised and not job.has(found[2]) and len(re.findall(rf"\$\{{?{found[2]}\b", job.text)) == 1:
            offset = sum(len(ln) for ln in job.text.splitlines(keepends=True)[: number - 1]) + found.start()
            text = f"{found[2]} has no effect: the batch system always sets {found[1]}"
            yield Violation(offset, text, why=DEFAULT_WHY, cure=f"${{{found[2]}:-${{{found[1]}}}}}", severity="warning")


# --------------------------------------------------------- ranks and GPUs of programs in the script


def group_of_one(job: JobDescription) -> Iterator[Violation]:
    """Report ``--nnodes=1`` with the address of the first node, which srun starts on several nodes."""
    for launch in job.launches:
        nodes, endpoint = launch.option("nnodes"), launch.value("rdzv_endpoint")
        srun = launch.srun
        if nodes is None or not endpoint or srun is None or srun.in_loop or srun.after == "&" or "array" in job.heading:
            continue
        shared = re.search(r"(?i)MASTER|HEAD|\bfirst", endpoint) is not None and backend(launch) == "c10d"
        started = job.srun_nodes(srun)
        if job.number(nodes.value) == 1 and shared and started and started > 1 and job.tasks_per_node(srun) == 1:
            text = (
                f"{nodes.arg.text}: the launchers of {started} nodes meet at {endpoint}, and only one of them is taken"
            )
            yield Violation(
                nodes.arg.offset, text, why="The others wait, and stop at the timeout.", cure=f"--nnodes={started}"
            )


DEVICES = lazy_regex(
    r"(?:\+{0,2}(?:\w+\.)*)?(?:devices|gpus|num_gpus|n_gpus?|ngpus?|num_devices|gpu_num|gpu_count)=(\d{1,2})"
)
NGPU = lazy_regex(r"--?(?:ngpus?|num[-_]?gpu|gpu[-_]?(?:num|count)|num[-_]?devices)(?:=(\d{1,2}))?")


def told_fewer(job: JobDescription) -> Iterator[Violation]:
    """Report a single program that is told to use fewer GPUs than the job has, and steps that get fewer."""
    gpus = job.gpus_per_node
    if not gpus or gpus < 2 or "array" in job.heading or len(job.work) != 1 or job.has("CUDA_VISIBLE_DEVICES"):
        return
    work, calls = job.work[0], [c for c in job.work_calls if PYTHON.match(c.program)]
    if work.after == "&" or work.in_loop or work.in_function or len(calls) != 1:
        return
    srun = calls[0].srun
    if srun is not None:
        options = slurm_options(srun)
        option = options.get("gres") or options.get("gpus-per-node")
        value = option.value if option else None
        counted, known = (
            count_gpus(*((None, value) if "gres" in options else (value, None))) if option else (None, False)
        )
        alone = len([c for c in job.calls if c.program == "srun" and not c.in_substitution]) == 1
        if (
            option
            and known
            and counted
            and counted < gpus
            and alone
            and srun.after != "&"
            and (job.tasks_per_node(srun) or 1) <= counted
        ):
            yield Violation(
                option.arg.offset, f"the only step gets {counted} of the {gpus} GPUs per node: the others are idle"
            )
        return
    if any(c.program in ("mpirun", "mpiexec", "horovodrun") for c in calls[0].under):
        return
    for arg, following in calls[0].pairs():
        named, option = DEVICES.fullmatch(arg.text), NGPU.fullmatch(arg.text)
        text = named[1] if named else (option[1] or (following.text if following else "")) if option else ""
        if text.isdecimal() and 0 < int(text) < gpus:
            shown = arg.text if named or (option and option[1]) else f"{arg.text} {text}"
            yield Violation(
                arg.offset, f"{shown}, but the job requests {gpus} GPU{'s' * (gpus > 1)} per node: the others are idle"
            )
            return


def few_in_parallel(job: JobDescription) -> Iterator[Violation]:
    """Report programs side by side that together use fewer GPUs than the job has."""
    gpus = job.gpus_per_node
    if not gpus or gpus < 2 or len(job.work) < 2 or "array" in job.heading or job.launches or job.submits:
        return
    used: set[int] = set()
    for call in job.work:
        own = [a for a in call.prefix if a.name == "CUDA_VISIBLE_DEVICES"]
        if not own or call.under or call.in_function or call.in_loop or not re.fullmatch(r"\d(?:,\d)*", own[-1].value):
            return
        used |= {int(n) for n in own[-1].value.split(",")}
    started = sum(len(c.prefix) > 0 for c in job.work)
    if any(c.after == "&" for c in job.work) and len(list(job.set_values("CUDA_VISIBLE_DEVICES"))) == started:
        if len(used) < gpus and max(used) < gpus:
            text = f"the programs use {len(used)} of the {gpus} GPUs that the job requests: the others are idle"
            yield Violation(job.work[0].prefix[0].offset, text)
