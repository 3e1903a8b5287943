"""Nodes and tasks: launchers on each node, counts of nodes and ranks, steps."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import REMOTE_SHELLS, SHELLS, Option, slurm_option, slurm_options
from allranks.analysis.lint.job import NODE_NAMES, SETS_PATHS_ONLY, USUAL_GPUS, JobDescription, LauncherCall, count_gpus
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules import (
    FIRST_WITHOUT_CPUS,
    MPI,
    SPREADING,
    STARTER_OPTION,
    _launching,
    error,
    note,
    started_by,
    warning,
)
from allranks.utils.text import lazy_regex


@error(
    "several-torchruns",
    why="Every task starts a launcher that starts all ranks of the node: too many ranks per GPU, and several launchers "
    "on the same port.",
    cure="#SBATCH --ntasks-per-node=1, so that one launcher starts the ranks of its node; or srun "
    "--ntasks=$SLURM_JOB_NUM_NODES",
    source="tested with Slurm 22.05",
    bad="#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun torchrun --nproc_per_node=4 train.py",
    good="#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nsrun torchrun --nproc_per_node=4 train.py",
)
def several(job: JobDescription) -> Iterator[Violation]:
    for launch in (la for la in job.launches if la.kind != "python"):
        if launch.srun:
            tasks = job.tasks_per_node(launch.srun)
            one_each = (launch.value("nproc_per_node", "num_processes") or "") == "1"
            if tasks is not None and tasks > 1 and not (one_each and launch.option("node_rank", "machine_rank")):
                text = f"srun starts {tasks} tasks per node, and each starts {launch.kind}"
                yield Violation(launch.call.offset, text, severity="error" if _certain_tasks(job, launch) else "note")
        elif (started := started_by(job, launch)) and (started.per_node or 1) > 1:
            if launch.value("nproc_per_node", "num_processes", "num_gpus") != "1":
                text = (
                    f"{started.starter.program} starts {started.per_node} processes per node, and each starts "
                    f"{launch.kind}"
                )
                cure = (
                    "one process per node: mpirun -np <nodes> --map-by ppr:1:node; jsrun -r 1 -a 1 -g ALL_GPUS -c "
                    "ALL_CPUS"
                )
                yield Violation(launch.call.offset, text, cure=cure)


def _certain_tasks(job: JobDescription, launch: LauncherCall) -> bool:
    """Return whether the task count is certain: srun's --ntasks-per-node replaces the job's in some Slurm versions."""
    own = slurm_options(launch.srun).get("ntasks-per-node") if launch.srun else None
    other = own is not None and own.value != job.heads("ntasks-per-node") and "ntasks-per-node" in job.heading
    return not other or job.slurm_version == FIRST_WITHOUT_CPUS


@error(
    "one-node-only",
    why="The batch script runs on the first node only. Without srun the other nodes are idle, or the launcher waits "
    "for them until the timeout.",
    cure="start it on every node: srun --ntasks-per-node=1 torchrun ...",
    source="Slurm's sbatch and srun manuals",
    bad="torchrun --nnodes=2 --nproc_per_node=2 train.py",
    good="srun torchrun --nnodes=2 --nproc_per_node=2 train.py",
)
def one_node(job: JobDescription) -> Iterator[Violation]:
    if not job.is_batch or not job.multi_node:
        return
    starters = [{c.program for c in la.call.under} for la in job.launches]
    together = any(names & SPREADING for names in starters)
    for launch, names in zip(job.launches, starters, strict=True):
        if launch.kind == "python" or names & SPREADING or launch.call.in_function or launch.option("hostfile", "H"):
            continue
        if together and (launch.value("nnodes") == "1" or "standalone" in launch.options):
            continue  # meant for one node, beside a launch on all
        if any(la.srun and la.call.instead_of(launch.call) for la in job.launches):
            continue  # the branch for one node
        by_ssh = any(
            la.kind == launch.kind and other & REMOTE_SHELLS for la, other in zip(job.launches, starters, strict=True)
        )
        if launch.option("node_rank") and by_ssh:
            continue  # the rank of the first node, beside those that ssh starts
        text = f"{launch.kind} runs on the first of {job.nodes or 'several'} nodes only"
        yield Violation(launch.call.offset, text, severity="note" if job.of_unknown_size else None)


@error(
    "world-size",
    why="init_process_group waits until WORLD_SIZE ranks have joined; with more ranks than that, it fails.",
    cure="export WORLD_SIZE=$SLURM_NTASKS",
    source="torch.distributed documentation, env://",
    bad="#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nexport WORLD_SIZE=4\nsrun python train.py",
    good="#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nexport WORLD_SIZE=$SLURM_NTASKS\nsrun python train.py",
)
def world_size(job: JobDescription) -> Iterator[Violation]:
    for launch in job.launches:
        started = started_by(job, launch) if launch.kind == "python" else None
        if started is None or not started.total or launch.call.in_loop or launch.call.in_function:
            continue
        for offset, name, size in _told_sizes(job, launch):
            # One task per node may start the ranks of its GPUs itself, and then counts these, or the nodes.
            own = started.per_node == 1 and size == (job.gpus_per_node or 0) * (job.nodes or 0)
            if size != started.total and not own:
                text = f"{name}={size}, but {started.starter.program} starts {started.total} ranks"
                yield Violation(offset, text)
                return


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


@error(
    "node-count",
    why="The launcher waits for nodes that never join, until the rendezvous timeout.",
    cure="--nnodes=$SLURM_JOB_NUM_NODES, so that the two are always equal",
    source="torch/distributed/run.py",
    bad="srun torchrun --nnodes=4 --nproc_per_node=2 train.py",
    good="srun torchrun --nnodes=$SLURM_JOB_NUM_NODES --nproc_per_node=2 train.py",
)
def count(job: JobDescription) -> Iterator[Violation]:
    if "nodes" not in job.heading or job.nodes is None:
        return
    for launch in job.launches:
        option = launch.option("nnodes", "num_machines", "num_nodes", "config_file")
        nnodes = job.number(option.value) if option and "config_file" not in option.arg.text else None
        if option and nnodes and nnodes > job.nodes:
            yield Violation(option.arg.offset, f"{launch.kind} waits for {nnodes} nodes, but the job has {job.nodes}")
        started = job.srun_nodes(launch.srun) if launch.srun and job.tasks_per_node(launch.srun) == 1 else None
        if option and nnodes and started and 1 < nnodes < started:
            text = f"srun starts {launch.kind} on {started} nodes, but it takes {nnodes}: the others wait, and fail"
            yield Violation(option.arg.offset, text)
        spread = launch.srun is not None or any(c.program in MPI for c in launch.call.under)
        source = option or launch.option("hostfile", "H", "no_ssh", "deepspeed_hostfile", "standalone")
        unknown = launch.open_ended or launch.kind == "python" or job.has("PET_NNODES", "ACCELERATE_CONFIG_FILE")
        if not spread or source or unknown:
            continue
        nodes = job.srun_nodes(launch.srun) if launch.srun else job.nodes
        if nodes and nodes > 1 and (launch.srun is None or job.tasks_per_node(launch.srun)):
            name = {"accelerate": "--num_machines", "deepspeed": "--hostfile"}.get(launch.kind, "--nnodes")
            text = f"no {name}: each of the {nodes} nodes forms its own group"
            yield Violation(launch.call.offset, text, why=ALONE_WHY)


ALONE_WHY = (
    "The launcher's default is one node: every node trains its own model without an error, or waits for others with "
    "the same rendezvous id until the timeout."
)


@error(
    "fewer-tasks-than-nodes",
    why="Slurm allocates at most as many nodes as the job has tasks, with only a warning; the launcher then waits for "
    "nodes that never join.",
    cure="#SBATCH --ntasks-per-node=1 instead of --ntasks",
    source="Slurm's sbatch and srun manuals",
    bad="#SBATCH --nodes=2\n#SBATCH --ntasks=1\nsrun torchrun --nnodes=2 train.py",
    good="#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nsrun torchrun --nnodes=2 train.py",
)
def fewer(job: JobDescription) -> Iterator[Violation]:
    tasks, nodes = job.number(job.heads("ntasks")), job.number((job.heads("nodes") or "").partition("-")[0])
    if tasks and nodes and tasks < nodes:
        yield Violation(job.heading["ntasks"].offset, f"--ntasks={tasks} with --nodes={nodes}: the job gets {tasks}")
        return
    steps: dict[str, list[tuple[int, int, int]]] = {}  # tasks, nodes that the launcher waits for, place of the option
    for launch in job.launches:
        options = slurm_options(launch.srun) if launch.srun else {}
        option, nnodes = options.get("ntasks"), job.number(launch.value("nnodes", "num_machines"))
        started = job.number(option.value) if option else None
        if option is None or not started or not nnodes or launch.srun is None:
            continue
        if any(c.in_loop or c.in_function for c in (launch.call, launch.srun)):
            continue  # it starts one step per round, or per call
        together = launch.call.under[0].after == "&" or options.keys() & {"nodelist", "relative"}
        group = steps.setdefault(launch.kind if together else str(option.arg.offset), [])
        group.append((started, nnodes, option.arg.offset))
    for group in steps.values():
        total, nnodes = sum(started for started, _, _ in group), max(nnodes for _, nnodes, _ in group)
        if total < nnodes:
            kind = "the steps start" if len(group) > 1 else "srun starts"
            yield Violation(group[0][2], f"{kind} {total} of the {nnodes} tasks that the launcher waits for")


@warning(
    "processes-of-one-node",
    why="accelerate divides --num_processes by the number of machines: too few ranks start, and GPUs are idle.",
    cure="--num_processes=$((SLURM_JOB_NUM_NODES * <GPUs per node>))",
    source="accelerate/utils/launch.py",
    bad="srun bash -c 'accelerate launch --num_machines 2 --num_processes 2 --machine_rank $SLURM_NODEID train.py'",
    good="srun bash -c 'accelerate launch --num_machines 2 --num_processes 4 --machine_rank $SLURM_NODEID train.py'",
)
def processes(job: JobDescription) -> Iterator[Violation]:
    for launch in (la for la in job.launches if la.kind == "accelerate"):
        option = launch.option("num_processes")
        machines, ranks = job.number(launch.value("num_machines")), job.number(option.value) if option else None
        if option and machines and ranks and machines > 1 and (ranks < machines or 1 < ranks == job.gpus_per_node):
            text = f"--num_processes={ranks} is the total for all {machines} machines, {ranks // machines} on each"
            yield Violation(option.arg.offset, text)


@note(
    "one-failed-rest-waits",
    why="By default, when one task fails, srun does not end the others; they wait for it in a collective until the "
    "timeout.",
    cure="srun --kill-on-bad-exit=1 (srun may then return 143 instead of the first task's code)",
    source="tested with Slurm 22.05",
    bad="srun torchrun --nnodes=2 --nproc_per_node=2 train.py",
    good="srun --kill-on-bad-exit=1 torchrun --nnodes=2 --nproc_per_node=2 train.py",
)
def kill(job: JobDescription) -> Iterator[Violation]:
    if job.has("SLURM_KILL_BAD_EXIT"):
        return
    for srun in _launching(job):
        tasks = job.tasks_per_node(srun)
        if (job.multi_node or (tasks is not None and tasks > 1)) and "kill-on-bad-exit" not in slurm_options(srun):
            yield Violation(srun.offset, "srun without --kill-on-bad-exit: if one task fails, the others continue")


@error(
    "step-exceeds-job",
    why="srun refuses the step: it waits for resources that the job does not have, or stops with 'More processors "
    "requested than permitted'.",
    cure="request the same in #SBATCH",
    source="Slurm's sbatch and srun manuals",
    bad="srun --nodes=4 --ntasks=4 python train.py",
    good="srun --nodes=2 --ntasks=2 python train.py",
)
def exceeds(job: JobDescription) -> Iterator[Violation]:
    if not job.is_batch or job.submits or any(c.program == "salloc" for c in job.calls):
        return
    for call in job.calls:
        options = slurm_options(call) if call.program == "srun" and not call.in_substitution else {}
        if not options or call.has_open_options or any(a.text == ":" for a in call.args):
            continue
        if not options.keys() & {"jobid", "het-group", "pack-group", "overcommit"}:
            for option, text in _exceeding(job, options):
                yield Violation(max(option.arg.offset, call.offset), f"srun asks for {text}")
                break


def _exceeding(job: JobDescription, options: dict[str, Option]) -> Iterator[tuple[Option, str]]:
    step_count, have = _number(job, options, "nodes"), job.number(job.heads("nodes"))
    if step_count and have and step_count > have:
        yield options["nodes"], f"{step_count} nodes, but the job has {have}"
    gpus = 0 if "exclusive" in job.heading else job.gpus_per_node or 0
    for name in ("gpus-per-node", "gres"):
        value = options[name].value if name in options else None
        counted, _ = count_gpus(value, None) if name == "gpus-per-node" else count_gpus(None, value)
        if gpus and counted and counted > gpus:
            yield options[name], f"{counted} GPUs per node, but the job has {gpus}"
    total = _number(job, options, "gpus")
    if gpus and job.nodes and total and total > gpus * job.nodes:
        yield options["gpus"], f"{total} GPUs, but the job has {gpus * job.nodes}"
    memory, limit = _megabytes(options["mem"].value) if "mem" in options else None, _megabytes(job.heads("mem"))
    if memory and limit and memory > limit:
        yield options["mem"], f"{options['mem'].value} of memory per node, but the job has {job.heads('mem')}"
    # Whole nodes may have more CPUs than the job asked for.
    uncounted = job.heading.keys() & {"exclusive", "cpus-per-gpu", "mincpus", "ntasks-per-gpu", "hint"}
    if job.whole_nodes or uncounted or not job.heading.keys() & {"ntasks", "ntasks-per-node"}:
        return
    tasks, most = _number(job, options, "ntasks"), job.number("$SLURM_NTASKS")
    each, own = job.number(job.heads("cpus-per-task") or "1"), _number(job, options, "cpus-per-task")
    if tasks and most and each and tasks > most and tasks * (own or 1) > most * each:
        cpus = f"{tasks} tasks of {own} CPUs" if own else f"{tasks} tasks"
        yield options["ntasks"], f"{cpus}, but the job has {most * each} CPU{'s' * (most * each > 1)}"


def _number(job: JobDescription, options: dict[str, Option], name: str) -> int | None:
    return job.number((options[name].value or "").rpartition(":")[2]) if name in options else None


MEMORY = lazy_regex(r"(\d{1,9})([kKmMgGtT]?)[bB]?")


def _megabytes(value: str | None) -> float | None:
    match = MEMORY.fullmatch(value or "")
    units = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024 * 1024}
    return int(match[1]) * units[(match[2] or "m").lower()] if match else None


@error(
    "nodes-in-sequence",
    why="The first launcher waits for the others, which start only after it has ended; it stops at the rendezvous "
    "timeout.",
    cure="srun --ntasks-per-node=1 without --nodelist starts all nodes at once; or end the line with & and add wait "
    "after the loop",
    source="torch/distributed/run.py",
    bad="for node in $NODES; do\n  srun -N1 -n1 -w $node torchrun --nnodes=2 --nproc_per_node=2 train.py\ndone",
    good="srun --ntasks-per-node=1 torchrun --nnodes=2 --nproc_per_node=2 train.py",
)
def sequence(job: JobDescription) -> Iterator[Violation]:
    for launch, srun in ((la, la.srun) for la in job.launches):
        if srun is None or not srun.in_loop or srun.in_function or launch.call.under[0].after == "&":
            continue
        node = slurm_options(srun).get("nodelist")
        rank = launch.value("node_rank", "machine_rank")
        counted = re.fullmatch(r"\"?\$\{?(?!SLURM)\w+\}?\"?", rank or "")
        one = (counted and job.srun_nodes(srun) == 1) or (node and "$" in (node.value or ""))
        if one and launch.value("nnodes", "num_machines") not in (None, "1"):
            yield Violation(srun.offset, f"the loop starts {launch.kind} on one node after another")


SPREADS_ITSELF = lazy_regex(
    r"(?:^|/)(?:\w*launch\w*|deepy)\.py$|--mpi[-_]\w+|--hosts?\b|^scoop$|submitit|smartsim|dask|\bray\b|parsl|mpi4py|spark|hostfile|horovod|pip$|venv$|--\w+[-_]nodes=|"
    rf"NODELIST|NODEFILE|{STARTER_OPTION.pattern}|^(?:mpirun|mpiexec|horovodrun|setup\.py)$"
)


@warning(
    "idle-nodes",
    why="The batch script runs on the first node only; the other nodes are idle, and paid for.",
    cure="srun python ..., or #SBATCH --nodes=1",
    source="Slurm's sbatch and srun manuals",
    bad="#SBATCH --nodes=2\npython train.py",
    good="#SBATCH --nodes=2\nsrun python train.py",
)
def idle_nodes(job: JobDescription) -> Iterator[Violation]:
    if not job.is_batch or (job.nodes or 1) < 2 or not job.work:
        return
    if job.launches or job.chooses_launcher or sources_unknown(job) or re.search(r"\bRADICAL_|\bradical\b", job.text):
        return
    if any(c.program in STARTS_ELSEWHERE or runs_script(c) for c in job.calls if not c.in_substitution):
        return
    options = " ".join(a.text for c in job.work for a in c.args)
    indices = [int(n) for n in re.findall(r"(?:^| )--(?:n|num)[-_]?gpus=(\d{1,6})(?= |$)", options)]
    work = next((c for c in job.work if not any(SPREADS_ITSELF.search(a.text) for a in c.args)), None)
    if work is not None and max(indices, default=0) <= max(job.gpus_per_node or 0, USUAL_GPUS):
        yield Violation(work.offset, f"{work.program} runs on the first of {job.nodes} nodes only")


STARTS_ELSEWHERE = {
    "srun", "mpirun", "mpiexec", "mpiexec.hydra", "ssh", "pdsh", "parallel", "sbatch", "ray", "pbsdsh", "clush",
    "jsrun", "aprun", "horovodrun", "orterun", "blaunch", "flux", "lrun", "ddlrun", "runjob", "dask-ssh", "dask-mpi",
    "ibrun", "prun", "mpirun_rsh", "likwid-mpirun",
}  # fmt: skip


def runs_script(call: ProgramCall) -> bool:
    """Return whether the call runs another script, which may start programs on the other nodes."""
    first = call.args[0].text if call.args else ""
    shell = call.program in SHELLS and not first.startswith("-")
    return shell or call.written.startswith(("./", "../", "$")) or call.written.endswith((".sh", ".bash"))


WRITES = {"echo", "printf", "cat", "scontrol", "sed", "awk", "cp", "tee", "sort", "uniq", "head"}


@error(
    "host-file",
    why="deepspeed reads lines of the form '<host> slots=<GPUs>' and stops at any other, or takes only the hosts that "
    "it understands.",
    cure='for host in $(scontrol show hostnames); do echo "$host slots=8"; done > hostfile.$SLURM_JOB_ID',
    source="DeepSpeed's launcher, runner.py",
    bad="scontrol show hostnames > hosts.$SLURM_JOB_ID\ndeepspeed --hostfile=hosts.$SLURM_JOB_ID train.py",
    good=(
        'scontrol show hostnames | sed "s/$/ slots=2/" > hosts.$SLURM_JOB_ID\ndeepspeed --hostfile=hosts.$SLURM_JOB_ID '
        "train.py"
    ),
)
def host_lines(job: JobDescription) -> Iterator[Violation]:
    """Report a host file of deepspeed that is written in another form, or of which only the last line is left."""
    for launch in job.launches:
        option = launch.option("hostfile", "H") if launch.kind == "deepspeed" else launch.option("deepspeed_hostfile")
        name = option.plain_value if option else ""
        if not name or launch.option("no_ssh"):
            continue
        writers = [
            (c, r.operator) for c in job.calls if not c.in_substitution for r in c.redirects
            if r.operator in (">", ">>") and r.target.strip("\"'") == name
        ]  # fmt: skip
        if writers and "slots=" not in job.text and all(c.program in WRITES for c, _ in writers):
            text = f"{name} has no slots=<GPUs>, without which deepspeed does not read it"
            yield Violation(writers[0][0].offset, text)
            return


TASK_NAMES = {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"}
OTHER_JOB = {"ntasks", "jobid", "het-group", "pack-group", "relative", "nodefile", "ntasks-per-gpu"}
ONE_HOST = lazy_regex(
    r"[A-Za-z][\w.-]*|\$\{\w+\[[^@*\]]+\]\}|\$\(hostname[^|)]*\)|[$`].*\|\s*(?:head\s+-n?\s*1|sed\s+-n\s+[\"']?\d+p[\"']?)\s*[)`]"
)


@error(
    "step-nodes",
    why="A step has as many nodes and tasks as the job, unless -N and -n say otherwise: -w only names nodes that it "
    "has to contain.",
    cure="srun -N 1 -n 1 -w <host> ...",
    source="tested with Slurm 22.05",
    bad="nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))\nsrun -w ${nodes[0]} ray start --head --block &",
    good="nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))\nsrun -N 1 -n 1 -w ${nodes[0]} ray start --head "
    "--block &",
)
def step_nodes(job: JobDescription) -> Iterator[Violation]:
    nodes, total = job.nodes, job.number("$SLURM_NTASKS")
    if not job.is_batch or not nodes or nodes < 2 or re.search(r"(?m)^#SBATCH\s+(?:hetjob|packjob)", job.text):
        return
    if any(a.name in NODE_NAMES | TASK_NAMES for a in job.assignments):
        return
    for call in job.calls:
        options = slurm_options(call) if call.program == "srun" else {}
        if not options or options.keys() & OTHER_JOB or _has_unknown_options(call):
            continue
        if any(c.program in ("ssh", "pdsh", "clush", "env", "srun") for c in call.under):
            continue
        count_option, named = options.get("nodes"), options.get("nodelist")
        count = job.number(count_option.value) if count_option else None
        if count_option is not None and count and total and count < nodes and total > count:
            each, cure = -(-total // count), f"-n {max(1, total * count // nodes)} too"
            text = (
                f"srun on {count} of {nodes} nodes, but with all {total} tasks of the job: {each} on a node, or it is "
                "refused"
            )
            yield Violation(count_option.arg.offset, text, cure=cure)
        elif count_option is None and named is not None and _is_one_host(job, named):
            text = f"{named.written} names one node, but without -N 1 -n 1 the step runs on all {nodes} nodes"
            yield Violation(call.offset, text)


def _has_unknown_options(call: ProgramCall) -> bool:
    """Return whether a word that is no option's value may hold options: ``srun $ARGS``, not ``srun -w $node``."""
    value = False
    for arg in call.args:
        if arg.is_open and not value:
            return True
        value = arg.text.startswith("-") and slurm_option(arg.text)[2]
    return False


