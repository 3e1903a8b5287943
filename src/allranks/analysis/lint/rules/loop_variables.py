"""Rules for the variables of loops: expanded before the loop sets them, and indices that leave the list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules.dataflow import GUARDS, INHERITED
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN

SET_BY_LOOP = re.compile(
    r"(?m)(?:^|[;&|({]|\bdo\b|\bthen\b)[ \t]*(?:for[ \t]+([A-Za-z_]\w*)[ \t]+in[ \t]|for[ \t]*\(\([ \t]*([A-Za-z_]\w*)[ \t]*=)"
)
EARLY_WHY = "The shell expands the variable where the text is written, not where it is used: every pass of the loop gets the same, empty value."


def expanded_before_loop(job: JobDescription) -> Iterator[Violation]:
    """Report a value with the variable of a loop that begins further down, in which the value is used."""
    if job.kind != "script" or job.sources_files or job.placeholders:
        return
    first: dict[str, int] = {}
    for found in SET_BY_LOOP.finditer(job.code):
        first.setdefault(found[1] or found[2], found.start())
    tested = {u.name for u in job.uses if u.program in ("[", "[[", "test", "case") or u.operator.startswith(GUARDS)}
    reads = job.reading.named - first.keys()
    for use in job.uses:
        name, start = use.name, first.get(use.name)
        if (
            start is None
            or use.offset >= start
            or use.in_function
            or use.in_loop
            or use.under
            or name in tested | reads | INHERITED
        ):
            continue
        if (
            use.program not in ("=", "export")
            or job.has(name)
            or re.search(rf"\b(?:read|mapfile|readarray)\b[^\n]*\b{name}\b", job.code)
        ):
            continue
        before = [a for a in job.assignments if a.offset < use.offset and not a.under]
        item = max(before, key=lambda a: a.offset, default=None)
        if item is None or item.in_substitution or item.name == name:
            continue
        later = any(u.name == item.name and u.offset > start and u.in_loop for u in job.uses)
        if later and len(job.by_name.get(item.name, ())) == 1:
            line = job.lines.place(start)[0]
            text = f"${name} is expanded here, before the loop in line {line} sets it: {item.name} is the same in every pass"
            yield Violation(use.offset, text, why=EARLY_WHY, cure=f"set {item.name} inside of the loop")
            return


# ----------------------------------------------------------------------------------- ends of lists


class Span(NamedTuple):
    """The numbers of a loop: the variable, the first and the last one, and where the loop's body is."""

    name: str
    first: int
    last: int
    start: int
    end: int


NUMBER = r"(?:\d{1,4}|\$\{#\w+\[[@*]\]\}|\$\(\([ \t]*\$\{#\w+\[[@*]\]\}[ \t]*-[ \t]*1[ \t]*\)\))"
NEXT = r"(?:(?P=n)\+\+|\+\+(?P=n)|(?P=n)[ \t]*\+=[ \t]*1)"
BOUNDS = rf"(?P<n>\w+)[ \t]*=[ \t]*(?P<a>\d{{1,4}})[ \t]*;[ \t]*(?P=n)[ \t]*(?P<sign><=?)[ \t]*(?P<b>{NUMBER})"
SEQUENCES = (
    re.compile(rf"\bfor[ \t]+(?P<n>\w+)[ \t]+in[ \t]+(?:\$\(|`)seq[ \t]+(?P<a>{NUMBER})[ \t]+(?P<b>{NUMBER})[ \t]*(?:\)|`)[ \t]*(?:;|\n)"),
    re.compile(r"\bfor[ \t]+(?P<n>\w+)[ \t]+in[ \t]+\{(?P<a>\d{1,4})\.\.(?P<b>\d{1,4})\}[ \t]*(?:;|\n)"),
    re.compile(rf"\bfor[ \t]*\(\([ \t]*{BOUNDS}[ \t]*;[ \t]*{NEXT}[ \t]*\)\)"),
    re.compile(r"\bfor[ \t]+(?P<n>\w+)[ \t]+in[ \t]+[\"']?\$\{!(?P<all>\w+)\[[@*]\]\}[\"']?[ \t]*(?:;|\n)"),
)  # fmt: skip
LEAVES = re.compile(r"(?m)(?:^|[;&|])[ \t]*(?:if|\[|\[\[|test|case|break|continue|while|until)(?!\w)")
BEYOND_WHY = "Elements count from 0: the one behind the last is empty, and the program gets no value for its option."


