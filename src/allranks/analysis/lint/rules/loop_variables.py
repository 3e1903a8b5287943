"""Rules for the variables of loops: expanded before the loop sets them, and indices that leave the list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules.dataflow import GUARDS, INHERITED
from allranks.analysis.lint.rules.mismatched_names import idle_variables, same_meaning
from allranks.analysis.lint.rules.variables import edits
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex

SET_BY_LOOP = lazy_regex(
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
    lazy_regex(rf"\bfor[ \t]+(?P<n>\w+)[ \t]+in[ \t]+(?:\$\(|`)seq[ \t]+(?P<a>{NUMBER})[ \t]+(?P<b>{NUMBER})[ \t]*(?:\)|`)[ \t]*(?:;|\n)"),
    lazy_regex(r"\bfor[ \t]+(?P<n>\w+)[ \t]+in[ \t]+\{(?P<a>\d{1,4})\.\.(?P<b>\d{1,4})\}[ \t]*(?:;|\n)"),
    lazy_regex(rf"\bfor[ \t]*\(\([ \t]*{BOUNDS}[ \t]*;[ \t]*{NEXT}[ \t]*\)\)"),
    lazy_regex(r"\bfor[ \t]+(?P<n>\w+)[ \t]+in[ \t]+(?P<a>\d{1,3})(?:[ \t]+\d{1,3})*[ \t]+(?P<b>\d{1,3})[ \t]*(?:;|\n)"),
    lazy_regex(r"\bfor[ \t]+(?P<n>\w+)[ \t]+in[ \t]+[\"']?\$\{!(?P<all>\w+)\[[@*]\]\}[\"']?[ \t]*(?:;|\n)"),
)  # fmt: skip
LEAVES = lazy_regex(r"(?m)(?:^|[;&|])[ \t]*(?:if|\[|\[\[|test|case|break|continue|while|until)(?!\w)")
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
    for use in job.uses:
        index = re.fullmatch(r"\[(\d{1,4})\]", use.index)
        if (
            index
            and sizes.get(use.name, 0) > 1
            and int(index[1]) >= sizes[use.name]
            and not use.operator
            and not use.under
        ):
            size = sizes[use.name]
            yield Violation(
                use.offset,
                f"{use.name} has {size} elements (0 to {size - 1}): element {index[1]} is empty",
                why=BEYOND_WHY,
            )
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


# -------------------------------------------------------------------------------- values of branches

BRANCHES_WHY = (
    "The other branch sets another name: there the variable keeps no value, and the program gets an empty one."
)
IF_BLOCK = lazy_regex(r"(?m)^(?P<indent>[ \t]*)if\b(?P<body>.*?)^(?P=indent)fi\b", re.DOTALL)
CASE_BLOCK = lazy_regex(r"(?m)^(?P<indent>[ \t]*)case\b[^\n]*\bin\b(?P<body>.*?)^(?P=indent)esac\b", re.DOTALL)
SET_HERE = lazy_regex(r"(?m)(?:^|;|\))[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(?![=~])")


def other_name_in_branch(job: JobDescription) -> Iterator[Violation]:
    """Report a branch that sets a name that nothing uses, where the other branches set the one that is used."""
    if job.kind != "script" or job.sources_files:
        return
    idle = {i.name: i for i in idle_variables(job)}
    blocks = (
        [(m.start("body"), m["body"], r"(?m)^[ \t]*(?:else|elif)\b") for m in IF_BLOCK.finditer(job.code)]
        if idle
        else []
    )
    blocks += [(m.start("body"), m["body"], ";;") for m in CASE_BLOCK.finditer(job.code)] if idle else []
    for start, body, divider in blocks:
        parts = [set(SET_HERE.findall(part)) for part in re.split(divider, body)]
        for part in parts:
            for name in sorted(part & idle.keys()):
                others = set().union(*(p for p in parts if p is not part))
                near = [
                    o
                    for o in sorted(others - part)
                    if o in job.used_names and (_near(name, o) or same_meaning(name, o))
                ]
                inside = len(near) == 1 and all(
                    start <= a.offset < start + len(body) for a in job.by_name.get(near[0], ())
                )
                if inside and name not in others and job.by_name.get(near[0]):
                    text = f"nothing uses {name}; the other branches set {near[0]}, which is empty after this one"
                    yield Violation(idle[name].offset, text, why=BRANCHES_WHY, cure=f"{near[0]}=...")
                    return


def _near(name: str, other: str) -> bool:
    return (
        min(len(name), len(other)) > 2
        and re.sub(r"\d", "", name) != re.sub(r"\d", "", other)
        and edits(name, other, 1) == 1
    )


# ------------------------------------------------------------------------------------- calculations

SUM_WHY = "The shell calculates only in $((...)): the value is the text, with the + in it."
NOT_CALCULATED = r"(?m)(?<![\w$.-]){name}=(?:\$?\{{?{name}\}}?)[ \t]*[-+*][ \t]*\d+[ \t]*(?:;|$)"


def not_calculated(job: JobDescription) -> Iterator[Violation]:
    """Report ``i=i+1`` and ``i=$i+1``, whose value is a text."""
    if job.kind != "script" or re.search(r"\b(?:declare|typeset|local)[ \t]+-\w*i", job.code):
        return
    for name, items in job.by_name.items():
        found = re.search(NOT_CALCULATED.format(name=name), job.code) if len(items) > 1 else None
        item = next((a for a in items if found and a.offset == found.start()), None)
        if found is None or item is None or job.line_of(found.start()).lstrip().startswith(("let", "((")):
            continue
        uses = [u for u in job.uses if u.name == name and not found.start() <= u.offset <= found.end()]
        plain = [
            u
            for u in uses
            if "((" not in job.line_of(u.offset) and not re.search(r"-(?:eq|ne|lt|le|gt|ge)\b", job.line_of(u.offset))
        ]
        if plain:
            text = f"{found[0].strip(' ;')} calculates nothing: {name} becomes a text"
            yield Violation(found.start(), text, why=SUM_WHY, cure=f"{name}=$(({name} + 1))")
            return


OPERAND = r"(?:\$\{?[A-Za-z_]\w*\}?|\d+)"
PRODUCT = lazy_regex(rf"(?m)(?<![\w$])([A-Za-z_]\w*)=(\"?)({OPERAND}(?:[ ]?[*+][ ]?{OPERAND})+)\2[ \t]*(?:;|#|$)")
COUNT_NAMES = lazy_regex(
    r"SLURM_(?:NTASKS|NPROCS|NNODES|JOB_NUM_NODES|CPUS_PER_TASK|NTASKS_PER_NODE|GPUS_ON_NODE|GPUS_PER_NODE|ARRAY_TASK_ID)"
)
PRODUCT_WHY = "The shell calculates only in $(( )), let and declare -i: the program gets the text with its signs."
CALCULATES = lazy_regex(r"\(\(|\blet\b|\bexpr\b|\bbc\b|\bawk\b|\beval\b|\$\[|-(?:eq|ne|lt|le|gt|ge)\b")


def product_as_text(job: JobDescription) -> Iterator[Violation]:
    """Report ``CORES=$NODES*$TASKS`` as the number that an option gets."""
    if job.kind != "script" or re.search(r"\b(?:declare|typeset|local)[ \t]+-\w*i", job.code):
        return
    for found in PRODUCT.finditer(job.code):
        name, names = found[1], re.findall(r"[A-Za-z_]\w*", found[3])
        item = next((a for a in job.by_name.get(name, ()) if a.offset == found.start(1)), None)
        numbers = all(COUNT_NAMES.fullmatch(n) or job.number(f"$(({n}))") is not None for n in names)
        if item is None or not names or not numbers or name in job.reading.named:
            continue
        if re.search(rf"\[\$?\{{?{name}\b", job.code):
            continue  # an index of an array is calculated
        own = re.compile(rf"(?<![\w])\"?\$(?:{name}\b|\{{{name}\}})\"?(?=\s|$)")
        uses = [
            u
            for u in job.uses
            if u.name == name and u.offset > item.offset and u.program not in ("echo", "printf", "=")
        ]
        plain = [u for u in uses if own.search(line := job.line_of(u.offset)) and not CALCULATES.search(line)]
        if plain and not any(CALCULATES.search(job.line_of(u.offset)) for u in uses):
            text = f"{name}={found[3]} calculates nothing: {plain[0].program} gets the text"
            yield Violation(
                item.offset,
                text,
                why=PRODUCT_WHY,
                cure=f"{name}=$(({found[3].replace('$', '').replace('{', '').replace('}', '')}))",
            )
            return


SAME_DEVICE_WHY = "All of them run at the same time on one GPU."


def device_never_changes(job: JobDescription) -> Iterator[Violation]:
    """Report ``CUDA_VISIBLE_DEVICES=$gpu`` of programs in the background of a loop that does not change the variable."""
    for call in job.calls if job.kind == "script" else ():
        for item in call.prefix if call.in_loop and call.after == "&" else ():
            written = re.match(r"CUDA_VISIBLE_DEVICES=[\"']?\$\{?(\w+)\}?[\"']?(?=\s)", job.text[item.offset :])
            own = job.by_name.get(written[1], []) if written else []
            if not written or len(own) != 1 or written[1] in job.reading.named or not own[0].value.isdecimal():
                continue
            changed = re.search(rf"\(\([^\n]*\b{written[1]}\b|\b(?:let|read)\b[^\n]*\b{written[1]}\b", job.code)
            if not changed and not own[0].in_function:
                text = f"every run of the loop uses GPU {own[0].value}: nothing changes {written[1]}"
                yield Violation(
                    item.offset,
                    text,
                    why=SAME_DEVICE_WHY,
                    cure=f"{written[1]}=$(({written[1]} + 1)) at the end of the loop",
                )
                return
