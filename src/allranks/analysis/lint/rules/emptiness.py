"""Rules for values that are empty, not set, or not where they seem to be: options without a value, set -u, paths in front of paths."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules.dataflow import GUARDS

EMPTY_WHY = "The shell removes an unquoted empty value: the option takes the next word as its value, or the program stops with 'expected one argument'."
EMPTY_CURE = '${NAME:+--option "$NAME"}, which is nothing if NAME is empty'
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
