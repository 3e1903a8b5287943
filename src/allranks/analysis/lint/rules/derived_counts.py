"""Rules for counts that a script derives: totals where those of a node belong, variables of steps, and lists of CPU masks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from allranks.analysis.lint.command_options import slurm_option, slurm_options, srun_end
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, VariableUse, Violation
from allranks.analysis.lint.rules.dataflow import GUARDS
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------- totals for each node

TOTAL_WHY = "The launcher starts this number on every node: ranks without a GPU stop with 'invalid device ordinal'."
NODES_WORD = lazy_regex(
    r"(?:SLURM_(?:JOB_)?)?N(?:UM(?:BER)?)?_?(?:OF_?)?(?:NODES?|HOSTS?|MACHINES?)|NODES?(?:_?(?:COUNT|NUM|SIZE))?|(?:MACHINES?|HOSTS?)_?(?:COUNT|NUM)|COUNT_?NODES?|WORKER_?NUM",
    re.IGNORECASE,
)
PRODUCT = lazy_regex(r"\$(?:\(\(|\[|\(expr\s)\s*([\w${}]+)\s*\\?['\"]?\*['\"]?\s*([\w${}]+)\s*(?:\)\)|\]|\))")


def total_per_node(job: JobDescription) -> Iterator[Violation]:
    """Report nodes times GPUs, calculated by the script, as the ranks of each node."""
    for launch in job.launches:
        option = launch.option("nproc_per_node", "num_gpus")
        found = PRODUCT.fullmatch((option.value or "").strip("\"'")) if option else None
        if option is None or found is None or launch.value("nnodes", "num_nodes") == "1" or job.nodes == 1:
            continue
        names = [part.strip("${}") for part in found.groups()]
        counts = [name for name in names if NODES_WORD.fullmatch(name) and job.number(f"$(({name}))") != 1]
        if len(counts) == 1 and job.number(option.value) is None:
            text = f"{option.written} is the total of all nodes ({counts[0]} times the GPUs of one), not of each"
            yield Violation(option.arg.offset, text, why=TOTAL_WHY, cure="the GPUs per node")


# ------------------------------------------------------------------- variables of a step

STEP_WHY = "Slurm sets it for the tasks of srun only. The batch script is no such task: the variable is empty there."
STEP_NAMES = {
    "SLURM_STEP_GPUS": "SLURM_JOB_GPUS, or SLURM_GPUS_ON_NODE for their number", "SLURM_STEP_NUM_TASKS": "SLURM_NTASKS",
    "SLURM_STEP_NUM_NODES": "SLURM_JOB_NUM_NODES", "SLURM_STEP_NODELIST": "SLURM_JOB_NODELIST", "SLURM_STEP_TASKS_PER_NODE": "SLURM_TASKS_PER_NODE",
}  # fmt: skip


def of_step(job: JobDescription) -> Iterator[Violation]:
    """Report variables of a step that the batch script itself reads."""
    if not job.is_batch or job.sources_files or re.search(r"\bsrun\b[^\n]*\$\{?(?:0|BASH_SOURCE)", job.text):
        return
    said: set[str] = set()
    for use in job.uses:
        if use.name not in STEP_NAMES or use.name in said or job.has(use.name) or not _by_batch_shell(use):
            continue
        said.add(use.name)
        if not _guarded(job, use.name):
            text = f"${use.name} is never set in the batch script"
            yield Violation(use.offset, text, why=STEP_WHY, cure=f"${STEP_NAMES[use.name]}")


def _by_batch_shell(use: VariableUse) -> bool:
    return not use.in_function and all(c.program not in ("srun", "bash", "sh", "ssh") for c in use.under)


def _guarded(job: JobDescription, name: str) -> bool:
    return any(
        u.name == name and (u.operator.startswith(GUARDS) or u.program in ("[", "[[", "test", "printenv"))
        for u in job.uses
    )


# ------------------------------------------------------------------- CPU masks

MASKS_WHY = (
    "srun gives the first of them to the first task of a node, and so on. Ranks that one task starts share the CPUs of this task; "
    "if there are fewer masks than tasks, they are used again, and several tasks share the CPUs of one."
)
MASKS = lazy_regex(r"(?:verbose,|quiet,|v,|q,)*(mask_cpu|map_cpu):([\da-fx]+(?:[,][\da-fx]+)*)", re.IGNORECASE)


def masks(job: JobDescription) -> Iterator[Violation]:
    """Compare the list of CPU masks with the tasks of a node."""
    for call in _sruns(job):
        option = slurm_options(call).get("cpu-bind")
        found = MASKS.fullmatch((option.value or "").strip("\"'")) if option else None
        tasks = job.tasks_per_node(call) if found and not _has_more(call) else None
        if option is None or found is None or not tasks:
            continue
        listed = found[2].split(",")
        ranks = max(
            (job.number(la.local_ranks) or 0 for la in job.launches if la.srun and la.srun.offset == call.offset),
            default=0,
        )
        meant = ranks > 1 or len(listed) == job.gpus_per_node
        if tasks == 1 and len(set(listed)) > 1 and meant and found[1].lower() == "mask_cpu":
            shares = f"its {ranks} ranks share" if ranks > 1 else "it gets"
            text = f"{len(listed)} CPU masks, but one task per node: {shares} the CPUs of the first mask"
            yield Violation(
                option.arg.offset, text, why=MASKS_WHY, cure="one mask of all CPUs, or a task for each rank"
            )
        elif len(set(listed)) == len(listed) and tasks > len(listed):
            text = f"{len(listed)} CPUs or masks for {tasks} tasks per node: several tasks share one"
            yield Violation(option.arg.offset, text, why=MASKS_WHY, cure="one for each task")


def _has_more(call: ProgramCall) -> bool:
    """Return whether some of the options are unknown: an open word that is not the value of an option."""
    before = [False, *(slurm_option(a.text)[2] for a in call.args)]
    return any(a.is_open and not value for a, value in zip(call.args, before, strict=False))


def _sruns(job: JobDescription) -> Iterator[ProgramCall]:
    """Yield every srun with the options of its own."""
    seen: set[int] = set()
    for call in job.calls:
        for outer in (call, *call.under):
            if outer.program == "srun" and outer.offset not in seen and not outer.in_substitution:
                seen.add(outer.offset)
                yield msgspec.structs.replace(outer, args=outer.args[: srun_end(outer.args)])


# ------------------------------------------------------------------- directives that are all comments

COMMENTED = lazy_regex(r"#[ \t]+SBATCH[ \t]+--?[A-Za-z]")
COMMENTED_WHY = "sbatch reads a line only if it begins with #SBATCH: these are ordinary comments, and the job gets the defaults of the cluster."
LEAST_LINES = 2
REQUESTS = lazy_regex(r"--?(?:gres|gpus|nodes|ntasks|cpus-per-task|mem|time|N|n|t|c|G|array)\b")


def all_commented(job: JobDescription) -> Iterator[Violation]:
    """Report ``# SBATCH`` in a script that has no other line for a batch system."""
    if job.is_job or job.kind != "script" or not job.source.text.startswith("#!"):
        return
    if re.search(r"(?m)^\s*#+\s*(?:PBS|BSUB|COBALT|PJM|OAR|\$)\s+-|^#+SBATCH", job.text):
        return
    first = min((c.offset for c in job.calls), default=len(job.text))
    found = [
        c
        for c in job.reading.comments
        if c.offset < first and COMMENTED.match(c.text) and job.lines.place(c.offset)[1] == 1
    ]
    if len(found) >= LEAST_LINES and any(REQUESTS.search(c.text) for c in found):
        text = f"none of the {len(found)} '# SBATCH' lines is read: there is a blank behind the #"
        yield Violation(found[0].offset, text, why=COMMENTED_WHY, cure="#SBATCH without a blank")


