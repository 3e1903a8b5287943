"""Parse the options of srun, sbatch and launchers, #SBATCH lines, and commands wrapped in other commands.

Options are normalised to long names without dashes. Wrappers are followed, for example srun, env, bash, torchrun.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import PurePosixPath

import msgspec

from allranks.analysis.lint.records import Argument, Directive, ProgramCall
from allranks.analysis.lint.shell_tokens import UNRESOLVED_CLOSE, UNRESOLVED_OPEN, MappedText
from allranks.utils.text import lazy_regex

SHORT = {
    "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "p": "partition", "G": "gpus", "t": "time", "J": "job-name",
    "o": "output", "e": "error", "A": "account", "w": "nodelist", "x": "exclude", "D": "chdir", "C": "constraint",
    "q": "qos", "K": "kill-on-bad-exit", "l": "label", "u": "unbuffered", "W": "wait", "L": "licenses", "a": "array",
    "d": "dependency", "m": "distribution", "i": "input", "F": "nodefile", "B": "extra-node-info", "b": "begin",
    "M": "clusters", "r": "relative", "T": "threads", "v": "verbose", "Q": "quiet", "O": "overcommit",
    "s": "oversubscribe", "k": "no-kill", "E": "preserve-env", "X": "disable-status", "Z": "no-allocate",
    "I": "immediate", "H": "hold", "V": "version", "S": "core-spec", "h": "help", "Y": "reboot",
}  # fmt: skip
# Options of srun and sbatch that take no value, or only one glued on with "=".
FLAGS = {
    "exclusive", "overcommit", "oversubscribe", "label", "unbuffered", "verbose", "quiet", "pty", "immediate",
    "preserve-env", "multi-prog", "disable-status", "exact", "overlap", "contiguous", "no-kill", "kill-on-bad-exit",
    "help", "version", "usage", "spread-job", "use-min-nodes", "no-allocate", "interactive", "whole", "join",
    "resv-ports", "propagate", "quit-on-interrupt", "container-mount-home", "no-container-mount-home",
    "container-remap-root", "no-container-remap-root", "container-entrypoint", "no-container-entrypoint",
    "container-writable", "container-readonly", "send-libs", "compress", "nice", "no-requeue", "requeue", "hold",
    "parsable", "test-only", "ignore-pbs", "reboot", "get-user-env", "no-bell", "no-shell", "debugger-test",
    "external", "wait-for-children", "container-save-none",
}  # fmt: skip
VALUED = {
    "account", "gres", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "cpus-per-gpu", "mem", "mem-per-cpu",
    "mem-per-gpu", "mail-type", "mail-user", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket",
    "ntasks-per-core", "signal", "open-mode", "export", "comment", "reservation", "switches", "tmp", "wckey",
    "threads-per-core", "cores-per-socket", "sockets-per-node", "hint", "gpu-bind", "gpu-freq", "mincpus", "profile",
    "prefer", "time-min", "export-file", "container", "network", "power", "priority", "bb", "bbf", "acctg-freq",
    "nice", "cpu-freq", "delay-boot", "deadline", "kill-on-invalid-dep", "thread-spec", "tres-per-task", "tres-bind",
    "gres-flags", "segment", "stepmgr", "cluster-constraint", "batch", "uid", "gid", "wait-all-nodes", "mem-bind",
    "wrap", "propagate", "container-image", "container-mounts", "container-name", "container-workdir", "container-env",
    "container-id", "mcs-label", "no-requeue", "oom-kill-step", "resv-ports", "consolidate-segments",
}  # fmt: skip
LONG = VALUED | FLAGS | set(SHORT.values())
ALIASES = {"tasks-per-node": "ntasks-per-node", "tasks": "ntasks-per-node", "cluster": "clusters"}
TORCHRUN_FLAGS = {
    "standalone", "m", "module", "no_python", "run_path", "use_env", "virtual_local_rank", "h", "help", "multi_gpu",
    "cpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "same_network", "debug", "quiet", "q", "mpi", "tpu",
    "use_xpu", "no_local_rank", "no_ssh", "force_multi", "save_pid", "bind_cores_to_rank", "use_mps_device",
    "downcast_bf16", "no_ssh_check", "use_parallelism_config", "venv_script", "tee_all",
}  # fmt: skip


class Option(msgspec.Struct, frozen=True):
    value: str | None
    arg: Argument

    @property
    def written(self) -> str:
        """Return the option as it is written, with its dashes and without its value."""
        return self.arg.text.partition("=")[0]

    @property
    def plain_value(self) -> str:
        """Return the value without quotes around it; empty if there is none."""
        return (self.value or "").strip("\"'")


def slurm_option(word: str) -> tuple[str, str | None, bool]:
    """Return the name, the value if attached, and whether the next word is the value."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        name = _whole(name)
        return name, (value if equals else None), not equals and name not in FLAGS
    name = SHORT.get(word[1:2], word[1:2])
    rest = word[2:]
    if name in FLAGS:
        if rest and rest[0].isalpha():  # -lu: several flags in one word; the first one counts
            return name, None, False
        return name, rest or None, False
    return name, (rest.removeprefix("=") or None), not rest


