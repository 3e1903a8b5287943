"""Rules for lines that run something else than meant: text that is no command, missing programs, misspelt commands, and paths that are lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.command_options import LAUNCHERS, PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, Assignment, ProgramCall, VariableUse, Violation
from allranks.analysis.lint.rules.dataflow import INHERITED
from allranks.analysis.lint.rules.variables import edits
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex, nearest_name

CAPITAL_COMMANDS = {"R", "Rscript", "Xvfb", "Xorg", "Xvnc", "MATLAB", "Singularity", "X", "GET", "POST", "HEAD"}
PROMPTS = {"$", ">>>"}
DOCUMENT_ENDS = {"EOF", "EOT", "END", "EOL", "EOM", "EOS"}
PROSE = lazy_regex(r"[A-Za-z][a-z']*[,.:;]?|[A-Z]+|\d+")
DEFAULT_EXPANSION = lazy_regex(r"\$\{(\w+):?=[^}]*\}")
CONFLICT = lazy_regex(r"(?m)^(?:<{7} \S.*|={7}|>{7} \S.*)$")
FENCE = lazy_regex(r"(?m)^```\w*[ \t]*$")
STRAY_WHY = (
    "The shell runs the line as a program that does not exist. The script goes on without it, or with set -e ends here; "
    "as the last line it makes the job fail."
)
STRAY_CURE = "remove it, or begin the line with #"
BLANK_WHY = "The value ends at the blank: the rest runs as a command, and the variable is set for that command only."


def stray(job: JobDescription) -> Iterator[Violation]:
    """Report text that stands where a command is expected."""
    if not (job.is_job or job.text.startswith("#!")):
        return  # it may be any text
    defined = _defined(job)
    said: set[str] = set()
    for call in job.calls:
        if call.in_substitution or call.written in defined or call.under:
            continue
        text = _stray_text(job, call)
        kind = call.written[:1] if text and call.written[:1] in "!\u200b\u00a0" else ""
        if text and (not kind or kind not in said):  # once of a kind of which a file has many
            said.add(kind)
            why = BLANK_WHY if call.prefix else None
            cure = "NAME=value without blanks" if call.prefix else None
            harmless = not call.written.strip("\u200b\u00a0\ufeff") and not call.args and not ends_at_errors(job)
            yield Violation(call.offset, text, why=why, cure=cure, severity="note" if harmless else None)
    for found in (*CONFLICT.finditer(job.text), *FENCE.finditer(job.text)):
        if found[0].startswith(("<", "`", ">")) and not _in_document(job, found.start()):
            what = "a mark of Markdown" if found[0].startswith("`") else "a mark of a conflict that git could not merge"
            yield Violation(found.start(), f"{found[0].split()[0]} is {what}, no command")
            return


def ends_at_errors(job: JobDescription) -> bool:
    """Return whether set -e is on in the script."""
    return bool(re.search(r"(?m)^\s*set\s+(?:-\w+\s+)*-\w*e|\berrexit\b|\A#!\S*sh\s+-\w*e", job.text))


def _defined(job: JobDescription) -> set[str]:
    functions = re.findall(r"(?m)^\s*(?:function\s+)?([\w-]+)\s*\(\)|^\s*function\s+([\w-]+)", job.text)
    return {name for pair in functions for name in pair if name} | set(re.findall(r"\balias\s+([\w-]+)=", job.text))


def _in_document(job: JobDescription, offset: int) -> bool:
    return job.in_comment(offset) or any(
        offset in body.at for body in (*job.reading.files.values(), *job.reading.submitted) if len(body.at)
    )


def _stray_text(job: JobDescription, call: ProgramCall) -> str | None:
    word, words = call.written, [a.text for a in call.args]
    alone = not words and not call.redirects
    expansion = DEFAULT_EXPANSION.fullmatch(word) if alone else None
    if expansion:
        return f"{word} runs its value as a command; to set a default write : {word}"
    if re.fullmatch(r"~+/?", word) and not words:
        return f"{word} runs your home folder as a command"
    if re.fullmatch(r"\d+(?:\.\d+)?", word) and not re.match(r"\s*\d", job.text[call.offset - 1 : call.offset]):
        before = call.prefix[-1] if call.prefix else None
        if before is not None and not before.value:
            return f"a blank follows {before.name}=: its value is empty, and {word} runs as a command"
        return f"{word} runs as a command: a value has no blanks" if before else f"{word} is a number, not a command"
    if call.prefix:
        return None
    if re.fullmatch(r"![a-z][\w-]*", word):
        return f"{word} is a line for a notebook: the shell looks for a program called {word}"
    if re.match(r"https?://", word) and not words:
        return "an address runs as a command"
    if not word.strip("\u200b\u00a0\ufeff"):
        return "an invisible character runs as a command"
    if re.search(r"\s", word):
        return _quoted_text(job, call)
    if len(words) > 1 and re.fullmatch(r"\d+L,", words[0]) and re.fullmatch(r"\d+[CB]", words[1]):
        return "the status line of an editor runs as a command"
    if word in PROMPTS and words:
        return f"{word} is a prompt, not a part of the command"
    if word in DOCUMENT_ENDS and alone:
        return f"{word} ends no here-document: none is open"
    if job.sources_files or word in CAPITAL_COMMANDS or not re.fullmatch(r"[A-Z][a-z]+[,.:]?", word):
        return None
    if alone and call.after in ("\n", ""):
        return f"{word} is no command"
    if len(words) > 1 and not call.redirects and all(PROSE.fullmatch(w) for w in words):
        return f"'{' '.join([word, *words])[:60]}' is text, not a command"
    return None


def _quoted_text(job: JobDescription, call: ProgramCall) -> str | None:
    """Return the finding for a command that is one word with blanks: text in quotes, or a whole command in a quoted variable."""
    start = job.text[call.offset : call.offset + 3]
    shown = " ".join(call.written.split())[:50]
    if start[:1] in ("'", '"') and start[1:2] not in "$/.~" and "$" not in call.written:
        begins = f"{start} begins no comment: " if start in ("'''", '"""') else ""
        return f"{begins}the text '{shown}' in quotes runs as a command"
    known = re.match(r"\"\$\{?(\w+)\}?\"(?=\s|\Z)", job.text[call.offset : call.offset + 60])
    if known and known[1] in job.by_name and "$" not in call.written.split()[0]:
        return f"the quotes make '{shown}' one word: there is no program of that name; write ${known[1]} without quotes, or use an array"
    return None


