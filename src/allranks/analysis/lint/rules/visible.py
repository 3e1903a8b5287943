"""Rules for CUDA_VISIBLE_DEVICES of tasks, loops and programs side by side, and for ports in options that nobody may use."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules.counts import DEVICE_NAME, LOCAL_VALUE
from allranks.analysis.lint.rules.starters import exported_before

NAME = "CUDA_VISIBLE_DEVICES"
NUMBERS = re.compile(r"\d{1,2}(?:,\d{1,2})*")
LAST_PORT, FIRST_FREE_PORT = 65535, 1024
ONE_WHY = "CUDA counts the visible GPUs from 0: with one of them, every other number is an invalid device ordinal."
SHARED_WHY = "Both programs run on this GPU at the same time: they share its memory and take turns."


def beyond_visible(job: JobDescription) -> Iterator[Violation]:
    """Report a device number that the program's own CUDA_VISIBLE_DEVICES leaves out."""
    for call in job.calls:
        if call.in_substitution or not PYTHON.match(call.program):
            continue
        own = [a for a in call.prefix if a.name == NAME]
        own = own or [a for a in exported_before(job, NAME, call) if a.under == call.under]
        if not own or len({a.value for a in job.set_values(NAME)}) > 1:
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
            text = f"{name} is {given}, but {NAME}={value} leaves {count} GPU{'s' * (count > 1)}, number{'s' * (count > 1)} 0{f' to {count - 1}' * (count > 1)}"
            yield Violation(arg.offset, text, why=ONE_WHY, cure="cuda:0", severity="error")
            break


def of_all_ranks(job: JobDescription) -> Iterator[Violation]:
    """Report a list that depends on the rank in the whole job, or is the same for all tasks of a node."""
    for item in job.set_values(NAME):
        srun = next((c for c in item.under if c.program == "srun"), None)
        if srun is None or item.offset < srun.offset or item.in_function:
            continue
        tasks, nodes = job.tasks_per_node(srun), job.srun_nodes(srun)
        if not tasks or tasks < 2:
            continue
        if re.fullmatch(r"\$\{?(?:SLURM_PROCID|RANK)\}?", item.value) and (nodes or 1) > 1:
            text = f"{NAME}={item.value} counts through all {nodes} nodes: from the second node on it names no GPU"
            yield Violation(item.offset, text, cure=f"{NAME}=$SLURM_LOCALID", severity="error")
        elif re.fullmatch(r"\d{1,2}", item.value) and job.has("MASTER_ADDR", "WORLD_SIZE", "MASTER_PORT"):
            text = f"{tasks} tasks per node all get {NAME}={item.value}"
            yield Violation(
                item.offset,
                text,
                why="NCCL refuses two ranks on one GPU ('Duplicate GPU detected').",
                cure=f"{NAME}=$SLURM_LOCALID",
            )


LOOP = re.compile(r"^[ \t]*for\s+(\w+)\s+in\s+((?:\d{1,2}[ \t]*)+|\{\d{1,2}\.\.\d{1,2}\})[ \t]*(?:;|$)", re.MULTILINE)


def of_loops(job: JobDescription) -> Iterator[Violation]:
    """Report a loop whose numbers, as GPUs, go beyond those of the job."""
    gpus = job.gpus_per_node
    if not gpus:
        return
    loops = {m[1]: m for m in LOOP.finditer(job.text)}
    for item in job.assignments:
        name = re.fullmatch(r"\$\{?(\w+)\}?", item.value)
        found = loops.get(name[1]) if name and item.name == NAME else None
        if found is None or found.start() > item.offset or len(LOOP.findall(job.text)) > len(loops):
            continue
        ends = [int(n) for n in re.findall(r"\d+", found[2])]
        if max(ends) >= gpus:
            text = f"{NAME} becomes {max(ends)}, but the job's {gpus} GPU{'s' * (gpus > 1)} have the numbers 0 to {gpus - 1}"
            yield Violation(item.offset, text, cure=f"for {found[1]} in {{0..{gpus - 1}}}")


def overlapping(job: JobDescription) -> Iterator[Violation]:
    """Report launchers side by side whose lists of GPUs overlap in part."""
    before: list[tuple[set[str], str, int]] = []
    for call in sorted(job.calls, key=lambda c: c.offset):
        if call.program == "wait":
            before = []
        own = [a for a in call.prefix if a.name == NAME]
        if not own or call.under or call.in_loop or call.in_function or call.in_substitution or call.branch:
            continue
        value = own[-1].value
        if not NUMBERS.fullmatch(value):
            continue
        mine = set(value.split(","))
        for other, text, place in before:
            both = mine & other
            if both and mine != other and place != own[-1].offset:
                message = f"GPU {min(both)} is in {NAME}={value}, and in {text} of line {job.lines.place(place)[0]}, which still runs"
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
        own = [a for a in launch.call.prefix if a.name == NAME] or exported_before(job, NAME, launch.call)
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
            text = f"{total} ranks, but {NAME}={own[-1].value} leaves {seen} GPU{'s' * (seen > 1)}"
            yield Violation(option.arg.offset, text)


def ports_of_options(job: JobDescription) -> Iterator[Violation]:
    """Report a port of a launcher that does not exist, or that only root may use."""
    for launch in job.launches:
        for name in ("master_port", "main_process_port", "rdzv_endpoint"):
            option = launch.option(name)
            digits = re.search(r"(?:\A|:)(\d{1,7})\Z", (option.value or "") if option else "")
            if option is None or digits is None:
                continue
            port = int(digits[1])
            shown = option.arg.text.partition("=")[0]
            if port > LAST_PORT:
                yield Violation(
                    option.arg.offset,
                    f"{shown}: {port} is above the last port, {LAST_PORT}",
                    cure="a port from 10000 to 32000",
                )
            elif 1 < port < FIRST_FREE_PORT:
                yield Violation(
                    option.arg.offset,
                    f"{shown}: only root may use port {port}",
                    cure="a port from 10000 to 32000",
                    severity="warning",
                )
