"""Rules for options and arguments that a script collects and no command gets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, Violation
from allranks.analysis.lint.rules.mismatched_names import IdleVariable, idle_variables, plain_name
from allranks.utils.text import lazy_regex

LOST_WHY = "What the caller passes is dropped without a message: the program runs with its own default."
OF_OPTION = lazy_regex(r"\$\{?OPTARG\b|\$\{?2\b|\$\{?[1i]#|\$\{\w+#")
OF_ARGUMENT = lazy_regex(r"\$(?:[1-9]\b|\{[1-9]\d?\b)")
IN_CASE = lazy_regex(r"^[ \t]*[-\w\"'| ?*=]+\)[ \t]*")
FOR_OTHERS = lazy_regex(r"(?i)(?:help|verbose|debug|quiet|usage|dry|test|comment|dummy|unused|version|_)\w*")
ENOUGH = 2
STARTERS = {
    "srun",
    "mpirun",
    "mpiexec",
    "jsrun",
    "singularity",
    "apptainer",
    "docker",
    "sbatch",
    "qsub",
    "julia",
    "Rscript",
}


def options_unused(job: JobDescription) -> Iterator[Violation]:
    """Report an option that the script parses, and whose value nothing uses; or several arguments of this kind."""
    started = job.work_calls or any(c.program in STARTERS for c in job.calls)
    if job.kind != "script" or job.sources_files or not started:
        return
    idle = [i for i in idle_variables(job) if not i.loops and not FOR_OTHERS.fullmatch(i.name)]
    named = [i for i in idle if _is_of_option(job, i)]
    placed = [i for i in idle if i not in named and _is_of_argument(job, i)]
    for item in named:  # each is one option of the script
        text = f"{item.name} gets an option's value, and no command uses it"
        yield Violation(item.offset, text, why=LOST_WHY, cure=f"pass ${item.name} to the program")
    if len(placed) >= ENOUGH:
        text = f"{', '.join(i.name for i in placed)} get the caller's arguments, and no command uses them"
        # Scripts of one family often take the same arguments, with defaults for those that only another one needs.
        defaults = any(re.search(r"-", job.by_name[i.name][0].value) for i in placed)
        severity = "note" if defaults else None
        cure = f"pass ${placed[0].name} to the program"
        yield Violation(placed[0].offset, text, why=LOST_WHY, cure=cure, severity=severity)


def _is_of_option(job: JobDescription, item: IdleVariable) -> bool:
    """Return whether the value is that of an option in a ``case`` of the script."""
    start = job.code.rfind("\n", 0, item.offset) + 1
    above = job.code[max(0, start - 200) : item.offset]
    in_case = re.search(r"(?:^|\n)[ \t]*\(?[-\w\"'|?*=: ]+\)[^\n]*(?:\n[^\n;]*)?\Z", above)
    shifted = re.search(r"\)[ \t]*(?:\n[ \t]*)?shift[ \t]*(?:;|\n)[ \t]*\Z", above) and re.search(
        r"\$\{?1\b", item.value
    )
    if re.search(r"\$\{\w+#{1,2}(?:--?\w|\*=)", item.value):
        return True  # ${arg#--lr=}
    taken = OF_OPTION.search(item.value) is not None and in_case is not None
    return (taken or bool(shifted)) and re.search(r"\bcase\b", job.code) is not None


def _is_of_argument(job: JobDescription, item: IdleVariable) -> bool:
    own = job.by_name.get(item.name, [])
    written = re.match(
        r"\w+=[\"']?\$(?:[1-9]|\{[1-9]\d?(?::?-[^{}]*)?\})[\"']?[ \t]*(?:[;#]|$)", job.line_of(item.offset).lstrip()
    )
    return len(own) == 1 and not own[0].in_function and written is not None


# -------------------------------------------------------------------------- another value for the option

FIXED_WHY = "The command has a value of its own for the option: what the script sets has no effect."


def settings_fixed(job: JobDescription) -> Iterator[Violation]:
    """Report ``EPOCHS=100`` that nothing uses, above ``--epochs 50``."""
    if job.kind != "script" or job.sources_files or re.search(r"(?<![-\w])eval\b|\$\{!", job.code):
        return
    for idle in idle_variables(job):
        own = job.by_name.get(idle.name, [])
        if (
            idle.loops
            or len(own) != 1
            or own[0].under
            or own[0].in_function
            or not re.fullmatch(r"[\w./+-]+", own[0].source.text)
        ):
            continue
        given = [
            (word, value) for word, value in _values(job, idle.offset) if plain_name(word) == plain_name(idle.name)
        ]
        if given and all(re.fullmatch(r"[\w./+-]+", value) and value != idle.value for _, value in given):
            word, value = given[0]
            text = f"{idle.name}={idle.value} is not used: the command has {word} {value}"
            yield Violation(idle.offset, text, why=FIXED_WHY, cure=f"{word} ${idle.name}")
            return


def _values(job: JobDescription, offset: int) -> Iterator[tuple[str, str]]:
    """Yield the options with values of the programs below a place."""
    for call in job.work_calls:
        for arg, following in call.pairs() if call.offset > offset else ():
            word, equals, value = arg.text.partition("=")
            if word.startswith("-") or equals:
                yield word, value if equals else following.text if following else ""


# ------------------------------------------------------------------------------- texts of options

TEXT_WHY = "The variable holds options for a program, and no command has it: the program runs without them."
LEFT_OVER = 4
"""A script with so many variables that nothing uses was written from another one, whose settings it does not need."""
OPTIONS = lazy_regex(r"[ \t\n\\]*--?[A-Za-z][\w.-]*(?:[= \t]|\Z)")


def options_collected(job: JobDescription) -> Iterator[Violation]:
    """Report a variable with a text of options that nothing uses."""
    if (
        job.kind != "script"
        or job.sources_files
        or not job.work_calls
        or re.search(r"(?<![-\w])eval\b|\$\{!", job.code)
    ):
        return
    idle = idle_variables(job)
    left_over = len(idle) >= LEFT_OVER
    for item in idle:
        own = job.by_name.get(item.name, [])
        listed = own[0].items if own else None
        value = listed[0].text if listed else item.value
        if not own or not OPTIONS.match(value) or any(a.under or a.in_function or a.in_substitution for a in own):
            continue
        if not any(w.offset > item.offset for w in job.work_calls) or _is_repeated(job, item, own):
            continue
        text = f"{item.name} holds options, and no command has ${item.name}"
        yield Violation(
            item.offset,
            text,
            why=TEXT_WHY,
            cure=f"${item.name} in the command",
            severity="note" if left_over else None,
        )


def _is_repeated(job: JobDescription, item: IdleVariable, own: list[Assignment]) -> bool:
    """Return whether the commands have the options themselves."""
    first = re.match(r"[ \t\n\\]*(--?[\w.-]+)", own[0].value)
    return first is not None and any(a.text.partition("=")[0] == first[1] for w in job.work_calls for a in w.args)


# ------------------------------------------------------------------------------------- overwritten

AGAIN_WHY = "The second assignment replaces the first one: its options never reach a program."
NAMES = lazy_regex(r"(?:^|\s)(--?[A-Za-z][\w.-]*)")


def options_replaced(job: JobDescription) -> Iterator[Violation]:
    """Report ``ARGS="--lr 1"`` above ``ARGS="--epochs 2"``, with other options and nothing between that uses the first."""
    if job.kind != "script" or re.search(r"\$\{!|(?<![-\w])eval\b", job.code):
        return
    for name, items in job.by_name.items():
        for first, second in pairwise(items):
            if any(a.under or a.in_function or a.in_substitution or a.subshell for a in (first, second)):
                continue
            if not (OPTIONS.match(first.value) and OPTIONS.match(second.value)):
                continue
            between = job.code[first.offset : second.offset]
            if re.search(r"(?m)^[ \t]*(?:if|elif|else|case|for|while|until|done|fi|esac|\})|\)[ \t]*$|;;", between):
                continue
            if job.line_of(first.offset)[:1].isspace() != job.line_of(second.offset)[:1].isspace():
                continue
            used = any(
                u.name == name
                and first.offset < u.offset < second.offset + len(second.value) + 40
                and u.offset < _end(job, second)
                for u in job.uses
            )
            one, two = set(NAMES.findall(first.value)), set(NAMES.findall(second.value))
            if not used and one and two and not one & two and second.name in job.used_names:
                line = job.lines.place(first.offset)[0]
                text = f"{name} is set again: the options of line {line} ({min(one)}) are lost"
                yield Violation(second.offset, text, why=AGAIN_WHY, cure=f'{name}="${name} ..."')
                return


def _end(job: JobDescription, item: Assignment) -> int:
    """Return the end of the line, or of the continued lines, in which an assignment stands."""
    end = job.text.find("\n", item.offset)
    while end > 0 and job.text[end - 1] == "\\":
        end = job.text.find("\n", end + 1)
    return end if end >= 0 else len(job.text)


ARGUMENT_WHY = "The value that the caller passes is lost: the program always gets the one in the script."


def argument_replaced(job: JobDescription) -> Iterator[Violation]:
    """Report ``LR=$1`` above ``LR=0.1``, with nothing between that uses the argument."""
    if job.kind != "script":
        return
    for name, items in job.by_name.items():
        for first, second in pairwise(items):
            if any(a.under or a.in_function or a.in_substitution or a.subshell for a in (first, second)):
                continue
            if not re.fullmatch(r"\$(?:[1-9]|\{[1-9]\})", first.value) or not re.fullmatch(
                r"[\w./:-]+", second.source.text
            ):
                continue
            between = job.code[first.offset : second.offset]
            plain = not job.line_of(first.offset)[:1].isspace() and not job.line_of(second.offset)[:1].isspace()
            if not plain or re.search(r"(?m)^[ \t]*(?:if|case|for|while|until|\[|test)\b|&&|\|\||\[", between):
                continue
            if re.search(r"&&|\|\|", job.line_of(second.offset)) or any(
                u.name == name and first.offset < u.offset < second.offset for u in job.uses
            ):
                continue
            line = job.lines.place(first.offset)[0]
            text = f"{name} is set again: the caller's value of line {line} is lost"
            yield Violation(second.offset, text, why=ARGUMENT_WHY, cure="remove the line; or ${1:-default}")
            return


# ------------------------------------------------------------------------------ settings for nobody

NOBODY_WHY = "The program is started without arguments and gets none of the settings: it runs with its own defaults."
NOT_SETTINGS = lazy_regex(
    r"(?i)(?:master|log|start|end|time|date|host|job|now|node|world|rank|gpu|n?proc|pid|port|addr|home|env)\w*|\w*(?:_port|_addr)"
)


def settings_for_nobody(job: JobDescription) -> Iterator[Violation]:
    """Report settings that nothing uses, in a script whose only program has no arguments."""
    if job.kind != "script" or job.sources_files or len(job.work_calls) != 1:
        return
    words = [a.text for a in job.work_calls[0].args if a.text != "-u"]
    if (
        len(words) != 1
        or not words[0].endswith(".py")
        or (job.work_calls[0].redirects and "<" in job.work_calls[0].redirects[0].operator)
    ):
        return
    idle = [
        i
        for i in idle_variables(job)
        if not i.loops and not re.search(r"[$`]", i.value) and not NOT_SETTINGS.fullmatch(i.name)
    ]
    idle = [
        i
        for i in idle
        if i.offset < job.work_calls[0].offset
        and not any(a.under or a.in_function for a in job.by_name.get(i.name, []))
    ]
    if len(idle) >= ENOUGH:
        text = f"{', '.join(i.name for i in idle[:3])} are set, and {words[0]} gets no arguments"
        yield Violation(
            idle[0].offset, text, why=NOBODY_WHY, cure=f"{words[0]} --{idle[0].name.lower()} ${idle[0].name} ..."
        )
