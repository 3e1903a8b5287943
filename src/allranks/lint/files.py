"""A file to text, and what kind of file it is. Everything that can be wrong with a file is said here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from allranks.inputs import STDIN_NAME, StdinClosed, is_stdin, open_input
from allranks.lint.source import CLOSE, OPEN

Kind = Literal["script", "environment", "spec"]
MAX_BYTES = 1_000_000
SHELL_LINE = re.compile(
    r"#!\s*(?:\S*/)?(?:env\s+(?:-\S+\s+)*(?:\S*/)?)?r?(?:bash|sh|zsh|dash|ksh|ash|ksh93|mksh)(?:\s|$)"
)
SHELL_SUFFIXES = {".sh", ".bash", ".sbatch", ".slurm", ".slm", ".job", ".zsh", ".ksh", ".batch", ".submit", ".sub"}
ENVIRONMENT_LINE = re.compile(r"\s*(?:(?:export|set -x|declare -x)\s+)?[A-Za-z_][A-Za-z0-9_.%()]*\s?=")
COMMAND_LINE = re.compile(
    r"\s*(?:(?:srun|sbatch|salloc|torchrun|accelerate|deepspeed|mpirun|export|source|module|ml|cd|echo|set|mkdir|conda|bash|"
    r"python[0-9.]*|unset|cat|nvidia-smi|scontrol|ulimit|trap|exec|eval|apptainer|singularity|uv|nohup|time|env|\.)\s"
    r"|(?:if|while|until|for|case)\s.*(?:\bthen|\bdo|\bin|;|\])\s*$|[A-Za-z_][A-Za-z0-9_]*=\S*|[A-Za-z_]+\s*\(\)\s*\{)"
)
OTHER_LANGUAGE = re.compile(
    r"\s*(?:import \w|from \w[\w.]* import |def \w+\(|class \w+[:(]|#include\b|<[!?a-zA-Z]|\{\s*$|\[\s*$|\{\s*\"|package \w+;?$)"
)


class Opened(msgspec.Struct, frozen=True):
    """Text of a file, its kind, and what is wrong with it although it could be read on (line and complaint)."""

    text: str
    kind: Kind
    complaints: tuple[tuple[int | None, str], ...] = ()


class NotReadable(Exception):
    """The file as a whole cannot be linted; the text says why."""


def open_file(path: Path) -> Opened:
    """Read and classify; ``-`` is standard input, which is no spec, since a spec names files beside it.

    Raises:
        NotReadable: missing, a folder, too large, empty, binary, or neither shell nor environment nor spec.
    """
    raw = _bytes(path)
    complaints: list[tuple[int | None, str]] = []
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        complaints.append(
            (line, f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8. The rest was read")
        )
        text = raw.decode("utf-8", errors="replace")
    text = text.replace(OPEN, "?").replace(CLOSE, "?")
    if not text.strip("\ufeff \t\r\n"):
        raise NotReadable(f"{STDIN_NAME if is_stdin(path) else 'the file'} is empty")
    return Opened(text, kind_of(path, text), tuple(complaints))


def _bytes(path: Path) -> bytes:
    try:
        if not is_stdin(path) and path.is_dir():
            raise NotReadable("this is a folder; name the files in it")
        with open_input(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except StdinClosed:
        raise NotReadable(f"{STDIN_NAME} is closed") from None
    except FileNotFoundError:
        raise NotReadable("there is no such file") from None
    except (OSError, ValueError) as error:
        raise NotReadable(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_BYTES:
        raise NotReadable(f"larger than {MAX_BYTES // 1000} kB; this is no script")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise NotReadable("this is UTF-16, which no shell reads; save it as UTF-8")
    if b"\0" in raw:
        line = raw.count(b"\n", 0, raw.index(b"\0")) + 1
        raise NotReadable(f"this is a binary file (a zero byte in line {line})")
    return raw


def kind_of(path: Path, text: str) -> Kind:
    """By the first line, the name, and what most lines look like."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return "spec"
    first = text.lstrip("\ufeff").split("\n", 1)[0].rstrip("\r")
    if first.startswith("#!"):
        if SHELL_LINE.match(first):
            return "script"
        raise NotReadable(
            f"this is no shell script: its first line is {first[:60]!r}; lint reads sh, bash, dash, ksh and zsh"
        )
    lines = [
        line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    commands = any(COMMAND_LINE.match(line) for line in lines)
    other = next((line for line in lines[:200] if OTHER_LANGUAGE.match(line)), None)
    environment = sum(1 for line in lines if ENVIRONMENT_LINE.match(line))
    if re.search(r"^#SBATCH\b", text, re.MULTILINE):
        return "script"
    if path.suffix.lower() in SHELL_SUFFIXES and (commands or other is None):
        return "script"
    if lines and environment == len(lines):
        return "script" if any("$(" in line or "`" in line for line in lines) else "environment"
    if path.suffix.lower() == ".env" or path.name == "environ":
        return "environment"
    if other is None and commands:
        return "environment" if environment > len(lines) * 0.6 and _is_dump(lines) else "script"
    raise NotReadable("this is neither a shell script nor an environment file (lines NAME=value) nor a spec (.yaml)")


def _is_dump(lines: list[str]) -> bool:
    """`env` prints values of several lines as they are; its first line and these names give it away."""
    names = {line.partition("=")[0] for line in lines}
    return bool(ENVIRONMENT_LINE.match(lines[0])) and len(names & {"PATH", "HOME", "PWD", "USER", "SHELL"}) >= 2
