"""Rules for what a script submits: dependencies between jobs, options behind the script, and batch scripts in here-documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from allranks.analysis.lint.command_options import LAUNCHERS, PYTHON, slurm_option, srun_end
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, ProgramCall, Violation
from allranks.analysis.lint.rules.dataflow import JOB_NAMES
from allranks.analysis.lint.rules.quoting import quoted_documents
from allranks.utils.text import lazy_regex

# -------------------------------------------------------------------------------------- dependencies

DEPENDENCY_WHY = "sbatch prints 'Submitted batch job 123' and not the number alone: the dependency is refused, and the second job is not submitted."
DEPENDENCY_CURE = "ID=$(sbatch --parsable ...)"
CONDITION = r"(?:after(?:any|ok|notok|corr|burstbuffer)?|expand)"
SYNTAX_WHY = "sbatch refuses it with 'Job dependency problem', and does not submit the job."
SUBMITS = lazy_regex(r"[\"']?(?:\$\(|`)\s*sbatch\s")
NUMBER_ALONE = lazy_regex(r"(?i)\b(?:biowulf|lscratch)\b")
"""Signs of a site whose sbatch prints the number alone (NIH Biowulf)."""


def dependency(job: JobDescription) -> Iterator[Violation]:
    """Report ``--dependency`` on the whole message of sbatch, on a variable that nothing sets, and without a colon."""
    if job.kind != "script":
        return
    for call in job.calls:
        if call.program != "sbatch":
            continue
        for arg, following in call.pairs():
            name, value, follows = slurm_option(arg.text)
            if not arg.text.startswith("-") or name != "dependency":
                continue
            text = value if value is not None else following.text if follows and following else ""
            wrong = re.match(rf"{CONDITION}=(.*)", text)
            direct = re.search(rf"{CONDITION}:(\$\(|`)\s*sbatch\s[^|]*\Z", text)
            if direct and "--parsable" not in text and not NUMBER_ALONE.search(job.text):
                yield Violation(
                    arg.offset, f"--dependency {text[:40]}: this is the whole message of sbatch, not the job's number"
                )
            elif re.fullmatch(rf"{CONDITION}:", text):
                yield Violation(
                    arg.offset,
                    f"--dependency={text} has no number: it ends at the blank",
                    why=SYNTAX_WHY,
                    cure="--dependency=afterok:$ID",
                )
            elif wrong:
                yield Violation(
                    arg.offset,
                    f"--dependency {text[:40]}: a colon stands between the condition and the job's number",
                    why=SYNTAX_WHY,
                    cure="--dependency=afterok:$ID",
                )
            else:
                yield from _message_as_id(job, call, arg.offset)


def _message_as_id(job: JobDescription, call: ProgramCall, offset: int) -> Iterator[Violation]:
    if NUMBER_ALONE.search(job.text):
        return
    end = job.text.find("\n", offset)
    for use in job.uses:
        if not offset <= use.offset < (end if end >= 0 else len(job.text)) or use.operator:
            continue
        if not re.match(
            rf"(?:.*[=:\s\"'])?{CONDITION}:[^\n]*\Z", job.text[offset : use.offset].rstrip("{").rstrip("$")
        ):
            continue
        before = [a for a in job.by_name.get(use.name, ()) if a.offset < use.offset]
        if not before or use.name in job.reading.named:
            continue
        written = before[-1].value
        whole = SUBMITS.match(written)
        if whole and not re.search(r"--parsable|\||--wrap|<<<|##|awk|grep|cut|\$\{", written):
            text = f"${use.name} is the whole message of sbatch, not the job's number"
            yield Violation(offset, text)
            return


OTHER_FIELD = lazy_regex(
    r"\|\s*awk\s+['\"]?\{\s*print\s+\\?\$([1-35-9])\s*;?\s*\}|\|\s*cut\s+-d\s*['\"] ['\"]\s+-f\s*([1-35-9])\b"
)
FIELD_WHY = "sbatch prints 'Submitted batch job 123': the number is the fourth word."


def wrong_field(job: JobDescription) -> Iterator[Violation]:
    """Report another word of the message of sbatch that is taken as the job's number."""
    for item in job.assignments if job.kind == "script" else ():
        found = OTHER_FIELD.search(item.value) if SUBMITS.match(item.value) else None
        used = found and re.search(rf"{CONDITION}:\$\{{?{item.name}\b", job.text)
        if found and used and "--parsable" not in item.value and not NUMBER_ALONE.search(job.text):
            text = f"{item.name} is word {found[1] or found[2]} of the message of sbatch, not the job's number"
            yield Violation(item.offset, text, why=FIELD_WHY, cure=DEPENDENCY_CURE)


