"""Rules for what a script asks for or keeps without any use: signals that reach no process, a count of zero GPUs, failures that are counted."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON, SHELLS, slurm_options
from allranks.analysis.lint.job import ACCELERATORS, JobDescription
from allranks.analysis.lint.records import Directive, Violation
from allranks.analysis.lint.rules.arrays import numbers_of
from allranks.analysis.lint.rules.exit_codes import shell_flags
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------------------------- signals

NO_STEP_WHY = (
    "Without B: Slurm sends the signal to the steps of srun only. What the batch script starts itself is no step: it ends at the time "
    "limit without a warning."
)
NO_STEP_CURE = (
    "srun before the program; or #SBATCH --signal=B:USR1@<seconds>, a trap, and the program in the background with wait"
)
STARTS_STEPS = lazy_regex(
    r"\b(?:srun|mpirun|mpiexec(?:\.\w+)?|orterun|prun|ibrun|jsrun|yhrun|ccc_mprun|parsl|submitit|dask|scancel|salloc|julia)\b"
)


def signal_without_step(job: JobDescription) -> Iterator[Violation]:
    """Report ``--signal=USR1@90`` in a job that starts nothing with srun."""
    found = job.heading.get("signal")
    value = found.value if found else None
    if found is None or not value or found.late or job.submits:
        return
    if not re.fullmatch(r"(?:R:)?(?:SIG)?[A-Z0-9]+(?:@\d+)?", value, re.IGNORECASE) or STARTS_STEPS.search(job.code):
        return
    programs = [c for c in job.work_calls if not c.in_function and PYTHON.match(c.program)]
    programs += [la.call for la in job.launches]
    if programs and not any(c.program == "trap" for c in job.calls) and not _runs_scripts(job):
        text = f"--signal={value} reaches no process: it goes to the steps of srun, and the job has none"
        yield Violation(found.offset, text, why=NO_STEP_WHY, cure=NO_STEP_CURE)


def _runs_scripts(job: JobDescription) -> bool:
    """Return whether the job runs other scripts, which may start steps."""
    for call in job.calls:
        first = call.args[0].text if call.args and call.program in SHELLS else call.written
        if re.search(r"[\w}]\.(?:sh|bash|sbatch|slurm)\Z", first) and call.program not in ("source", "."):
            return True
    return False


# ---------------------------------------------------------------------------------------- zero GPUs

ZERO_WHY = "The number behind the colon is a count, and not the index of a GPU: the job gets none, and Slurm hides those of the node."
GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task")
NAMES_GPUS = lazy_regex(r"(?i)gpu|[avhp]100|v100|titan|rtx|dgx|cuda")
TELLS_GPUS = lazy_regex(r"(?i)#.*?(?<![\w.])(?:[1-9]\d?|an?|one|two|four|eight)[ \t]+(?:\w+[ \t]+)?gpus?\b")
CUDA_MODULE = lazy_regex(r"(?i)(?:\A|/)(?:cuda|cudnn|nccl|cudatoolkit|rocm|tensorflow-gpu|pytorch-gpu)(?:\Z|[/_-])")
GPU_PROGRAM = lazy_regex(
    r"(?i)(?:\A|[/_.-])(?:main|train\w*|finetune\w*|pretrain\w*|eval\w*|test|infer\w*|run)[^/]*\.py\Z"
)
DEVICE_OPTION = lazy_regex(r"--?(?:gpus?|gpu[-_]ids?|device|cuda(?:[-_]device)?)")


def zero_gpus(job: JobDescription) -> Iterator[Violation]:
    """Report ``--gres=gpu:0`` in a job for GPUs: on their partition, with a program that uses one."""
    if not job.is_batch or job.submits:
        return
    asked = [d for name in GPU_OPTIONS if (d := job.heading.get(name)) and not d.late]
    zero = next((d for d in asked if _counts(d) == [0]), None)
    if zero is None or any(count for d in asked for count in _counts(d)) or _steps_ask(job):
        return
    told = TELLS_GPUS.search(zero.text) is not None
    partition = f"{job.heads('partition') or ''} {job.heads('constraint') or ''}"
    programs = [c for c in job.work_calls if any(GPU_PROGRAM.search(a.text) for a in c.args)]
    if told or (NAMES_GPUS.search(partition) and programs and _uses_gpus(job)):
        text = f"--{zero.name}={zero.value} requests no GPU"
        yield Violation(zero.offset, text, why=ZERO_WHY, cure=f"--{zero.name}={_one(zero.value or '')}")


def _counts(item: Directive) -> list[int | None]:
    """Return the numbers of GPUs of a request, None for one that is unknown; empty if it is not about GPUs."""
    kinds = (item.value or "").removeprefix("gres/").split(",")
    found: list[int | None] = []
    for kind in kinds:
        if item.name == "gres" and not ACCELERATORS.match(kind):
            continue
        last = kind.rpartition(":")[2]
        found.append(int(last) if last.isdecimal() and len(last) < 9 else None if "$" in kind else 1)
    return found


def _one(value: str) -> str:
    return re.sub(r"(\A|:)0+(?=\Z|,)", r"\g<1>1", value)


def _steps_ask(job: JobDescription) -> bool:
    return any(slurm_options(c).keys() & set(GPU_OPTIONS) for c in job.calls if c.program in ("srun", "salloc"))


def _uses_gpus(job: JobDescription) -> bool:
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program == "nvidia-smi" or (call.program in ("module", "ml") and any(map(CUDA_MODULE.search, words))):
            return True
        if any(w in ("--nv", "--rocm") for w in words):
            return True
    visible = any(re.fullmatch(r"\d+(?:,\d+)*", a.value) for a in job.set_values("CUDA_VISIBLE_DEVICES"))
    device = (
        DEVICE_OPTION.fullmatch(a.text) and n is not None and re.match(r"\d|cuda", n.text)
        for c in job.work_calls
        for a, n in c.pairs()
    )
    return visible or any(device)


# ------------------------------------------------------------------------------------ counted failures

COUNTED_WHY = "Nothing reads the number: the script ends with the exit code of its last command, and the job is reported as COMPLETED."
FAILURE_NAME = lazy_regex(
    r"(?i)(?:\w*_)?(?:n|num|total|any|all|overall|global|final|has|some)?_?"
    r"(?:fail(?:s|ed|ures?)?|err(?:s|ors?)?|rvs?|rcs?|ret(?:val|code|s)?|exit_?(?:code|status|stat)?|status)"
    r"(?:_(?:count|code|sum|total|flag|status))?"
)
INCREMENTS = (
    r"\(\([ \t]*NAME[ \t]*(?:\+\+|\+=)",
    r"\(\([ \t]*\+\+NAME[ \t]*\)\)",
    r"\blet[ \t]+[\"']?NAME[ \t]*(?:\+\+|\+=)",
    r"NAME=\$\(\([^\n)]*\bNAME\b[^\n]*\)\)",
    r"NAME=\$\[[^\n\]]*\bNAME\b",
    r"NAME\+=\(",
    r"NAME=(?:`|\$\()expr[ \t][^\n]*\bNAME\b",
)


def counted_failures(job: JobDescription) -> Iterator[Violation]:
    """Report failures that a script counts, and never looks at."""
    if not (job.is_job or job.work) or shell_flags(job)[0]:
        return
    for found in re.finditer(
        r"(?m)^[ \t]*(?:local[ \t]+|declare[ \t]+(?:-\w+[ \t]+)?)?([A-Za-z_]\w*)=(?:0|\(\))[ \t]*(?:;|$)", job.code
    ):
        name = found[1]
        if not FAILURE_NAME.fullmatch(name) or name in job.reading.exported:
            continue
        increment = "|".join(INCREMENTS).replace("NAME", re.escape(name))
        first = re.search(increment, job.code[found.end() :])
        rest = re.sub(increment, "", job.code[found.end() :])
        again = rf"(?m)(?:^|;)[ \t]*(?:local[ \t]+|export[ \t]+)?{re.escape(name)}=(?:0|1|\(\))(?=[ \t]*(?:;|$))"
        if first and not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", re.sub(again, "", rest)):
            place = found.end() + first.start()
            text = f"{name} counts failures, and nothing reads it: the job ends as if there were none"
            yield Violation(place, text, why=COUNTED_WHY, cure=f'exit "${name}" as the last line')
            return


# --------------------------------------------------------------------------------- choices in comments

SAME_TASKS_WHY = "The line that gives each task a value of its own is a comment: all tasks run with the same one, and do the same work."
CHOICE = lazy_regex(
    r"#+[ \t]*([A-Za-z_]\w*)=(?:[^\s\[]*\[[^\s\]]*|\$\((?:sed|head)[^\n]*|`(?:sed|head)[^\n]*)\$?\{?SLURM_ARRAY_TASK_ID\b"
)
OUTPUT_NAME = lazy_regex(r"(?i)name|dir|path|save|log|out|exp|result|suffix|tag|folder|run")
NAMED_LINE = lazy_regex(
    r"[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=\S*[ \t]*(?:#.*)?\Z|.*?(--?[\w-]+)[= ]\S*\bSLURM_ARRAY_TASK_ID\b"
)


def choice_in_comment(job: JobDescription) -> Iterator[Violation]:
    """Report a job array whose choice of a value by the task's number is a comment, below which every task gets one value."""
    numbers = numbers_of(job.heads("array"))
    chosen = {m[1] for c in job.reading.comments if (m := CHOICE.match(c.text))}
    if len(numbers) < 2 or job.submits or not chosen:
        return
    for line in job.code.split("\n"):
        if "SLURM_ARRAY_TASK_ID" not in line or re.match(r"[ \t]*(?:echo|printf)\b", line):
            continue
        found = NAMED_LINE.match(line)
        if found is None or not OUTPUT_NAME.search(found[1] or found[2]) or re.search(r"\[[^\]]*ARRAY_TASK", line):
            return
    items = [a for name in sorted(chosen) for a in job.by_name.get(name, [])]
    if all(_is_plain(a.value) for a in items) and {a.name for a in items} == chosen:
        text = f"{items[0].name} is the same in all {len(numbers)} tasks of the array: its choice by the task's number is a comment"
        cure = "#SBATCH --array=<one number>; or the line of the comment"
        yield Violation(items[0].offset, text, why=SAME_TASKS_WHY, cure=cure)


def _is_plain(value: str) -> bool:
    return re.fullmatch(r"[\w./+:-]+", value) is not None