BLANK_CURE = 'NAME=value without blanks, or NAME="several words" with quotes'


def value_split(job: JobDescription) -> Iterator[Violation]:
    """Report ``NAME=first second`` whose variable is used later: the shell sets it for the command ``second`` only."""
    yield from _blanks(job)
    yield from _commas(job)
    set_names = job.by_name
    for call in job.calls:
        if not call.prefix or call.in_substitution or call.program == "env" or call.tested:
            continue
        item = call.prefix[-1]
        name = item.name
        if name in INHERITED or name.startswith(("SLURM_", "CUDA_")) or item.under != call.under:
            continue
        if any(a.offset != item.offset for a in set_names.get(name, ())) or name in job.reading.named:
            continue
        later = [u for u in job.uses if u.name == name and u.offset > call.offset and u.under == call.under]
        line = job.lines.place(call.offset)[0]
        if later and all(job.lines.place(u.offset)[0] > line for u in later) and not later[0].operator:
            if re.fullmatch(r"\d+(?:\.\d+)?", call.written) or _runs_something(call):
                continue
            yield Violation(
                item.offset,
                f"{name}={item.value} ends at the blank: {call.written[:40]} runs as a command, and ${name} is empty later",
                why=BLANK_WHY,
                cure=f'{name}="..." in quotes, without a blank after =',
            )


def _runs_something(call: ProgramCall) -> bool:
    """Return whether the program is one that a script runs with variables of its own."""
    known = PYTHON.match(call.program) or call.program in LAUNCHERS | {
        "srun",
        "bash",
        "sh",
        "singularity",
        "apptainer",
        "exec",
    }
    return bool(known) or call.program.endswith((".sh", ".py")) or call.written.startswith("./")


