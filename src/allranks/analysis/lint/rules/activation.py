"""Rules for the way to an environment: activation by a wrong path, a search path that is lost, settings that come too late, scripts of csh."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.environments import LOGIN_SHELL, activates, uses_python
from allranks.analysis.lint.rules.variables import edits
from allranks.utils.text import lazy_regex

ACTIVATION_WHY = (
    "The environment is not activated: the script goes on with another Python, without the packages of the environment."
)
ACTIVATE = "source <environment>/bin/activate"


def wrong_activation(job: JobDescription) -> Iterator[Violation]:
    """Report activations that name a folder, a script of another shell or system, or a program."""
    if job.kind != "script":
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        if not words or call.in_substitution or call.tested or call.after in ("||", "&&"):
            continue
        found = _wrong(call.program, words)
        if found:
            yield Violation(call.offset, found[0], why=ACTIVATION_WHY, cure=found[1])


def _wrong(program: str, words: list[str]) -> tuple[str, str] | None:
    first = words[0]
    if program in ("source", "."):
        if first == "conda" and words[1:2] in (["activate"], ["deactivate"]):
            return f"source conda {words[1]}: source reads the program conda as a script", f"conda {words[1]} <name>"
        if (re.search(r"[\w}]/\Z|/(?:bin|Scripts)\Z", first) and not words[1:]) or first.endswith("/activate/"):
            return f"source {first}: this is a folder", ACTIVATE
        if re.search(r"/activate(?:\.(?:c?sh|fish|ps1|bat))\Z", first) and not first.endswith("activate.sh"):
            return f"source {first}: this file is for another shell", ACTIVATE
        if re.search(r"/Scripts/activate\Z", first):
            return f"source {first}: only environments of Windows have this folder", ACTIVATE
        if re.fullmatch(r"~\.(?:bashrc|bash_profile|profile)", first):
            return f"source {first}: ~ without a / is not your home folder", f"source ~/{first[1:]}"
        last = first.rpartition("/")[2]
        if last != "activate" and (re.search(r"/bin/a\w+\Z", first) and 0 < edits(last, "activate", 2) <= 2):
            return f"source {first}: {last} is no activate", ACTIVATE
        if last == "binactivate":
            return f"source {first}: no / before activate", ACTIVATE
        if re.search(r"/bin/activate/[\w.-]+\Z", first):
            return f"source {first}: activate is a file, and no folder", f"source {first.rpartition('/')[0]} {last}"
        if re.search(r"/bin/(?:conda|mamba|micromamba|python3?)\Z", first):
            return f"source {first}: this is a program, and no script of the shell", ACTIVATE
    elif program in ("conda", "mamba"):
        if words[0] == "activate" and words[1:] and words[1].endswith("/bin/activate"):
            return (
                f"{program} activate {words[1]}: it takes the environment's folder",
                f"{program} activate {words[1][:-13]}",
            )
        if words[:2] in (["source", "activate"], ["env", "activate"]):
            return f"{program} {words[0]} activate: {program} has no such command", f"{program} activate <name>"
    elif program == "activate" and len(words) == 1 and re.fullmatch(r"[\w./${}~-]+", first):
        return f"activate {first} runs as a program, which cannot change this shell", f"source activate {first}"
    elif PYTHON.match(program) and first.endswith("/bin/activate"):
        return f"{program} {first}: activate is a script of the shell", f"source {first}"
    return None


# ----------------------------------------------------------------------------------- search paths

COMMA_WHY = (
    "The folders of a search path are parted by colons: with a comma both become one name, which does not exist."
)
NAME_WHY = "Without the $ this is the text itself, and the folders of the old value are lost."
SEARCH_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH")


WITHOUT_BIN = lazy_regex(
    r"((?:\$\{?\w+\}?|~)?(?:/[\w.-]+)*/(?:envs|venvs?|virtualenvs?|env|ana(?:conda)?[23]?|mini(?:conda|forge)[23]?|mambaforge)(?:/(?!bin(?:[/:]|\Z)|shims|sbin|condabin|scripts)[\w.-]+)?)/?:\$\{?PATH\}?\Z"
)


def search_paths(job: JobDescription) -> Iterator[Violation]:
    """Report search paths that lose their old value or hold a comma."""
    if job.kind != "script":
        return
    for item in job.set_values_at_top():
        if item.name not in SEARCH_PATHS or item.in_function:
            continue
        value = item.value
        if re.match(rf"{item.name}:|[^$]*:{item.name}\Z", value):
            cure = f"{item.name}=<folder>:${item.name}"
            yield Violation(
                item.offset, f"{item.name} holds the text {item.name}: the $ is missing", why=NAME_WHY, cure=cure
            )
        elif item.name == "PATH" and (
            program := re.search(r"(?:\A|:)([^:]*/bin/(?:python3?|conda|pip3?|nvcc|mpirun|gcc))(?::|\Z)", value)
        ):
            yield Violation(
                item.offset,
                f"PATH has the program {program[1]} instead of its folder",
                why="The shell looks for commands in the folders of PATH: in a program it finds none.",
                cure=f"PATH={program[1].rpartition('/')[0]}:$PATH",
            )
        elif item.name == "PATH" and (folder := WITHOUT_BIN.match(value)):
            yield Violation(
                item.offset,
                f"PATH has {folder[1]}, and the programs of an environment are in its folder bin",
                why="The shell looks for commands in the folders of PATH themselves: it finds none here, and runs those of the system.",
                cure=f"PATH={folder[1]}/bin:$PATH",
            )
        elif item.name in SEARCH_PATHS and re.search(r"(?:\A|:)\$/\w", value):
            yield Violation(
                item.offset,
                f"{item.name} has a $ in front of a path",
                why="A $ that no name follows is an ordinary character: there is no folder of this name.",
                cure="the path without the $",
            )
        elif re.search(r"(?:/[\w.-]+)+,\s*(?:/|\$)", value) and "{" not in value.replace("${", ""):
            yield Violation(item.offset, f"{item.name} has a comma between its folders", why=COMMA_WHY, cure="a colon")


# --------------------------------------------------------------------------------------- too late

PURGED_WHY = "It unloads what the lines above have loaded: the programs below run without it."
LATE_WHY = "Nothing runs after it: a program gets its environment when it starts."
LATE_CURE = "move it above the program"
OF_LIBRARIES = lazy_regex(
    r"(?:NCCL|GLOO|OMP|MKL|TORCH|PYTORCH|HF|WANDB|TRANSFORMERS|TOKENIZERS|FI|UCX|MPICH|XLA|TF)_\w+|CUDA_\w+|MASTER_(?:ADDR|PORT)|"
    r"WORLD_SIZE|PYTHONPATH|LD_LIBRARY_PATH"
)


def set_after_work(job: JobDescription) -> Iterator[Violation]:
    """Report settings of libraries below the last program, and modules that are loaded and unloaded before the first."""
    if not job.is_job or not job.work or job.submits:
        return
    last = max(w.offset for w in job.work)
    in_front = {
        a.offset for c in job.calls for a in c.prefix
    }  # of a command, whose words may stand in a variable above
    for item in job.assignments:
        if (
            item.exported
            and item.offset > last
            and item.offset not in in_front
            and OF_LIBRARIES.fullmatch(item.name)
            and not (item.under or item.in_function or item.in_substitution)
        ):
            later = [c for c in job.calls if c.offset > item.offset and c.program not in IDLE]
            first = not any(a.name == item.name and a.offset < item.offset for a in job.assignments)
            looped = any(w.in_loop or w.in_function for w in job.work)
            if (
                not (later or _runs_variable(job, item.offset))
                and first
                and not looped
                and item.name not in job.used_names
            ):
                yield Violation(
                    item.offset,
                    f"{item.name} is set when the last program has ended",
                    why=LATE_WHY,
                    cure=LATE_CURE,
                    severity="warning",
                )
                return


def _runs_variable(job: JobDescription, offset: int) -> bool:
    """Return whether a command below is the value of a variable, and so has its place where the value stands."""
    return bool(re.search(r"(?m)^[ \t]*\"?\$", job.text[offset:]))


LATE_TRAP_WHY = "A trap holds from its line on: while the program ran, the signal ended the script."


def trapped_after_work(job: JobDescription) -> Iterator[Violation]:
    """Report traps for signals that the script sets when its last program has ended."""
    if not job.work or job.submits or any(w.in_function or w.in_loop for w in job.work):
        return
    last = max(w.offset for w in job.work)
    traps = [c for c in job.calls if c.program == "trap" and not c.under and not c.in_function and len(c.args) > 1]
    first = next((c for c in traps if _names_signal(c) and c.args[0].text not in ("", "-")), None)
    if first is not None and first.offset > last and not any(c.offset < last for c in traps):
        later = [
            c
            for c in job.calls
            if c.offset > first.offset and c.program not in IDLE | {"trap", "cp", "mv", "rm", "tar", "rsync", "kill"}
        ]
        if not (later or _runs_variable(job, first.offset) or any(job.runs_in_background(w) for w in job.work)):
            cure = "move it above the program"
            text = "the trap is set when the last program has ended"
            yield Violation(first.offset, text, why=LATE_TRAP_WHY, cure=cure)


def _names_signal(call: ProgramCall) -> bool:
    return any(re.fullmatch(r"(?:SIG)?(?:USR[12]|TERM|INT|HUP|CONT|QUIT)|1|2|10|12|15", a.text) for a in call.args[1:])


THREADS_WHY = "The variable counts the CPUs of the node, and each of its tasks starts so many threads."


def threads_of_node(job: JobDescription) -> Iterator[Violation]:
    """Report as many threads for each of several tasks as the node has CPUs."""
    items = list(job.set_values("OMP_NUM_THREADS"))
    found = (
        re.fullmatch(r"\$\{?(SLURM_CPUS_ON_NODE|SLURM_JOB_CPUS_PER_NODE)\}?|\$\((nproc)(?: --all)?\)", items[0].value)
        if len(items) == 1
        else None
    )
    tasks = job.number(job.heads("ntasks-per-node"))
    if found is None or not job.is_batch or not tasks or tasks < 2 or items[0].under:
        return
    steps = [la.srun for la in job.launches if la.srun is not None]
    if steps and all((job.tasks_per_node(step) or 1) == tasks for step in steps):
        text = f"{tasks} tasks of a node with {items[0].value} threads each"
        yield Violation(items[0].offset, text, why=THREADS_WHY, cure="export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK")


SINGLE_GPU = lazy_regex(r"(?:\A|[/_.-])(?:single_?-?gpu|one_?-?gpu|1_?-?gpu)(?=[/_.-])\S*\.py\Z", re.IGNORECASE)


def program_of_one_gpu(job: JobDescription) -> Iterator[Violation]:
    """Report a program for one GPU, by its name, as the only work of a job of several GPUs."""
    gpus = job.gpus_per_node
    if not gpus or gpus < 2 or len(job.work) != 1 or not job.work_calls or "array" in job.heading or job.submits:
        return
    call = job.work_calls[0]
    name = next((a for a in call.args if SINGLE_GPU.search(a.text)), None)
    looped = call.in_loop or call.in_function or job.work[0].in_loop or job.runs_in_background(job.work[0])
    tasks = job.tasks_per_node(call.srun) if call.srun else 1
    if name and PYTHON.match(call.program) and not looped and tasks == 1:
        yield Violation(
            name.offset, f"{name.text} is a program for one GPU, but the job requests {gpus}: the others are idle"
        )


IDLE = {
    "echo",
    "printf",
    "date",
    "exit",
    "wait",
    "conda",
    "deactivate",
    "module",
    "ml",
    "hostname",
    "export",
    "set",
    "nvidia-smi",
    "true",
}


def purged(job: JobDescription) -> Iterator[Violation]:
    """Report ``module purge`` below the modules of the script, with none loaded after it."""
    if not job.is_job:
        return
    loaded: ProgramCall | None = None
    purge: ProgramCall | None = None
    for call in job.calls:
        if call.under or call.in_function or call.in_substitution:
            if purge is not None and call.program in ("module", "ml", "source", "."):
                return
            continue
        words = [a.text for a in call.args]
        if call.offset in {w.offset for w in job.work}:
            if purge is not None and loaded is not None:
                line = job.lines.place(loaded.offset)[0]
                yield Violation(
                    purge.offset,
                    f"module purge unloads the modules of line {line}",
                    why=PURGED_WHY,
                    cure="module purge above them",
                )
            return
        if call.program in ("module", "ml"):
            if words[:1] == ["purge"]:
                purge = call if loaded is not None and not call.branch else None
            elif words and words[0] not in ("list", "avail", "use", "unload", "rm", "spider", "show"):
                loaded, purge = (call, None) if not call.branch else (loaded, None)
        elif call.program in ("source", ".", "spack", "conda", "mamba", "eval", "singularity", "apptainer"):
            purge = None


MODULE_WHY = "There is no module of this name: the line fails, and the script goes on without the module."


def module_names(job: JobDescription) -> Iterator[Violation]:
    """Report names of modules with a comma or a dot at their end."""
    for call in job.calls:
        words = [a.text for a in call.args]
        names = (
            words[1:]
            if call.program == "module" and words[:1] in (["load"], ["add"])
            else words
            if call.program == "ml"
            else []
        )
        wrong = next((n for n in names if re.fullmatch(r"[A-Za-z][\w./+-]*(?:,|(?<=\d)\.)", n)), None)
        if wrong and not call.in_function:
            yield Violation(
                call.offset,
                f"no module is called {wrong}: the {wrong[-1]} at the end is too much",
                why=MODULE_WHY,
                cure=wrong[:-1],
            )


# ------------------------------------------------------------------------------- misspelt starters

STARTERS = {
    "srun": lazy_regex(
        r"-[nNc]\d*\Z|--(?:ntasks|nodes|gres|mpi|cpus-per-task|gpus|ntasks-per-node|cpu-bind|exclusive)\b"
    ),
    "mpirun": lazy_regex(r"--?(?:np?|hostfile|map-by|bind-to|npernode|x)\Z"),
    "torchrun": lazy_regex(r"--(?:nproc|nnodes|standalone|rdzv|master)[\w-]*"),
}
OTHER_STARTERS = {"jsrun", "lrun", "prun", "arun", "trun", "yhrun", "ccrun"}


def misspelt_starters(job: JobDescription) -> Iterator[Violation]:
    """Report ``run -n 4 ./a.out`` and ``srun--ntasks=4``: one letter or the blank is missing."""
    if not job.is_job or job.sources_files:
        return
    for call in job.calls:
        if call.in_substitution or call.under or (not call.args and "--" not in call.written):
            continue
        word = call.written
        glued = re.match(r"(srun|mpirun|mpiexec|torchrun)(--?[a-z][\w-]*(?:=.*)?)\Z", word)
        if glued and glued[2].startswith("--"):
            yield Violation(call.offset, f"{word[:40]}: no blank behind {glued[1]}", cure=f"{glued[1]} {glued[2]}")
            continue
        if not re.fullmatch(r"[a-z]{3,9}", word) or word in OTHER_STARTERS or _is_defined(job, word) or not call.args:
            continue
        for starter, options in STARTERS.items():
            if word != starter and edits(word, starter, 1) == 1 and options.match(call.args[0].text):
                text = f"{word} {call.args[0].text}: there is no such program; {starter} was probably meant"
                yield Violation(call.offset, text, cure=starter)


def _is_defined(job: JobDescription, word: str) -> bool:
    return bool(re.search(rf"(?m)^\s*(?:function\s+)?{word}\s*\(\)|\bfunction\s+{word}\b|\balias\s+{word}=", job.text))


# ------------------------------------------------------------------------------------------- csh

CSH_WHY = "The first line names csh, which does not know the syntax of bash: the script ends with an error."
OF_BASH = lazy_regex(
    r"(?m)^[ \t]*(?:export[ \t]+[A-Za-z_]\w*=|[A-Za-z_]\w*=[^=\s]|if[ \t]+\[\[?[ \t]|for[ \t]+\w+[ \t]+in[ \t]|(?:fi|done|esac)[ \t]*$|then[ \t]*$)"
)


def csh_script(job: JobDescription) -> Iterator[Violation]:
    """Report lines of bash in a script whose first line names csh."""
    if not re.match(r"#!\s*\S*/(?:env\s+)?t?csh\b", job.text) or "<<" in job.text:
        return
    found = OF_BASH.search(job.text)
    if found:
        yield Violation(
            found.start(),
            f"'{found[0].strip()[:40]}' is no line of csh",
            why=CSH_WHY,
            cure="#!/bin/bash, or setenv NAME value",
        )


EXPORTED_WHY = (
    "The value ends at the blank: the words behind it are names of variables to export, not a part of the value."
)


def exported_words(job: JobDescription) -> Iterator[Violation]:
    """Report ``export NAME=first second``, whose second word is no variable."""
    for call_offset, name in _bare_exports(job):
        yield Violation(
            call_offset,
            f"{name} is exported as a variable, which does not exist: the value has no blank",
            why=EXPORTED_WHY,
            cure='export NAME="first second"',
        )


USUAL_NAMES = {
    "PATH",
    "HOME",
    "USER",
    "SHELL",
    "LANG",
    "TERM",
    "DISPLAY",
    "PWD",
    "CC",
    "CXX",
    "CFLAGS",
    "LDFLAGS",
    "PS",
    "TMPDIR",
    "SCRATCH",
    "WORK",
    "RANK",
}


def _bare_exports(job: JobDescription) -> Iterator[tuple[int, str]]:
    for found in re.finditer(
        r"(?m)^[ \t]*export[ \t]+(\w+)=([\w./:,-]+)[ \t]+([a-z]\w*|[A-Z]+)(?:[ \t]+[A-Za-z]\w*)*[ \t]*(?:#.*)?$",
        job.text,
    ):
        name = found[3]
        known = job.has(name) or name in job.reading.named or name in job.used_names or name in USUAL_NAMES
        if not known and not job.in_comment(found.start(3)) and not _inside_text(job, found.start()):
            yield found.start(3), name


def _inside_text(job: JobDescription, offset: int) -> bool:
    return any(len(body.at) and offset in body.at for body in (*job.reading.files.values(), *job.reading.submitted))


OFF_WHY = "It switches the environment off again: the programs below run with another Python."


def deactivated(job: JobDescription) -> Iterator[Violation]:
    """Report an environment that the script switches off between its activation and its only work."""
    events = [c for c in job.calls if not (c.under or c.in_function or c.in_substitution or c.branch or c.in_loop)]
    active: ProgramCall | None = None
    off: ProgramCall | None = None
    works = {w.offset for w in job.work}
    for call in events:
        words = [a.text for a in call.args]
        if call.offset in works:
            if off is not None and uses_python(
                next((c for c in job.work_calls if c.starter.offset == call.offset), call)
            ):
                yield Violation(off.offset, f"the environment of line {job.lines.place(active.offset)[0] if active else 0} is off here", why=OFF_WHY,
                                cure="deactivate behind the last program")  # fmt: skip
            return
        if activates(call.program, words) or (call.program in ("source", ".") and active and off):
            active, off = call, None
        elif call.program == "deactivate" or (call.program in ("conda", "mamba") and words[:1] == ["deactivate"]):
            off = call if active is not None else None
        elif call.program not in ("echo", "module", "ml", "export", "cd", "date", "which", "conda", "set"):
            active = None


NOTHING_ACTIVE_WHY = (
    "deactivate is a function that an activated environment defines, and functions do not reach a batch job: "
    "the shell ends with 127, and a job that has succeeded counts as failed."
)


def nothing_to_deactivate(job: JobDescription) -> Iterator[Violation]:
    """Report ``deactivate`` at the end of a job in which nothing has activated an environment."""
    own = [c for c in job.calls if not c.under and not c.in_substitution]
    last = own[-1] if own and job.is_batch else None
    if last is None or last.program != "deactivate" or last.branch or last.in_function or last.tested:
        return
    unknown = {
        "source",
        ".",
        "eval",
        "module",
        "ml",
        "uenv",
        "spack",
        "conda",
        "mamba",
        "micromamba",
        "pyenv",
        "workon",
    }
    if last.after in ("||", "&&") or unknown & {c.program for c in own} or LOGIN_SHELL.match(job.lines.line(1)):
        return
    if re.search(r"(?<!de)activate|\bdeactivate[ \t]*\(", job.code):
        return
    text = "there is no command deactivate: nothing in the script has activated an environment"
    yield Violation(
        last.offset,
        text,
        why=NOTHING_ACTIVE_WHY,
        cure="remove it, or activate the environment in this script: source <venv>/bin/activate",
    )