def _sizes(job: JobDescription) -> dict[str, int]:
    """Return the sizes of the lists that the script sets once, as written."""
    found: dict[str, int] = {}
    for name, items in job.by_name.items():
        listed = items[0].items if len(items) == 1 else None
        changed = re.search(rf"(?m)(?<!\w){name}(?:\[[^\]]*\])?\+?=", job.code[items[0].offset + len(name) :])
        if (
            listed
            and not changed
            and name not in job.reading.named
            and not any(UNRESOLVED_OPEN in i.text or re.search(r"[$`*?{]", i.text) for i in listed)
        ):
            found[name] = len(listed)
    return found


def _spans(job: JobDescription, sizes: dict[str, int]) -> Iterator[Span]:
    for pattern in SEQUENCES:
        for found in pattern.finditer(job.code):
            end = re.compile(r"(?m)^[ \t]*done\b|;[ \t]*done\b").search(job.code, found.end())
            groups = found.groupdict()
            if end is None or re.search(
                r"(?m)(?:^|[;&|])[ \t]*(?:for|while|until)\b", job.code[found.end() : end.start()]
            ):
                continue
            if groups.get("all"):
                count = sizes.get(found["all"])
                first, last = 0, count - 1 if count else None
            else:
                first, last = _number(found["a"], sizes), _number(found["b"], sizes)
                last = last - 1 if last is not None and groups.get("sign") == "<" else last
            if first is not None and last is not None:
                yield Span(found["n"], first, last, found.end(), end.start())


def _number(text: str, sizes: dict[str, int]) -> int | None:
    if text.isdecimal():
        return int(text)
    name = re.search(r"#(\w+)\[", text)
    size = sizes.get(name[1]) if name else None
    return size - 1 if size is not None and text.startswith("$((") else size


def index_beyond_list(job: JobDescription) -> Iterator[Violation]:
    """Report a loop whose numbers leave the list from which it takes its elements."""
    if job.kind != "script" or "[" not in job.code or re.match(r"#!.*\bzsh\b", job.text):
        return
    sizes = _sizes(job)
    for span in _spans(job, sizes) if sizes else ():
        if LEAVES.search(job.code[span.start : span.end]):
            continue
        for use in job.uses:
            if not span.start <= use.offset < span.end or use.name not in sizes or use.operator:
                continue
            index = re.fullmatch(r"\[[ \t]*\$?\{?(\w+)\}?[ \t]*\]", use.index)
            if index and index[1] == span.name and span.last >= sizes[use.name] > 1:
                size = sizes[use.name]
                text = f"the loop takes element {span.last} of {use.name}, which has {size} (0 to {size - 1})"
                yield Violation(use.offset, text, why=BEYOND_WHY)
                return
    yield from _index_of_text(job)


TEXT_WHY = "A text is element 0 of itself, and has no others: for each other index the value is empty."


def _index_of_text(job: JobDescription) -> Iterator[Violation]:
    """Report an element of a variable that is one text with blanks."""
    for use in job.uses:
        items = job.by_name.get(use.name, [])
        index = re.fullmatch(r"\[\$?\{?([A-Za-z_]\w*)\}?\]", use.index)
        if not index or not items or use.operator or use.name in job.reading.named or use.under:
            continue
        texts = all(a.items is None and re.fullmatch(r"[\w./+-]+(?:[ \t]+[\w./+-]+)+", a.value) for a in items)
        if texts and not re.search(
            rf"(?<!\w){use.name}(?:\[|\+?=\()|\b{use.name}=\(\$|=\([\"']?\$\{{?{use.name}\b",
            job.code.replace(f"${{{use.name}[", ""),
        ):
            value = items[0].value
            text = f"{use.name} is one text and no list: ${{{use.name}[{index[1]}]}} is empty for every index but 0"
            yield Violation(use.offset, text, why=TEXT_WHY, cure=f"{use.name}=({value})")
            return