# ------------------------------------------------------------------- counts of the wrong things

COUNTED = r"\$\{?(?:CUDA_VISIBLE_DEVICES|SLURM_(?:JOB|STEP)_GPUS|SLURM_(?:JOB_)?NODELIST|ROCR_VISIBLE_DEVICES)\}?"
ECHOED = rf"(?:echo|printf)[ \t]+(?:-n[ \t]+)?[\"']?{COUNTED}[\"']?"
WORDS = lazy_regex(rf"{ECHOED}[ \t]*\|[ \t]*wc[ \t]+-w|wc[ \t]+-w[ \t]*<<<[ \t]*[\"']?{COUNTED}")
COMMAS = lazy_regex(
    rf"{ECHOED}[ \t]*\|[ \t]*(?:tr[ \t]+-(?:cd|dc)[ \t]+[\"']?,[\"']?[ \t]*\|[ \t]*wc[ \t]+-[cm]"
    r"|grep[ \t]+-o[ \t]+[\"']?,[\"']?[ \t]*\|[ \t]*wc[ \t]+-l)[ \t]*[)`]"
)
LENGTH = lazy_regex(r"\$\{#(?:CUDA_VISIBLE_DEVICES|SLURM_JOB_GPUS)\}")
FILE_NAME = lazy_regex(
    r"(?:echo|printf)[ \t]+[\"']?\$\{?(?:PBS_NODEFILE|LSB_DJOB_HOSTFILE|PE_HOSTFILE|OAR_NODEFILE)\}?[\"']?[ \t]*\|[ \t]*"
    r"(?:(?:sort|uniq)[^|\n]*\|[ \t]*)*wc\b"
)
HEADER = lazy_regex(r"\bnvidia-smi\b([^|\n)`]*--format[= ]csv(?![\w,]*noheader)[^|\n)`]*)\|[ \t]*wc[ \t]+-l[ \t]*[)`]")
ASSIGNED = lazy_regex(r"(?m)^[ \t]*(?:(?:export|local|declare|readonly)[ \t]+)?(\w+)=[\"']?\Z")


