"""Rules for programs that are told which launcher starts them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, ProgramCall, Violation

LAUNCHER_WHY = (
    "The program takes its rank and the number of ranks from what the launcher sets, which is missing here: it stops, or waits for ranks "
    "that nothing starts."
)
HARMLESS_STARTERS = {"time", "nohup", "env", "singularity", "apptainer", "stdbuf", "numactl", "nice", "exec"}


def _told(call: ProgramCall) -> tuple[str, Argument] | None:
    for arg, following in call.pairs():
        name, equals, value = arg.text.partition("=")
        if name == "--launcher":
            return (value if equals else following.text if following else "").strip("\"'"), arg
    return None


def told_launcher(job: JobDescription) -> Iterator[Violation]:
    """Report ``python train.py --launcher slurm`` without srun, and ``--launcher pytorch`` without torchrun."""
    if not job.is_batch or job.submits:
        return
    for call in job.calls:
        told = _told(call) if PYTHON.match(call.program) and not call.in_substitution else None
        if told is None or call.module or {c.program for c in call.under} - HARMLESS_STARTERS:
            continue
        kind, arg = told
        tasks = job.number("$SLURM_NTASKS") or 1
        if kind == "slurm" and tasks > 1:
            text = f"--launcher slurm without srun: one process runs, and {tasks} ranks are expected"
            yield Violation(arg.offset, text, why=LAUNCHER_WHY, cure="srun python ... --launcher slurm")
        elif kind == "pytorch" and not job.sources_files and not re.search(r"\bRANK=", job.text):
            text = "--launcher pytorch without torchrun: nothing sets RANK and WORLD_SIZE"
            yield Violation(
                arg.offset, text, why=LAUNCHER_WHY, cure="torchrun --nproc_per_node=<n> ... in place of python"
            )
