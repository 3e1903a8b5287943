"""Rules for tasks, CPUs, threads and GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import REMOTE_SHELLS, slurm_options
from allranks.analysis.lint.job import SETS_PATHS_ONLY, JobDescription, LauncherCall
from allranks.analysis.lint.placement import MPI, fills_first, names_hosts, started_by
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.utils.text import lazy_regex

SEVERAL_WHY = "Every task starts a launcher that starts all ranks of the node: too many ranks per GPU, and several launchers on the same port."
SEVERAL_CURE = (
    "use #SBATCH --ntasks-per-node=1, so that one launcher starts the ranks of its node; or srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1: "
    "without --ntasks srun keeps the job's number of tasks and ignores --ntasks-per-node"
)
SEVERAL_CURES = {
    "mpirun": "one process per node: mpirun -np <nodes> --map-by ppr:1:node, or mpiexec -n <nodes> --ppn 1",
    "jsrun": "one resource set per node: jsrun -r 1 -a 1 -g ALL_GPUS -c ALL_CPUS",
}
ONE_NODE_WHY = "The batch script runs on the first node only. Without srun the other nodes are idle, or the launcher waits for them until the timeout."
ONE_NODE_CURE = "start it on every node: srun --ntasks-per-node=1 torchrun ..."
INHERITED_WHY = (
    "From Slurm 22.05 to 23.02 srun does not read --cpus-per-task of the job: each task gets one CPU, which its data loaders share. "
    "With one task per node, most clusters give it all CPUs anyway."
)
INHERITED_CURE = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK", or export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
MISSING_WHY = "Without --cpus-per-task a task has one CPU, which all ranks and data loaders of the node share."
MISSING_CURE = "#SBATCH --cpus-per-task=<CPUs of a node / tasks per node>, and the same for srun; or --exclusive, or --cpus-per-gpu"
THREADS_WHY = (
    "torchrun and accelerate set OMP_NUM_THREADS=1 if it is missing; other launchers do not, and every rank starts as many threads as "
    "there are cores."
)
THREADS_CURE = "export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / <ranks per task>))"
GPUS_WHY = "--gpus counts GPUs of the whole job; Slurm may distribute them unevenly, 7 and 1, while the launcher expects the same number on every node."
PER_TASK_WHY = (
    "Each task only sees its own GPU, as number 0: cuda:LOCAL_RANK fails from the second rank on, and direct copies between the ranks' GPUs "
    "may not work."
)
PER_TASK_CURE = "--gpus-per-node=<n>, so that every task sees all GPUs of its node and uses the one of its local rank"
COUNT_WHY = "The launcher waits for nodes that never join, until the rendezvous timeout."
COUNT_CURE = "--nnodes=$SLURM_JOB_NUM_NODES, so that the two are always equal"
ALONE_WHY = (
    "The launcher's default is one node: every node trains its own model without an error, or waits for others with the same rendezvous id "
    "until the timeout."
)
FEWER_WHY = "Slurm allocates at most as many nodes as the job has tasks, with only a warning; the launcher then waits for nodes that never join."
FEWER_CURE = "#SBATCH --ntasks-per-node=1 instead of --ntasks"
PROCESSES_WHY = "accelerate divides --num_processes by the number of machines: too few ranks start, and GPUs are idle."
PROCESSES_CURE = "--num_processes=$((SLURM_JOB_NUM_NODES * <GPUs per node>))"
KILL_WHY = (
    "By default, when one task fails, srun does not end the others; they wait for it in a collective until the timeout."
)
KILL_CURE = "srun --kill-on-bad-exit=1 (srun may then return 143 instead of the first task's code)"
FIRST_WITHOUT_CPUS, FIRST_WITH_CPUS_AGAIN = (22, 5), (23, 11)
OVERSUBSCRIBED_WHY = (
    "Threads that outnumber the CPUs take turns: data preparation and CPU operations become many times slower."
)
OVERSUBSCRIBED_CURE = "export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / <ranks per task>))"
WORLD_WHY = "init_process_group waits until WORLD_SIZE ranks have joined; with more ranks than that, it fails."
WORLD_CURE = "export WORLD_SIZE=$SLURM_NTASKS"
FEW_CPUS_WHY = "Ranks and the workers of their data loaders take turns on the CPUs: the GPUs wait for data."
FEW_CPUS_CURE = "#SBATCH --cpus-per-task=<ranks per task x (1 + loader workers)>"
SPREADING = {
    "pbsdsh",
    "pbs_tmrsh",
    "blaunch",
    "srun",
    "mpirun",
    "mpiexec",
    "ssh",
    "pdsh",
    "clush",
    "parallel",
    "aprun",
    "jsrun",
    "lrun",
    "flux",
    "orterun",
    "mpiexec.hydra",
    "ibrun",
    "prun",
    "mpirun_rsh",
    "likwid-mpirun",
    "ddlrun",
}


def _starts(launch: LauncherCall) -> bool:
    return launch.kind != "python"


def several(job: JobDescription) -> Iterator[Violation]:
    yield from _nested(job)
    for launch in job.launches:
        if _starts(launch) and launch.srun and _same_unknown(job, launch):
            asked = job.heads("ntasks-per-node")
            yield Violation(
                launch.call.offset,
                f"srun starts {asked} tasks per node, and each starts {launch.kind} with as many ranks",
            )
        elif _starts(launch) and launch.srun:
            tasks = job.tasks_per_node(launch.srun)
            one_each = (launch.value("nproc_per_node", "num_processes") or "") == "1"
            if tasks is not None and tasks > 1 and not (one_each and launch.option("node_rank", "machine_rank")):
                text = f"srun starts {tasks} tasks per node, and each starts {launch.kind}"
                yield Violation(launch.call.offset, text, severity="error" if _certain_tasks(job, launch) else "note")
        elif _starts(launch) and (started := started_by(job, launch)) and (started.per_node or 1) > 1:
            if launch.value("nproc_per_node", "num_processes", "num_gpus") != "1":
                name = started.starter.program
                text = f"{name} starts {started.per_node} processes per node, and each starts {launch.kind}"
                yield Violation(launch.call.offset, text, cure=SEVERAL_CURES.get(name, SEVERAL_CURES["mpirun"]))


def on_first_node(job: JobDescription) -> Iterator[Violation]:
    """Report mpirun with a launcher for each node, all of which it puts on the first nodes."""
    for launch in job.launches:
        started = started_by(job, launch) if _starts(launch) and not launch.srun else None
        filled = fills_first(job, started.starter) if started and started.per_node == 1 else None
        if started and filled:
            name = started.starter.program
            text = f"{name} fills the first node first: {filled[1]} of its {filled[0]} processes are there, and each starts {launch.kind}"
            yield Violation(started.starter.offset, text, cure=SEVERAL_CURES["mpirun"])


def _nested(job: JobDescription) -> Iterator[Violation]:
    """Report mpirun in every task of srun."""
    for call in job.calls:
        if call.program not in MPI or call.srun is None or call.in_substitution:
            continue
        each, nodes = job.tasks_per_node(call.srun), job.srun_nodes(call.srun)
        if each and each * (nodes or 1) > 1:
            text = f"srun starts {each * (nodes or 1)} tasks, and each starts {call.program}"
            why = f"Every task starts all processes of {call.program} again, or fails because Slurm's PMI already names it a rank."
            yield Violation(
                call.offset, text, why=why, cure=f"srun without {call.program}, or {call.program} without srun"
            )


def _certain_tasks(job: JobDescription, launch: LauncherCall) -> bool:
    """Return whether the number of tasks is certain: whether --ntasks-per-node of srun replaces that of the job depends on Slurm's version."""
    own = slurm_options(launch.srun).get("ntasks-per-node") if launch.srun else None
    other = own is not None and own.value != job.heads("ntasks-per-node") and "ntasks-per-node" in job.heading
    return not other or job.slurm_version == FIRST_WITHOUT_CPUS