LAST_WHY = "The loop submits several jobs and keeps the number of the last one only: the dependent job starts while the others still run."


def last_of_loop(job: JobDescription) -> Iterator[Violation]:
    """Report a dependency on the last job of a loop, all of which are meant."""
    for call in job.calls if job.kind == "script" else ():
        if call.program != "sbatch" or call.in_loop or call.in_function or call.in_substitution:
            continue
        for arg, following in call.pairs():
            name, value, follows = slurm_option(arg.text)
            text = value if value is not None else following.text if follows and following else ""
            found = re.fullmatch(rf"{CONDITION}:\$\{{?(\w+)\}}?", text) if name == "dependency" else None
            items = job.by_name.get(found[1] or "", []) if found else []
            if len(items) != 1 or not SUBMITS.match(items[0].value):
                continue
            inner = [
                c
                for c in job.calls
                if c.program == "sbatch"
                and c.in_loop
                and items[0].offset < c.offset < call.offset
                and c.in_substitution
            ]
            again = len(re.findall(rf"\$\{{?{found[1]}\b" if found else "", job.text))
            if inner and again == 1 and not re.search(rf"\b{found[1]}\+=" if found else "", job.text):
                yield Violation(arg.offset, f"${found[1] if found else ''} is the number of the last job of the loop only", why=LAST_WHY,
                                cure="collect them: IDS=$IDS:$ID, then --dependency=afterok$IDS")  # fmt: skip
                return


PROGRAMS = lazy_regex(
    r"(?:python[\d.]*|bash|sh|srun|mpirun|mpiexec|torchrun|accelerate|deepspeed|singularity|apptainer|conda|time|env|julia|Rscript)"
)
PROGRAM_WHY = "sbatch takes the first word as the batch script: it refuses a program with 'This does not look like a batch script'."
WRAP_WHY = "--wrap takes one word: sbatch refuses the others with 'Script arguments not permitted with --wrap option'."


def submitted_program(job: JobDescription) -> Iterator[Violation]:
    """Report a program in the place of the batch script, and ``--wrap`` without quotes."""
    for call in job.calls if job.kind == "script" else ():
        if call.program != "sbatch" or any(a.is_open for a in call.args):
            continue
        end = srun_end(call.args)
        rest = call.args[end:]
        wrap = next((a for a in call.args[:end] if re.match(r"--wrap(?:=|\Z)", a.text)), None)
        if wrap is not None and rest and not any(r.operator.startswith("<<") for r in call.redirects):
            yield Violation(
                wrap.offset,
                "--wrap takes one word: the command has no quotes",
                why=WRAP_WHY,
                cure="--wrap='command with its options'",
            )
        elif rest and PROGRAMS.fullmatch(rest[0].text) and not rest[0].quoted and wrap is None:
            yield Violation(
                rest[0].offset,
                f"sbatch takes {rest[0].text} as the batch script",
                why=PROGRAM_WHY,
                cure="sbatch script.sh; or sbatch --wrap='command'",
            )


# ------------------------------------------------------------------------- options behind the script

LATE_WHY = "sbatch and srun read options only in front of the script or program: these are arguments of it, and nothing of them is requested."
OF_SLURM = {
    "gres", "array", "dependency", "cpus-per-task", "gpus-per-task", "gpus-per-node", "cpus-per-gpu", "ntasks-per-node", "mem-per-cpu",
    "mem-per-gpu", "mail-type", "mail-user", "kill-on-bad-exit", "exclusive", "nodelist", "open-mode", "requeue", "constraint", "partition", "qos",
}  # fmt: skip
OF_PROGRAMS = {"exclusive", "constraint", "partition", "qos", "array"}
"""Other programs have these options too: they count only besides another one."""
BATCH_SCRIPT = lazy_regex(r"\.(?:sh|sbatch|slurm|job|bash|slr|sub)\Z")
OWN_SUBMITTER = lazy_regex(r"(?i)submit|slurm|launch|sbatch|cluster|sweep|hydra|schedul")


