"""Rules for slips in a command's first words: a word typed twice, a program in the place of another, text of other languages and editors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.command_options import PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.grammar import without_texts
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------------------ doubled words

SOURCED_TWICE_WHY = "The second word is taken for the file to read, and there is no file of that name: nothing is set."
COMMAND_TWICE_WHY = "The second word is taken for a command of the first, or for a file, which does not exist: the line fails, and does nothing."
TWICE = {
    "source", ".", "cd", "conda", "mamba", "micromamba", "module", "ml", "pip", "pip3", "git", "singularity", "apptainer", "docker", "podman",
    "sbatch", "torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "scancel", "wandb", "spack", "horovodrun", "exec", "tar", "unzip", "qsub",
    "cp", "mv", "rsync", "ln", "chmod",
}  # fmt: skip
TWICE_BEHIND = {
    "module": {"load", "add", "use", "unload", "swap", "switch"},
    "conda": {"activate", "run", "create"},
    "mamba": {"activate", "run", "create"},
    "source": {"activate"},
    "accelerate": {"launch"},
    "singularity": {"exec", "run"},
    "apptainer": {"exec", "run"},
    "docker": {"run", "exec"},
}


def doubled_words(job: JobDescription) -> Iterator[Violation]:
    """Report ``source source FILE``, ``conda activate activate NAME`` and ``srun srun program``."""
    if job.kind != "script":
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.in_substitution or call.tested:
            continue
        if call.under and call.under[-1].program == call.program == "srun" and not call.under[-1].args:
            why = "The inner srun asks for the tasks and CPUs that the outer one holds: it waits for them, and nothing starts."
            yield Violation(call.offset, "srun srun: each task starts a step of its own", why=why, cure="srun once")
            continue
        if not words or call.args[0].quoted:
            continue
        if call.program in TWICE and words[0] == call.written == call.program:
            if call.program in ("cp", "mv", "ln", "rsync", "tar") and len(words) < 3:
                continue
            if not _exists(job, words[0]):
                sourced = call.program in ("source", ".")
                yield Violation(
                    call.args[0].offset,
                    f"{call.program} {call.program}: the word stands twice",
                    why=SOURCED_TWICE_WHY if sourced else COMMAND_TWICE_WHY,
                    cure=f"{call.program} once",
                )
        elif words[0] in TWICE_BEHIND.get(call.program, ()) and words[1:2] == words[:1] and len(words) > 2:
            yield Violation(
                call.args[1].offset,
                f"{call.program} {words[0]} {words[0]}: the word stands twice",
                why=COMMAND_TWICE_WHY,
                cure=f"{call.program} {words[0]} once",
            )


def _exists(job: JobDescription, name: str) -> bool:
    return name != "." and job.folder is not None and (job.folder / name).exists()


# ------------------------------------------------------------------------- text of other languages

FOREIGN_WHY = "The shell looks for a program of this name, and finds none: the line does nothing, and as the last one it makes the job fail."
EDITOR = lazy_regex(r":(?:wq?!?|q!?|x|set|e|r|w)|--|\^\[\[\w*")
COMMENT_SIGNS = {"//": "C", "/*": "C", "*/": "C", "REM": "DOS", "rem": "DOS", "%%": "Matlab", "::": "DOS"}


def foreign_text(job: JobDescription) -> Iterator[Violation]:
    """Report commands of an editor, comments of other languages, magics of notebooks and imports of Python."""
    if not (job.is_job or job.text.startswith("#!")):
        return
    said: set[str] = set()
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.in_substitution or call.under or call.prefix or call.written in said:
            continue
        if not job.text.startswith(call.written[:2], call.offset):
            continue  # the value of a variable
        found = _foreign(job, call, words)
        if found:
            said.add(call.written)
            yield Violation(call.offset, found, why=FOREIGN_WHY, cure="remove it, or begin the line with #")


def _foreign(job: JobDescription, call: ProgramCall, words: list[str]) -> str | None:
    word = call.written
    start = job.lines.place(call.offset)
    if job.lines.line(start[0])[: start[1] - 1].strip():
        return None  # not at the start of a line
    if word in COMMENT_SIGNS:
        return f"{word} begins no comment of the shell"
    if EDITOR.fullmatch(word) and (word != "--" or words[:1] == ["INSERT"]) and len(words) < 4:
        return f"{' '.join([word, *words])[:40]} is a command or a key of an editor"
    if re.fullmatch(r"%%?[a-z]\w*", word):
        return f"{word} is a command of a notebook"
    if (
        word == "import"
        and len(words) == 1
        and words[0] in ("os", "sys", "torch", "numpy", "argparse", "json", "wandb", "time")
    ):
        return f"import {words[0]} is a line of Python"
    if word == "from" and words[1:2] == ["import"]:
        return "from ... import is a line of Python"
    return None


# ------------------------------------------------------------------------------- prompts that write

PROMPT_WHY = "> at the start of a line is a redirection: the shell empties or creates a file of the program's name, and runs the rest as a command."


def written_prompts(job: JobDescription) -> Iterator[Violation]:
    """Report ``> python train.py``, a copied prompt that makes an empty file called python."""
    if job.kind != "script":
        return
    for found in re.finditer(
        r"(?m)^[ \t]*>[ \t]+((?:python3?|torchrun|srun|bash|conda|pip|cd|export|module)\b[^\n]*)$", job.text
    ):
        call = next((c for c in job.calls if found.start() <= c.offset <= found.end()), None)
        if job.in_comment(found.start()) or call is None or not any(r.operator == ">" for r in call.redirects):
            continue
        yield Violation(
            found.start() + found[0].index(">"), "a > from a prompt begins the line", why=PROMPT_WHY, cure=found[1][:60]
        )
        return


TERMINAL = lazy_regex(
    r"(?m)^[ \t]*(?:\([\w.+-]+\)[ \t]*)?(?:\[[\w.-]+@[\w.-]+[ :][^\]\n]*\]|[a-z_][\w.-]*@[\w.-]+:[\w~./@+-]*)[$#%>](?:[ \t][^\n]*)?$"
)
TERMINAL_WHY = "The line was copied from a terminal: the shell looks for a program called user@host, or stops with a syntax error at (."


def terminal_prompts(job: JobDescription) -> Iterator[Violation]:
    """Report ``user@host:~/run$ cat job.sh``, the prompt of a terminal with or without a command."""
    if job.kind != "script" or not (job.is_job or job.text.startswith("#!")):
        return
    code = without_texts(job)
    for found in TERMINAL.finditer(code):
        start = found.start() + len(found[0]) - len(found[0].lstrip())
        if code[: found.start()].rstrip("\n").endswith("\\"):
            continue
        prompt = re.split(r"(?<=[$#%>])(?=[ \t]|\Z)", found[0].strip(), maxsplit=1)[0]
        yield Violation(start, f"{prompt[:60]} is the prompt of a terminal, no command", why=TERMINAL_WHY)
        return


# ----------------------------------------------------------------------------- interpreters without

ALONE_WHY = "Without a script the interpreter reads standard input, which is empty in a job: it ends at once, and the next line runs as a command."


def lone_interpreter(job: JobDescription) -> Iterator[Violation]:
    """Report ``python`` on a line of its own, with its script on the next one."""
    for call, following in pairwise(job.calls):
        if not PYTHON.match(call.program) or any(not re.fullmatch(r"-[uBOsEI]+", a.text) for a in call.args):
            continue
        if call.redirects or call.after != "\n" or call.before in ("|", "|&") or following.under != call.under:
            continue
        line = job.lines.place(call.offset)[0]
        if (
            re.search(r"\.py\Z", following.written)
            and job.lines.place(following.offset)[0] == line + 1
            and not _has_script(job, call)
        ):
            text = f"{call.written} has no script: {following.written} in the next line runs without it"
            yield Violation(call.offset, text, why=ALONE_WHY, cure=f"{call.written} {following.written}")


def _has_script(job: JobDescription, call: ProgramCall) -> bool:
    return any(call in c.under for c in job.calls)


# ------------------------------------------------------------------------------------- cut addresses

ADDRESS_WHY = (
    "& ends the command and sends it to the background: the address is cut, and the rest is an assignment of the shell."
)
FETCHES = {"wget", "curl", "aria2c", "gdown", "axel", "git"}


def cut_address(job: JobDescription) -> Iterator[Violation]:
    """Report an address with & and without quotes, ``wget https://host/x?a=1&id=2``."""
    for call in job.calls:
        if call.program not in FETCHES or call.after != "&" or call.in_substitution:
            continue
        last = next((a for a in reversed(call.args) if "://" in a.text), None)
        if last is None or last.quoted or last is not call.args[-1]:
            continue
        end = last.offset + len(last.text)
        if re.match(r"&[A-Za-z_]\w*=[^\s&]", job.text[end : end + 40]):
            text = f"the address ends at the &: {job.text[end : end + 20].split()[0]} is not part of it"
            yield Violation(last.offset, text, why=ADDRESS_WHY, cure="the address in quotes")


