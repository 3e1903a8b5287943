"""Rules for job arrays: numbers of tasks that select nothing, and files that all tasks write."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import MAX_LEVELS, JobDescription
from allranks.analysis.lint.readers import calculate
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN, MappedText
from allranks.utils.text import lazy_regex

TASK = "SLURM_ARRAY_TASK_ID"
MOST_TASKS = 2000
PART = lazy_regex(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,5}))?)?")


def numbers_of(value: str | None) -> list[int]:
    """Return the numbers of the tasks of ``--array=0-9,12%4``; empty if they are not literal, or too many."""
    text = re.sub(r"%\d+\Z", "", (value or "").strip("[]\"'"))
    found: list[int] = []
    for part in text.split(","):
        bounds = PART.fullmatch(part)
        if bounds is None or int(bounds[3] or 1) == 0 or int(bounds[2] or bounds[1]) - int(bounds[1]) > MOST_TASKS:
            return []
        found += range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1, int(bounds[3] or 1))
    return found


OTHER_ARRAYS = lazy_regex(r"#PBS\s+-[Jt]\s*(\S+)|#BSUB\s+-J\s*[\"']?[\w.-]*\[([^\]\s]+)\]|#\$\s+-t\s+(\S+)")


def array_numbers(job: JobDescription) -> list[int]:
    """Return the numbers of the tasks of an array of Slurm, PBS, LSF or Grid Engine."""
    if job.is_batch:
        return numbers_of(job.heads("array"))
    found = (OTHER_ARRAYS.match(c.text) for c in job.reading.comments if job.lines.place(c.offset)[1] == 1)
    lists = [m[1] or m[2] or m[3] for m in found if m]
    return numbers_of(lists[0]) if len(lists) == 1 else []


class _Task:
    """Values of variables in one task of the array."""

    def __init__(self, job: JobDescription, number: int) -> None:
        self.job, self.number = job, number

    def value(self, name: str, depth: int = 0) -> int | None:
        if name == TASK:
            return self.number
        items = self.job.by_name.get(name, [])
        if len(items) != 1 or depth > MAX_LEVELS or name in self.job.reading.named:
            return None
        item = items[0]
        if item.in_function or item.under or item.in_substitution or item.items is not None:
            return None
        return self.calculate(item.value, depth + 1)

    def calculate(self, text: str, depth: int = 0) -> int | None:
        text = text.strip().strip("\"'")
        if text.isdecimal():
            return int(text[:9])
        name = re.fullmatch(r"\$\{?(\w+)\}?", text)
        if name:
            return self.value(name[1], depth)
        text = re.sub(r"\$\{#(\w+)\[[@*]\]\}", self._count, text)
        text = re.sub(r"\A`\s*(expr\s.*)`\Z", r"$(\1)", text)
        if re.search(r"\$\{\w+[^\w}]", text):
            return None  # a default, or a part of the value
        return calculate(text, lambda part: self.value(part, depth))

    def _count(self, found: re.Match[str]) -> str:
        items = self.job.by_name.get(found[1], [])
        known = len(items) == 1 and items[0].items is not None and not _open_items(items[0].items)
        return str(len(items[0].items or ())) if known else found[0]


def _open_items(items: tuple[MappedText, ...]) -> bool:
    """Return whether the number of elements is unknown."""
    return any(not i.text or UNRESOLVED_OPEN in i.text or re.search(r"[*?{]", i.text) for i in items)


def computed_index(job: JobDescription) -> Iterator[Violation]:
    """Report an element of a list that a task of the array calculates and that does not exist."""
    numbers = numbers_of(job.heads("array"))
    if not numbers or job.submits:
        return
    guarded = re.search(rf"(?m)^[^#\n]*(?:{TASK}=|-(?:ge|gt|le|lt)\b|\(\([^\n]*[<>])", job.text)
    yield from _one_too_many(job, numbers)
    for use in job.uses:
        items = job.by_name.get(use.name, [])
        index = use.index[1:-1].strip()
        if len(items) != 1 or items[0].items is None or items[0].offset > use.offset or use.operator or not index:
            continue
        listed = items[0].items
        least = 1 if re.search(r"%\s*\d+\Z", index) else 2  # a list of one element may still be filled
        if len(listed) < least or _open_items(listed) or use.in_loop or use.in_function or guarded or index in "@*":
            continue
        if re.search(rf"\$\{{#{use.name}\[", job.text) and f"#{use.name}[" not in use.index:
            continue  # the script knows how many there are
        form = index if index.startswith("$((") or index.isidentifier() else f"$(({index}))"
        form = f"${index}" if index.isidentifier() else form
        form = index if re.fullmatch(r"\$\{?\w+\}?", index) else form
        for number in numbers:
            place = _Task(job, number).calculate(form)
            if place is None:
                break
            if place >= len(listed) or place < -len(listed):
                text = f"task {number} of the array takes element {place} of {use.name}, which has {len(listed)} (0 to {len(listed) - 1})"
                yield Violation(use.offset, text)
                return


BEYOND = lazy_regex(
    rf"(?m)^[ \t]*if[ \t]+(?:\[\[?[ \t]+[\"']?\$\{{?{TASK}\}}?[\"']?[ \t]+-gt|\(\([ \t]*\$?\{{?{TASK}\}}?[ \t]*>(?!=))[ \t]*[\"']?"
    r"\$\{#(\w+)\[[@*]\]\}"
)


def _one_too_many(job: JobDescription, numbers: list[int]) -> Iterator[Violation]:
    """Report ``-gt ${#LIST[@]}``, which lets the task pass whose number is that of the elements, counted from 0."""
    for found in BEYOND.finditer(job.text):
        items = job.by_name.get(found[1], [])
        if job.in_comment(found.start(1)) or len(items) != 1 or items[0].items is None or _open_items(items[0].items):
            continue
        count = len(items[0].items)
        element = rf"\$\{{{found[1]}\[\$?\{{?{TASK}\}}?\]\}}"
        if count in numbers and re.search(element, job.code):
            text = f"-gt lets task {count} of the array pass: the last element of {found[1]} is {count - 1}"
            yield Violation(found.start(1), text, cure=f"-ge ${{#{found[1]}[@]}}")


CASE = lazy_regex(rf"(?ms)^[ \t]*case[ \t]+[\"']?\$\{{?{TASK}\}}?[\"']?[ \t]+in\b(.*?)^[ \t]*esac\b")
NO_BRANCH_WHY = "What the branches set is empty in this task."
CASE_PATTERN = lazy_regex(r"(?m)(?:^|;;)[ \t]*\(?([^\s()#;][^()#;\n]*?)\)")


def case_of_task(job: JobDescription) -> Iterator[Violation]:
    """Report a task of the array for which ``case`` has no branch."""
    numbers = numbers_of(job.heads("array"))
    for found in CASE.finditer(job.text) if len(numbers) > 1 else ():
        if job.in_comment(found.start(1)):
            continue
        patterns = [p.strip().strip("\"'") for words in CASE_PATTERN.findall(found[1]) for p in words.split("|")]
        if len(patterns) < 2 or not all(p.isdecimal() for p in patterns):
            continue
        missing = [n for n in numbers if str(n) not in patterns]
        if missing and not re.search(rf"(?m)^[^#\n]*{TASK}[^\n]*-(?:gt|ge|lt|le)\b", job.text):
            text = f"the case has no branch for task {missing[0]} of the array"
            yield Violation(
                found.start(1) - 1, text, why=NO_BRANCH_WHY, cure=f"#SBATCH --array={_span(patterns)}; or a branch *)"
            )


def _span(patterns: list[str]) -> str:
    own = sorted({int(p) for p in patterns})
    return f"{own[0]}-{own[-1]}" if own == list(range(own[0], own[-1] + 1)) else ",".join(map(str, own))


LINE = lazy_regex(
    r"\bsed[ \t]+(?:-n[ \t]+)?[\"']{0,2}\$\{?(\w+)\}?[\"']{0,2}(?:p|q;d)\b"
    r"|\bhead[ \t]+-n?[ \t]*[\"']?\$\{?(\w+)\}?[\"']?[^\n|]*\|[ \t]*tail[ \t]+-(?:n[ \t]*)?1\b"
)
LINE_WHY = "Lines count from 1: sed refuses line 0, and head -n 0 prints nothing, so this task gets no settings."


def line_zero(job: JobDescription) -> Iterator[Violation]:
    """Report task 0 of an array that takes the line of its number from a file."""
    if 0 not in numbers_of(job.heads("array")) or job.submits:
        return
    for found in LINE.finditer(job.text):
        name = found[1] or found[2]
        zero = name == TASK or _Task(job, 0).value(name) == 0
        if zero and not job.in_comment(found.start()) and _Task(job, 5).value(name) == 5:
            text = "task 0 of the array takes line 0 of the file, which does not exist"
            yield Violation(found.start(), text, why=LINE_WHY, cure="#SBATCH --array=1-<lines>; or the number + 1")
            return


MOVES = r"(?m)\b(?:cd|pushd)\b[ \t]+(?![\"']?\$\{?(?:PBS_O_WORKDIR|SGE_O_WORKDIR|LS_SUBCWD|SLURM_SUBMIT_DIR|HOME)\b[\w/}\"']*[ \t]*(?:;|&&|$))[^\n]*\$"
WRITTEN_WHY = (
    "Each task truncates the file when it starts, and they write into it together: the results of the others are lost."
)


def shared_files(job: JobDescription) -> Iterator[Violation]:
    """Report a file to which every task of the array redirects the output of its work."""
    numbers = array_numbers(job)
    if len(numbers) < 2 or job.submits or re.search(MOVES, job.code) or "--chdir" in job.text:
        return
    works = {(c.under[0] if c.under else c).offset for c in job.work_calls if not c.in_function}
    piped = None
    for call in (c for c in job.calls if not c.in_substitution and not c.under):
        target = next((r.target for r in call.redirects if r.operator in (">", "&>")), None)
        if call.offset in works:
            piped = call if call.is_piped else None
        elif piped is not None and call.program == "tee" and call.before in ("|", "|&"):
            target = call.args[0].text if len(call.args) == 1 else None
        else:
            continue
        if (
            target
            and not call.branch
            and re.fullmatch(r"[\w./~-]+", target)
            and not target.startswith(("/dev/", "/tmp", "-"))
        ):
            again = len(re.findall(rf"(?<![\w./-]){re.escape(target)}(?![\w/-])", job.text)) > 1
            if not again:
                text = f"all {len(numbers)} tasks of the array write {target}"
                number = f"${TASK}" if job.is_batch else "the number of the task"
                yield Violation(call.offset, text, why=WRITTEN_WHY, cure=f"a name with {number}")
                return


MOST_TEXT = 3000
BRANCH_WHY = "The tasks run at the same time: one changes the files that the others are just reading."
SETTINGS_WHY = "The tasks run at the same time and write into one file: a task reads the settings of another one."


def shared_settings(job: JobDescription) -> Iterator[Violation]:
    """Report a file of settings that each task of the array writes for itself, under the same name."""
    value = job.heads("array") or ""
    if len(numbers_of(value)) < 2 or value.endswith("%1") or job.submits:
        return
    if re.search(r"(?m)^[^#\n]*\b(?:cd|pushd)\b[^\n]*\$|--chdir", job.text):
        return
    names = [TASK, *(n for n, items in job.by_name.items() if any(TASK in a.value for a in items))]
    own = re.compile(r"\$\{?(?:" + "|".join(map(re.escape, names)) + r")\b")
    used = " ".join(a.text for c in job.work_calls for a in c.args)
    for call in job.calls:
        if call.in_substitution or call.under or call.branch or call.in_function:
            continue
        targets = [r.target for r in call.redirects if r.operator == ">"]
        text = " ".join(a.text for a in call.args)
        if call.program in ("cat", "echo", "printf"):
            body = job.text[call.offset : call.offset + MOST_TEXT]
            marked = (
                re.search(r"<<-?[ \t]*(\w+)[^\n]*\n(.*?)\n[ \t]*\1\b", body, re.DOTALL)
                if call.program == "cat"
                else None
            )
            told = bool(own.search(marked[2] if marked else text))
        elif call.program == "sed" and any(a.text.startswith("-i") for a in call.args):
            targets, told = [a.text for a in call.args[-1:]], bool(own.search(text))
        elif call.program == "sed":
            told = bool(own.search(text))
        elif call.program in ("cp", "mv", "ln") and len(call.args) > 1:
            targets = [a.text for a in call.args[-1:]]
            told = any(own.search(a.text) for a in call.args[:-1]) and not own.search(targets[0])
        elif call.program == "git" and call.args and call.args[0].text in ("checkout", "switch") and own.search(text):
            message = f"each task of the array runs git {text[:60]} in the same folder"
            yield Violation(call.offset, message, why=BRANCH_WHY, cure="git worktree add, with one folder per task")
            return
        else:
            continue
        for target in targets:
            plain = re.fullmatch(r"[\w./~-]+\.\w+", target) and not target.startswith(("/tmp", "/dev/"))
            if told and plain and re.search(rf"(?<![\w.-]){re.escape(target.removeprefix('./'))}(?![\w.-])", used):
                message = f"all tasks of the array write their settings into {target}"
                yield Violation(call.offset, message, why=SETTINGS_WHY, cure=f"a name with ${TASK}")
                return


NUMBER_WHY = (
    "Outside of an array %a is 4294967294: every job writes the same file, and truncates the log of the one before it."
)


def number_without_array(job: JobDescription) -> Iterator[Violation]:
    """Report a log with %a, and no number of the job, in a script that has no array and uses no number of a task."""
    if "array" in job.heading or job.submits or re.search(r"ARRAY|\barray\b", job.text):
        return
    for name in ("output", "error"):
        item = job.heading.get(name)
        value = re.sub(r"%%", "", (item.value or "") if item else "")
        if item and not item.late and re.search(r"%\d*a", value) and not re.search(r"%\d*[AjJ]", value):
            text = f"--{name} has %a, but the job is no array: it is the same number in every job"
            yield Violation(item.offset, text, why=NUMBER_WHY, cure="%j, the number of the job")
            return


# ------------------------------------------------------------------ arrays whose tasks do the same

ARRAYS_WITH_NUMBER = (
    ("#PBS", lazy_regex(r"#PBS\s+(-[tJ])\s*(\d+)-(\d+)(?!.*%1\b)"), "$PBS_ARRAY_INDEX (PBS) or $PBS_ARRAYID (Torque)"),
    ("#BSUB", lazy_regex(r"#BSUB\s+(-J)\s*[\"']?[\w.-]*\[(\d+)-(\d+)\](?!.*%1\b)"), "$LSB_JOBINDEX"),
    ("#\\$", lazy_regex(r"#\$\s+(-t)\s+(\d+)-(\d+)(?!.*-tc\s+1\b)"), "$SGE_TASK_ID"),
)
READS_NUMBER = lazy_regex(
    r"(?i)array|JOBINDEX|TASK_ID|\$\{?[@*#1-9]|\$RANDOM|\bmktemp\b|PBS_JOBID|LSB_JOBID|wandb|sweep|agent|worker|resume"
)


def number_not_used(job: JobDescription) -> Iterator[Violation]:
    """Report a job array of PBS, LSF or Grid Engine whose script never looks at the number of its task."""
    if job.is_batch or job.sources_files or len(job.work) != 1 or job.submits:
        return
    for system, form, variable in ARRAYS_WITH_NUMBER:
        text = "\n".join(line for line in job.text.splitlines() if not re.match(system, line))
        for comment in job.reading.comments:
            found = form.match(comment.text) if job.lines.place(comment.offset)[1] == 1 else None
            if found is None or found[2] == found[3] or READS_NUMBER.search(text):
                continue
            if not any("$" in a.text for a in job.work_calls[0].args):
                shown = " ".join(found[0].split()[1:])
                message = f"{shown}, but nothing in the script uses the number of the task"
                yield Violation(comment.offset, message, cure=f"pass {variable} to the program")
                return