def _is_one_host(job: JobDescription, named: Option) -> bool:
    """Return whether the word is one host's name: an element of an array, a loop's variable, or a name."""
    match = re.compile(r"(?:-w|--nodelist)(?:[=\s]|\\\n)*[\"']?([^\s\"']+|\$\([^)]*\))").match(
        job.text, named.arg.offset
    )
    value = match[1] if match else named.plain_value  # as it is written: an element of an array, not its value
    name = re.fullmatch(r"\$\{?(\w+)\}?", value)
    looped = name is not None and re.search(rf"\bfor\s+{name[1]}\s+in\s|\bread\s+(?:-r\s+)?{name[1]}\b", job.code)
    return bool(looped) or ONE_HOST.fullmatch(value) is not None


SETS_UP = lazy_regex(
    r"(?i)(?:env|set_?up|init|modules?|profile|rc|venv|conda|paths?|load_?\w*|exports?)(?:[._-]\w+)*\Z"
)


def sources_unknown(job: JobDescription) -> bool:
    """Return whether the script reads a file, not named as a setup, that may start programs on the other nodes."""
    sourced = [c.args[0].text for c in job.calls if c.program in ("source", ".") and c.args]
    return job.sources_files and not all(SETS_UP.search(name) or SETS_PATHS_ONLY.search(name) for name in sourced)
