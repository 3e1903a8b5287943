"""Rules for variables that are empty where they are used, as the words around them show."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import SETS_PATHS_ONLY, JobDescription
from allranks.analysis.lint.records import Assignment, VariableUse, Violation
from allranks.analysis.lint.rules.blocks import in_loops_only, outer_loop
from allranks.analysis.lint.rules.dataflow import GUARDS, INHERITED, LAUNCHER_NAMES, PRINTING
from allranks.analysis.lint.rules.unset_variables import OUTSIDE_NAMES, USUAL_OUTSIDE, is_set, set_by_module
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------------- words of a language

KEYWORDS = {"true", "false", "True", "False", "TRUE", "FALSE", "None", "null"}
KEYWORD_WHY = "The shell has no such variable: the value is empty."


def keywords(job: JobDescription) -> Iterator[Violation]:
    """Report ``$true`` and ``$None``."""
    for use in job.uses if job.kind == "script" else ():
        if use.name in KEYWORDS and not is_set(job, use.name) and not use.operator:
            text = f"${use.name} is a variable that nothing sets; {use.name} was meant"
            yield Violation(use.offset, text, why=KEYWORD_WHY, cure=use.name)
            return


# ------------------------------------------------------------------------- set in front of the command

PREFIX_WHY = "The shell expands the words of a command before it sets what stands in front of it, which only the command's own process gets."


def set_in_front(job: JobDescription) -> Iterator[Violation]:
    """Report ``LR=0.1 python t.py --lr $LR``: the value is not set when the shell expands it."""
    for call in job.calls if job.kind == "script" else ():
        for item in call.prefix if not call.under or call.starter.prefix == call.prefix else ():
            others = [a for a in job.by_name.get(item.name, []) if a.offset != item.offset]
            if others or item.name in job.reading.named | job.reading.exported | INHERITED or item.under != call.under:
                continue
            if not item.value or re.search(rf"\$\{{?{item.name}\b", item.value) or OUTSIDE_NAMES.match(item.name):
                continue
            line = job.lines.place(item.offset)[0]
            end = _end_of_line(job, line)
            use = next(
                (
                    u
                    for u in job.uses
                    if u.name == item.name and item.offset + len(item.name) < u.offset < end and u.under == call.under
                    and u.offset > call.offset  # what stands in front of the command is set from left to right
                    and u.program not in ("=", "export") and not u.operator
                ),
                None,
            )  # fmt: skip
            between = job.code[item.offset : use.offset] if use else ""
            if use and not re.search(r";|&|\||\n(?<!\\\n)", between) and not use.in_function:
                text = f"${item.name} is expanded before {item.name}={item.value[:20]} in front of the command is set"
                yield Violation(use.offset, text, why=PREFIX_WHY, cure=f"{item.name}=... on a line of its own")
                return


def _end_of_line(job: JobDescription, line: int) -> int:
    end = job.text.find("\n", job.lines.start(line))
    while end > 0 and job.text[end - 1] == "\\":
        end = job.text.find("\n", end + 1)
    return end if end >= 0 else len(job.text)


# ------------------------------------------------------------------------------ set further down

LATER_WHY = "The shell reads the lines from top to bottom: here the variable is still empty."
FILE_TEST = lazy_regex(r"-[defrswx][ \t]+[\"']?\$\{?\Z")


def set_below(job: JobDescription) -> Iterator[Violation]:
    """Report a value, or a test for a file, with a variable that the script sets further down, before any file that might set it."""
    if job.kind != "script":
        return
    unknown = [c.offset for c in job.calls if _may_set(c.program, [a.text for a in c.args])]
    first_unknown = min(unknown, default=len(job.text))
    said: set[str] = set()
    guarded = {u.name for u in job.uses if u.operator.startswith(GUARDS)} | job.reading.named
    for use in job.uses:
        own = job.by_name.get(use.name, [])
        if not own or use.under or use.in_function or use.operator or use.name in guarded | said:
            continue
        before = job.text[max(0, use.offset - 6) : use.offset]
        in_test = use.program in ("[", "[[", "test")
        if (
            use.offset > first_unknown
            or (in_test and not FILE_TEST.search(before))
            or use.program in PRINTING | {"?", "for", ":", "date"}
        ):
            continue
        first = own[0]
        if use.offset >= first.offset or any(a.under or a.in_substitution for a in own):
            continue
        tested = any(
            u.name == use.name and u.program in ("[", "[[", "test", "case") and use.offset != u.offset < first.offset
            for u in job.uses
        )
        if tested:
            continue
        if use.in_loop and outer_loop(job.code, use.offset) == outer_loop(job.code, first.offset):
            continue  # the next pass has the value
        line, later = job.lines.place(use.offset)[0], job.lines.place(first.offset)[0]
        again = re.search(rf"\$\{{?{use.name}\b", job.line_of(first.offset))
        usual = (
            (USUAL_OUTSIDE.fullmatch(use.name) and use.name.count("_") < 2)
            or use.name in INHERITED
            or set_by_module(job, use.name)
            or use.name.startswith(("SLURM_", "PBS_", "LSB_"))
        )
        if (
            line >= later
            or again
            or usual
            or (
                job.lines.line(later)[:1].isspace()
                and not (_in_all_branches(job, own) or all(a.in_function for a in own))
                and not (use.in_loop and in_loops_only(job.code, first.offset))
            )
        ):
            continue
        if use.name in (job.heads("export") or "") or re.search(
            rf"(?m)^\s*#(?!\s*{use.name}=).*(?<![$\w{{]){use.name}\b", job.text
        ):
            continue
        said.add(use.name)
        text = f"${use.name} is used before it is set, in line {later}"
        yield Violation(use.offset, text, why=LATER_WHY, cure=f"move line {later} up")


def _in_all_branches(job: JobDescription, own: list[Assignment]) -> bool:
    """Return whether the first values are those of the branches of one ``if`` with an ``else``, so that one of them is set."""
    if len(own) < 2:
        return False
    between = job.code[own[0].offset : own[1].offset]
    return re.search(r"(?m)^else\b", between) is not None and re.search(r"(?m)^(?:fi|elif)\b", between) is None


def _may_set(program: str, words: list[str]) -> bool:
    """Return whether a command may set any variable: a file that is sourced, or an eval."""
    if program in ("source", "."):
        return bool(words) and not SETS_PATHS_ONLY.search(words[0])
    return program == "eval"


# ------------------------------------------------------------------------------------ one of many

SIBLINGS = 3
ANY_NAME = lazy_regex(
    r"\b(?:declare|export|local|readonly|typeset)[ \t]+(?:-\w+[ \t]+)*[\"']?\$|(?<![-\w])eval\b|\bprintf[ \t]+-v\b|\bread[ \t]+[^\n<]*\$"
)
"""Commands that may set a variable of any name: ``declare $name=...``."""
SIBLING_WHY = "The other values of the command are set in the script; this one is empty, and its option takes the next word or none."


def one_of_many(job: JobDescription) -> Iterator[Violation]:
    """Report a name in lower case that nothing sets, in a command with three other own variables of this kind."""
    if job.kind != "script" or job.sources_files or job.placeholders or ANY_NAME.search(job.code):
        return
    tested = {u.name for u in job.uses if u.program in ("[", "[[", "test", "case") or u.operator.startswith(GUARDS)}
    known = tested | INHERITED | LAUNCHER_NAMES | job.reading.named | job.reading.exported | job.by_name.keys()
    for use in job.uses:
        if use.name in known or use.program in PRINTING or use.index or not re.fullmatch(r"[a-z][a-z0-9_]+", use.name):
            continue
        if (
            use.in_function
            or set_by_module(job, use.name)
            or re.search(rf"(?<![\w$.-]){use.name}\s*(?:[-+*/%]?=|\+\+)", job.text)
        ):
            continue
        if re.search(rf"(?m)^\s*#(?!SBATCH|PBS|BSUB).*\b{use.name}\b|--export[= ][^\n]*\b{use.name}\b", job.text):
            continue
        before, after = job.text[max(0, use.offset - 40) : use.offset], job.text[use.offset + len(use.name) :][:2]
        if re.search(r"arg|opt|flag|extra|param|cmd|command|prefix", use.name) or after.lstrip("}").startswith("/"):
            continue
        if not re.search(r"(?:--?[A-Za-z][\w.-]*(?:=|[ \t]+)|\w=|\$\{?\w+\}?\"?[ \t]+|\w\}[._-])[\"']?\$\{?\Z", before):
            continue
        others = _others(job, use)
        if len(others) >= SIBLINGS and all(_is_own(job, name) for name in others):
            text = f"${use.name} is never set; the command's {', '.join(sorted(others)[:3])} are"
            yield Violation(use.offset, text, why=SIBLING_WHY)
            return


def _others(job: JobDescription, use: VariableUse) -> set[str]:
    """Return the other names in lower case in the same command."""
    start = job.lines.place(use.offset)[0]
    while start > 1 and job.lines.line(start - 1).rstrip().endswith("\\"):
        start -= 1
    first, end = job.lines.start(start), _end_of_line(job, start)
    found = {u.name for u in job.uses if first <= u.offset < end and u.under == use.under}
    return {n for n in found - {use.name} if re.fullmatch(r"[a-z][a-z0-9_]+", n)}


def _is_own(job: JobDescription, name: str) -> bool:
    return name in job.reading.named or any(not a.under for a in job.by_name.get(name, []))


# ------------------------------------------------------------------------------- in the other case

CASE_WHY = "Names of variables are case-sensitive: the one in this spelling is never set, and empty."


def in_other_case(job: JobDescription) -> Iterator[Violation]:
    """Report ``$seed`` where the script sets and uses SEED, and nothing sets seed."""
    if job.kind != "script" or job.sources_files or job.placeholders or ANY_NAME.search(job.code):
        return
    own: dict[str, set[str]] = {}
    for item in job.set_values_at_top():
        own.setdefault(item.name.lower(), set()).add(item.name)
    guarded = {u.name for u in job.uses if u.operator.startswith(GUARDS) or u.program in ("[", "[[", "test", "case")}
    for use in job.uses:
        others = own.get(use.name.lower(), set())
        if len(others) != 1 or use.name in guarded | INHERITED | LAUNCHER_NAMES or is_set(job, use.name):
            continue
        other = next(iter(others))
        values = job.by_name[other]
        if (
            use.program in PRINTING
            or use.in_function
            or not re.fullmatch(r"[a-z][a-z0-9_]+", use.name)
            or OUTSIDE_NAMES.match(use.name)
            or use.under
        ):
            continue
        if any(use.name in a.value or a.offset > use.offset for a in values) or re.search(
            rf"(?m)^\s*#.*\b{use.name}\b", job.text
        ):
            continue
        if re.search(rf"(?<![\w$.-]){use.name}\s*(?:[-+*/%]?=|\+\+)", job.text) or set_by_module(job, use.name):
            continue
        text = f"${use.name} is never set; {other}, which the script sets, was probably meant"
        yield Violation(use.offset, text, why=CASE_WHY, cure=f"${other}")
        return


# --------------------------------------------------------------------------- the end of another name

LONGER_WHY = "Nothing sets a variable of this name: it is empty, and the text around it is joined."


def longer_than_own(job: JobDescription) -> Iterator[Violation]:
    """Report ``$SUFFIX_RESNET`` where the script sets SUFFIX only, and ``$data-dir`` where it sets data_dir."""
    if job.kind != "script" or job.placeholders or ANY_NAME.search(job.code):
        return
    guarded = {u.name for u in job.uses if u.operator.startswith(GUARDS) or u.program in ("[", "[[", "test", "case")}
    for use in job.uses:
        name = use.name
        if name in guarded | INHERITED or is_set(job, name) or use.program in PRINTING or use.in_function or use.under:
            continue
        if (
            OUTSIDE_NAMES.match(name)
            or re.search(rf"(?<![\w$.-]){name}\s*(?:[-+*/%]?=|\+\+)", job.text)
            or set_by_module(job, name)
        ):
            continue
        dash = re.match(rf"\$?\{{?{name}-([A-Za-z]\w*)", job.text[use.offset : use.offset + 80])
        if dash and job.has(f"{name}_{dash[1]}") and not use.operator and len(name) > 1:
            text = f"${name}-{dash[1]} is ${name}, which is never set, and the text -{dash[1]}; ${name}_{dash[1]} was meant"
            yield Violation(use.offset, text, why=LONGER_WHY, cure=f"${name}_{dash[1]}")
            return
        if job.sources_files or job.submits or re.search(rf"(?m)^\s*#(?!\s*{name}=).*\b{name}\b", job.text):
            continue
        own = [
            n
            for n in job.by_name
            if name.startswith(f"{n}_") and len(n) > 2 and any(not a.under for a in job.by_name[n])
        ]
        line = job.lines.place(use.offset)[0]
        above = [
            n
            for n in own
            if job.by_name[n][0].offset < use.offset and job.lines.place(job.by_name[n][0].offset)[0] != line
        ]
        if above and not any(name in a.value for n in own for a in job.by_name[n]):
            text = f"${name} is never set; only {max(above, key=len)} is"
            yield Violation(use.offset, text, why=LONGER_WHY)
            return


# ------------------------------------------------------------------------------------ without its $

NAME_WHY = "The shell expands only names with a $: the command takes the name itself for a file or a folder."
TAKES_FILES = {"mkdir", "cd", "pushd", "rm", "rmdir", "cp", "mv", "rsync", "touch", "ls", "cat", "tar", "unzip", "ln"}
IS_PATH = lazy_regex(r"[\"']?(?:\.{0,2}/|~|\$\{?\w+\}?/|\$\(\w+\)/|`\w+`/|[\w.-]+/[\w.$-])")


def name_as_folder(job: JobDescription) -> Iterator[Violation]:
    """Report ``mkdir -p out_dir`` below ``out_dir=/data/out``."""
    for call in job.calls if job.kind == "script" else ():
        if call.program not in TAKES_FILES or call.in_substitution or call.under:
            continue
        for arg in call.args:
            name = arg.source.text
            own = [a for a in job.by_name.get(name, ()) if a.offset < call.offset and not a.under]
            if not own or len(name) < 3 or not ("_" in name or name.isupper()) or name in INHERITED:
                continue
            value = own[-1].value
            folder = rf"(?<![\w$/{{.-]){name}/|/{name}\b"  # also the name of a folder
            if IS_PATH.match(value) and not re.search(folder, job.code) and not job.has_folder(name):
                text = f"{name} is the text {name} here, not {value[:40]}: the $ is missing"
                yield Violation(arg.offset, text, why=NAME_WHY, cure=f"{call.program} ${name}")
                return