def _commas(job: JobDescription) -> Iterator[Violation]:
    """Report an array whose elements are separated by commas."""
    for item in job.assignments:
        parts = [part.text for part in item.items or ()]
        commas = len(parts) > 1 and all(len(p) > 1 and p.endswith(",") for p in parts[:-1])
        readers = {u.program for u in job.uses if u.name == item.name}
        if commas and not parts[-1].endswith(",") and not (readers and readers <= {"echo", "printf"}):
            yield Violation(
                item.offset,
                f"the elements of {item.name} are separated by blanks: the commas become part of them ('{parts[0][:40]}')",
                why="The program gets the value with the comma.",
                cure=f"{item.name}=(first second third)",
            )


def _blanks(job: JobDescription) -> Iterator[Violation]:
    """Report words after ``export`` that name no variable, and ``NAME =value``."""
    seen: set[int] = set()
    for offset, word in job.reading.misnamed:
        line = job.lines.place(offset)[0]
        if re.match(r"[A-Za-z_]\w*-[\w-]*=", word):
            continue  # test-syntax
        if line in seen or not re.search(r"\bexport\b", job.lines.line(line)):  # a template
            continue
        seen.add(line)
        spaced = word.startswith("=")
        text = "export NAME = value sets nothing" if spaced else f"export: {word[:60]} is not the name of a variable"
        yield Violation(
            offset,
            text,
            why="bash says 'not a valid identifier' and goes on: the value ends at the blank, or the variable is not set.",
            cure="export NAME=value without blanks, or with quotes around the value",
        )
    for call in job.calls:
        first = call.args[0] if call.args else None
        if first is None or first.quoted or not re.match(r"=[^=\s]", first.text) or call.in_substitution:
            continue
        if re.fullmatch(r"[A-Za-z_]\w*", call.written) and (call.written.isupper() or call.written in job.used_names):
            text = f"{call.written} {first.text} is a command, not an assignment"
            yield Violation(call.offset, text, why="An assignment has no blanks: this runs a program of that name.",
                            cure=f"{call.written}=value")  # fmt: skip


NO_PROGRAM_WHY = (
    "It starts nothing and stops with an error; what follows runs without it, in the batch shell, on one node."
)
NO_PROGRAM_CURE = "end the line with a backslash that nothing follows"


def without_program(job: JobDescription) -> Iterator[Violation]:
    """Report launchers and containers whose program is missing, because the line before it has no backslash."""
    for index, (call, following) in enumerate(pairwise(job.calls)):
        if call.in_substitution or call.redirects or call.before in ("|", "|&") or following.under:
            continue
        line = job.lines.place(following.offset)[0]
        if _lacks_program(call, following) and line > job.lines.place(call.offset)[0] and _is_last(job, index):
            text = f"{call.written} has no program: '{following.written[:40]}' in line {line} runs without it"
            yield Violation(call.offset, text, why=NO_PROGRAM_WHY, cure=NO_PROGRAM_CURE)


def _lacks_program(call: ProgramCall, following: ProgramCall) -> bool:
    """Return whether a launcher, Python or a container has only options, and its program stands in the next line."""
    words = [a.text for a in call.args]
    if _open(call.args) or call.after not in ("\n", ";") or "--version" in words or "--help" in words:
        return False
    if call.program in LAUNCHERS or PYTHON.match(call.program):
        named = any(w.endswith(".py") or w in ("-m", "-c", "--module", "-", "--no_python") for w in words)
        return not named and following.written.endswith(".py") and (bool(words) or call.program in LAUNCHERS)
    if call.program in ("singularity", "apptainer"):
        starts = PYTHON.match(following.program) is not None or following.program in LAUNCHERS
        return words[:1] == ["exec"] and words[-1].endswith((".sif", ".simg")) and starts
    return False


def _is_last(job: JobDescription, index: int) -> bool:
    call = job.calls[index]
    return not any(call in c.under for c in job.calls[index + 1 : index + 4])


def _open(args: tuple[Argument, ...]) -> bool:
    """Return whether a word is unknown here, such as ``$COMMAND``."""
    return any(a.source.text.startswith(UNRESOLVED_OPEN) for a in args)


