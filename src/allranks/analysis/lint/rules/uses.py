"""What becomes of a variable where it is used: whether anything depends on its value."""

from __future__ import annotations

import re

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import VariableUse


def of_one_task(job: JobDescription, use: VariableUse) -> bool:
    """Return whether the use is in the command of an srun of one task, whose number is 0."""
    steps = [c for c in job.calls if c.program == "srun" and c.offset <= use.offset and not c.in_substitution]
    if job.nodes != 1 or use.program != "srun" or not steps:
        return False
    return job.tasks_per_node(max(steps, key=lambda c: c.offset)) == 1


def is_only_shown(job: JobDescription, name: str) -> bool:
    """Return whether the variable is only printed, or passed to scontrol, which then takes the job's own list."""
    uses = [u for u in job.uses if u.name == name]
    for use in uses:
        before = [c for c in job.calls if c.offset <= use.offset and c.program == use.program.rpartition("/")[2]]
        call = max(before, key=lambda c: c.offset, default=None)
        if call is None or use.under or use.in_redirect:
            return False
        printed = call.program in ("echo", "printf") and not (
            call.in_substitution or call.after in ("|", "|&") or any(r.operator != ">&" for r in call.redirects)
        )
        lists = call.program == "scontrol" and "NODELIS" in name and any("hostname" in a.text for a in call.args)
        if not printed and not lists:
            return False
    return bool(uses)


def is_read(job: JobDescription, use: VariableUse, by_programs: re.Pattern[str]) -> bool:
    """Return whether the value goes to a command, or to a variable that something in the script uses."""
    if use.program not in ("=", "export", "declare"):
        return True
    before = [a for a in job.assignments if a.offset < use.offset and not a.under]
    target = max(before, key=lambda a: a.offset, default=None)
    return target is None or target.name in job.used_names or bool(by_programs.match(target.name))
