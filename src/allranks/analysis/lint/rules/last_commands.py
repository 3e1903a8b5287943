"""Rules for the last command of a job, whose exit code the batch system takes for that of the work."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.exit_codes import commands_after, is_looked_at, is_stored, name_of_work, shell_flags
from allranks.analysis.lint.rules.waiting import CHECKS_RESULTS, QUIET, RESULT_CURE, RESULT_WHY, server_awaited
from allranks.utils.text import lazy_regex

LAST_CURE = "rc=$? directly behind the work, and exit $rc as the last line; or set -e at the top"
TELLS = {
    "echo", "printf", "date", "hostname", "pwd", "uptime", "whoami", "free", "seff", "sacct", "squeue", "sstat", "nvidia-smi", "rocm-smi", "qstat",
    "deactivate", "popd", "times",
}  # fmt: skip
"""Commands that succeed, whatever became of the work."""
TELLS_WITH = {
    "conda": {"deactivate", "env", "info", "list"}, "mamba": {"deactivate"}, "micromamba": {"deactivate"}, "source": {"deactivate"}, ".": {"deactivate"},
    "scontrol": {"show"}, "pyenv": {"deactivate"}, "module": {"unload", "purge", "list", "rm"},
}  # fmt: skip
SERVES = lazy_regex(
    r"\bapi_server\b|\bserve\b|\bhttp\.server\b|\bjupyter\b|\bsglang\.launch_server\b|\btext-generation-launcher\b"
)
REMOVES_QUIETLY = lazy_regex(r"-\w*f\w*|--force")


def hides_result(job: JobDescription) -> Iterator[Violation]:
    """Report a job whose last command succeeds in any case: ``echo done``, ``date``, ``wait`` without a process.

    A note: of 33 such jobs that people had labelled, they took one for a mistake and 10 for correct.
    """
    if not job.is_job or job.submits:
        return
    errexit, _ = shell_flags(job)
    work = next((w for w in reversed(job.work) if not w.in_substitution and not _sets_up(w)), None)
    if errexit or work is None or work.in_function or work.tested or is_stored(job, work) or is_looked_at(job, work):
        return
    if work.after in ("||", "&&", "&", "|", "|&") or work.before in ("||", "|", "|&"):
        return
    later = commands_after(job, work)
    if later and later[-1].program == "exit" and not later[-1].args and not later[-1].branch:
        later = later[:-1]
    end = later[-1] if later else None
    if end is None or not _always_succeeds(job, end, later):
        return
    if end.branch or end.in_loop or end.tested or end.in_function or end.before in ("||", "&&", "|", "|&"):
        return
    if end.after in ("&", "||", "&&", "|", "|&") or any(c.program in ("exit", "return") for c in later):
        return
    words = " ".join([end.written, *(a.text for a in end.args[:1] if end.program not in ("echo", "printf", "date"))])
    text = f"the job ends with the exit code of '{words}', which is 0, even if {name_of_work(job, work)} failed"
    yield Violation(end.offset, text, cure=LAST_CURE, severity="note")


def _sets_up(call: ProgramCall) -> bool:
    """Return whether a Python program only prepares the environment: ``python -m pip install``."""
    words = [a.text for a in call.args[:2]]
    return (
        words[:1] in (["pip"], ["venv"]) or words in (["-m", "pip"], ["-m", "venv"]) or call.program in ("pip", "venv")
    )


def _always_succeeds(job: JobDescription, end: ProgramCall, later: list[ProgramCall]) -> bool:
    """Return whether the exit code of the command says nothing of the work."""
    words = [a.text for a in end.args]
    if end.program == "rm":
        return any(REMOVES_QUIETLY.fullmatch(w) for w in words)
    if end.program == "wait":
        started = any(c.after == "&" for c in job.calls) or re.search(r"(?m)(?<![&>])&[ \t]*(?:#.*)?$", job.code)
        return not started and (not words or all(w.startswith("$") for w in words))
    if end.program == "deactivate" and not any(
        "activate" in c.written or "activate" in " ".join(a.text for a in c.args) for c in job.calls if c is not end
    ):
        return False
    return end.program in TELLS or (bool(words) and words[0] in TELLS_WITH.get(end.program, ()))


def hides_results_of_background(job: JobDescription) -> Iterator[Violation]:
    """Report a plain ``wait`` as the end of a job whose work runs in the background: it returns 0, even with set -e."""
    works = [w for w in job.work if not w.in_substitution]
    behind = [w for w in works if job.runs_in_background(w)]
    if not job.is_job or job.submits or not behind or any(w.in_function or w.tested for w in works):
        return
    if len(behind) < len(works) and works[-1] is not behind[-1]:
        return
    if CHECKS_RESULTS.search(job.code) or any(True for _ in server_awaited(job)) or SERVES.search(job.code):
        return
    own = [c for c in job.calls if c.offset > behind[-1].offset and not c.under and not c.in_substitution]
    place = next((n for n, c in enumerate(own) if c.program == "wait"), None)
    if place is None or any(c.program not in QUIET and not _always_succeeds(job, c, own) for c in own[place + 1 :]):
        return
    call = own[place]
    if call.args or call.in_function or call.tested or call.before in ("||", "&&") or call.after in ("||", "&&"):
        return
    if any(c.program == "exit" and c.args and c.args[0].text != "0" for c in own):
        return
    text = f"wait returns 0, even if {name_of_work(job, behind[0])} in the background failed: the job ends with success"
    yield Violation(call.offset, text, why=RESULT_WHY, cure=RESULT_CURE)
