"""Rules for values that a script takes from outside, or calculates, and then does not use: another name or a constant is used instead."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, Violation
from allranks.analysis.lint.rules.ports import backend

# ------------------------------------------------------------------------- the same name in other case

OWN_VALUE = r"=(\"?)\$(?:{name}\b|\{{{name}\}})\1[ \t]*(?:[;#].*)?$"
CASE_WHY = (
    "Names of variables are case-sensitive: NAME=$NAME passes on what the environment has, which is nothing here."
)


def other_case(job: JobDescription) -> Iterator[Violation]:
    """Report ``export NAME=$NAME`` below ``name=...``, which nothing uses."""
    if job.kind != "script":
        return
    for item in job.set_values_at_top():
        name = item.name
        if item.in_function or len(job.by_name[name]) > 1 or name in job.reading.named:
            continue
        if not re.compile(OWN_VALUE.format(name=name), re.MULTILINE).match(job.text, item.offset + len(name)):
            continue
        others = [a for a in job.set_values_at_top() if a.name != name and a.name.lower() == name.lower()]
        if not others or any(a.offset > item.offset or not a.value for a in others):
            continue
        other = others[-1]
        if other.name not in job.used_names and not other.exported and other.name not in job.reading.exported:
            line = job.lines.place(other.offset)[0]
            text = f"{name}=${name} sets nothing; {other.name}, which line {line} sets and nothing uses, was probably meant"
            yield Violation(item.offset, text, why=CASE_WHY, cure=f"{name}=${other.name}")


# ---------------------------------------------------------------------------------- the node rank

RANK_NAME = re.compile(r"(?i)(?:node|machine)_?rank")
FROM_OUTSIDE = re.compile(r"\$(?:\{?\d\b|\{?[A-Za-z_])")
RANK_WHY = "Every node runs this script with the same rank: the launchers take each other's place, or wait for the other ranks until the timeout."


def rank_not_used(job: JobDescription) -> Iterator[Violation]:
    """Report a constant rank of the node in a script that takes the rank from outside and does not use it."""
    if job.kind != "script" or job.submits:
        return
    taken = [
        a
        for a in job.set_values_at_top()
        if RANK_NAME.fullmatch(a.name) and FROM_OUTSIDE.match(a.value) and a.name not in job.used_names
    ]
    if not taken or any(a.exported for a in taken):
        return
    for launch in job.launches:
        option, nodes = launch.option("node_rank", "machine_rank"), launch.option("nnodes", "num_machines")
        if option is None or nodes is None or not (option.value or "").isdecimal() or backend(launch) != "static":
            continue
        if (
            launch.call.in_loop
            or launch.call.branch
            or (job.number(nodes.value) or 2) < 2
            or taken[0].offset > launch.call.offset
        ):
            continue
        line = job.lines.place(taken[0].offset)[0]
        text = f"{option.arg.text}: the same on every node; {taken[0].name} of line {line} is not used"
        yield Violation(option.arg.offset, text, why=RANK_WHY, cure=f"--node_rank=${taken[0].name}")
        return


# ---------------------------------------------------------------------------- the script's arguments

DROPPED_WHY = "What the caller passes to the script is dropped without a message: the program runs with its defaults."
DROPPED_CURE = 'pass $NAME on at the end of the command, or "$@"'
ALL_ARGUMENTS = re.compile(
    r"=\(?[ \t]*(\"?)\$(?:[@*]|\{[@*](?::[ \t]*[1-9]\d?)?\})\1[ \t]*\)?[ \t]*(?:[;#].*)?$", re.MULTILINE
)
PASSES_ON = re.compile(r"\$[@*]|\$\{[@*]|\$\{!|\beval\b|\benvsubst\b")


def arguments_dropped(job: JobDescription) -> Iterator[Violation]:
    """Report a variable with the arguments of the script that no command uses, in a script that starts ranks."""
    if job.kind != "script" or job.sources_files:
        return
    for item in job.set_values_at_top():
        if item.in_function or item.exported or item.name in job.used_names or len(job.by_name[item.name]) > 1:
            continue
        written = ALL_ARGUMENTS.match(job.text, item.offset + len(item.name))
        if written is None or not any(la.call.offset > item.offset for la in job.launches):
            continue
        if item.name not in job.reading.exported and not _used_in_text(job, item, written.end()):
            yield Violation(item.offset, f"{item.name} has the arguments of the script, and no command uses it")
            return


def _used_in_text(job: JobDescription, item: Assignment, end: int) -> bool:
    """Return whether the text outside of comments has the name again, or passes the arguments on in another way."""
    rest = job.text[: item.offset] + job.text[end:]
    code = "\n".join(line for line in rest.split("\n") if not line.lstrip().startswith("#"))
    return PASSES_ON.search(code) is not None or re.search(rf"\b{item.name}\b", code) is not None
