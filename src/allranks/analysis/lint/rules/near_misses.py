"""Rules for slips of one letter or one sign: names, comments, modules as commands, and numbers of an array without a branch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules.arrays import TASK, numbers_of
from allranks.analysis.lint.rules.mismatched_names import missing_names
from allranks.analysis.lint.rules.variables import edits
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------------------------- names

SHORTEST = 5
OWN_NAME = lazy_regex(r"[a-z][a-z0-9_]*")
MAX_PAIRS = 20_000


def nearly_own(job: JobDescription) -> Iterator[Violation]:
    """Report ``$suffic`` where the script sets and uses ``suffix``."""
    if job.kind != "script" or job.sources_files or job.placeholders:
        return
    missing = {n: u for n, u in missing_names(job).items() if len(n) >= SHORTEST and OWN_NAME.fullmatch(n)}
    own = {a.name: a.offset for a in reversed(list(job.set_values_at_top())) if OWN_NAME.fullmatch(a.name)}
    if len(missing) * len(own) > MAX_PAIRS:
        return
    for name, use in missing.items():
        near = [n for n, place in own.items() if place < use.offset and len(n) >= SHORTEST and edits(name, n, 1) == 1]
        if len(near) == 1 and re.sub(r"\d", "", near[0]) != re.sub(r"\d", "", name) and not use.under:
            text = f"${name} is never set; {near[0]} was probably meant"
            yield Violation(use.offset, text, cure=f"${near[0]}")


def swapped_letters(job: JobDescription) -> Iterator[Violation]:
    """Report ``$MDOEL`` where the script sets ``MODEL``, in names of any case and whatever a sourced file may set."""
    if job.kind != "script" or job.placeholders:
        return
    for name, use in missing_names(job).items():
        near = [n for n in job.by_name if is_swapped(name, n)] if len(name) >= SHORTEST else []
        if len(near) == 1 and not re.search(rf"(?<![\w$-]){name}=(?!=)", job.text):
            text = f"${name} is never set: two letters are swapped, and {near[0]} was meant"
            yield Violation(use.offset, text, cure=f"${near[0]}")


def is_swapped(name: str, other: str) -> bool:
    """Return whether two names differ by the order of two letters that follow each other."""
    if len(name) != len(other) or name == other:
        return False
    place = next(i for i, (a, b) in enumerate(zip(name, other, strict=True)) if a != b)
    pair = name[place : place + 2]
    return pair.isalpha() and pair[::-1] == other[place : place + 2] and name[place + 2 :] == other[place + 2 :]


# ----------------------------------------------------------------------------------------- comments

GLUED = lazy_regex(
    r"(?m)^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(?:\"[^\"\n]*\"|'[^'\n]*'|[\w./:,-]+)(#[ \t]*\S[^\n]*)$"
)
GLUED_WHY = (
    "The # begins a comment only behind a blank: what stands behind it, up to the next blank, belongs to the value."
)


def glued_comment(job: JobDescription) -> Iterator[Violation]:
    """Report ``NAME="value"#comment``."""
    places = {a.offset: a for a in job.assignments if not a.in_substitution}
    for found in GLUED.finditer(job.code) if job.kind == "script" else ():
        item = places.get(found.start(1))
        quoted = job.text[found.start(2) - 1] in "\"'"
        if item is not None and "#" in item.value and (quoted or re.match(r"#+(?:[ \t]|[A-Za-z]+[ \t])", found[2])):
            text = f"the # behind the value of {found[1]} begins no comment: the value is {item.value[:60]}"
            yield Violation(found.start(2), text, why=GLUED_WHY, cure="a blank in front of the #")


# ------------------------------------------------------------------------------------------ modules

MODULE = lazy_regex(r"[A-Za-z][\w+.-]*/v?\d+(?:\.\d+)+[\w+.-]*")
MODULE_WHY = (
    "The shell looks for a program in a folder of this name: 'No such file or directory', and the module is not loaded."
)


def module_alone(job: JobDescription) -> Iterator[Violation]:
    """Report the name of a module that stands alone as a command."""
    loads = any(c.program in ("module", "ml") for c in job.calls)
    for call in job.calls if loads else ():
        if MODULE.fullmatch(call.written) and not call.args and not call.under and not call.in_substitution:
            if not job.has_folder(call.written.partition("/")[0]):
                text = f"{call.written} alone is no command: module load is missing"
                yield Violation(call.offset, text, why=MODULE_WHY, cure=f"module load {call.written}")


# ------------------------------------------------------------------------------------------- arrays

EQUAL = lazy_regex(rf"\[\[?[ \t]+[\"']?\$\{{?{TASK}\}}?[\"']?[ \t]+(?:==?|-eq)[ \t]+[\"']?(\d+)[\"']?[ \t]+\]")
NO_WORK_WHY = "Every task of the array waits for the resources of the job and holds them: these tasks end at once."
MOST_NAMED = 4


def branches_of_task(job: JobDescription) -> Iterator[Violation]:
    """Report tasks of the array for which no ``if`` of the script starts anything."""
    numbers, found = numbers_of(job.heads("array")), list(EQUAL.finditer(job.code))
    if len(numbers) < 2 or not found or not job.work or not all(c.branch and not c.in_function for c in job.work):
        return
    uses = [u for u in job.uses if u.name == TASK and u.program not in ("echo", "printf")]
    if len(uses) != len(found) or re.search(r"(?m)^[ \t]*(?:else|while|until|for)\b", job.code):
        return
    named = {int(m[1]) for m in found}
    missing = [str(n) for n in numbers if n not in named]
    if missing:
        many = f"task {missing[0]}" if len(missing) == 1 else f"tasks {', '.join(missing[:MOST_NAMED])}"
        more = ", ..." if len(missing) > MOST_NAMED else ""
        text = f"no branch is for {many}{more} of the array: nothing runs there"
        cure = f"#SBATCH --array={','.join(str(n) for n in sorted(named & set(numbers)) or sorted(named))}"
        yield Violation(job.heading["array"].offset, text, why=NO_WORK_WHY, cure=cure)
