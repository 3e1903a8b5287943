"""Rules for names: variables that nothing reads, values that no program gets, commands that do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules.variables import edits

# --------------------------------------------------------------------------- unset NAME=value

LIBRARY_NAME = re.compile(
    r"(?:NCCL|CUDA|TORCH|OMP|MKL|MASTER|SLURM|WANDB|HF|PYTHON|LD|GLOO|TF|TRANSFORMERS|ROCR|HIP)_?[A-Z_]*"
)
UNSET_WHY = "unset takes names: anything else is 'not a valid identifier', and the variable keeps its value."


def unset_value(job: JobDescription) -> Iterator[Violation]:
    """Report ``unset NAME=value`` and ``unset $NAME``."""
    for item in job.assignments:
        if item.removed and (found := re.match(r"([A-Za-z_]\w*)=", item.name)):
            text = f"unset {item.name[:60]}: nothing is unset"
            yield Violation(item.offset, text, why=UNSET_WHY, cure=f"unset {found[1]}")
    for found in re.finditer(r"(?m)^[ \t]*unset[ \t]+(?:-v[ \t]+)?(\$\{?(\w+)\}?)(?=[ \t]*(?:$|#|;))", job.text):
        if LIBRARY_NAME.fullmatch(found[2]) and not job.in_comment(found.start(1)) and not _is_set_plain(job, found[2]):
            text = f"unset {found[1]} unsets the variable that the value of {found[2]} names"
            yield Violation(found.start(1), text, why=UNSET_WHY, cure=f"unset {found[2]}")


def _is_set_plain(job: JobDescription, name: str) -> bool:
    return any(re.fullmatch(r"[A-Za-z_]\w*", a.value) for a in job.by_name.get(name, ()))


# ------------------------------------------------------------------------- misspelt commands

FREQUENT = (
    "exit", "export", "module", "source", "srun", "python", "python3", "echo", "conda", "mamba", "mkdir", "unset", "sleep", "wait", "torchrun",
    "accelerate", "deepspeed", "sbatch", "scontrol", "hostname", "nvidia-smi", "ulimit", "touch", "tail", "return", "break", "continue", "mpirun",
    "singularity", "apptainer", "bash", "chmod", "printf", "squeue", "scancel", "rsync", "unzip", "activate",
)  # fmt: skip
# Programs that exist, or functions that sourced files define, and that are nearly one of the above.
EXISTING = {
    "exec", "expr", "exif", "expand", "node", "mode", "modules", "sources", "jsrun", "lrun", "aprun", "prun", "run", "python2", "pythonw", "ipython",
    "bpython", "condor", "reset", "watch", "salloc", "sbcast", "sattach", "hostid", "limit", "mail", "fail", "bail", "dash", "hash", "mpiexec",
    "mpicc", "print", "sprintf", "queue", "cancel", "sync", "gunzip", "exist", "lmod", "deactivate", "reactivate", "sinfo", "sacct", "trail",
    "exports", "await", "hostnamectl", "rails", "batch", "sbatchd", "breaks", "text", "test", "next", "init", "edit", "quit", "main",
}  # fmt: skip
GLUED = re.compile(
    r"(?:exit|sleep|wait|echo|cd|export)\d+|cd\.\.|(?:pip3?|conda)install|moduleload|condaactivate|sourceactivate"
)
LONGEST_EXIT = 10
LONG_COMMAND = 8


def misspelt_commands(job: JobDescription) -> Iterator[Violation]:
    """Report commands that are one letter, or for long names two, from a usual one, and that nothing defines."""
    if not (job.is_job or job.text.startswith("#!")):
        return
    defined = set(re.findall(r"(?m)^\s*(?:function\s+)?([\w-]+)\s*\(\)|^\s*function\s+([\w-]+)", job.text))
    names = {name for pair in defined for name in pair} | set(re.findall(r"\balias\s+([\w-]+)=", job.text))
    known: dict[str, str | None] = {}
    for call in job.calls:
        word = call.written
        if word in names or call.in_substitution or not re.fullmatch(r"[A-Za-z][\w.-]{2,14}", word):
            continue
        if any(c.program not in ("srun", "time", "env") for c in call.under):
            continue
        if word not in known:
            known[word] = _command_meant(word)
        meant = known[word]
        if meant and word in job.text[call.offset : call.offset + len(word)]:
            yield Violation(call.offset, f"{word}: there is no such command; {meant} was probably meant", cure=meant)


def _command_meant(word: str) -> str | None:
    if word in FREQUENT or word in EXISTING:
        return None
    if GLUED.fullmatch(word):
        return re.sub(r"(\d+|\.\.|install|load|activate)\Z", r" \1", word)
    if (
        word.lower() in FREQUENT
        and word != word.lower()
        and (not word.isupper() or word in ("EXPORT", "SOURCE", "ECHO", "MODULE", "SRUN"))
    ):
        return word.lower()
    if not re.fullmatch(r"[a-z][a-z_-]+", word):
        return None
    if (
        word.startswith("exit")
        and "exit" != word <= "exit" + "z" * LONGEST_EXIT
        and "_" not in word
        and "-" not in word
    ):
        return "exit"
    near = [u for u in FREQUENT if len(word) > 3 and edits(word, u, 1) == 1 and not word.endswith(u)]
    near += [u for u in FREQUENT if len(u) >= LONG_COMMAND and edits(word, u, 2) == 2 and word[0] == u[0]]
    return near[0] if near else None