PATH_LISTS = (
    r"(PATH|LD_LIBRARY_PATH|PYTHONPATH|LIBRARY_PATH|CPATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|PKG_CONFIG_PATH|MANPATH)"
)
GLUED_AFTER = lazy_regex(rf"(?<![\w$]){PATH_LISTS}=[\"']?([^\s\"']*[^\s\"':=;{{}}\\])\$(?:\{{\1\}}|\1(?!\w))")
GLUED_BEFORE = lazy_regex(
    rf"(?<![\w$]){PATH_LISTS}=[\"']?[^\s\"'#]*\$(?:\{{\1\}}|\1(?!\w))[\"']?([/~][\w.~/]|\$\{{?\w)"
)
SEMICOLON = lazy_regex(rf"(?<![\w$]){PATH_LISTS}=[\"']?\$(?:\{{\1\}}|\1(?!\w))[\"']?;[ ]?(?:/|\$\w)")
EQUALS = lazy_regex(rf"(?<![\w$-]){PATH_LISTS}=[\"']?(?:[^\s\"'=#]*:)?\$(?:\{{\1\}}|\1(?!\w))=(?:/|~|\$\{{?\w)")
COLON_CURE = "separate the folders by colons"
COLON_WHY = "Two folders become one name that does not exist: both are lost from the list."


def missing_colon(job: JobDescription) -> Iterator[Violation]:
    """Report lists of folders whose parts no colon separates."""
    for pattern, what in (
        (GLUED_AFTER, "no colon before ${name}"),
        (GLUED_BEFORE, "no colon after ${name}"),
        (SEMICOLON, "a semicolon instead of a colon after ${name}: the rest is not part of the list"),
        (EQUALS, "an equals sign instead of a colon after ${name}: it becomes part of the folder's name"),
    ):
        for found in pattern.finditer(job.text):
            if not job.in_comment(found.start(1)):
                yield Violation(
                    found.start(1), what.replace("{name}", found[1]), cure=f"{found[1]}=/folder:${found[1]}"
                )


PATH_LIST_NAMES = r"(PATH|LD_LIBRARY_PATH|PYTHONPATH|LIBRARY_PATH|CPATH)"
AFTER_SEMICOLON = lazy_regex(
    rf"(?m)^[ \t]*(?:export[ \t]+)?{PATH_LIST_NAMES}=[\"']?[^\s\"';$]+;[ ]?\$(?:\{{\1\}}|\1(?!\w))"
)


def semicolon(job: JobDescription) -> Iterator[Violation]:
    """Report ``PATH=/folder;$PATH``."""
    for found in AFTER_SEMICOLON.finditer(job.text):
        if not job.in_comment(found.start(1)):
            text = f"a semicolon instead of a colon before ${found[1]}: the list has only the new folder, and ${found[1]} runs as a command"
            yield Violation(found.start(1), text, cure=f"{found[1]}=/folder:${found[1]}")


TILDE_VALUE = lazy_regex(
    r"(?m)^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(?:\"~(?:/[^\"\n]*)?\"|'~(?:/[^'\n]*)?')[ \t]*(?:#.*|;.*)?$"
)
TILDE_LISTS = lazy_regex(
    rf"(?m)^[ \t]*(?:export[ \t]+)?{PATH_LISTS}=(?:\"(?:[^\"\n]*:)?~/[^\"\n]*\"|'(?:[^'\n]*:)?~/[^'\n]*')"
)
FILE_COMMANDS = {
    "cd",
    "source",
    ".",
    "mkdir",
    "cp",
    "mv",
    "ls",
    "rm",
    "tar",
    "rsync",
    "ln",
    "cat",
    "touch",
    "pushd",
    "unzip",
    "bash",
    "sh",
    "chmod",
    "Rscript",
    "[",
    "[[",
    "test",
}
TILDE_WHY = "The shell replaces ~ only at the start of a word or value, and outside of quotes: a folder with the name ~ is used."
TILDE_CURE = 'use "$HOME/..." instead'


def quoted_tilde(job: JobDescription) -> Iterator[Violation]:
    """Report ``~`` in quotes where a folder is meant."""
    for found in TILDE_LISTS.finditer(job.text):
        if not job.in_comment(found.start(1)) and found[1] not in ("PATH", "MANPATH"):
            yield Violation(found.start(1), f"~ in the quotes of {found[1]} is not expanded", cure=TILDE_CURE)
    for found in TILDE_VALUE.finditer(job.text):
        name = found[1]
        if job.in_comment(found.start(1)) or re.search(rf"\beval\b.*\${{?{name}|\${{{name}/#|HOME\}}", job.text):
            continue
        place = next((a for a in job.assignments if a.offset == found.start(1)), None)
        if place is not None and _names_file(job, place):
            yield Violation(found.start(1), f"~ in the quotes of {name} is not expanded", cure=TILDE_CURE)
    for call in job.calls:
        if call.program in FILE_COMMANDS - {"bash", "sh"} and not call.under:
            arg = next((a for a in call.args if a.quoted and re.match(r"~(?:/|\Z)", a.text)), None)
            if arg is not None and job.text[arg.source.where(0) - 1 : arg.source.where(0)] in ("'", '"'):
                if job.lines.place(arg.source.where(0))[0] == job.lines.place(call.offset)[0]:
                    yield Violation(arg.offset, f"~ in the quotes of {arg.text} is not expanded", cure=TILDE_CURE)


