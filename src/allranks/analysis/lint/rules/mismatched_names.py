"""Rules for names that do not meet: a variable that is used and never set beside one that is set and never used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import VariableUse, Violation
from allranks.analysis.lint.rules.conditions import COUNTERS
from allranks.analysis.lint.rules.dataflow import GUARDS, INHERITED, LAUNCHER_NAMES, PRINTING
from allranks.analysis.lint.rules.unset_variables import OUTSIDE_NAMES, USUAL_OUTSIDE, set_by_module
from allranks.analysis.lint.rules.variables import edits
from allranks.utils.text import lazy_regex

MAX_PAIRS = 20_000
OPTION_BEFORE = lazy_regex(
    r"(?:(?:\A|[\s\"'(])-{1,2}([A-Za-z][\w.-]*)(?:=|[ \t]+)|(?<![\w.$-])([A-Za-z][\w.]*)=)[\"']?\$\{?\Z"
)


class IdleVariable(NamedTuple):
    """A variable that is set and never used."""

    name: str
    offset: int
    value: str
    loops: bool  # set by for, or by read in a loop


def _written(job: JobDescription, name: str) -> bool:
    """Return whether the file sets the name in a way that the reader does not know, or says that the caller gives it."""
    assigned = rf"(?<![\w$-]){name}\s*(?:[-+*/%]?=(?!=)|\+\+|--)"
    return (
        re.search(assigned, job.text) is not None
        or re.search(rf"(?m)^\s*#(?!SBATCH|PBS|BSUB).*\b{name}\b", job.text) is not None
    )


def missing_names(job: JobDescription) -> dict[str, VariableUse]:
    """Return the first use of each variable that nothing sets, tests or gives a default."""
    tested = {u.name for u in job.uses if u.program in ("[", "[[", "test", "case") or u.operator.startswith(GUARDS)}
    known = tested | INHERITED | LAUNCHER_NAMES | job.reading.named | job.reading.exported | job.by_name.keys()
    found: dict[str, VariableUse] = {}
    for use in job.uses:
        name = use.name
        if name in known or name in found or use.program in PRINTING or use.index or not re.match(r"[A-Za-z]\w", name):
            continue
        if not OUTSIDE_NAMES.match(name):
            found[name] = use
    return {n: u for n, u in found.items() if not (_written(job, n) or set_by_module(job, n))}


FOR = lazy_regex(r"(?m)(?:^|[;&|({]|\bdo\b|\bthen\b)[ \t]*for[ \t]+([A-Za-z_]\w*)[ \t]+in[ \t]")
READ = lazy_regex(r"(?m)\bread(?:[ \t]+-[rs]+)*((?:[ \t]+[A-Za-z_]\w*)+)[ \t]*(?:;|<|$)")


def idle_variables(job: JobDescription) -> list[IdleVariable]:
    """Return the variables that the script sets and nothing mentions again."""
    found = {
        a.name: IdleVariable(a.name, a.offset, a.value, False)
        for a in job.set_values_at_top()
        if a.value
        and not a.exported
        and a.name not in job.reading.exported | INHERITED
        and len(job.by_name[a.name]) < 4
    }
    code = job.code
    for loop in FOR.finditer(code):
        found.setdefault(loop[1], IdleVariable(loop[1], loop.start(1), "", True))
    for command in READ.finditer(code):
        for name in command[1].split():
            found.setdefault(name, IdleVariable(name, command.start(1), "", True))
    return [
        item
        for name, item in found.items()
        if name not in job.used_names
        and not name.startswith("_")
        and not re.search(rf"[$!#{{]\{{?{name}\b|\(\([^\n]*\b{name}\b|\bexport\b[^\n]*\b{name}\b", code)
    ]


def plain_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


PARTS = {
    "path",
    "dir",
    "name",
    "file",
    "folder",
    "size",
    "list",
    "args",
    "root",
    "directory",
    "dirs",
    "id",
    "model",
    "data",
}
EQUAL_WORDS = {
    "n": "num",
    "nr": "num",
    "number": "num",
    "folder": "dir",
    "directory": "dir",
    "output": "out",
    "input": "in",
}
SHORTEST_PART, SHORTEST_WORD = 3, 4


def same_meaning(name: str, other: str) -> bool:
    """Return whether two names have the same words: in another order or form, shortened, or with ``_dir`` behind."""
    if re.sub(r"\d", "", name) != name or re.sub(r"\d", "", other) != other:
        return False
    if plain_name(name) == plain_name(other):
        return len(plain_name(name)) > 1
    first, second = (re.sub(r"(?<=[a-z])(?=[A-Z])", "_", n).lower().split("_") for n in (name, other))
    first, second = ([EQUAL_WORDS.get(word, word) for word in words] for words in (first, second))
    if sorted(first) == sorted(second):
        return True
    if len(first) == len(second):
        shortest = SHORTEST_PART if len(first) > 1 else SHORTEST_WORD
        pairs = [sorted(pair, key=len) for pair in zip(first, second, strict=True)]
        cut = [(b, b[len(a) :]) for a, b in pairs if a != b and b.startswith(a) and len(a) >= SHORTEST_PART]
        same = all(a == b or (len(a) >= shortest and b.startswith(a)) for a, b in pairs)
        return same or (len(pairs) == 1 and len(cut) == 1 and cut[0][1] in PARTS)
    shorter, longer = sorted((first, second), key=len)
    rest = longer[len(shorter) :]
    return longer[: len(shorter)] == shorter and ((len(rest) == 1 and rest[0] in PARTS) or rest[0] == "per")


def _like_of_loop(name: str, other: str) -> bool:
    """Return whether a name is that of a loop's variable with a letter more, less or changed, or with its end cut."""
    shorter, longer = sorted((name, other), key=len)
    near = len(shorter) >= SHORTEST_WORD and edits(name, other, 1) == 1
    return not COUNTERS.fullmatch(other) and len(shorter) > 1 and (near or longer.startswith(shorter))