def _same_unknown(job: JobDescription, launch: LauncherCall) -> bool:
    """Return whether one variable is both the number of tasks per node and that of the ranks that each starts."""
    asked, ranks = job.heads("ntasks-per-node") or "", launch.value("nproc_per_node", "num_gpus") or ""
    plain = [text.replace("{", "").replace("}", "") for text in (asked, ranks)]
    return (
        plain[0].startswith("$")
        and plain[0] == plain[1]
        and not (slurm_options(launch.srun).keys() & {"ntasks", "ntasks-per-node"} if launch.srun else False)
    )


def one_node(job: JobDescription) -> Iterator[Violation]:
    if not job.is_job or not job.multi_node:
        return
    together = any(c.program in SPREADING for la in job.launches for c in la.call.under)
    for launch in job.launches:
        horovod = next((c for c in launch.call.under if c.program == "horovodrun"), None)
        # It asks LSF for its hosts itself.
        if horovod and horovod.srun is None and job.nodes and not names_hosts(horovod) and job.hosts is None:
            text = f"horovodrun without -H starts all its processes on the first of {job.nodes} nodes"
            yield Violation(horovod.offset, text, cure="srun python ..., or horovodrun -np <n> -H <host>:<GPUs>,...")
        spread = any(c.program in SPREADING for c in launch.call.under)
        if together and (launch.value("nnodes") == "1" or "standalone" in launch.options):
            continue  # meant for one node, beside a launch on all
        if not spread and any(la.srun and la.call.instead_of(launch.call) for la in job.launches):
            continue  # the branch for one node
        if not spread and _starts(launch) and not launch.call.in_function and not launch.option("hostfile", "H"):
            if launch.option("node_rank") and any(
                la.kind == launch.kind and REMOTE_SHELLS & {c.program for c in la.call.under} for la in job.launches
            ):
                continue  # the rank of the first node, beside those that ssh starts
            text = f"{launch.kind} runs on the first of {job.nodes or 'several'} nodes only"
            yield Violation(launch.call.offset, text, severity="note" if job.of_unknown_size else None)


