"""Rules for values that are empty, not set, or not where they seem to be: options without a value, set -u, paths in front of paths."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, VariableUse, Violation
from allranks.analysis.lint.rules.dataflow import GUARDS

EMPTY_WHY = "The shell removes an unquoted empty value: the option takes the next word as its value, or the program stops with 'expected one argument'."
EMPTY_CURE = '${NAME:+--option "$NAME"}, which is nothing if NAME is empty'
UNBOUND_WHY = "With set -u the shell stops at a variable that is not set, with 'unbound variable'; a batch system need not set this one."
PATH_WHY = "The variable is an absolute path: with something in front of it, it is the path of another folder, which does not exist."

EMPTY_VALUE = re.compile(r"""=(?:""|''|"?\$\{\w+:?-(?:""|'')?\}"?)?[ \t]*(?:#.*|;.*)?$""", re.MULTILINE)
LIST_NAME = re.compile(r"(?i)arg|opt|flag|extra|param|cmd|command|config|cfg|setting|override|more|other|add_|kw")
OPTION_BEFORE = re.compile(r"(?:\A|\s)(--?[A-Za-z][\w-]*)[ \t]+\$\{?\Z")
VALUE_ENDS = re.compile(r"\}?(?=[ \t]*(?:\\?\n|\Z|[;|&)\"'])|[ \t]+\S)")
SHORTEST = 4


def empty_value(job: JobDescription) -> Iterator[Violation]:
    """Report ``--option $NAME`` of a variable whose only value is the empty one."""
    tested = {
        u.name for u in job.uses if u.program in ("[", "[[", "test", "case", "read") or u.operator.startswith(GUARDS)
    }
    for use in job.uses:
        if (
            use.operator
            or use.index
            or use.program in ("echo", "printf")
            or use.in_redirect
            or not _is_empty(job, use.name)
        ):
            continue
        items = job.by_name[use.name]
        inherits = any(re.search(rf"\$\{{{use.name}:?-", a.value) for a in items)
        if (use.name in tested and not inherits) or _is_tested(job, use.name) or use.offset < items[0].offset:
            continue
        before = OPTION_BEFORE.search(job.text[max(0, use.offset - 80) : use.offset])
        end = use.offset + len(use.name)
        if before is None or not VALUE_ENDS.match(job.text, end) or LIST_NAME.search(use.name):
            continue
        if _akin(before[1], use.name):
            text = f"${use.name} is empty: {before[1]} gets no value"
            cure = f'${{{use.name}:+{before[1]} "${use.name}"}}, which is nothing if {use.name} is empty'
            yield Violation(use.offset, text, why=EMPTY_WHY, cure=cure)
            return


def _is_empty(job: JobDescription, name: str) -> bool:
    items = job.by_name.get(name, [])
    if not items or name in job.reading.named or job.placeholders:
        return False
    return all(
        a.items is None
        and not a.under
        and not a.in_function
        and EMPTY_VALUE.match(job.text, a.offset + len(name)) is not None
        for a in items
    )


def _is_tested(job: JobDescription, name: str) -> bool:
    """Return whether a condition looks at the variable, or at whether it is empty."""
    return any(
        u.name == name and (u.program in ("[", "[[", "test", "case") or u.operator.startswith((":+", "+", ":?", "?")))
        for u in job.uses
    )


def _akin(option: str, name: str) -> bool:
    """Return whether an option has the name of the variable: a flag in front of ``$MORE_OPTIONS`` has not."""
    first, second = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (option, name))
    return (
        first == second or (len(first) >= SHORTEST and first in second) or (len(second) >= SHORTEST and second in first)
    )


# ------------------------------------------------------------------------------------------- set -u

SEARCH_LISTS = {
    "PYTHONPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH",
    "LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF", "XLA_FLAGS", "MANPATH", "INCLUDE", "DYLD_LIBRARY_PATH",
}  # fmt: skip
NOUNSET = re.compile(r"-\w*u\w*")


def unbound(job: JobDescription) -> Iterator[Violation]:
    """Report a list of folders that grows from nothing, ``A=/x:$A``, where set -u is on."""
    changes: list[tuple[int, bool]] = []
    if re.match(r"#!\S*sh\s+-\w*u", job.lines.line(1)):
        changes.append((0, True))
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program == "set" and not call.under and not call.in_substitution:
            if any(NOUNSET.fullmatch(w) for w in words) or "-o nounset" in " ".join(words):
                changes.append((call.offset, True))
            elif any(re.fullmatch(r"\+\w*u\w*", w) for w in words) or "+o nounset" in " ".join(words):
                changes.append((call.offset, False))
    if not changes:
        return
    yield from _never_set(job, changes)
    for use in job.uses:
        state = [on for place, on in changes if place < use.offset]
        if use.name not in SEARCH_LISTS or not state or not state[-1] or use.operator or use.under or use.in_function:
            continue
        earlier = [
            a for a in job.by_name.get(use.name, []) if job.lines.place(a.offset)[0] < job.lines.place(use.offset)[0]
        ]
        guarded = any(u.name == use.name and u.operator and u.offset <= use.offset for u in job.uses)
        if earlier or guarded or use.program in ("[", "[["):
            continue
        loaded = any(
            c.program in ("module", "ml", "source", ".", "eval", "spack") and c.offset < use.offset and not c.in_substitution
            and not re.search(r"bin/activate\Z|\bpurge\b|\buse\b", " ".join(a.text for a in c.args))
            for c in job.calls
        )  # fmt: skip
        sure = not loaded or (use.name == "PYTHONPATH" and not SETS_PYTHONPATH.search(job.text))
        text = f"set -u stops the script here if ${use.name} is not set"
        yield Violation(use.offset, text, why=UNBOUND_WHY, cure=f"{use.name}=/folder${{{use.name}:+:${use.name}}}",
                        severity=None if sure else "note")  # fmt: skip
        return