def related_names(job: JobDescription) -> Iterator[Violation]:
    """Report a variable that nothing sets where another one, which nothing uses, is the option's or has its name as the value."""
    if job.kind != "script" or job.sources_files or job.placeholders:
        return
    missing = missing_names(job)
    idle = idle_variables(job) if missing else []
    if len(missing) * len(idle) > MAX_PAIRS:
        return
    for name, use in missing.items():
        before = OPTION_BEFORE.search(job.text[max(0, use.offset - 80) : use.offset])
        option = plain_name(before[1] or before[2]) if before else ""
        here = job.lines.place(use.offset)[0]
        above = [i for i in idle if i.offset < use.offset or use.in_function]
        above = [i for i in above if job.lines.place(i.offset)[0] != here]
        found = [i for i in above if i.value == name and len(name) >= SHORTEST_WORD]
        found = found or [
            i
            for i in above
            if len(option) >= SHORTEST_PART and plain_name(i.name) == option and not COUNTERS.fullmatch(i.name)
        ]
        if not (USUAL_OUTSIDE.fullmatch(name) and not name.upper().startswith("DATA")):
            found = found or [i for i in above if same_meaning(name, i.name)]
            found = found or [i for i in above if i.loops and use.in_loop and _like_of_loop(name, i.name)]
        if len(found) == 1:
            line = job.lines.place(found[0].offset)[0]
            text = f"${name} is never set; {found[0].name}, which line {line} sets and nothing uses, was probably meant"
            yield Violation(use.offset, text, cure=f"${found[0].name}")


# ------------------------------------------------------------------------------------ one of several


TAKES_OPTIONS = lazy_regex(r"\bgetopts?\b|\"?\$#\"?|\bcase[ \t]+\"?\$\{?1\b")


def only_longer_names(job: JobDescription) -> Iterator[Violation]:
    """Report ``$config_name`` where the script takes ``base_config_name`` and ``few_shot_config_name``."""
    if job.kind != "script" or job.sources_files or job.placeholders or not TAKES_OPTIONS.search(job.code):
        return
    own = job.by_name.keys() | job.reading.named
    for name, use in missing_names(job).items():
        longer = sorted(n for n in own if n.endswith(f"_{name}"))
        if len(longer) > 1 and len(name) > SHORTEST_WORD:
            text = f"${name} is never set, only {' and '.join(longer[:3])} are"
            yield Violation(use.offset, text, cure=f"one of ${', $'.join(longer[:3])}")


INDEX_NAME = lazy_regex(r"\[\$?\{?([A-Za-z]\w*)\}?\]")
INDEX_WHY = "An index without a value is 0, or refused: every pass of the loop gets the same element, or none."
LOOPS = lazy_regex(r"(?m)\bfor[ \t]+(?:([A-Za-z_]\w*)[ \t]+in\b|\(\([ \t]*([A-Za-z_]\w*)[ \t]*=)")