def inherited(job: JobDescription) -> Iterator[Violation]:
    asked = job.number(job.heads("cpus-per-task"))
    version = job.slurm_version
    affected = version is None or FIRST_WITHOUT_CPUS <= version < FIRST_WITH_CPUS_AGAIN
    if asked is None or asked < 2 or job.has("SRUN_CPUS_PER_TASK") or not affected:
        return
    for srun in _launching(job):
        if slurm_options(srun).keys() & {"cpus-per-task", "exclusive", "cpus-per-gpu", "cpu-bind"}:
            continue
        certain = version is not None and (job.tasks_per_node(srun) or 2) > 1
        yield Violation(
            srun.offset,
            f"srun has no --cpus-per-task, which the job sets to {asked}",
            severity="warning" if certain else "note",
        )


def _launching(job: JobDescription):
    """Return the sruns that start ranks, each once."""
    found = {id(la.srun): la.srun for la in job.launches if la.srun}
    return list({s.offset: s for s in found.values() if s}.values())


def missing(job: JobDescription) -> Iterator[Violation]:
    if not job.heading or not job.launches or job.whole_nodes:
        return
    given = job.heading.keys() & {
        "cpus-per-task",
        "cpus-per-gpu",
        "exclusive",
        "mincpus",
        "cores-per-socket",
        "threads-per-core",
        "ntasks-per-core",
    }
    if given or any(slurm_options(s).keys() & {"cpus-per-task", "cpus-per-gpu", "exclusive"} for s in _launching(job)):
        return
    launch = next((one for one in job.launches if one.srun is not None), job.launches[0])
    tasks = job.number(job.heads("ntasks-per-node")) or job.number(job.heads("ntasks")) or 1
    if launch.srun is None and tasks > 1:
        return  # the task has all CPUs of the batch script
    text = (
        f"the job requests no CPUs: {launch.kind} and its ranks get one per task, unless the site has another default"
    )
    yield Violation(launch.call.offset, text)


