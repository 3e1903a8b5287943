"""Rules for output that goes to the wrong place: misspelt redirections, one log or one file for several runs, logs that are thrown away."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.results import truncated_file
from allranks.analysis.lint.rules.subshells import FILE_ONE, NUMBER_WHY, READS_WHOLE, runs_once
from allranks.utils.text import lazy_regex

# ----------------------------------------------------------------------------- misspelt redirections

VERSION_WHY = "> is a redirection also in the middle of a word: the program gets the name without the version."
INSTALLERS = {"pip", "pip3", "conda", "mamba", "micromamba", "uv"}


def version_as_file(job: JobDescription) -> Iterator[Violation]:
    """Report ``pip install torch>=2.0`` without quotes."""
    for call in job.calls if job.kind == "script" else ():
        words = [a.text for a in call.args]
        inner = call.program if call.program in INSTALLERS else "pip" if words[:2] == ["-m", "pip"] else None
        for redirect in call.redirects if inner and "install" in words else ():
            number = re.fullmatch(r"=\d[\w.*,<]*|\d+\.\d[\w.]*", redirect.target)
            if (
                redirect.operator == ">"
                and number
                and re.search(rf"\w>{re.escape(redirect.target)}", job.text[call.offset :])
            ):
                text = f">{redirect.target} writes a file called {redirect.target}: {inner} gets no version"
                yield Violation(call.offset, text, why=VERSION_WHY, cure=f'quotes: "name>{redirect.target}"')
                return


AMPERSAND_WHY = "& ends the command, which runs in the background: what stands behind it is a command of its own."
ARGUMENT_WHY = "The 2 is an argument of the program, and both outputs go to a file with the name 1."


def misspelt(job: JobDescription) -> Iterator[Violation]:
    """Report ``2&>1``, ``&2>1``, ``1>2`` and ``echo error > 2``."""
    if job.kind != "script":
        return
    said: set[int] = set()
    for call in job.calls:
        line = job.lines.place(call.offset)[0]
        if call.in_substitution or line in said:
            continue
        for redirect in call.redirects:
            if redirect.operator not in (">", "&>") or redirect.target not in ("1", "2"):
                continue
            rest = job.text[call.offset : _end_of_command(job, call.offset)]
            if FILE_ONE.search(rest) or not re.search(rf">[ \t]*{redirect.target}(?![\w./-])", rest):
                continue
            said.add(line)
            if redirect.operator == "&>":
                yield Violation(call.offset, "2&>1 writes a file with the name 1", why=ARGUMENT_WHY, cure="2>&1")
            else:
                text = f"> {redirect.target} writes a file with the name {redirect.target}"
                yield Violation(call.offset, text, why=NUMBER_WHY, cure=f">&{redirect.target}")
    for found in re.finditer(r"(?m)(?<=[ \t])&2>[ \t]*&?1(?=[ \t]*$)", job.text):
        if not job.in_comment(found.start()) and not job.in_quotes(found.start()):
            yield Violation(found.start(), f"{found[0]}: the & ends the command", why=AMPERSAND_WHY, cure="2>&1")


def _end_of_command(job: JobDescription, offset: int) -> int:
    """Return where the line ends, with those that a backslash joins to it."""
    end = job.text.find("\n", offset)
    while end > 0 and job.text[end - 1] == "\\":
        end = job.text.find("\n", end + 1)
    return end if end >= 0 else len(job.text)


TWO_WHY = "The file is opened twice, each with a position of its own: the two outputs write over each other, and lines are lost."


def opened_twice(job: JobDescription) -> Iterator[Violation]:
    """Report ``> log 2> log``."""
    for call in job.calls if job.kind == "script" else ():
        targets = [r.target for r in call.redirects if r.operator in (">", "&>")]
        double = next((t for n, t in enumerate(targets) if t in targets[:n] and re.search(r"\w", t)), None)
        if double and not double.startswith(("/dev/", "&")):
            yield Violation(call.offset, f"both outputs open {double}", why=TWO_WHY, cure=f"> {double} 2>&1")
            return


PIPE_WHY = "The shell empties the file when it starts the pipe, while the first program still reads it: most or all of it is lost."


def own_input(job: JobDescription) -> Iterator[Violation]:
    """Report ``cat file | sort > file``."""
    own = sorted((c for c in job.calls if not c.under and not c.in_substitution), key=lambda c: c.offset)
    first: ProgramCall | None = None
    for call in own:
        if call.before not in ("|", "|&"):
            first = call if call.is_piped and call.program in READS_WHOLE else None
        elif first is not None and not call.is_piped:
            names = {a.text for a in first.args if not a.text.startswith("-")}
            target = next((r.target for r in call.redirects if r.operator == ">" and r.target in names), None)
            if target is not None:
                text = f"{first.program} reads {target}, which > has already truncated"
                yield Violation(
                    first.offset, text, why=PIPE_WHY, cure=f"... > {target}.new && mv {target}.new {target}"
                )


# ------------------------------------------------------------------------------ one log for two runs

TWICE_WHY = "> and tee without -a empty the file that they open: the log of the first program is gone when the second one starts."
MOVES = {"cd", "pushd", "popd", "mv", "cp", "cat", "tail", "grep", "gzip", "rsync", "eval", "source", ".", "exec"}


def one_log_for_two(job: JobDescription) -> Iterator[Violation]:
    """Report two programs, one behind the other, whose output goes to the same file."""
    own = sorted((c for c in job.calls if not c.under and not c.in_substitution), key=lambda c: c.offset)
    works = {w.offset for w in job.work}
    logs: dict[str, tuple[int, ProgramCall]] = {}
    for number, call in enumerate(own):
        if call.program in MOVES:
            logs = {}
        if call.offset not in works or call.in_function or call.tested or call.before == "||":
            continue
        log = truncated_file(own, number)
        if log is None or log.startswith(("/dev/", "$(")) or re.search(r"\$\(|`|RANDOM", log):
            continue
        known = logs.get(log)
        if known is not None and known[1].in_loop == call.in_loop and not _set_between(job, known[1], call, log):
            first = known[1]
            same_way = call.branch[: len(first.branch)] == first.branch
            if same_way and _words(first) != _words(call) and not any(log in a.text for a in call.args):
                line = job.lines.place(first.offset)[0]
                text = f"{log} is the log of the program in line {line}, which this one truncates"
                yield Violation(call.offset, text, why=TWICE_WHY, cure=f">> {log}, tee -a, or a name for each")
                return
        logs[log] = (number, call)


def _words(call: ProgramCall) -> list[str]:
    return [a.text for a in call.args]


def _set_between(job: JobDescription, first: ProgramCall, second: ProgramCall, log: str) -> bool:
    names = {a.name for a in job.assignments if first.offset < a.offset < second.offset}
    return any(re.search(rf"\$\{{?{name}\b", log) for name in names)


# --------------------------------------------------------------------- one file for all runs of a loop

LOOP_FILE_WHY = "Every run of the loop writes this file anew: only the result of the last one stays."
WRITES = lazy_regex(
    r"--?(?:save|out|output|dump|export|write|result|results|ckpt|checkpoint)(?:[_-]?(?:path|file|name|to|model|model_path|ckpt|checkpoint|file_path|filename|fname|results|as))?"
)
ONE_FILE = lazy_regex(
    r"(?:[\w./~-]|\$\{?\w+\}?)+\.(?:pth?|pth\.tar|ckpt|bin|safetensors|np[yz]|pkl|pickle|joblib|model|mat|nc|h5|hdf5|onnx|png|pdf|svg|gz|mp4|zip)"
)


def one_file_for_loop(job: JobDescription) -> Iterator[Violation]:
    """Report a file without the loop's variable that each run of a loop writes."""
    for call in job.work_calls:
        if not call.in_loop or call.in_substitution or call.in_function or call.tested:
            continue
        head = _inner_loop(job, call)
        if head is None or runs_once(job, call.under[0] if call.under else call):
            continue
        name, start, end = head
        body = job.text[start:end]
        if not any(f"${name}" in a.text or f"${{{name}" in a.text for a in call.args):
            continue
        for arg, following in call.pairs():
            option, equals, value = arg.text.partition("=")
            value = value if equals else following.text if following else ""
            if not WRITES.fullmatch(option) or not ONE_FILE.fullmatch(value) or re.search(rf"\$\{{?{name}\b", value):
                continue
            if "$" in value and not _is_fixed(job, value, start, end):
                continue
            if len(re.findall(re.escape(value.rpartition("/")[2]), body)) > 1 or re.search(
                r"(?m)^[ \t]*(?:cd|pushd|mv|cp)\b", body
            ):
                continue
            yield Violation(
                arg.offset, f"each run of the loop writes {value}", why=LOOP_FILE_WHY, cure=f"a name with ${name}"
            )
            return