def late_options(job: JobDescription) -> Iterator[Violation]:
    """Report options of Slurm behind the script of sbatch, or behind the program of srun."""
    if job.kind != "script":
        return
    for call in job.calls:
        reader = (
            "sbatch" if call.program == "sbatch" else "srun" if call.under and call.under[-1].program == "srun" else ""
        )
        if not reader or call.in_function:
            continue
        start = srun_end(call.args) if reader == "sbatch" else 0
        words = [a.text for a in call.args[start:]]
        if reader == "sbatch":
            program = words[0] if words and BATCH_SCRIPT.search(words[0]) and not call.args[start].is_open else ""
        else:
            program = next((w for w in words if w.endswith(".py")), "") if PYTHON.match(call.program) else ""
        if (
            not program
            or OWN_SUBMITTER.search(BATCH_SCRIPT.sub("", program))
            or {*LAUNCHERS, "srun", "sbatch"} & set(words)
        ):
            continue
        behind = call.args[start + words.index(program) + 1 :]
        late = [
            a for a in behind if not a.quoted and a.text.startswith("--") and a.text[2:].partition("=")[0] in OF_SLURM
        ]
        if reader == "srun":
            late = [a for a in late if not _tells_program(job, a, behind)]
        sure = [a for a in late if a.text[2:].partition("=")[0] not in OF_PROGRAMS]
        if sure or len(late) > 1:
            first = (sure or late)[0]
            text = f"{first.text.partition('=')[0]} stands behind {program[:40]}: {reader} does not read it"
            yield Violation(
                first.offset, text, cure=f"put it in front of {'the script' if reader == 'sbatch' else 'python'}"
            )


def _tells_program(job: JobDescription, option: Argument, words: Sequence[Argument]) -> bool:
    """Return whether the option tells the program what the job has: its value is Slurm's, or that of the same option above."""
    name, equals, value = option.text[2:].partition("=")
    following = next((b for a, b in pairwise(words) if a is option), None)
    value = value if equals else following.text if following else ""
    return "SLURM_" in value or (name in job.heading and (job.heads(name) or "") == value)


# ------------------------------------------------------------------------ scripts in here-documents

ARGUMENTS_WHY = "A batch script that sbatch reads from a here-document has no arguments: the value is empty."
UNSEEN_WHY = (
    "The quoted here-document passes the name, not the value, and the variable is not exported: it is empty in the job."
)


def submitted_text(job: JobDescription) -> Iterator[Violation]:
    """Report ``$1`` and own variables in a quoted here-document that sbatch reads."""
    if job.kind != "script":
        return
    for document in quoted_documents(job, r"[^#\n]*\bsbatch\b(?P<words>[^\n|;]*)"):
        words = document.head.start("words")
        if re.search(r"--export(?!=ALL\b(?!,))|\s-\s+\S", document.head["words"]):
            continue
        body = job.text[document.start : document.end]
        lines = _without_comments(body)
        if re.search(r"(?m)^\s*(?:set\s+--|function\b|\w+\s*\(\))|\bshift\b|\b(?:awk|perl|sed)\b|<<", lines):
            continue
        place = re.search(r"\$\{?[1-9]\b\}?(?![^\n]*')", lines)
        if place:
            at = document.start + body.find(place[0])
            yield Violation(at, f"{place[0]} in the here-document is an argument of the job, which has none",
                            why=ARGUMENTS_WHY, cure="take the quotes from the here-document's mark, or export a variable")  # fmt: skip
            continue
        yield from _not_visible(job, words, document.start, body, lines)


QUOTED_SCRIPT = lazy_regex(r"(?m)^[ \t]*echo[ \t]+'(#![^']*)'[ \t]*>[ \t]*(\S+)")
QUOTED_DOCUMENT = r"[ \t]*cat\b(?P<words>[^\n]*)"