def oversubscribed(job: JobDescription) -> Iterator[Violation]:
    """Report more OpenMP threads than CPUs: the threads of all ranks of a task share its CPUs."""
    items = list(job.set_values("OMP_NUM_THREADS"))
    if len(items) != 1 or "exclusive" in job.heading:
        return
    exported = items[0].exported or items[0].under or "OMP_NUM_THREADS" in job.reading.exported
    if not exported and not any(items[0] in c.prefix for c in job.calls):
        return  # no program gets it
    value = items[0].value
    own = re.fullmatch(r"\$\{?SLURM_CPUS_PER_TASK(?::-\d+)?\}?", value)
    threads = job.number(job.heads("cpus-per-task")) if own else job.number(value)
    if threads is None or threads < 2:
        return
    # A step of one process that asks for fewer CPUs than the tasks of the job is a helper, such as a scheduler.
    shares = [pair for pair in _shares(job) if threads * pair[0] > pair[1] and not (own and pair[0] == 1)]
    worst = max(shares, key=lambda p: p[0] / p[1], default=None)
    if worst is not None:
        ranks, cpus = worst
        many = f"{ranks} ranks x {threads} threads" if ranks > 1 else f"{threads} threads"
        cpus_name = "SLURM_CPUS_PER_TASK" if job.is_batch else "NCPUS"
        cure = (
            f"export OMP_NUM_THREADS=$(({cpus_name} / {ranks}))"
            if ranks > 1
            else f"export OMP_NUM_THREADS=${cpus_name}"
        )
        yield Violation(items[0].offset, f"{many} per task, but a task has {cpus} CPU{'s' * (cpus > 1)}", cure=cure)


def few_cpus(job: JobDescription) -> Iterator[Violation]:
    """Report fewer CPUs than ranks."""
    if "exclusive" in job.heading:
        return
    for ranks, cpus in _shares(job):
        found = job.heading.get("cpus-per-task")
        place = found.offset if found else job.pbs.place if job.pbs else None
        if ranks > cpus and place is not None:
            have = f"{cpus} CPU{'s' * (cpus > 1)}"
            text = f"{ranks} ranks share {have}, and so do their data loaders"
            yield Violation(place, text, severity="warning" if ranks >= 2 * cpus else "note")
            return


def _shares(job: JobDescription) -> list[tuple[int, int]]:
    """Return, for each launch, the ranks of a task and the CPUs that they share, where both are known."""
    found = [
        (ranks, cpus)
        for la in job.launches
        if (ranks := _ranks_of_task(job, la)) and (cpus := cpus_of_task(job, la.srun, la.call))
    ]
    if not job.launches and job.work and job.is_job and not any(c.under for c in job.work):
        cpus = cpus_of_task(job, None, job.work[0])
        found += [(1, cpus)] if cpus else []
    return found


def cpus_of_task(job: JobDescription, srun: ProgramCall | None, call: ProgramCall) -> int | None:
    """Return the CPUs of a task of srun, or of the shell that runs the job's script."""
    if any(c.program in SPREADING for c in call.under if c.program != "srun"):
        return None
    if job.pbs is not None:
        return job.pbs.cpus
    own = slurm_options(srun) if srun else {}
    if "cpus-per-task" in own and "SLURM_CPUS_PER_TASK" not in (own["cpus-per-task"].value or ""):
        return job.number(own["cpus-per-task"].value)
    if own.keys() & {"exclusive", "cpus-per-gpu", "overlap"}:
        return None
    tasks = tasks_of_node(job)
    if "cpus-per-gpu" in job.heading:
        each, gpus = job.number(job.heads("cpus-per-gpu")), job.gpus_per_node
        return each * gpus if each and gpus and (srun is None or tasks == 1) else None
    cpus = job.number(job.heads("cpus-per-task"))
    if cpus is None or srun is not None:
        return cpus
    return cpus * tasks if tasks else None  # the batch shell has the CPUs of all tasks of its node