def _whole(name: str) -> str:
    """Return the full option name: getopt accepts any unique prefix, such as ``--out``."""
    if name in LONG or name in ALIASES:
        return ALIASES.get(name, name)
    names = [known for known in LONG if len(name) > 2 and known.startswith(name)]
    return names[0] if len(names) == 1 else name


def srun_end(args: Sequence[Argument]) -> int:
    """Return the index of the first word that is the command and not an option of srun."""
    i = 0
    while i < len(args):
        word = args[i].text
        if word == "--":
            return i + 1
        if not word.startswith("-") or word == "-":
            if word == ":":  # more options of a heterogeneous step follow
                i += 1
                continue
            if _unknown_options(args[i]) and i + 1 < len(args):
                i += 1
                continue
            return i
        i += 2 if slurm_option(word)[2] else 1
    return len(args)


def sbatch_options(words: Sequence[str], flags: Sequence[str] = ()) -> tuple[dict[str, str | None], int]:
    """Return the options of a command line of sbatch, the last of each name, and the index of the script; `flags` are
    further options without a value."""
    options: dict[str, str | None] = {}
    i = 0
    while i < len(words) and words[i] != "--" and words[i].startswith(("-", ":")):
        name, value, follows = slurm_option(words[i])
        # srun's --wait has a value; a colon separates the parts of a heterogeneous job
        if follows and words[i] != ":" and name not in ("wait", "stepmgr", *flags):
            i += 1
            value = words[i] if i < len(words) else None
        options[name] = value
        i += 1
    return options, i + (words[i : i + 1] == ["--"])


def _unknown_options(arg: Argument) -> bool:
    """Return whether a word is ``$SRUN_ARGS`` or ``"$@"``: options with unknown values."""
    text = arg.source.text
    several = text in (
        f"{UNRESOLVED_OPEN}@{UNRESOLVED_CLOSE}",
        f"{UNRESOLVED_OPEN}*{UNRESOLVED_CLOSE}",
    ) or text.endswith(f"[@]{UNRESOLVED_CLOSE}")
    if text.rpartition(UNRESOLVED_CLOSE)[2].startswith("/"):
        return False  # a path: $FOLDER/bin/torchrun
    return text.startswith(UNRESOLVED_OPEN) and (several or not arg.quoted)


def slurm_options(call: ProgramCall) -> dict[str, Option]:
    """Return the options of an srun (or salloc, sbatch) call."""
    options: dict[str, Option] = {}
    args = call.args
    i = 0
    while i < len(args):
        word = args[i].text
        if word.startswith("-") and len(word) > 1 and word != "--":
            name, value, follows = slurm_option(word)
            if follows and i + 1 < len(args):
                value = args[i + 1].text
                options[name] = Option(value, args[i])
                i += 2
                continue
            options[name] = Option(value, args[i])
        i += 1
    return options