def _names_file(job: JobDescription, item: Assignment) -> bool:
    """Return whether the value is used as a path by the shell or a program that expands no ~."""
    places = set(item.source.at)
    for call in job.calls:
        if call.offset < item.offset or call.under:
            continue
        own = call.program in FILE_COMMANDS
        first = PYTHON.match(call.program) is not None
        for number, arg in enumerate(call.args):
            if not (places & set(arg.source.at[:2])) or not arg.text.startswith("~"):
                continue
            if own or (first and number == 0):
                return True
    return any(r.target.startswith("~") and r.target.startswith(item.value) for c in job.calls for r in c.redirects)


# -------------------------------------------------------------------------------- misspelt commands

MISTYPED_WHY = "The command is not found; without set -e the script goes on without it."
COMMANDS = (
    "source", "module", "export", "srun", "sbatch", "conda", "mamba", "python", "python3", "torchrun", "accelerate", "deepspeed", "mkdir",
    "echo", "singularity", "apptainer", "scontrol", "mpirun", "nvidia-smi", "unset", "sleep", "ulimit", "hostname",
)  # fmt: skip
LONG_NAME = 6
KNOWN_SIMILAR = {
    "crun",
    "fsync",
    "pythonw",
    "python2",
    "pip",
    "sources",
    "modules",
    "mods",
    "eco",
    "slurm",
    "mpiexec",
    "ssource",
    "trun",
    "runs",
    "run",
    "strun",
}


def mistyped(job: JobDescription) -> Iterator[Violation]:
    """Report commands whose name is nearly that of a usual one."""
    near_names: dict[str, str | None] = {}
    defined = set(re.findall(r"(?m)^\s*(?:function\s+)?([\w-]+)\s*\(\)", job.text)) | set(
        re.findall(r"\balias\s+([\w-]+)=", job.text)
    )
    for call in job.calls:
        name = call.written
        if (
            not re.fullmatch(r"[a-z][a-z-]{3,}", name)
            or name in COMMANDS
            or name in defined | KNOWN_SIMILAR
            or call.in_substitution
        ):
            continue
        if name not in near_names:
            near_names[name] = nearest_name(name, COMMANDS, 0.83)
        near = near_names[name]
        if near and name.startswith(near + "-"):
            continue  # a wrapper, such as singularity-gpu
        if near and (sorted(near) == sorted(name) or len(near) > LONG_NAME):
            yield Violation(call.offset, f"{name}: there is no such command; {near} was probably meant", cure=near)


def misspelt_commands(job: JobDescription) -> Iterator[Violation]:
    """Report commands that are one letter, or for long names two, from a usual one, and that nothing defines."""
    if not (job.is_job or job.text.startswith("#!")):
        return
    defined = set(re.findall(r"(?m)^\s*(?:function\s+)?([\w-]+)\s*\(\)|^\s*function\s+([\w-]+)", job.text))
    names = {name for pair in defined for name in pair} | set(re.findall(r"\balias\s+([\w-]+)=", job.text))
    known: dict[str, str | None] = {}
    for call in job.calls:
        word = call.written
        if word in names or call.in_substitution or not re.fullmatch(r"[A-Za-z][\w.-]{2,14}", word):
            continue
        if any(c.program not in ("srun", "time", "env") for c in call.under):
            continue
        if word not in known:
            known[word] = _command_meant(word)
        meant = known[word]
        if meant and re.search(rf"[\"'= ]{word}[\"']?[ \t]*(?:\]|\)\s)|^[ \t]*{word}\)", job.text, re.MULTILINE):
            continue  # the script also compares with it: a mode of its own
        if meant and word in job.text[call.offset : call.offset + len(word)]:
            yield Violation(call.offset, f"{word}: there is no such command; {meant} was probably meant", cure=meant)