def tasks_of_node(job: JobDescription) -> int | None:
    """Return the tasks per node that the job requests; None if they may be distributed unevenly."""
    told = job.number(job.heads("ntasks-per-node"))
    if told or "ntasks-per-node" in job.heading:
        return told
    if "ntasks" in job.heading:
        tasks = job.number(job.heads("ntasks"))
        even = tasks and job.nodes and tasks % job.nodes == 0
        return tasks // job.nodes if even and tasks and job.nodes else None
    return None if job.heading.keys() & {"ntasks-per-gpu", "ntasks-per-socket"} else 1


def _ranks_of_task(job: JobDescription, launch: LauncherCall) -> int | None:
    if launch.kind == "python":
        return 1
    told = launch.value("nproc_per_node", "num_gpus")
    if told in ("gpu", "auto") or (launch.kind == "deepspeed" and told is None):
        return job.gpus_per_node
    if launch.kind == "accelerate":
        total, machines = job.number(launch.value("num_processes")), job.number(launch.value("num_machines")) or 1
        if launch.option("config_file") and not launch.option("num_machines"):
            return None
        return total // machines if total else 1  # at least
    return 1 if told is None and not launch.open_ended else job.number(told)


def world_size(job: JobDescription) -> Iterator[Violation]:
    """Compare WORLD_SIZE with the tasks that srun starts, or with the single process of a script without srun."""
    alone = [c for c in job.work if not c.under]
    if job.is_batch and not job.launches and len(job.work) == 1 and alone and not job.submits:
        tasks = [a for a in job.set_values("WORLD_SIZE") if re.fullmatch(r"\$\{?SLURM_(?:NTASKS|NPROCS)\}?", a.value)]
        if tasks and (tasks_of_node(job) or 1) > 1 and job.set_values_named("RANK", "SLURM_PROCID"):
            text = f"WORLD_SIZE is the number of tasks, but '{alone[0].written}' is one process: without srun no other task starts"
            yield Violation(tasks[0].offset, text, cure="srun before the command")
    for launch in job.launches:
        yield from _lightning(job, launch)
        started = started_by(job, launch) if launch.kind == "python" else None
        if started is None or not started.total or launch.call.in_loop or launch.call.in_function:
            continue
        for offset, name, size in _told_sizes(job, launch):
            several = (
                job.gpus_per_node and job.nodes and started.per_node == 1 and size == job.gpus_per_node * job.nodes
            )
            # One task per node may start the ranks of its GPUs itself, and then counts these, or the nodes.
            if size != started.total and not several:
                text = f"{name}={size}, but {started.starter.program} starts {started.total} ranks"
                yield Violation(offset, text)
                return


LIGHTNING_DEVICES = lazy_regex(r"(?:--)?trainer\.(?:devices|gpus)|--devices")
LIGHTNING_NODES = lazy_regex(r"(?:--)?trainer\.num_nodes|--num[-_]nodes")
LIGHTNING_WHY = (
    "Under Slurm Lightning takes the tasks of srun as its processes and starts none itself: it refuses another number of tasks per node, or "
    "waits for the missing ranks."
)