def written_text(job: JobDescription) -> Iterator[Violation]:
    """Report own variables in a script that ``echo '...'`` or a quoted here-document writes."""
    if job.kind != "script":
        return
    for found in QUOTED_SCRIPT.finditer(job.text):
        if not job.in_comment(found.start(1)):
            yield from _in_written(job, found.start(), found.start(1), found[1], found[2])
    for document in quoted_documents(job, QUOTED_DOCUMENT):
        target = re.search(r">[ \t]*(\S+)", f"{document.head['words']} {document.head['rest']}")
        if target and job.text.startswith("#!", document.start):
            body = job.text[document.start : document.end]
            yield from _in_written(job, document.head.start("words"), document.start, body, target[1])


def _in_written(job: JobDescription, place: int, start: int, body: str, target: str) -> Iterator[Violation]:
    name = re.escape(target.strip("\"'").rpartition("/")[2])
    if not body.startswith(("#!/bin/bash", "#! /bin/bash", "#!/usr/bin/env bash", "#!/bin/sh")):
        return
    if re.search(
        rf"(?m)^[^\n]*(?:\bsource|^\s*\.|\bsed\b|envsubst|\bperl\b|eval)[^\n]*{name}", job.text[start + len(body) :]
    ):
        return  # it runs in this shell, or is completed before
    lines = _without_comments(body)
    if not re.search(r"\b(?:getopts|awk|perl)\b|<<", lines):
        yield from _not_visible(job, place, start, body, lines)


def _without_comments(body: str) -> str:
    return "\n".join(line for line in body.split("\n") if not line.lstrip().startswith("#"))


def _not_visible(job: JobDescription, call: int, start: int, body: str, lines: str) -> Iterator[Violation]:
    inner = set(
        re.findall(r"(?:^|[\s;(])([A-Za-z_]\w*)=|\bfor[ \t]+(\w+)\b|\bread\b[^\n]*?(\w+)$", lines, re.MULTILINE)
    )
    own = {name for names in inner for name in names if name}
    exported = job.reading.exported | {a.name for a in job.assignments if a.exported}
    if re.search(r"(?m)^\s*set\s+(?:-\w*a\w*|-o\s+allexport)", job.text) or re.search(
        r"(?m)^\s*(?:source|\.|eval)\s", lines
    ):
        return
    for use in re.finditer(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", lines):
        name = use[1] or use[2]
        set_outside = any(a.offset < call for a in job.by_name.get(name, ()) if a.value and not a.under)
        if (
            name in own | exported
            or not (set_outside or name in job.reading.named)
            or (name.isupper() and not set_outside)
        ):
            continue
        at = start + max(0, body.find(use[0]))
        yield Violation(at, f"${name} is a variable of this script, which the other one does not get", why=UNSEEN_WHY,
                        cure=f"export {name} above it, or let this shell expand it")  # fmt: skip
        return


WRAPPED_WHY = (
    "In double quotes the shell that submits expands the variable, where it is not set: the job gets an empty value."
)


def wrapped_too_early(job: JobDescription) -> Iterator[Violation]:
    """Report ``sbatch --wrap="python x.py $SLURM_ARRAY_TASK_ID"``."""
    if job.kind != "script" or job.is_job:
        return
    for call in job.calls:
        for arg, following in call.pairs() if call.program == "sbatch" else ():
            word = arg if arg.text.startswith("--wrap=") else following if arg.text == "--wrap" else None
            if word is None or not len(word.source.at):
                continue
            first, last = word.source.where(0), word.source.where(len(word.source.text) - 1)
            uses = [u for u in job.uses if first <= u.offset <= last and u.program == "sbatch" and not u.under]
            use = next((u for u in uses if JOB_NAMES.fullmatch(u.name) and not job.has(u.name)), None)
            if use is not None:
                text = f"${use.name} is expanded when the job is submitted, where it is not set"
                yield Violation(use.offset, text, why=WRAPPED_WHY, cure=f"\\${use.name}, or single quotes")
                return