def _never_set(job: JobDescription, changes: list[tuple[int, bool]]) -> Iterator[Violation]:
    """Report a name in small letters that nothing in the script sets: an environment has none of these."""
    guarded = {u.name for u in job.uses if u.operator}
    if (
        job.sources_files
        or job.placeholders
        or any(c.program in ("eval", "set", "getopts") and c.args and c.program != "set" for c in job.calls)
    ):
        return
    for use in job.uses:
        state = [on for place, on in changes if place < use.offset]
        known = job.has(use.name) or use.name in job.reading.named | job.reading.exported | guarded
        if (
            not state
            or not state[-1]
            or known
            or use.under
            or use.in_function
            or not re.fullmatch(r"[a-z][a-z0-9_]+", use.name)
        ):
            continue
        if (
            re.search(
                rf"(?<![$\w{{]){use.name}(?:=|\+\+|\[)|-v[ \t]+{use.name}\b|[ \t]{use.name}\b[ \t]*(?:;|\n)", job.text
            )
            or "proxy" in use.name
        ):
            continue
        text = f"set -u stops the script here: nothing sets ${use.name}"
        yield Violation(use.offset, text, why="With set -u the shell stops at a variable that is not set, with 'unbound variable'.",
                        cure=f"${{{use.name}:-}}, or set it above")  # fmt: skip
        return


SETS_PYTHONPATH = re.compile(
    r"(?im)^\s*(?:module\s+(?:load|add)|ml)\s.*(?:scipy|pytorch|tensorflow|easybuild|spack|python|jax|rocm|paraview|openmm|LUMI|cray)|^\s*(?:source|\.)\s+\S*(?:setup|env)\w*\.(?:sh|bash)"
)

# ----------------------------------------------------------------------------------- absolute paths

ALWAYS_ABSOLUTE = {
    "HOME",
    "PWD",
    "OLDPWD",
    "SLURM_SUBMIT_DIR",
    "PBS_O_WORKDIR",
    "PBS_O_HOME",
    "LS_SUBCWD",
    "SLURM_TMPDIR",
    "CONDA_PREFIX",
    "VIRTUAL_ENV",
}
IN_FRONT = re.compile(
    r"(?:(?<=[\s=\"'(])|\A)((?:\.{1,2}/)+|~/|\$\{?(?:PWD|HOME|SLURM_SUBMIT_DIR|PBS_O_WORKDIR)\}?/|\$\(pwd\)/|`pwd`/|/home/)\"?\$\{?\Z"
)


def path_in_front(job: JobDescription) -> Iterator[Violation]:
    """Report ``../$SLURM_SUBMIT_DIR`` and ``$PWD/$HOME``: a path in front of one that begins with /."""
    for use in job.uses:
        if use.operator or use.index or use.program in ("echo", "printf", "[", "[[") or not _is_absolute(job, use):
            continue
        before = IN_FRONT.search(job.text[max(0, use.offset - 60) : use.offset])
        after = job.text[use.offset + len(use.name) : use.offset + len(use.name) + 1]
        if before and after != ":":
            shown = f"{before[1]}${use.name}"
            value = next((a.value for a in job.by_name.get(use.name, [])), "an absolute path")
            cure = f'"${use.name}/.."' if before[1].startswith("../") else f'"${use.name}"'
            yield Violation(use.offset, f"{shown}: ${use.name} is {value[:60]}, and {before[1]} stands in front of it",
                            why=PATH_WHY, cure=cure)  # fmt: skip


def _is_absolute(job: JobDescription, use: VariableUse) -> bool:
    items: list[Assignment] = job.by_name.get(use.name, [])
    if not items:
        return use.name in ALWAYS_ABSOLUTE and use.name not in job.reading.named
    if use.name in job.reading.named or any(a.items is not None for a in items):
        return False
    return all(re.match(r"/[\w$.-]|\$\{?(?:HOME|PWD|SLURM_SUBMIT_DIR|PBS_O_WORKDIR)\b", a.value) for a in items)