def _lightning(job: JobDescription, launch: LauncherCall) -> Iterator[Violation]:
    """Compare the devices that Lightning's trainer is told with the tasks of srun on each node."""
    if launch.kind != "python" or launch.srun is None or launch.open_srun:
        return
    told: dict[str, tuple[int, int]] = {}
    for arg, following in launch.call.pairs():
        name, equals, value = arg.text.partition("=")
        for kind, pattern in (("devices", LIGHTNING_DEVICES), ("nodes", LIGHTNING_NODES)):
            count = (
                job.number(value if equals else following.text if following else None)
                if pattern.fullmatch(name)
                else None
            )
            if count:
                told[kind] = (count, arg.offset)
    tasks = job.tasks_per_node(launch.srun)
    if len(told) == 2 and tasks and tasks != told["devices"][0]:
        devices, offset = told["devices"]
        text = f"{devices} devices per node, but srun starts {tasks} task{'s' * (tasks > 1)} per node"
        yield Violation(offset, text, why=LIGHTNING_WHY, cure=f"#SBATCH --ntasks-per-node={devices}")


def _told_sizes(job: JobDescription, launch: LauncherCall) -> Iterator[tuple[int, str, int]]:
    """Yield where the script tells the program the number of ranks: WORLD_SIZE in the environment, or an option."""
    set_here = [a for a in job.set_values("WORLD_SIZE") if a.exported or "WORLD_SIZE" in job.reading.exported]
    before = [a for a in set_here if a.offset < launch.call.offset or a.under]
    if len({a.value for a in before}) == 1 and (size := job.number(before[-1].value)):
        yield before[-1].offset, "WORLD_SIZE", size
    for arg, following in launch.call.pairs():
        name, equals, value = arg.text.partition("=")
        if WORLD_OPTION.fullmatch(name) and (equals or following):
            size = job.number(value if equals else following.text if following else None)
            if size and (launch.srun is None or (job.tasks_per_node(launch.srun) or 1) > 1):
                yield arg.offset, name, size


WORLD_OPTION = lazy_regex(r"--(?:dist[-_.])?world[-_]size")


def sources_settings(job: JobDescription) -> bool:
    """Return whether a file is sourced that may set anything; scripts of virtual environments only set paths."""
    return any(
        c.program in ("source", ".") and c.args and not SETS_PATHS_ONLY.search(c.args[0].text) for c in job.calls
    )


def threads(job: JobDescription) -> Iterator[Violation]:
    if job.has("OMP_NUM_THREADS") or not job.launches or sources_settings(job) or _passes(job, "OMP_NUM_THREADS"):
        return
    for launch in job.launches:
        if not job.is_batch and launch.srun is None:
            continue  # the caller of this script may have set it
        per_node = job.number(launch.value("nproc_per_node", "num_gpus"))
        if launch.kind == "python":
            tasks = job.tasks_per_node(launch.srun) if launch.srun else None
            bound = (slurm_options(launch.srun) if launch.srun else {}).keys() & {"cpus-per-task", "cpu-bind"}
            if tasks and tasks > 1 and not bound:
                yield Violation(
                    launch.call.offset,
                    f"no OMP_NUM_THREADS: each of the {tasks} ranks per node starts a thread for every visible core",
                )
                return
        elif per_node != 1 and (per_node or launch.value("nproc_per_node", "num_gpus", "num_processes")):
            sets = (
                "all cores for every rank" if launch.kind == "deepspeed" else f"{launch.kind} gives every rank 1 thread"
            )
            yield Violation(launch.call.offset, f"no OMP_NUM_THREADS: {sets}")
            return


def _passes(job: JobDescription, name: str) -> bool:
    return any(a.text.startswith((f"--export=ALL,{name}", f"{name}=")) for c in job.calls for a in c.args)


def gpus_total(job: JobDescription) -> Iterator[Violation]:
    found = job.heading.get("gpus")
    count = re.search(r"\d+\Z", found.value or "") if found else None
    if found and count and job.nodes and job.nodes > 1:
        uneven = int(count[0][:9]) % job.nodes
        severity = "warning" if uneven or int(count[0][:9]) == job.gpus_of_launchers else "note"
        yield Violation(found.offset, f"--gpus={found.value} is the total for all {job.nodes} nodes", severity=severity)