# ------------------------------------------------------------------------------ names of containers

ENDED_WHY = "Without -d docker run ends with the container and prints the program's output: the variable holds this output, and no container is running."
OF_CONTAINER = {"stop", "logs", "wait", "rm", "exec", "kill", "cp", "inspect", "start", "attach", "port"}


def container_without_detach(job: JobDescription) -> Iterator[Violation]:
    """Report ``id=$(docker run image program)``, whose value is used as the name of a running container."""
    for item in job.set_values_at_top():
        found = re.match(r"\$\(\s*(docker|podman)\s+run\s", item.value)
        if found is None:
            continue
        options = item.value[found.end() :]
        if re.search(r"(?:\A|\s)(?:-[a-zA-Z]*d[a-zA-Z]*|--detach(?:=true)?)(?=\s)", options) or re.search(
            r"\$\{?\w*(?:OPT|ARG|FLAG)", options
        ):
            continue
        used = any(
            c.program == found[1]
            and any(a.text in OF_CONTAINER for a in c.args[:2])
            and any(f"${item.name}" in a.text or f"${{{item.name}" in a.text for a in c.args)
            for c in job.calls
        ) or re.search(
            rf"{found[1]}\s+(?:container\s+)?(?:{'|'.join(OF_CONTAINER)})\s[^\n]*\$\{{?{item.name}\b", job.code
        )
        if used:
            text = f"{found[1]} run without -d: ${item.name} is the output of the program, and no container"
            yield Violation(item.offset, text, why=ENDED_WHY, cure=f"{item.name}=$({found[1]} run -d ...)")


# ------------------------------------------------------------------------------- misspelt booleans

TRUTH_WHY = (
    "The program gets a text that it does not know: it refuses it, or takes it for the opposite of what was meant."
)
MISSPELT_TRUTH = {
    "ture": "true", "treu": "true", "turue": "true", "ttrue": "true", "truee": "true",
    "flase": "false", "fasle": "false", "fales": "false", "flse": "false", "falsee": "false",
}  # fmt: skip


def misspelt_truth(job: JobDescription) -> Iterator[Violation]:
    """Report ``--resume Flase``."""
    for call in job.work_calls:
        for before, arg in pairwise(call.args):
            name, equals, value = arg.text.rpartition("=")
            meant = MISSPELT_TRUTH.get(value.strip("\"'").lower())
            if meant is None or not (equals or re.fullmatch(r"--?[\w-]+", before.text) or value.istitle()):
                continue
            right = meant.title() if value.istitle() else meant
            text = f"{value} is misspelt: {right} was probably meant"
            yield Violation(arg.offset, text, why=TRUTH_WHY, cure=f"{name}{equals}{right}")
            return
