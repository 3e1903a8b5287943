"""Rules for arguments: how a script takes its own ones, and values that the shell splits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation
from allranks.utils.text import lazy_regex

GETOPTS = lazy_regex(r"\bgetopts[ \t]+(?:\"([^\"\n$]*)\"|'([^'\n$]*)'|([\w:]+))[ \t]+(\w+)")
LETTER_WHY = (
    "Without a colon behind its letter the option takes no value: $OPTARG is empty, and the value ends the options."
)
UNKNOWN_WHY = "getopts knows only the letters in its text: for another one it prints 'illegal option', and the branch is never taken."


def letters(job: JobDescription) -> Iterator[Violation]:
    """Report an option of getopts whose branch takes $OPTARG without a colon in the text, or whose letter is not in it."""
    for found in GETOPTS.finditer(job.code) if job.kind == "script" else ():
        text = found[1] or found[2] or found[3] or ""
        end = re.compile(r"(?m)^[ \t]*done\b|;[ \t]*done\b").search(job.code, found.end())
        if end is None or "-" in text or not text:
            continue
        body_start = found.end()
        for branch in re.finditer(
            r"(?ms)(?:^|;;|\bin\b)[ \t\n]*\(?[\"']?([A-Za-z])[\"']?[ \t]*\)(.*?)(?:;;|\besac\b)",
            job.code[body_start : end.start()],
        ):
            letter = branch[1]
            place = body_start + branch.start(1)
            if letter not in text.replace(":", ""):
                yield Violation(
                    place,
                    f"-{letter} is not in the text of getopts, '{text}'",
                    why=UNKNOWN_WHY,
                    cure=f"getopts '{text}{letter}'",
                )
                return
            if "OPTARG" in branch[2] and f"{letter}:" not in text:
                yield Violation(
                    place,
                    f"-{letter} takes $OPTARG, but has no colon in '{text}'",
                    why=LETTER_WHY,
                    cure=f"{letter}: in the text of getopts",
                )
                return


COUNTED = lazy_regex(
    r"(?m)^[ \t]*if[ \t]+(?:\[\[?[ \t]+[\"']?\$#[\"']?[ \t]+(?:-ne|!=|-gt)[ \t]+[\"']?(?P<n>\d)[\"']?[ \t]+\]\]?"
    r"|\(\([ \t]*\$#[ \t]*(?:!=|>)[ \t]*(?P<n2>\d)[ \t]*\)\))"
    r"[ \t]*;?[ \t]*\n?[ \t]*then(?P<body>.*?)^[ \t]*fi\b",
    re.DOTALL,
)
COUNT_WHY = "The script ends for every other number of arguments: this one is always empty."


def beyond_count(job: JobDescription) -> Iterator[Violation]:
    """Report ``$4`` in a script that ends unless it gets three arguments."""
    for found in COUNTED.finditer(job.code) if job.kind == "script" else ():
        number = int(found["n"] or found["n2"])
        if (
            not re.search(r"\bexit\b", found["body"])
            or re.search(r"\b(?:else|elif)\b", found["body"])
            or re.search(r"(?m)^[ \t]*(?:shift|set[ \t]+--)\b", job.code)
        ):
            continue
        if re.search(r"\(\)[ \t\n]*\{|\bfunction\b|\bawk\b|\bperl\b|<<", job.code):
            continue
        rest = job.code[found.end() :]
        for use in re.finditer(r"(?<![\\$\w'])\$(?:([1-9])(?!\d)|\{([1-9])\})", rest):
            position = int(use[1] or use[2])
            place = found.end() + use.start()
            line = job.line_of(place)
            if position > number and (not job.in_quotes(place) or ('"' in line and "'" not in line)):
                yield Violation(
                    place,
                    f"${position} is always empty: the script takes {number} argument{'s' if number != 1 else ''}",
                    why=COUNT_WHY,
                )
                return


NO_SHIFT_WHY = "The value stays in $1 of the next pass, where no branch knows it: the script ends, or drops the value."
LOOP = lazy_regex(
    r"(?m)^([ \t]*)while[ \t]+(?:\[\[?[ \t]+[^\n]*\$#[^\n]*|\(\([^\n]*\$#[^\n]*|test[^\n]*\$#[^\n]*)(?P<body>.*?)^\1done\b",
    re.DOTALL,
)


def value_not_shifted(job: JobDescription) -> Iterator[Violation]:
    """Report ``--lr) LR=$2 ;;`` in a loop that shifts once, and ends for an unknown option."""
    for found in LOOP.finditer(job.code) if job.kind == "script" else ():
        body = found["body"]
        case = re.search(r"(?s)\bcase\b(.*?)\besac\b(.*)\Z", body)
        if (
            case is None
            or len(re.findall(r"(?m)(?:^|[;&|])[ \t]*shift\b[ \t]*(?:1\b)?", case[2])) != 1
            or re.search(r"shift[ \t]+[2-9$]", body)
        ):
            continue
        start = found.start("body") + case.start(1)
        other = re.search(r"(?ms)\*[ \t]*\)(.*?)(?:;;|\Z)", case[1])
        if other is None or not re.search(r"\b(?:exit|usage|die|help)\b", other[1]):
            continue
        for branch in re.finditer(
            r"(?ms)(?:^|;;)[ \t\n]*\(?(-{1,2}[\w-]+(?:[ \t]*\|[ \t]*-{1,2}[\w-]+)*)[ \t]*\)(.*?)(?:;;|\Z)", case[1]
        ):
            if re.search(r"=[\"']?\$\{?2\b", branch[2]) and "shift" not in branch[2]:
                text = f"{branch[1].split('|')[0].strip()} takes $2, and the loop shifts one word only"
                yield Violation(start + branch.start(1), text, why=NO_SHIFT_WHY, cure="shift behind the value")
                return


SELF_WHY = "In this branch $1 is the option itself: its value is $2."
TAKES_ITSELF = lazy_regex(
    r"(?m)(?:^|;;|\bin\b)[ \t]*\(?(?:-\w[ \t]*\|[ \t]*)?(-{1,2}[\w-]+)[ \t]*\)\s*(?:export[ \t]+)?(\w+)=[\"']?\$\{?1\}?[\"']?[ \t]*[;\n]\s*"
    r"shift(?:[ \t]+2\b|[ \t]*(?:;|\n|&&)\s*shift\b)"
)


def option_as_value(job: JobDescription) -> Iterator[Violation]:
    """Report ``--lr) LR=$1; shift 2 ;;``, whose value is the option."""
    for found in TAKES_ITSELF.finditer(job.code) if job.kind == "script" else ():
        text = f"{found[2]} gets the word {found[1]}, and its value is skipped"
        yield Violation(found.start(2), text, why=SELF_WHY, cure=f"{found[2]}=$2")
        return


# ----------------------------------------------------------------------------- values with blanks

NAMED = lazy_regex(
    r"(?<!\S)--?(?:\w*(?:name|title|prompt|question|instruction|description|comment|notes?)|desc)(?:=|[ \t]+)\$\{?\Z"
)
SENTENCE = lazy_regex(r"[A-Za-z][\w.,!?:-]*(?:[ \t]+[\w.,!?:-]+)+")
BLANKS_WHY = "Without quotes the shell splits the value at its blanks: the option gets the first word, and the program refuses the others."


def split_names(job: JobDescription) -> Iterator[Violation]:
    """Report ``--name $NAME`` of a name with blanks."""
    if job.kind != "script" or "zsh" in job.lines.line(1):
        return
    for use in job.uses:
        items = job.by_name.get(use.name, [])
        if (
            not items
            or use.quoted
            or use.operator
            or use.index
            or use.under
            or use.name in job.reading.named
            or use.program in ("=", "export", "echo", "printf", "for")
        ):
            continue
        values = [
            a
            for a in items
            if a.items is None and SENTENCE.fullmatch(a.source.text) and not re.search(r"(?:^|\s)-", a.source.text)
        ]
        before = job.text[max(0, use.offset - 60) : use.offset]
        if (
            len(values) != len(items)
            or NAMED.search(before) is None
            or re.search(r"names[= \t]", before[-12:])
            or job.in_quotes(use.offset)
        ):
            continue
        text = f"${use.name} has blanks: without quotes it is {len(values[0].value.split())} words"
        yield Violation(use.offset, text, why=BLANKS_WHY, cure=f'"${use.name}"')
        return


DEFAULT_WHY = (
    "A colon without a minus sign takes a part of the value, from a place on: without the argument the value is empty."
)
NO_DEFAULT = lazy_regex(r"\$\{([1-9]|[A-Za-z_]\w*):([A-Za-z./][\w./-]*)\}")


def default_without_sign(job: JobDescription) -> Iterator[Violation]:
    """Report ``${1:train}``, which was meant as ``${1:-train}``."""
    if job.kind != "script" or not job.text.startswith("#!"):
        return
    for found in NO_DEFAULT.finditer(job.code):
        name, word = found[1], found[2]
        counted = (
            job.has(word)
            or word in job.reading.named
            or re.search(rf"(?<![\w:]){re.escape(word)}[ \t]*(?:=|\+\+)", job.code)
        )
        if not counted and not _in_single_quotes(job, found.start()):
            text = f"${{{name}:{word}}} has no default: without a minus sign it is a part of ${name}"
            yield Violation(found.start(), text, why=DEFAULT_WHY, cure=f"${{{name}:-{word}}}")
            return


def _in_single_quotes(job: JobDescription, offset: int) -> bool:
    line, column = job.lines.place(offset)
    return job.lines.line(line)[: column - 1].count("'") % 2 == 1


FOREVER_WHY = "The loop goes on as long as there are arguments: without shift it looks at the same one again and again, and never ends."
LEAVES = lazy_regex(r"(?i)\b(?:shift|exit|return|break|set|getopts|exec)\b|\b\w*(?:usage|help|error|die|fail|abort)\w*")
ARGUMENT_LOOP = lazy_regex(
    r"(?m)^([ \t]*)while[ \t]+(?:\[\[?[ \t]+[^\n]*(?:\$#|-n[ \t]+[\"']?\$\{?1\b)[^\n]*|\(\([^\n]*\$#[^\n]*|(?::|true)[ \t]*;[ \t]*do)"
    r"(?P<body>.*?)^\1done\b",
    re.DOTALL,
)
BRANCH = lazy_regex(
    r"(?ms)(?:^|;;)[ \t\n]*\(?((?:\*|[\"']?-{1,2}[\w?*-]+[\"']?)(?:[ \t]*\|[ \t]*[^\s|()]+)*)[ \t]*\)(.*?)(?:;;|\Z)"
)


def never_shifted(job: JobDescription) -> Iterator[Violation]:
    """Report a branch of ``case $1`` in a loop over the arguments that leaves the argument where it is."""
    for found in ARGUMENT_LOOP.finditer(job.code) if job.kind == "script" else ():
        case = re.search(r"(?s)\A(.*?)\bcase[ \t]+[\"']?\$\{?1\}?[\"']?[ \t]+in\b(.*?)\besac\b(.*)\Z", found["body"])
        if case is None or re.search(r"\b(?:shift|set|getopts?|case)\b", case[1] + case[3]) or "shift" not in case[2]:
            continue
        if re.search(r"\bcase\b", case[2]):
            continue
        if re.search(r"\$#[^\n]*&&|\$#[^\n]*-a", job.code[found.start() : found.start("body") + 200].split("\n")[0]):
            continue
        start = found.start("body") + case.start(2)
        for branch in BRANCH.finditer(case[2]):
            if not LEAVES.search(branch[2]):
                text = f"the branch {branch[1].strip()[:30]}) has no shift: the loop does not end"
                yield Violation(start + branch.start(1), text, why=FOREVER_WHY, cure="shift, or exit 1")
                return