def gpu_per_task(job: JobDescription) -> Iterator[Violation]:
    found = job.heading.get("gpus-per-task")
    if "allow-task-sharing" in f"{job.heads('gres-flags')}{[a.value for a in job.set_values('SLURM_GRES_FLAGS')]}":
        return
    if any(a.value == "none" for a in job.set_values("SLURM_GPU_BIND")):
        return
    for launch in job.launches:
        if launch.kind != "python" or launch.srun is None or (job.tasks_per_node(launch.srun) or 1) < 2:
            continue
        options = slurm_options(launch.srun)
        option, bound = options.get("gpus-per-task"), options.get("gpu-bind")
        if (bound.value if bound else job.heads("gpu-bind")) == "none":
            continue  # every task sees all GPUs of its node
        flags = options.get("gres-flags")
        if launch.open_srun or (flags and "allow-task-sharing" in (flags.value or "")):
            continue
        if found or option:
            yield Violation(
                option.arg.offset if option else found.offset if found else 0,
                "one GPU per task with several tasks per node",
            )
            return


def _told_in_a_branch(job: JobDescription, launch: LauncherCall) -> bool:
    """Return whether a variable of the command has the option in one of its values."""
    command = re.match(r"(?:[^\n\\]|\\.|\\\n)*", job.text[launch.call.offset :], re.DOTALL)
    names = re.findall(r"\$\{?([A-Za-z_]\w*)", command[0] if command else "")
    option = re.compile(r"--(?:nnodes|num_machines|hostfile)\b")
    return any(option.search(a.value) for name in names for a in job.by_name.get(name, ()))


def count(job: JobDescription) -> Iterator[Violation]:
    """Compare the nodes that the launcher waits for with the nodes of the job."""
    if ("nodes" not in job.heading and job.pbs is None) or job.nodes is None:
        return
    own_settings = ("PET_NNODES", "ACCELERATE_CONFIG_FILE")
    for launch in job.launches:
        option = launch.option("nnodes", "num_machines", "num_nodes", "config_file")
        asked = job.number(option.value) if option and "config_file" not in option.arg.text else None
        if option and asked and asked > job.nodes:
            yield Violation(option.arg.offset, f"{launch.kind} waits for {asked} nodes, but the job has {job.nodes}")
        started = job.srun_nodes(launch.srun) if launch.srun and job.tasks_per_node(launch.srun) == 1 else None
        if option and asked and started and 1 < asked < started:
            text = f"srun starts {launch.kind} on {started} nodes, but it takes {asked}: the others wait, and fail"
            yield Violation(option.arg.offset, text)
        yield from _alone_on_purpose(job, launch)
        spread = launch.srun is not None or any(c.program in MPI for c in launch.call.under)
        kinds = ("torchrun", "torch.distributed.launch", "accelerate", "deepspeed")
        hosts = launch.option("hostfile", "H", "no_ssh", "deepspeed_hostfile")
        alone = launch.kind in kinds and option is None and spread and hosts is None
        if not alone or "standalone" in launch.options or job.has(*own_settings) or launch.open_ended:
            continue
        if _told_in_a_branch(job, launch):
            continue
        nodes = job.srun_nodes(launch.srun) if launch.srun else job.nodes
        if nodes and nodes > 1 and (launch.srun is None or job.tasks_per_node(launch.srun)):
            name = {"accelerate": "--num_machines", "deepspeed": "--hostfile"}.get(launch.kind, "--nnodes")
            yield Violation(
                launch.call.offset, f"no {name}: each of the {nodes} nodes forms its own group", why=ALONE_WHY
            )


