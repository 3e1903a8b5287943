"""Rules for options that a launcher does not have, subcommands that do not exist, and names written without their $."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import LAUNCHERS, PYTHON
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.records import Argument, Violation
from allranks.analysis.lint.rules.dataflow import INHERITED, MORE_READ
from allranks.analysis.lint.rules.variables import edits
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN

OPTION_WHY = "The launcher stops with 'unrecognized arguments', or the program gets the option and the launcher uses its default."
OPTION_CURE = "the launcher's own options stand before the program"
TORCHRUN_HAS = {"num_gpus": "nproc_per_node", "num_processes": "nproc_per_node", "num_machines": "nnodes", "machine_rank": "node_rank",
                "main_process_ip": "master_addr", "main_process_port": "master_port", "num_nodes": "nnodes"}  # fmt: skip
NO_OPTION = {
    "torchrun": TORCHRUN_HAS,
    "torch.distributed.launch": TORCHRUN_HAS,
    "accelerate": {"num_gpus": "num_processes", "nproc_per_node": "num_processes", "nnodes": "num_machines", "node_rank": "machine_rank",
                   "master_addr": "main_process_ip", "master_port": "main_process_port", "num_nodes": "num_machines"},
    "deepspeed": {"nproc_per_node": "num_gpus", "nnodes": "num_nodes", "num_processes": "num_gpus", "num_machines": "num_nodes"},
}  # fmt: skip
OF_LAUNCHER = {
    "nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "num_processes", "num_machines", "machine_rank", "main_process_ip",
    "main_process_port",
}  # fmt: skip


def launcher_option(job: JobDescription) -> Iterator[Violation]:
    """Report options that the launcher does not have, options behind the program, and ``torchrun python train.py``."""
    for launch in job.launches:
        known = NO_OPTION.get(launch.kind)
        if known is None or launch.call.written.startswith("$"):
            continue
        wrong = next((n for n in launch.options if n in known), None)
        if wrong:
            option = launch.options[wrong]
            text = f"{launch.kind} has no option {option.arg.text.partition('=')[0]}"
            yield Violation(option.arg.offset, text, cure=f"--{known[wrong]}")
            continue
        program = _program(launch)
        if program is None:
            continue
        flags = launch.options.keys() & {"no_python", "m", "module"}
        if PYTHON.fullmatch(program.text) and not flags and not program.text.startswith("/"):
            text = f"{launch.kind} starts Python itself: here it looks for a script called {program.text}"
            yield Violation(program.offset, text, cure=f"{launch.kind} ... train.py")
            continue
        yield from _behind(launch, program)
    for call in job.calls:
        rest = job.text[call.offset : call.offset + 80]
        if call.program == "accelerate-other" and re.match(
            r"\S*accelerate[ \t]+(?:-{1,2}\w\S*[ \t]+)*[^\s-]\S*\.py\b", rest
        ):
            yield Violation(
                call.offset, "accelerate without launch starts no program", cure="accelerate launch train.py"
            )


def _program(launch: LauncherCall) -> Argument | None:
    """Return the launcher's first word that is neither an option nor its value."""
    values = {id(o.arg) for o in launch.options.values()} | {id(o.arg) for _, o in launch.repeated}
    args, i = launch.call.args, 0
    while i < len(args):
        if id(args[i]) in values:
            name = args[i].text.lstrip("-").partition("=")[0].replace("-", "_")
            option = launch.options.get(name)
            i += 2 if option and option.value is not None and "=" not in args[i].text else 1
            continue
        return None if args[i].text.startswith("-") or UNRESOLVED_OPEN in args[i].source.text else args[i]
    return None