def miscounted(job: JobDescription) -> Iterator[Violation]:
    """Report counts of GPUs that take a list with commas as words, its commas or characters, or the header of a table."""
    if job.kind != "script":
        return
    for pattern, text, cure in (
        (WORDS, "the list has commas and no blanks: wc -w counts one word", "tr ',' '\\n' | wc -l"),
        (COMMAS, "this counts the commas, which are one fewer than the elements", "tr ',' '\\n' | wc -l"),
        (LENGTH, "this is the number of characters of the list, not of its elements", "tr ',' '\\n' | wc -l"),
        (
            FILE_NAME,
            "this counts the one line with the file's name, not the lines of the file",
            "wc -l < $PBS_NODEFILE",
        ),
        (HEADER, "the first line is the header of the table: the count is one too high", "--format=csv,noheader"),
    ):
        for found in pattern.finditer(job.code):
            start = found.start()
            line = job.line_of(start)
            shown = re.match(r"[ \t]*(?:echo|printf|if|while|\[)", line)
            if job.in_comment(start) or shown or re.search(r"\(\(|\bexpr\b|\$\[|\blet\b|#SBATCH", line):
                continue
            before = ASSIGNED.search(job.code[: _substitution(job.code, start)])
            name = before[1] if before else None
            if name and _reduced(job.code, name):
                continue
            yield Violation(start, text, why=MISCOUNTED_WHY, cure=cure)
            return


MISCOUNTED_WHY = (
    "The launcher starts another number of ranks than the job has GPUs, or waits for nodes that do not exist."
)


def _substitution(text: str, start: int) -> int:
    """Return where the substitution begins in which a command stands."""
    opened = max(text.rfind("$(", 0, start), text.rfind("`", 0, start))
    return opened if opened >= 0 and "\n" not in text[opened:start] else start


def _reduced(text: str, name: str) -> bool:
    """Return whether the script calculates with the number, which may correct it."""
    return re.search(rf"\(\([^)\n]*\b{name}\b|\bexpr\b[^\n]*\b{name}\b|\blet\b[^\n]*\b{name}\b", text) is not None


# ------------------------------------------------------------------- what Slurm has chosen already

CHOSEN = lazy_regex(
    r"(?m)^[ \t]*(?:export[ \t]+)?(CUDA_VISIBLE_DEVICES)=[\"']?(?:\$\(|`)[ \t]*nvidia-smi\b[^\n]*(?:memory|utilization)[^\n]*\b(?:sort|head|awk)\b"
)
CHOSEN_WHY = (
    "Slurm has set CUDA_VISIBLE_DEVICES to the GPU of this job. Where nvidia-smi shows all GPUs of the node, this takes the one of another job; "
    "where it shows the one of the job only, there is nothing to choose."
)


def chosen_device(job: JobDescription) -> Iterator[Violation]:
    """Report the emptiest GPU of the node as the one that a job of one GPU takes."""
    if job.is_batch and job.gpus_per_node == 1 and (found := CHOSEN.search(job.code)):
        text = "the GPU with the most free memory replaces the one that Slurm has given to the job"
        cure = "remove it: Slurm sets CUDA_VISIBLE_DEVICES"
        yield Violation(found.start(1), text, why=CHOSEN_WHY, cure=cure, severity="note")


STEP_TASKS_WHY = "The job's --ntasks is in SLURM_NTASKS, which srun takes as its own --ntasks: it warns that it cannot honor --ntasks-per-node."


def step_per_node(job: JobDescription) -> Iterator[Violation]:
    """Report ``srun --ntasks-per-node`` with more tasks than the job's ``--ntasks`` leaves for a node."""
    total, nodes = job.number(job.heads("ntasks")), job.nodes
    for launch in job.launches:
        own = slurm_options(launch.srun) if launch.srun else {}
        option = own.get("ntasks-per-node")
        asked = job.number(option.value) if option else None
        if option is None or not asked or not total or not nodes or own.keys() & {"ntasks", "nodes"}:
            continue
        if launch.kind == "python" and asked > -(-total // nodes):
            text = f"srun starts {total} task{'s' * (total > 1)}, not {asked} per node: the job has --ntasks={total}"
            cure = f"srun --ntasks={asked * nodes} --ntasks-per-node={asked}; and as many in #SBATCH"
            yield Violation(option.arg.offset, text, why=STEP_TASKS_WHY, cure=cure)
            return