FOR_HEAD = lazy_regex(r"(?m)^([ \t]*)for[ \t]+(\w+)[ \t]+in\b[^\n]*(?:\n[ \t]*){0,2}\bdo\b")


def _inner_loop(job: JobDescription, call: ProgramCall) -> tuple[str, int, int] | None:
    """Return the variable of the nearest loop around a call, and where its body starts and ends."""
    best: tuple[str, int, int] | None = None
    for found in FOR_HEAD.finditer(job.text):
        done = re.compile(rf"(?m)^{re.escape(found[1])}done\b").search(job.text, found.end())
        if done and found.end() <= call.offset < done.start():
            best = (found[2], found.end(), done.start())
    return best


def _is_fixed(job: JobDescription, value: str, start: int, end: int) -> bool:
    """Return whether no variable of the value changes within the loop."""
    names = set(re.findall(r"\$\{?(\w+)", value))
    inside = {a.name for a in job.assignments if start <= a.offset < end} | job.reading.named
    return not names & inside and all(job.has(n) or n in ("HOME", "USER") for n in names)


# ------------------------------------------------------------------------------ logs to /dev/null

NOWHERE_WHY = (
    "Slurm discards the output of the job: an error message of the program, or of Slurm, is nowhere to be read."
)


def thrown_away(job: JobDescription) -> Iterator[Violation]:
    """Report ``--output=/dev/null`` for a job that writes its output nowhere else."""
    output, error = job.heads("output"), job.heads("error")
    if output != "/dev/null" or error not in (None, "/dev/null") or not job.work or job.submits:
        return
    kept = any(c.redirects or c.program == "tee" for c in job.calls if not c.in_substitution)
    options = any(re.match(r"--?(?:log|output|error|e\b|o\b)", a.text) for c in job.calls for a in c.args)
    if not kept and not options and "exec" not in job.code:
        yield Violation(job.heading["output"].offset, "the output of the job goes to /dev/null", why=NOWHERE_WHY, severity="note",
                        cure="#SBATCH --output=%x-%j.out")  # fmt: skip


