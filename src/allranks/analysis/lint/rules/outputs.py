"""Rules for redirections: files that are truncated, written over, or have another name than meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.command_options import PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.tasks import sources_settings

OVER_WHY = "> truncates the file each time it is opened: only the output of the last run stays."
SAME_WHY = "The shell truncates the file before the program reads it: it is empty."
NUMBER_WHY = "2>1 writes to a file with the name 1, and 2>&1 to where the output goes."
ORDER_WHY = (
    "Redirections count from left to right: 2>&1 is where the output goes at that moment, not the file behind it."
)
READS_WHOLE = {
    "cat",
    "sort",
    "uniq",
    "sed",
    "grep",
    "awk",
    "tr",
    "cut",
    "head",
    "tail",
    "jq",
    "shuf",
    "column",
    "envsubst",
    "tac",
    "paste",
}
FILE_ONE = re.compile(r"(?<![\w$\[<>&(])(?:2|&)>[ \t]*1(?=[ \t]*(?:$|[;|&)\n]))", re.MULTILINE)
WRONG_ORDER = re.compile(r"[ \t]2>&1[ \t]+1?>{1,2}[ \t]*([^\s;|&()]+)")


def overwritten(job: JobDescription) -> Iterator[Violation]:
    """Report logs that each run of a loop truncates, files that are their own input, and ``2>1``."""
    for call in job.calls:
        if call.in_substitution:
            continue
        for redirect in call.redirects:
            target = redirect.target
            plain = re.fullmatch(r"[\w./~-]+", target) is not None and not target.startswith("/dev/")
            if redirect.operator not in (">", "&>") or not plain:
                continue
            words = [a.text for a in call.args]
            if call.program in READS_WHOLE and target in words and "-i" not in words and not call.under:
                text = f"{call.program} reads {target}, which > has already truncated"
                yield Violation(
                    call.offset,
                    text,
                    why=SAME_WHY,
                    cure=f"{call.program} ... > {target}.new && mv {target}.new {target}",
                )
    for found in FILE_ONE.finditer(job.text):
        if not job.in_comment(found.start()) and _in_command(job, found.start()):
            yield Violation(
                found.start(), f"{found[0].strip()} writes a file with the name 1", why=NUMBER_WHY, cure="2>&1"
            )
    loops = [c for c in job.work_calls if c.in_loop and not c.in_substitution and not c.in_function and not c.tested]
    for call in loops:
        outer = call.under[0] if call.under else call
        for redirect in outer.redirects:
            plain = re.fullmatch(r"[\w./~-]+", redirect.target) is not None and not redirect.target.startswith("/dev/")
            if (
                redirect.operator in (">", "&>")
                and plain
                and not (_kept(job, redirect.target) or _runs_once(job, outer))
            ):
                text = f"each run of the loop truncates {redirect.target}"
                yield Violation(
                    outer.offset, text, why=OVER_WHY, cure=f">> {redirect.target}, or a name with the loop's variable"
                )
                return


def tee_in_loop(job: JobDescription) -> Iterator[Violation]:
    """Report ``program | tee file`` without -a in a loop."""
    works = {
        (c.under[0] if c.under else c).offset
        for c in job.work_calls
        if c.in_loop and not c.tested and not c.in_function
    }
    for before, call in pairwise(c for c in job.calls if not c.under and not c.in_substitution):
        words = [a.text for a in call.args]
        if call.program != "tee" or call.before not in ("|", "|&") or before.offset not in works or len(words) != 1:
            continue
        target = words[0]
        if (
            re.fullmatch(r"[\w./~-]+", target)
            and not target.startswith(("/dev/", "-"))
            and not (_kept(job, target) or _runs_once(job, call))
        ):
            text = f"each run of the loop truncates {target}"
            yield Violation(call.offset, text, cure=f"tee -a {target}, or a name with the loop's variable")
            return


def _kept(job: JobDescription, target: str) -> bool:
    """Return whether something else in the script reads, moves or empties the file: it is a temporary one."""
    return (
        len(re.findall(rf"(?<![\w./-]){re.escape(target)}(?![\w/-])", job.text)) > 1
        or re.search(r"(?m)^[^#\n]*\b(?:cd|pushd)\b", job.text) is not None
    )


def _runs_once(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the nearest loop above the call has one value, or repeats the same command until it succeeds."""
    heads = list(
        re.finditer(r"(?m)^[ \t]*(?:for[ \t]+\w+[ \t]+in[ \t]+([^;\n]*)|while\b|until\b)", job.text[: call.offset])
    )
    if not heads or (heads[-1][1] is None and "read" not in job.line_of(heads[-1].end())):
        return True  # a loop until it succeeds
    value = (heads[-1][1] or "").strip()
    return re.fullmatch(r"[\w.:/=-]+", value) is not None


def _in_command(job: JobDescription, offset: int) -> bool:
    line, column = job.lines.place(offset)
    before = job.lines.line(line)[: column - 1]
    if job.in_quotes(offset) or "((" in before or "[[" in before:
        return False
    return any(r.operator in (">", "&>", ">&") and r.target == "1" for c in job.calls for r in c.redirects)


def wrong_order(job: JobDescription) -> Iterator[Violation]:
    """Report ``2>&1 > file``, which keeps the errors out of the file."""
    for found in WRONG_ORDER.finditer(job.text):
        rest = job.text[found.end() : found.end() + 5].lstrip(" \t")
        if job.in_comment(found.start()) or rest.startswith("|") or found[1].startswith(("/dev/", "&")):
            continue
        if any(r.target == "1" and r.operator == ">&" for c in job.calls for r in c.redirects):
            text = f"2>&1 stands before > {found[1]}: the errors do not go to the file"
            yield Violation(found.start() + 1, text, why=ORDER_WHY, cure=f"> {found[1]} 2>&1", severity="note")


# ---------------------------------------------------------------------------------- buffered output

BUFFERED_WHY = "Python buffers some kB of output if it does not write to a terminal; when a rank is killed, its last lines are lost."


def buffered(job: JobDescription) -> Iterator[Violation]:
    if job.has("PYTHONUNBUFFERED") or sources_settings(job) or not job.is_batch:
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        alone = not call.under and not job.launches
        ranks = any(la.call is call for la in job.launches)
        if (
            PYTHON.match(call.program)
            and not call.module
            and (alone or ranks)
            and any(w.endswith(".py") for w in words)
        ):
            if not any(
                re.match(r"-[a-zA-Z]*u", w) for w in words[: next(i for i, w in enumerate(words) if w.endswith(".py"))]
            ):
                yield Violation(
                    call.offset,
                    "Python's output is buffered: no PYTHONUNBUFFERED and no -u (torchrun passes -u itself, srun does not)",
                )
                return