def _behind(launch: LauncherCall, program: Argument) -> Iterator[Violation]:
    if not program.text.endswith(".py") or launch.open_ended:
        return
    index = launch.call.args.index(program)
    for arg in launch.call.args[index + 1 :]:
        name = arg.text.lstrip("-").partition("=")[0].replace("-", "_")
        if (
            arg.text.startswith("--")
            and name in OF_LAUNCHER
            and name not in launch.options
            and not launch.option("config_file", "standalone")
        ):
            own = {
                "accelerate": {"num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"}
            }
            if name in own.get(launch.kind, OF_LAUNCHER - own["accelerate"]) and launch.kind != "deepspeed":
                text = f"{arg.text.partition('=')[0]} stands behind {program.text}: the program gets it, and {launch.kind} uses its default"
                yield Violation(arg.offset, text)
                return


# -------------------------------------------------------------------------- modules and subcommands

LAUNCH_MODULES = (
    "torch.distributed.launch",
    "torch.distributed.run",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
)
MODULE_WORDS = {
    "load", "unload", "list", "avail", "av", "purge", "swap", "switch", "use", "unuse", "show", "display", "spider", "save", "restore", "reset",
    "add", "rm", "del", "whatis", "help", "keyword", "refresh", "update", "is-loaded", "is-avail", "try-load", "overview", "initadd", "clear", "try-add",
    "path", "paths", "append-path", "prepend-path", "savelist", "saveshow", "sh-to-mod", "load-any", "mod-to-sh", "test", "info-loaded", "search",
    "config", "aliases", "source", "key", "apropos", "getdefault", "gd", "sl", "ls", "r", "s", "switchto", "edit", "spider-all", "autoinit",
}  # fmt: skip
CONDA_WORDS = ("activate", "deactivate", "install", "create", "config")


def misspelt_subcommands(job: JobDescription) -> Iterator[Violation]:
    """Report ``module laod``, ``module cuda/11``, ``conda actviate``, ``python -m torchrun`` and launchers called by their module."""
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.in_substitution or call.in_function:
            continue
        first = words[0] if words else ""
        if call.written == "module" and first and not first.startswith(("-", "$")) and first not in MODULE_WORDS:
            near = re.fullmatch(r"[a-z]{3,7}", first) and any(
                0 < edits(first, w, 2) <= (2 if w == "load" else 1) for w in ("load", "purge", "unload")
            )
            if near or (re.search(r"/\d", first) and not call.args[0].quoted):
                yield Violation(
                    call.offset,
                    f"module has no command {first}: nothing is loaded",
                    cure=f"module load {first if not near else '...'}",
                )
        elif call.written in ("conda", "mamba") and re.fullmatch(r"[a-z]{5,12}", first) and first not in CONDA_WORDS:
            meant = next((w for w in CONDA_WORDS if 0 < edits(first, w, 2) <= 2 and abs(len(first) - len(w)) < 2), None)
            if meant and first not in ("info", "inactivate"):
                yield Violation(call.offset, f"{call.written} has no command {first}", cure=f"{call.written} {meant}")
        elif re.fullmatch(r"torch\.distributed\.(?:launch|run)", call.written):
            yield Violation(
                call.offset, f"{call.written} is a module of Python, no command", cure=f"python -m {call.written}"
            )
        elif PYTHON.match(call.program) and "-m" in words[:3]:
            module = words[words.index("-m") + 1] if words.index("-m") + 1 < len(words) else ""
            near = next((m for m in LAUNCH_MODULES if 0 < edits(module, m, 2) <= 2), None)
            if module == "torchrun" or near:
                yield Violation(
                    call.offset, f"Python has no module {module}", cure=f"python -m {near or 'torch.distributed.run'}"
                )


# ---------------------------------------------------------------------------------- names without $

NAME_WHY = "The shell expands only $NAME and ${NAME}: the program gets the text, or nothing."


