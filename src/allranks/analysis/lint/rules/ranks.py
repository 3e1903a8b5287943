"""Rules for ranks that a script sets by hand, and for launchers that start launchers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placement import MPI, TOTAL, count_of
from allranks.analysis.lint.records import Assignment, ProgramCall, Violation
from allranks.analysis.lint.rules.dataflow import exported_before
from allranks.utils.text import lazy_regex

EQUAL_WHY = "Two processes with one rank wait for the ranks that are missing until the timeout, or the last one takes the place of the others."
DEVICE_WHY = "LOCAL_RANK is the process's number on its node, by which it takes its GPU: from the second node on these GPUs do not exist."
OF_SLURM = {
    "RANK": lazy_regex(r"\$\{?SLURM_(NODEID|LOCALID)\}?"),
    "LOCAL_RANK": lazy_regex(r"\$\{?SLURM_(NODEID|PROCID)\}?"),
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
        ranks = job.number(launch.local_ranks)
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
        value = chosen.plain_value if chosen else ""
        if launch.kind != "accelerate" or option is None or not re.fullmatch(r"\d{1,2}(?:,\d{1,2})*", value):
            continue
        total, listed = job.number(option.value), len(value.split(","))
        if total and total > listed and launch.value("num_machines") in (None, "1"):
            yield Violation(
                option.arg.offset, f"{total} ranks, but --gpu_ids {value} leaves {listed} GPU{'s' * (listed > 1)}"
            )


def rank_of_loop(job: JobDescription) -> Iterator[Violation]:
    """Report one node rank for all nodes on which a loop starts the launcher in the background."""
    for launch in job.launches:
        option, nodes = launch.option("node_rank", "machine_rank"), launch.option("nnodes", "num_machines")
        outer = launch.call.starter
        if option is None or nodes is None or not (option.value or "").isdecimal() or not outer.in_loop:
            continue
        if outer.program not in ("srun", "ssh") or outer.after != "&" or outer.in_function or outer.branch:
            continue
        written = re.match(r"--\w+[= ]+[\"']*\$\{?(\w+)", job.text[option.arg.offset : option.arg.offset + 60])
        if written and re.search(rf"(?:\blet\s|\(\(|\bexpr\b|\bread\b)[^\n]*\b{written[1]}\b", job.text):
            continue  # the loop counts it
        several = job.number(nodes.value)
        if (several is None or several > 1) and launch.call.program != "deepspeed" and not launch.open_ended:
            text = f"{option.written} is {option.value} in every run of the loop"
            yield Violation(
                option.arg.offset, text, why=EQUAL_WHY, cure="a number that the loop counts: rank=$((rank + 1))"
            )


# ---------------------------------------------------------------------- LLaMA-Factory

FACTORY_WHY = "llamafactory-cli starts torchrun with NNODES, NODE_RANK and MASTER_ADDR of the environment: every node needs its own start and its own rank."


def _factory_calls(job: JobDescription) -> Iterator[tuple[ProgramCall, int]]:
    """Yield the calls of llamafactory-cli that start ranks on several nodes, with the number of nodes."""
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program != "llamafactory-cli" or words[:1] != ["train"] or call.in_substitution:
            continue
        told = _of_environment(job, call, "NNODES")
        nodes = job.number(told[-1].value) if told else None
        if nodes and nodes > 1:
            yield call, nodes


def _of_environment(job: JobDescription, call: ProgramCall, name: str) -> list[Assignment]:
    own = [a for c in (call, *call.under) for a in c.prefix if a.name == name]
    inside = [a for a in job.set_values(name) if a.under and a.under[0] in call.under]
    return own or inside or exported_before(job, name, call)


def factory_alone(job: JobDescription) -> Iterator[Violation]:
    """Report llamafactory-cli for several nodes in the batch script, which runs on the first one."""
    for call, nodes in _factory_calls(job):
        if job.is_batch and job.multi_node and not call.under and not (call.in_loop or call.in_function or job.submits):
            text = f"llamafactory-cli for {nodes} nodes runs on the first one only"
            yield Violation(
                call.offset,
                text,
                why=FACTORY_WHY,
                cure="srun bash -c 'NODE_RANK=$SLURM_NODEID ... llamafactory-cli train ...'",
            )


def factory_rank(job: JobDescription) -> Iterator[Violation]:
    """Report llamafactory-cli for several nodes without a rank, or with one that does not exist."""
    for call, nodes in _factory_calls(job):
        rank = _of_environment(job, call, "NODE_RANK")
        cure = "NODE_RANK=$SLURM_NODEID, expanded in each task"
        if not rank and call.srun is not None and not job.sources_files and not call.in_loop:
            text = f"llamafactory-cli for {nodes} nodes without NODE_RANK"
            yield Violation(call.offset, text, why=FACTORY_WHY, cure=cure)
        elif rank and rank[-1].value.isdecimal() and int(rank[-1].value[:6]) >= nodes:
            text = f"NODE_RANK={rank[-1].value} with {nodes} nodes: ranks count from 0"
            yield Violation(rank[-1].offset, text, why=FACTORY_WHY, cure=f"0 to {nodes - 1}")


# --------------------------------------------------------------------------- counts of CPUs

CPUS = lazy_regex(r"\$\{?SLURM_CPUS_(?:PER_TASK|ON_NODE)\}?|\$\(nproc(?:\s+--all)?\)|`nproc(?:\s+--all)?`")
NO_GPU_WHY = "jsrun gives its resource sets no GPU unless -g asks for some: CUDA finds no device."
USES_GPUS = lazy_regex(r"(?i)gpu|cuda|ddp|horovod|nccl")


def cpus_as_ranks(job: JobDescription) -> Iterator[Violation]:
    """Report as many ranks per node as CPUs in a job of GPUs, and jsrun without GPUs for a program that is told some."""
    for launch in job.launches:
        option = launch.option("nproc_per_node", "num_gpus")
        if option and job.gpus_per_node and CPUS.fullmatch(option.plain_value):
            cpus = job.number(job.heads("cpus-per-task"))
            if cpus != job.gpus_per_node:
                text = f"{option.written} counts CPUs, but the job requests {job.gpus_per_node} GPUs per node"
                yield Violation(option.arg.offset, text, cure=f"{job.gpus_per_node}, or gpu")
    for call in job.calls:
        starter = call.under[-1] if call.under else None
        if starter is None or starter.program != "jsrun" or not PYTHON.match(call.program) or starter.has_open_options:
            continue
        asked = any(re.match(r"-g|--gpu_per_rs|-U|--erf_input|-E|--rs_per_host=\$|-f", a.text) for a in starter.args)
        if not asked and any(USES_GPUS.search(a.text) for a in call.args):
            yield Violation(
                starter.offset,
                "jsrun without -g: its processes see no GPU",
                why=NO_GPU_WHY,
                cure="-g 1, for each resource set",
            )


# ------------------------------------------------------------------------------- addresses

NODE_RECORD = lazy_regex(r"scontrol\s+(?:-\w+\s+)*show\s+nodes?\b")
RECORD_WHY = "scontrol show node prints the node's record, which begins with NodeName=: that is no address."


def node_record(job: JobDescription) -> Iterator[Violation]:
    """Report the record of a node as an address."""
    for item in job.assignments:
        if re.fullmatch(r"(?i)\w*(?:ADDR|HEAD_NODE|MASTER_NODE|MASTER_HOST|MASTER)", item.name) and NODE_RECORD.search(
            item.value
        ):
            if not re.search(r"grep|awk|sed|cut|perl|python|\btr\b|-o\b", item.value):
                text = f"{item.name} is the record of a node, not its name"
                yield Violation(
                    item.offset, text, why=RECORD_WHY, cure='scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1'
                )
