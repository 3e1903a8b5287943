"""From the words of a command to the programs in it: srun starts env starts bash starts torchrun."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath

import msgspec

from allranks.lint.options import srun_end
from allranks.lint.records import Arg, Call

SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
SHELL_C = re.compile(r"-[a-zA-Z]*c[a-zA-Z]*\Z")
ASSIGN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
PYTHON = re.compile(r"(python|pypy)[0-9.]*\Z")
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
LAUNCHERS = {"torchrun", "torch.distributed.launch", "accelerate", "deepspeed"}
# Programs whose options are not worth knowing: the command is where one of TARGETS stands.
LOOSE = {
    "singularity", "apptainer", "enroot", "shifter", "docker", "podman", "podman-hpc", "charliecloud", "ch-run", "sarus",
    "nsys", "ncu", "numactl", "taskset", "xargs", "strace", "memray", "py-spy", "conda", "mamba", "micromamba", "uv", "poetry",
    "pixi", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "jsrun", "aprun", "stdbuf", "nice", "ionice", "chrt", "setsid",
    "unbuffer", "sudo", "ssh", "pdsh", "clush", "parallel", "rocprof", "rocprofv3", "gdb", "ray", "spack", "ftxrun", "pipenv",
}  # fmt: skip
SIMPLE = {"time", "nohup", "exec", "command", "builtin", "then", "else", "do", "!", "{"}


class Opened(msgspec.Struct, frozen=True):
    """A command taken apart: `calls` from the outermost in, and the words of a shell script that the last one runs."""

    calls: tuple[Call, ...]
    script: Arg | None = None


def basename(word: str) -> str:
    return PurePosixPath(word).name if "/" in word and not word.endswith("/") else word


def is_target(word: str) -> bool:
    if re.search(r"\s", word):
        return False
    name = basename(word)
    return name in LAUNCHERS | SHELLS or PYTHON.match(name) is not None or name.endswith(".py")


def open_command(args: list[Arg], make: Callable[..., Call], under: tuple[Call, ...]) -> Opened:
    """Take wrappers off, one after another. `make` builds a call with what all calls of the command share."""
    calls: list[Call] = []
    while args:
        program = basename(args[0].text)
        rest = args[1:]
        if program in SIMPLE:
            args = rest if program != "exec" else _without_flags(rest)
            if not args:
                return Opened(tuple(calls))
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
    return Opened(tuple(calls))


def _without_flags(rest: list[Arg]) -> list[Arg]:
    while rest and rest[0].text in ("-a", "-c", "-l"):
        rest = rest[2:] if rest[0].text == "-a" else rest[1:]
    return rest


def _split(program: str, rest: list[Arg]) -> int | None:
    """Where the inner command begins in `rest`; None if the program is none that starts others, or starts nothing."""
    if program == "srun":
        end = srun_end(rest)
    elif program == "env":
        end = _env_end(rest)
    elif program == "timeout":
        end = _timeout_end(rest)
    elif program in LOOSE:
        end = next((i for i, a in enumerate(rest) if is_target(a.text)), len(rest))
    else:
        return None
    return end if end < len(rest) else None


def _env_end(rest: list[Arg]) -> int:
    i = 0
    while i < len(rest) and rest[i].text.startswith("-"):
        i += 2 if rest[i].text in ("-u", "-C", "-S") else 1
    while i < len(rest) and ASSIGN.match(rest[i].text):
        i += 1
    return i


def _timeout_end(rest: list[Arg]) -> int:
    i = 0
    while i < len(rest) and rest[i].text.startswith("-"):
        i += 2 if rest[i].text in ("-k", "-s", "--signal", "--kill-after") else 1
    return i + 1


def _last(
    program: str, args: list[Arg], make: Callable[..., Call], under: tuple[Call, ...], calls: list[Call]
) -> Opened:
    rest = args[1:]
    if program in SHELLS:
        call = make(program, tuple(rest), args[0], under)
        index = next((i for i, a in enumerate(rest) if SHELL_C.match(a.text)), None)
        script = rest[index + 1] if index is not None and index + 1 < len(rest) else None
        return Opened((*calls, call), script)
    if PYTHON.match(program):
        for index, arg in enumerate(rest):
            module = rest[index + 1].text if arg.text == "-m" and index + 1 < len(rest) else ""
            if module in MODULES:
                call = make(MODULES[module], tuple(rest[index + 2 :]), args[0], under, module=True)
                return Opened((*calls, call))
            if not arg.text.startswith("-") and (index == 0 or rest[index - 1].text not in ("-X", "-W")):
                break
    if program == "accelerate":  # only `accelerate launch` starts ranks
        launches = bool(rest) and rest[0].text == "launch"
        return Opened((*calls, make("accelerate" if launches else "accelerate-other", tuple(rest[1:]), args[0], under)))
    return Opened((*calls, make(program, tuple(rest), args[0], under)))
