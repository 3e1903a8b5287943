"""Rules for commands that keep a script from its work, and for ranks and GPUs that all nodes or programs share."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON, slurm_options
from allranks.analysis.lint.job import JobDescription, count_gpus
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules.ports import backend
from allranks.analysis.lint.rules.tasks import SEVERAL_WHY

# ------------------------------------------------------------------------- commands before the work


def asks_more(job: JobDescription) -> Iterator[Violation]:
    """Report a question of accelerate, or of the script itself, in a batch job."""
    if not job.is_job:
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        if (
            call.in_substitution
            or call.before in ("|", "|&")
            or call.in_function
            or any(r.operator.startswith("<") for r in call.redirects)
        ):
            continue
        if call.program == "accelerate-other" and "config" in job.line_of(call.offset).split() and not words:
            yield Violation(
                call.offset,
                "accelerate config asks its questions at the terminal",
                cure="accelerate config default, or --config_file",
            )
        elif (
            call.program == "read"
            and any(re.fullmatch(r"-\w*p\w*", w) for w in words)
            and not call.tested
            and not call.under
        ):
            yield Violation(
                call.offset, "read -p waits for an answer, and gets an empty one", cure="an argument of the script"
            )


# ------------------------------------------------------------------------------- ranks of the nodes

SAME_RANK_WHY = "Every node gets the same rank: they never form a group, or all believe that they are the first."
SAME_RANK_CURE = "srun bash -c '... --node_rank=$SLURM_NODEID ...' in single quotes"


def same_rank(job: JobDescription) -> Iterator[Violation]:
    """Report a node rank that is 0, or another constant, on every node."""
    if not job.multi_node:
        return
    for launch in job.launches:
        option = launch.option("node_rank", "machine_rank")
        nodes = job.srun_nodes(launch.srun) if launch.srun else None
        if (
            option is None
            or not option.value
            or launch.srun is None
            or (nodes or 2) < 2
            or launch.srun.in_loop
            or launch.call.in_loop
        ):
            continue
        if (
            backend(launch) != "static"
            or launch.srun.after == "&"
            or slurm_options(launch.srun).keys() & {"nodelist", "relative"}
        ):
            continue
        value = option.value.strip("\"'")
        default = re.fullmatch(r"\$\{([A-Za-z_]\w*):?-0\}", value)
        wrong = None
        if re.fullmatch(r"\$\{?SLURM_LOCALID(?::-0)?\}?", value):
            wrong = "$SLURM_LOCALID is the number of the task on its node: 0 on every node"
        elif (
            default
            and not default[1].startswith("SLURM_")
            and not job.has(default[1])
            and default[1] not in job.reading.named
        ):
            wrong = f"nothing sets ${default[1]}, so it is 0 on every node"
        elif value in ("$(echo $SLURM_NODEID)", "$(echo $SLURM_PROCID)") and not any(
            "SLURM_" in u.name and u.under for u in job.uses
        ):
            wrong = f"{value} is expanded by the batch shell, where it is 0"
        elif re.match(r"\$\(\s*hostname\b", value) and not any(c.program == "hostname" and c.srun for c in job.calls):
            wrong = f"{value} is expanded by the batch shell, on the first node"
        if wrong:
            yield Violation(
                option.arg.offset,
                f"{option.arg.text.partition('=')[0]}: {wrong}",
                why=SAME_RANK_WHY,
                cure=SAME_RANK_CURE,
            )


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


# ------------------------------------------------------------------------------------ GPUs not used

DEVICES = re.compile(
    r"(?:\+{0,2}(?:\w+\.)*)?(?:devices|gpus|num_gpus|n_gpus?|ngpus?|num_devices|gpu_num|gpu_count)=(\d{1,2})"
)
NGPU = re.compile(r"--?(?:ngpus?|num[-_]?gpu|gpu[-_]?(?:num|count)|num[-_]?devices)(?:=(\d{1,2}))?")


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
            yield Violation(arg.offset, f"{shown}, but the job requests {gpus} GPUs per node: the others are idle")
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