def names_as_text(job: JobDescription) -> Iterator[Violation]:
    """Report the name of a variable that nothing uses, where its value is meant: ``--data DATA``, ``{DATA}``, ``%DATA%``."""
    unused = (
        {a.name for a in job.set_values_at_top() if a.value and not a.exported}
        - job.used_names
        - job.reading.exported
        - INHERITED
    )
    for call in job.work_calls:
        if any(c.program in ("ssh", "docker") for c in call.under):
            continue
        for arg, following in call.pairs():
            text = arg.text
            if text == "$" and following is not None and re.match(r"\{\w+\}", following.text):
                yield Violation(
                    arg.offset,
                    f"$ {following.text}: a blank stands behind the $",
                    why=NAME_WHY,
                    cure=f"${following.text}",
                )
            found = re.fullmatch(
                r"(?:--?[\w-]+=)?(?:\{([A-Za-z_]\w{2,})\}|%([A-Za-z_]\w{2,})%|([A-Z][A-Z0-9_]{2,}))", text
            )
            name = (found[1] or found[2] or found[3]) if found else None
            if name in unused and not arg.quoted:
                yield Violation(
                    arg.offset,
                    f"{text} is text: the value of {name} is meant, which nothing uses",
                    why=NAME_WHY,
                    cure=f"${name}",
                )
                return
    for call in job.calls:
        if (
            call.in_substitution
            and not call.args
            and call.written in job.by_name
            and re.fullmatch(r"[A-Z_][A-Z0-9_]+", call.written)
        ):
            if job.text[max(0, call.offset - 2) : call.offset] == "$(":
                text = f"$({call.written}) runs {call.written} as a command"
                yield Violation(
                    call.offset,
                    text,
                    why="$(...) is the output of a command, ${...} the value of a variable.",
                    cure=f"${{{call.written}}}",
                )


# ---------------------------------------------------------------------- lines that take in the next

TAKES_WORDS = {"module", "ml", "export", "cd", "source", ".", "mkdir", "conda", "ulimit", "unset", "pip", "pip3"}


def swallowed_by(job: JobDescription) -> Iterator[Violation]:
    """Report a launch that became the arguments of the command above, which ends with a backslash."""
    for call in job.calls:
        if call.program not in TAKES_WORDS or call.in_substitution:
            continue
        for arg in call.args[1:]:
            line, column = job.lines.place(arg.source.where(0))
            starts = arg.text in LAUNCHERS | {"srun", "mpirun"} or PYTHON.fullmatch(arg.text) is not None
            if (
                starts
                and not arg.quoted
                and not job.lines.line(line)[: column - 1].strip()
                and job.lines.line(line - 1).endswith("\\")
            ):
                text = (
                    f"the line ends with a backslash: '{arg.text}' in line {line} becomes an argument of {call.written}"
                )
                yield Violation(job.lines.start(line - 1), text)
                return


COLON_NAME = re.compile(r"([A-Z][A-Z0-9_]+):[\w./-]*")


def colon_assignment(job: JobDescription) -> Iterator[Violation]:
    """Report ``OMP_NUM_THREADS:4`` as a command."""
    for call in job.calls:
        found = COLON_NAME.fullmatch(call.written)
        if found and not call.args and not call.in_substitution and MORE_READ.match(found[1]):
            yield Violation(
                call.offset,
                f"{call.written} runs as a command: a value is assigned with =",
                cure=f"export {found[1]}=...",
            )


PATH_LISTS = r"(PATH|LD_LIBRARY_PATH|PYTHONPATH|LIBRARY_PATH|CPATH)"
AFTER_SEMICOLON = re.compile(rf"(?m)^[ \t]*(?:export[ \t]+)?{PATH_LISTS}=[\"']?[^\s\"';$]+;[ ]?\$(?:\{{\1\}}|\1(?!\w))")


def semicolon(job: JobDescription) -> Iterator[Violation]:
    """Report ``PATH=/folder;$PATH``."""
    for found in AFTER_SEMICOLON.finditer(job.text):
        if not job.in_comment(found.start(1)):
            text = f"a semicolon instead of a colon before ${found[1]}: the list has only the new folder, and ${found[1]} runs as a command"
            yield Violation(found.start(1), text, cure=f"{found[1]}=/folder:${found[1]}")