PROGRAM_TWICE_WHY = "The second word is taken for the script, and there is no file of that name."


def repeated_words(job: JobDescription) -> Iterator[Violation]:
    """Report ``python python train.py``, ``bash bash run.sh`` and images such as ``docker:name`` without //."""
    for call in job.calls:
        first, second = (*call.args[:2], None, None)[:2]
        if first is None or call.in_substitution or first.quoted:
            continue
        twice = PYTHON.match(call.program) and PYTHON.fullmatch(first.text) and second is not None
        twice = twice or (call.program in ("bash", "sh") and first.text == call.program and second is not None)
        if twice and "/" not in first.text and not (job.folder and (job.folder / first.text).exists()):
            text = f"{call.written} gets {first.text} as its script"
            yield Violation(
                first.offset, text, why=PROGRAM_TWICE_WHY, cure=f"{call.written} {second.text if second else ''}"
            )
        elif call.program in ("singularity", "apptainer"):
            image = next((a for a in call.args if re.match(r"(?:docker|library|oras|shub):(?!//)\S", a.text)), None)
            if image is not None:
                cure = image.text.replace(":", "://", 1)
                yield Violation(image.offset, f"{image.text} names no image: // is missing", why="It is taken for the name of a file.", cure=cure)  # fmt: skip


FREQUENT = (
    "exit", "export", "module", "source", "srun", "python", "python3", "echo", "conda", "mamba", "mkdir", "unset", "sleep", "wait", "torchrun",
    "accelerate", "deepspeed", "sbatch", "scontrol", "hostname", "nvidia-smi", "ulimit", "touch", "tail", "return", "break", "continue", "mpirun",
    "singularity", "apptainer", "bash", "chmod", "printf", "squeue", "scancel", "rsync", "unzip", "activate",
)  # fmt: skip
# Programs that exist, or functions that sourced files define, and that are nearly one of the above.
EXISTING = {
    "exec", "expr", "exif", "expand", "node", "mode", "modules", "sources", "jsrun", "lrun", "aprun", "prun", "run", "python2", "pythonw", "ipython",
    "bpython", "condor", "reset", "watch", "salloc", "sbcast", "sattach", "hostid", "limit", "mail", "fail", "bail", "dash", "hash", "mpiexec",
    "mpicc", "print", "sprintf", "queue", "cancel", "sync", "gunzip", "exist", "lmod", "deactivate", "reactivate", "sinfo", "sacct", "trail",
    "exports", "await", "hostnamectl", "crun", "fsync", "rails", "batch", "sbatchd", "breaks", "text", "test", "next", "init", "edit", "quit", "main",
}  # fmt: skip
GLUED = lazy_regex(
    r"(?:exit|sleep|wait|echo|cd|export)\d+|cd\.\.|(?:pip3?|conda)install|moduleload|condaactivate|sourceactivate"
)
LONGEST_EXIT = 10
LONG_COMMAND = 8


def _command_meant(word: str) -> str | None:
    if word in FREQUENT or word in EXISTING:
        return None
    if GLUED.fullmatch(word):
        return re.sub(r"(\d+|\.\.|install|load|activate)\Z", r" \1", word)
    if (
        word.lower() in FREQUENT
        and word != word.lower()
        and (not word.isupper() or word in ("EXPORT", "SOURCE", "ECHO", "MODULE", "SRUN"))
    ):
        return word.lower()
    if not re.fullmatch(r"[a-z][a-z_-]+", word):
        return None
    if (
        word.startswith("exit")
        and "exit" != word <= "exit" + "z" * LONGEST_EXIT
        and "_" not in word
        and "-" not in word
    ):
        return "exit"
    near = [u for u in FREQUENT if len(word) > 3 and edits(word, u, 1) == 1 and not word.endswith(u)]
    near += [
        u
        for u in ("echo", "exit", "wait", "srun", "mkdir", "touch", "sleep")
        if word in (u[1:], u[:-1]) and word not in EXISTING
    ]
    near += [u for u in FREQUENT if len(u) >= LONG_COMMAND and edits(word, u, 2) == 2 and word[0] == u[0]]
    return near[0] if near else None