def index_never_set(job: JobDescription) -> Iterator[Violation]:
    """Report an element whose index nothing sets, in a loop that counts with another variable."""
    if job.kind != "script" or job.sources_files or job.placeholders:
        return
    counting = [found[1] or found[2] for found in LOOPS.finditer(job.code)]
    said: set[str] = set()
    known = job.by_name.keys() | job.reading.named | job.reading.exported | INHERITED | set(counting)
    array = "array" in job.heading and "SLURM_ARRAY_TASK_ID" not in job.text
    for use in job.uses if counting or array else ():
        found = INDEX_NAME.fullmatch(use.index)
        if (
            not found
            or not (array or (use.in_loop and counting))
            or found[1] in known | said
            or use.operator.startswith(GUARDS)
        ):
            continue
        name, items = found[1], job.by_name.get(use.name, [])
        if name.startswith(("SLURM", "PBS", "LSB")) or not any(a.items is not None for a in items):
            continue
        if re.search(r"\b(?:declare|typeset|local)[ \t]+-\w*A", job.code) or _written(job, name):
            continue
        said.add(name)
        counted = (
            f"the loop counts with {' or '.join(dict.fromkeys(counting))}"
            if use.in_loop
            else "a task has SLURM_ARRAY_TASK_ID"
        )
        text = f"${name}, the index, is never set; {counted}"
        yield Violation(use.offset, text, why=INDEX_WHY)


# ---------------------------------------------------------------------------------- generated scripts

DIRECTIVE = lazy_regex(r"#(?:SBATCH|PBS|BSUB)\b")
DIRECTIVE_WHY = "The script that is written gets an empty value: the batch system refuses the option, or takes the next word for its value."
ENOUGH = 2


def generated_directive(job: JobDescription) -> Iterator[Violation]:
    """Report a variable that nothing sets in an option of sbatch, or of a script that this one writes, whose others it sets."""
    if job.kind != "script" or job.sources_files or job.placeholders:
        return
    missing = _missing_anywhere(job)
    options = [u for u in job.uses if not u.under and _is_option_of_job(job, u)] if len(missing) == 1 else []
    others = {u.name for u in options if u.name in job.by_name or u.name in job.reading.named}
    for use in options:
        if use.name in missing and len(others) >= ENOUGH:
            yield Violation(use.offset, f"${use.name}, the value of the job's option, is never set", why=DIRECTIVE_WHY)
            return


def _is_option_of_job(job: JobDescription, use: VariableUse) -> bool:
    line, column = job.line_of(use.offset), job.lines.place(use.offset)[1]
    before = line[: column - 1]
    if re.match(rf"\$?\{{?{use.name}\}}?/", line[column - 1 :]):
        return False  # the folder of a user or a project
    if use.program == "sbatch" and OPTION_BEFORE.search(before) and not use.quoted:
        return True
    return use.program in WRITING and DIRECTIVE.search(before) is not None and not use.in_redirect


WRITING = {"echo", "printf", "cat", "tee", "sbatch", "="}


def _missing_anywhere(job: JobDescription) -> dict[str, VariableUse]:
    """Return what is missing, with what stands in the text that ``echo`` writes."""
    tested = {u.name for u in job.uses if u.program in ("[", "[[", "test", "case") or u.operator.startswith(GUARDS)}
    known = tested | INHERITED | LAUNCHER_NAMES | job.reading.named | job.reading.exported | job.by_name.keys()
    found: dict[str, VariableUse] = {}
    for use in job.uses:
        if not (
            use.name in known
            or not re.match(r"[A-Za-z]\w", use.name)
            or OUTSIDE_NAMES.match(use.name)
            or USUAL_OUTSIDE.fullmatch(use.name)
        ):
            found.setdefault(use.name, use)
    return {n: u for n, u in found.items() if not _written(job, n)}


# ------------------------------------------------------------------------------------------- messages


def printed_names(job: JobDescription) -> Iterator[Violation]:
    """Report ``echo "ip_prefix: $ip_pref"``: the message names the variable whose value was meant."""
    if job.kind != "script" or job.placeholders:
        return
    known = job.by_name.keys() | job.reading.named | job.reading.exported | INHERITED
    said: set[str] = set()
    for use in job.uses:
        name = use.name
        if use.program not in ("echo", "printf") or use.operator or use.under or name in known | said:
            continue
        line = job.line_of(use.offset)
        if not re.match(r"[ \t]*(?:echo|printf)\b(?!.*[|>])", line):
            continue
        near = [
            other
            for other in job.by_name
            if len(name) >= SHORTEST_WORD
            and (other.startswith(name) or edits(name, other, 1) == 1)
            and re.search(rf"(?<![\w$}}{{]){other}(?=[\s\"']*[:=])", line)
        ]
        if len(near) == 1 and not re.search(rf"\$\{{?{near[0]}\b", line) and not _written(job, name):
            said.add(name)
            text = f"${name} is never set; {near[0]}, which the message names, was probably meant"
            yield Violation(use.offset, text, cure=f"${near[0]}")
