"""Rules for what a script prepares and no program gets: a launcher that nothing runs, and a shell that ends with what it sets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON, SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------ a launcher that nothing runs

NOT_RUN_WHY = "The variable is only a text: the program starts as one process, and the launcher's ranks never run."
LAUNCHER_TEXT = lazy_regex(
    r"(?:\S*/)?(?:torchrun|accelerate\s+launch|deepspeed|python[\d.]*(?:\s+-u)?\s+-m\s+(?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch))(?=\s|\Z)"
)


def launcher_not_run(job: JobDescription) -> Iterator[Violation]:
    """Report ``cmd="torchrun ..."`` that nothing uses, above ``python train.py`` in a job of several GPUs."""
    if not job.is_job or job.launches or job.submits or job.sources_files or len(job.work) != 1:
        return
    call, several = job.work[0], (job.gpus_per_node or 1) > 1 or (job.nodes or 1) > 1
    if not several or not PYTHON.match(call.program) or call.under or call.prefix or call.in_function:
        return
    for item in job.assignments:
        if item.offset > call.offset or item.exported or item.under or not LAUNCHER_TEXT.match(item.value):
            continue
        if not re.search(rf"(?<![\w-]){item.name}\b(?!\+?=)", job.code):
            text = f"{call.program} runs without the launcher in {item.name}, which nothing uses: one process"
            yield Violation(
                call.offset, text, why=NOT_RUN_WHY, cure=f"${item.name} {call.args[0].text if call.args else '...'}"
            )
            return


# ------------------------------------------------------------------------ a shell that only sets variables

STARTERS = {"srun", "mpirun", "mpiexec", "mpiexec.hydra", "jsrun", "aprun", "prun", "pdsh"}
DEFINED = lazy_regex(r"-l?c[ \t]+\"\$\(declare -f (\w+)\)[ \t]*;[ \t]*\1[ \t]*;?\"")
SETS = lazy_regex(r"(?:export[ \t]+|local[ \t]+)?[A-Za-z_]\w*(?:=\S.*)?|echo\b.*|#.*|")


def only_sets(job: JobDescription) -> Iterator[Violation]:
    """Report ``srun bash -c "export X=1"``: the shell ends with its variables, and no program gets them."""
    own = [c.offset for c in job.calls if not c.under and not c.in_substitution]
    for call in job.calls:
        starters = {c.program for c in call.under}
        if call.program not in SHELLS or not starters or not starters <= STARTERS or call.in_substitution:
            continue
        if call.after in ("|", "|&", "&&", "||") or call.redirects or not any(p > call.offset for p in own):
            continue
        inner = {a.name: a for a in job.assignments if call in a.under and a.exported and not a.removed}
        names = [*inner] if not any(call in c.under for c in job.calls) else _set_by_function(job, call)
        if names:
            text = f"{names[0]} is set in a shell that ends at once: the programs below do not get it"
            yield Violation(
                call.starter.offset, text, cure="export it in the script itself, or start the program in the same shell"
            )


def _set_by_function(job: JobDescription, call: ProgramCall) -> list[str]:
    """Return what a function sets that is all that the shell runs: ``bash -c "$(declare -f f); f"``."""
    found = DEFINED.search(job.line_of(call.offset))
    body = (
        re.search(rf"(?ms)^[ \t]*(?:function[ \t]+)?{found[1]}[ \t]*\(\)[ \t]*\{{\s*$(.*?)^[ \t]*\}}", job.text)
        if found
        else None
    )
    lines = [line.strip() for line in body[1].splitlines()] if body else []
    if not lines or not all(SETS.fullmatch(line) for line in lines):
        return []
    return [m[1] for line in lines if (m := re.match(r"export[ \t]+([A-Za-z_]\w*)", line))]