# -------------------------------------------------------------------------- paths in front of paths

PATH_WHY = "The variable is an absolute path: with something in front of it, it is the path of another folder, which does not exist."
IN_FRONT = lazy_regex(
    r"(?:(?<=[\s=\"'(])|\A)((?:\.{1,2}/)+|~/|\$\{?(?:PWD|HOME|SLURM_SUBMIT_DIR|PBS_O_WORKDIR)\}?/|\$\(pwd\)/|`pwd`/|/home/)\"?\$\{?\Z"
)


def path_in_front(job: JobDescription) -> Iterator[Violation]:
    """Report ``../$SLURM_SUBMIT_DIR`` and ``$PWD/$HOME``: a path in front of one that begins with /."""
    for use in job.uses:
        if use.operator or use.index or use.program in ("echo", "printf", "[", "[[") or not _is_absolute(job, use):
            continue
        before = IN_FRONT.search(job.text[max(0, use.offset - 60) : use.offset])
        after = job.text[use.offset + len(use.name) : use.offset + len(use.name) + 1]
        if before and after != ":":
            shown = f"{before[1]}${use.name}"
            value = next((a.value for a in job.by_name.get(use.name, [])), "an absolute path")
            cure = f'"${use.name}/.."' if before[1].startswith("../") else f'"${use.name}"'
            yield Violation(use.offset, f"{shown}: ${use.name} is {value[:60]}, and {before[1]} stands in front of it",
                            why=PATH_WHY, cure=cure)  # fmt: skip


ALWAYS_ABSOLUTE = {
    "HOME",
    "PWD",
    "OLDPWD",
    "SLURM_SUBMIT_DIR",
    "PBS_O_WORKDIR",
    "PBS_O_HOME",
    "LS_SUBCWD",
    "SLURM_TMPDIR",
    "CONDA_PREFIX",
    "VIRTUAL_ENV",
}


def _is_absolute(job: JobDescription, use: VariableUse) -> bool:
    items: list[Assignment] = job.by_name.get(use.name, [])
    if not items:
        return use.name in ALWAYS_ABSOLUTE and use.name not in job.reading.named
    if use.name in job.reading.named or any(a.items is not None for a in items):
        return False
    return all(re.match(r"/[\w$.-]|\$\{?(?:HOME|PWD|SLURM_SUBMIT_DIR|PBS_O_WORKDIR)\b", a.value) for a in items)


PATH_LOST_WHY = (
    "PATH is the list of folders in which the shell looks for commands: none of the usual ones is left in it."
)
USUAL_COMMANDS = {
    "srun", "mkdir", "ls", "cp", "mv", "rm", "cat", "date", "hostname", "scontrol", "nvidia-smi", "bash", "sed", "awk", "grep", "tee", "sleep",
    "head", "tail", "env", "sbatch", "tar", "which", "nproc", "free", "df", "uname", "touch", "basename", "dirname", "seq", "mktemp", "rsync",
}  # fmt: skip


def path_lost(job: JobDescription) -> Iterator[Violation]:
    """Report ``PATH=/folder``, which takes the usual commands away that the script needs below."""
    fronts = {a.offset for c in job.calls for a in c.prefix}
    own = [a for a in job.set_values_at_top() if a.name == "PATH" and not a.in_function and a.offset not in fronts]
    for item in own:
        written = job.line_of(item.offset)[job.lines.place(item.offset)[1] - 1 :]
        folders = re.split(r"[:;\s\"']", written.partition("=")[2])
        if re.search(r"\$(?!\{?(?:HOME|USER|PWD)\b)|`|\\$|\.\.\.|£|=\s*$", written) or {
            "/bin",
            "/usr/bin",
            "/usr/local/bin",
        } & set(folders):
            continue
        end = min((a.offset for a in own if a.offset > item.offset), default=len(job.text))
        needed = (
            c
            for c in job.calls
            if item.offset < c.offset < end
            and c.written in USUAL_COMMANDS
            and not (c.under or c.in_function or c.branch)
        )
        call = next(needed, None)
        if call is not None and item.subshell is None:
            text = f"$PATH is not part of the new PATH: {call.written} and other commands are not found"
            yield Violation(item.offset, text, why=PATH_LOST_WHY, cure="PATH=/folder:$PATH")
            return