FIRST_WHY = "> empties the file: what the script wrote into it before is gone."
WRITERS = {"echo", "printf"}


def lost_first_lines(job: JobDescription) -> Iterator[Violation]:
    """Report ``echo a > file`` above ``echo b > file`` and ``echo c >> file``, where the second > was meant as >>."""
    own = sorted((c for c in job.calls if not c.under and not c.in_substitution), key=lambda c: c.offset)
    for number, call in enumerate(own):
        target = _written(call, ">")
        if target is None or call.in_loop or call.in_function or not call.args:
            continue
        for later, second in enumerate(own[number + 1 :], number + 1):
            if second.in_loop or second.in_function:
                break
            texts = [*(a.text for a in second.args), *(r.target for r in second.redirects)]
            again = _written(second, ">") == target and second.args
            if not again and (_written(second, ">>") == target):
                continue
            if not again:
                if any(target in t for t in texts) or second.program in (
                    "cd",
                    "eval",
                    "source",
                    ".",
                    "exit",
                    "wait",
                    "sbatch",
                    "srun",
                ):
                    break
                continue
            grows = later + 1 < len(own) and _written(own[later + 1], ">>") == target
            same_way = second.branch == call.branch[: len(second.branch)]
            if grows and same_way and _words(call) != _words(second) and not _set_between(job, call, second, target):
                text = f"> empties {target}, into which line {job.lines.place(call.offset)[0]} has written"
                yield Violation(second.offset, text, why=FIRST_WHY, cure=f">> {target}")
                return
            break


def _written(call: ProgramCall, operator: str) -> str | None:
    """Return the file to which a message is written with this operator."""
    if call.program not in WRITERS:
        return None
    found = next(
        (r.target for r in call.redirects if r.operator == operator and not r.target.startswith("/dev/")), None
    )
    return found if found and not re.fullmatch(r"&?\d", found) else None