def _alone_on_purpose(job: JobDescription, launch: LauncherCall) -> Iterator[Violation]:
    """Report ``--nnodes=1`` and ``--standalone`` where srun starts the launcher on several nodes with the same arguments."""
    option = launch.option("standalone", "nnodes", "num_machines")
    if (
        option is None
        or launch.srun is None
        or launch.kind not in ("torchrun", "torch.distributed.launch", "accelerate")
    ):
        return
    nodes, tasks = job.srun_nodes(launch.srun), job.tasks_per_node(launch.srun)
    single = "standalone" in launch.options or job.number(option.value) == 1
    told = {text for o in launch.options.values() for text in (o.arg.text, o.value or "")}
    contradicts = launch.option("main_process_ip", "machine_rank", "node_rank", "master_addr") is not None
    passed = [a.text for a in launch.call.args if a.text not in told or not contradicts]
    own = any("SLURM_" in text for text in passed) or "array" in job.heading or launch.srun.in_loop
    if single and nodes and nodes > 1 and tasks and not own and launch.srun.after != "&":
        text = f"{option.arg.text}: each of the {nodes} nodes trains its own model"
        yield Violation(option.arg.offset, text, why="Every node does the same work, and writes the same files.")


def fewer(job: JobDescription) -> Iterator[Violation]:
    """Report fewer tasks than nodes."""
    tasks, nodes = job.number(job.heads("ntasks")), job.number((job.heads("nodes") or "").partition("-")[0])
    if tasks and nodes and tasks < nodes:
        yield Violation(job.heading["ntasks"].offset, f"--ntasks={tasks} with --nodes={nodes}: the job gets {tasks}")
        return
    steps: dict[
        str, list[tuple[int, int, int]]
    ] = {}  # tasks, nodes that the launcher waits for, position of the option
    for launch in job.launches:
        option = slurm_options(launch.srun).get("ntasks") if launch.srun else None
        started = job.number(option.value) if option else None
        asked = job.number(launch.value("nnodes", "num_machines"))
        if option is None or not started or not asked or launch.srun is None:
            continue
        if any(c.in_loop or c.in_function for c in (launch.call, launch.srun)):
            continue  # it starts one step per round, or per call
        together = launch.call.under[0].after == "&" or slurm_options(launch.srun).keys() & {"nodelist", "relative"}
        group = launch.kind if together else str(option.arg.offset)
        steps.setdefault(group, []).append((started, asked, option.arg.offset))
    for group in steps.values():
        total, asked = sum(started for started, _, _ in group), max(asked for _, asked, _ in group)
        if total < asked:
            kind = "the steps start" if len(group) > 1 else "srun starts"
            yield Violation(group[0][2], f"{kind} {total} of the {asked} tasks that the launcher waits for")


def processes(job: JobDescription) -> Iterator[Violation]:
    """Report ``accelerate launch --num_processes`` with the ranks of one machine: it counts the ranks of all machines."""
    for launch in job.launches:
        option = launch.option("num_processes")
        machines, ranks = job.number(launch.value("num_machines")), job.number(option.value) if option else None
        if launch.kind != "accelerate" or option is None or machines is None or ranks is None or machines < 2:
            continue
        gpus = job.gpus_per_node or 0
        one_each = ranks == machines and gpus > 1 and not launch.open_ended and launch.option("multi_gpu") is not None
        if ranks < machines or (ranks == gpus and ranks > 1) or one_each:
            text = f"--num_processes={ranks} is the total for all {machines} machines, {ranks // machines} on each"
            yield Violation(option.arg.offset, text)


def kill(job: JobDescription) -> Iterator[Violation]:
    if job.has("SLURM_KILL_BAD_EXIT"):
        return
    for srun in _launching(job):
        tasks = job.tasks_per_node(srun)
        if (job.multi_node or (tasks is not None and tasks > 1)) and "kill-on-bad-exit" not in slurm_options(srun):
            yield Violation(srun.offset, "srun without --kill-on-bad-exit: if one task fails, the others continue")