class LauncherOptions(msgspec.Struct, frozen=True):
    """Options of a launcher by name, those replaced by a later one, and whether some are unknown (``$EXTRA_ARGS``)."""

    last: dict[str, Option]
    repeated: tuple[tuple[str, Option], ...]
    unknown: bool


def launcher_options(call: ProgramCall) -> LauncherOptions:
    """Return the options of torchrun, accelerate launch or deepspeed up to the script; names with underscores."""
    options: dict[str, Option] = {}
    repeated: list[tuple[str, Option]] = []
    unknown = False
    args = call.args
    i = 0
    while i < len(args):
        word = args[i].text
        if not word.startswith("-"):
            if _unknown_options(args[i]) and i + 1 < len(args):
                unknown = True
                i += 1  # $EXTRA_ARGS
                continue
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        follows = not equals and name not in TORCHRUN_FLAGS and i + 1 < len(args)
        option = Option(args[i + 1].text if follows else value if equals else None, args[i])
        if name in options:
            repeated.append((name, options[name]))
        options[name] = option
        i += 2 if follows else 1
    return LauncherOptions(options, tuple(repeated), unknown)


DIRECTIVE_WORD = lazy_regex(r"""(?:[^\s"'\\]|\\.|"[^"]*"?|'[^']*'?)+""")


def read_directives(source: MappedText, comments: set[int]) -> list[Directive]:
    """Return the options of lines that start with ``#SBATCH``; `comments` are the offsets where comments start."""
    directives: list[Directive] = []
    late = False
    offset = 0
    # The lines of a here-document in an unknown value, $(sbatch << EOF ...), are no lines of this script.
    text = UNKNOWN_PART.sub(lambda m: m[0].replace("\n", " "), source.text)
    for line in text.split("\n"):
        if line.startswith("#SBATCH") and line[7:8] in (" ", "\t", "-", "\r", "") and source.where(offset) in comments:
            directives += _options(source.part(offset, offset + len(line.rstrip())), late)
        elif line.strip() and not line.lstrip().startswith("#"):
            late = True
        offset += len(line) + 1
    return directives


UNKNOWN_PART = lazy_regex(f"{UNRESOLVED_OPEN}[^{UNRESOLVED_CLOSE}]*{UNRESOLVED_CLOSE}")


def _options(source: MappedText, late: bool) -> list[Directive]:
    # What an unknown value contains, such as the blanks of a command, is no part of the line.
    line = UNKNOWN_PART.sub(lambda m: m[0][0] + re.sub(r"\W", "_", m[0][1:-1]) + m[0][-1], source.text)
    words: list[tuple[str, int]] = []
    for word in DIRECTIVE_WORD.finditer(line, 7):
        if word[0].startswith("#"):
            break
        words.append((word[0], word.start()))
    directives: list[Directive] = []
    i = 0
    while i < len(words):
        text, column = words[i]
        i += 1
        if not text.startswith("-") or len(text) < 2:
            directives.append(Directive("", text, source.where(column), line[column:], late))
            continue
        name, value, follows = slurm_option(text)
        if follows and i < len(words):
            value = words[i][0]
            i += 1
        unquoted = None if value is None else re.sub(r"[\"']", "", value)
        directives.append(Directive(name, unquoted, source.where(column), line[column:], late))
    return directives


SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
SHELL_C = lazy_regex(r"-[a-zA-Z]*c[a-zA-Z]*\Z")
ASSIGN = lazy_regex(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
PYTHON = lazy_regex(r"(python|pypy)[0-9.]*\Z")
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
LAUNCHERS = {"torchrun", "torch.distributed.launch", "accelerate", "deepspeed"}
# Programs whose options are not parsed: the command starts at one of TARGETS.
WRAPPERS = {
    "singularity", "apptainer", "enroot", "shifter", "docker", "nvidia-docker", "podman", "podman-hpc", "charliecloud",
    "ch-run", "sarus", "nsys", "ncu", "numactl", "taskset", "xargs", "strace", "memray", "py-spy", "conda", "mamba",
    "micromamba", "uv", "poetry", "pixi", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "jsrun", "aprun", "stdbuf",
    "nice", "ionice", "chrt", "setsid", "unbuffer", "sudo", "ssh", "pdsh", "clush", "parallel", "rocprof", "rocprofv3",
    "gdb", "ray", "spack", "ftxrun", "pipenv", "blaunch", "pbsdsh", "lrun", "horovodrun", "singularity_wrapper",
    "ibrun", "prun", "mpirun_rsh", "flux", "likwid-mpirun", "likwid-pin", "likwid-perfctr", "ddlrun", "catchsegv",
    "xvfb-run", "vglrun", "proxychains", "proxychains4", "eatmydata", "flock", "faketime", "rlwrap", "ltrace",
    "valgrind", "unshare", "prlimit", "tini", "dumb-init", "perf", "vtune", "nvprof", "compute-sanitizer",
    "cuda-memcheck", "rocprofv2", "rye", "hatch", "pdm",
}  # fmt: skip
STARTS_RANKS = lazy_regex(
    r"(?=.*\s).*\b(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate\s+launch|deepspeed)\b", re.DOTALL
)
CONTAINERS = {
    "singularity", "apptainer", "shifter", "enroot", "docker", "nvidia-docker", "podman", "sarus", "ch-run",
    "podman-hpc",
}  # fmt: skip
STARTERS = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun"}
REMOTE_SHELLS = {"ssh", "pdsh", "clush", "pssh"}
SHELL_PREFIXES = {"time", "nohup", "exec", "command", "builtin", "then", "else", "do", "!", "{"}


class UnwrappedCommand(msgspec.Struct, frozen=True):
    """A command without wrappers: `calls` from the outermost in, and the words of a shell script that the last runs."""

    calls: tuple[ProgramCall, ...]
    script: Argument | None = None


def basename(word: str) -> str:
    return PurePosixPath(word).name if "/" in word and not word.endswith("/") else word


NO_TARGET = lazy_regex(r"\s|^-*[A-Za-z_][\w-]*=|:/")
"""Values of options that may end like a program: ``PYTHONPATH=/opt/python``, ``/opt/python:/opt/python``."""


def is_target(word: str) -> bool:
    if NO_TARGET.search(word):
        return False
    name = basename(word)
    return (
        name in LAUNCHERS | SHELLS | {"srun", "horovodrun", "mpirun", "mpiexec"}
        or PYTHON.match(name) is not None
        or name.endswith(".py")
    )


def unwrap_command(
    args: list[Argument], make: Callable[..., ProgramCall], under: tuple[ProgramCall, ...]
) -> UnwrappedCommand:
    """Remove wrappers one by one. `make` builds a call with the attributes that all calls of the command share."""
    calls: list[ProgramCall] = []
    while args:
        program = basename(args[0].text)
        rest = args[1:]
        if program == "allranks" and rest and rest[0].text == "torchrun":  # it has torchrun's options
            args = rest
            continue
        if program in SHELL_PREFIXES:
            args = _without_flags(rest) if program == "exec" else _without_format(rest) if program == "time" else rest
            if not args:
                return UnwrappedCommand(tuple(calls))
            continue
        split = _split(program, rest)
        if split is None:
            return _last(program, args, make, under, calls)
        call = make(program, tuple(rest[:split]), args[0], under)
        calls.append(call)
        under = (*under, call)
        args = rest[split:]
        while args and program == "env" and ASSIGN.match(args[0].text):
            args = args[1:]
    return UnwrappedCommand(tuple(calls))


def _without_flags(rest: list[Argument]) -> list[Argument]:
    while rest and rest[0].text in ("-a", "-c", "-l"):
        rest = rest[2:] if rest[0].text == "-a" else rest[1:]
    return rest


def _without_format(rest: list[Argument]) -> list[Argument]:
    """Remove the options of the program time, or of the shell's word."""
    while rest and rest[0].text.startswith("-"):
        rest = rest[2:] if rest[0].text in ("-f", "-o", "--format", "--output") else rest[1:]
    return rest


def _split(program: str, rest: list[Argument]) -> int | None:
    """Return where the inner command starts in `rest`; None if the program starts no other command."""
    if program == "srun":
        end = srun_end(rest)
    elif program == "env":
        end = _env_end(rest)
    elif program == "timeout":
        end = _timeout_end(rest)
    elif program in WRAPPERS:
        also = STARTERS if program in CONTAINERS else set[str]()  # mpirun in a container starts the program
        served = [*(a.text == "serve" for a in rest[1:]), False]  # the name alone may be that of an environment
        targets = (is_target(a.text) or basename(a.text) in also or (basename(a.text) == "vllm" and served[i])
                 for i, a in enumerate(rest))  # fmt: skip
        end = next((i for i, is_command in enumerate(targets) if is_command), len(rest))
    else:
        return None
    return end if end < len(rest) else None


def _env_end(rest: list[Argument]) -> int:
    i = 0
    while i < len(rest) and rest[i].text.startswith("-"):
        i += 2 if rest[i].text in ("-u", "-C", "-S") else 1
    while i < len(rest) and ASSIGN.match(rest[i].text):
        i += 1
    return i


def _timeout_end(rest: list[Argument]) -> int:
    i = 0
    while i < len(rest) and rest[i].text.startswith("-"):
        i += 2 if rest[i].text in ("-k", "-s", "--signal", "--kill-after") else 1
    return i + 1


def _last(
    program: str,
    args: list[Argument],
    make: Callable[..., ProgramCall],
    under: tuple[ProgramCall, ...],
    calls: list[ProgramCall],
) -> UnwrappedCommand:
    rest = args[1:]
    if program in SHELLS:
        call = make(program, tuple(rest), args[0], under)
        index = next((i for i, a in enumerate(rest) if SHELL_C.match(a.text)), None)
        script = rest[index + 1] if index is not None and index + 1 < len(rest) else None
        return UnwrappedCommand((*calls, call), script)
    if program in REMOTE_SHELLS and len(rest) > 1 and STARTS_RANKS.search(rest[-1].text):  # for the other host's shell
        return UnwrappedCommand((*calls, make(program, tuple(rest), args[0], under)), rest[-1])
    if PYTHON.match(program):
        for index, arg in enumerate(rest):
            module = rest[index + 1].text if arg.text == "-m" and index + 1 < len(rest) else ""
            if index == 0 and basename(arg.text) in {"torchrun", "deepspeed"}:  # python $(which torchrun)
                call = make(basename(arg.text), tuple(rest[1:]), args[0], under)
                return UnwrappedCommand((*calls, call))
            if module in MODULES:
                call = make(MODULES[module], tuple(rest[index + 2 :]), args[0], under, module=True)
                return UnwrappedCommand((*calls, call))
            if not arg.text.startswith("-") and (index == 0 or rest[index - 1].text not in ("-X", "-W")):
                break
    if program == "accelerate":  # only `accelerate launch` starts ranks
        launches = bool(rest) and rest[0].text == "launch"
        return UnwrappedCommand(
            (*calls, make("accelerate" if launches else "accelerate-other", tuple(rest[1:]), args[0], under))
        )
    return UnwrappedCommand((*calls, make(program, tuple(rest), args[0], under)))


IMAGE = lazy_regex(r"\.(?:sif|simg|img|sqsh)\Z|^(?:docker|library|oras|shub)://|^instance://")
VALUED_OPTION = lazy_regex(
    r"-[BHWovew]|--(?:bind|overlay|home|pwd|workdir|env|env-file|volume|mount|name|user|shm-size|ipc|net|network|hostname)"
)


def may_have_more_options(call: ProgramCall) -> bool:
    """Return whether an unknown word may be the runtime's option: no option's value, not the image or behind it."""
    for before, word in pairwise(call.args):
        if IMAGE.search(word.text) and not VALUED_OPTION.fullmatch(before.text):
            return False
        if word.is_open and not VALUED_OPTION.fullmatch(before.text) and word is not call.args[-1]:
            return True
    return False
