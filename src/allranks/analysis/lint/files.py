"""Open the files to lint: read, decode and classify them. Problems with a file as a whole are reported here."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from allranks.analysis.lint.shell_tokens import UNRESOLVED_CLOSE, UNRESOLVED_OPEN
from allranks.utils.inputs import STDIN_NAME, FileTooLarge, NotRegularFile, StdinClosed, is_stdin, read_input
from allranks.utils.text import lazy_regex, nearest_file_hint

FileKind = Literal["script", "environment", "spec"]
MAX_BYTES = 1_000_000
SHELL_LINE = lazy_regex(
    r"#!\s*(?:\S*/)?(?:env\s+(?:-\S+\s+)*(?:\S*/)?)?r?(?:bash|sh|zsh|dash|ksh|ash|ksh93|mksh)(?:\s|$)"
)
SHELL_SUFFIXES = {".sh", ".bash", ".sbatch", ".slurm", ".slm", ".job", ".zsh", ".ksh", ".batch", ".submit", ".sub"}
ENVIRONMENT_LINE = lazy_regex(r"\s*(?:(?:export|set -x|declare -x)\s+)?[A-Za-z_][A-Za-z0-9_.%()]*\s?=")
COMMAND_LINE = lazy_regex(
    r"\s*(?:(?:srun|sbatch|salloc|torchrun|accelerate|deepspeed|mpirun|export|source|module|ml|cd|echo|set|mkdir|conda|bash|"
    r"python[0-9.]*|unset|cat|nvidia-smi|scontrol|ulimit|trap|exec|eval|apptainer|singularity|uv|nohup|time|env|\.)\s"
    r"|(?:if|while|until|for|case)\s.*(?:\bthen|\bdo|\bin|;|\])\s*$|[A-Za-z_][A-Za-z0-9_]*=\S*|[A-Za-z_]+\s*\(\)\s*\{)"
)
OTHER_LANGUAGE = lazy_regex(
    r"\s*(?:import \w|from \w[\w.]* import |def \w+\(|class \w+[:(]|#include\b|<[!?a-zA-Z]|\{\s*$|\[\s*$|\{\s*\"|package \w+;?$)"
)


class OpenedFile(msgspec.Struct, frozen=True):
    """Text of a file, its kind, and its problems that did not prevent reading (line and message)."""

    text: str
    kind: FileKind
    complaints: tuple[tuple[int | None, str], ...] = ()


class UnreadableInput(Exception):
    """The file as a whole cannot be linted; the text says why."""


def open_file(path: Path) -> OpenedFile:
    """Read and classify a file; ``-`` is standard input, which cannot be a spec, because a spec refers to files next to
    it.

    Raises:
        UnreadableInput: missing, a folder, too large, empty, binary, or neither shell nor environment nor spec.
    """
    raw = _bytes(path)
    complaints: list[tuple[int | None, str]] = []
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        complaints.append(
            (line, f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8. The other lines were read")
        )
        text = raw.decode("utf-8", errors="replace")
    text = text.replace(UNRESOLVED_OPEN, "?").replace(UNRESOLVED_CLOSE, "?")
    if not text.strip("\ufeff \t\r\n"):
        raise UnreadableInput(f"{STDIN_NAME if is_stdin(path) else 'the file'} is empty")
    return OpenedFile(text, kind_of(path, text), tuple(complaints))


def _bytes(path: Path) -> bytes:
    try:
        raw = read_input(path, MAX_BYTES)
    except IsADirectoryError:
        raise UnreadableInput("this is a folder; give the files in it") from None
    except FileTooLarge:
        raise UnreadableInput(f"larger than {MAX_BYTES // 1000} kB; this is not a script") from None
    except NotRegularFile as error:
        raise UnreadableInput(
            f"cannot be read: {error.strerror}; pass its content on standard input and name it -"
        ) from None
    except StdinClosed:
        raise UnreadableInput(f"{STDIN_NAME} is closed") from None
    except FileNotFoundError:
        raise UnreadableInput(f"no such file{nearest_file_hint(path)}") from None
    except (OSError, ValueError) as error:
        raise UnreadableInput(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnreadableInput("this is UTF-16, which no shell reads; save it as UTF-8")
    if b"\0" in raw:
        line = raw.count(b"\n", 0, raw.index(b"\0")) + 1
        raise UnreadableInput(f"this is a binary file (a zero byte in line {line})")
    return raw


def kind_of(path: Path, text: str) -> FileKind:
    """Classify by the first line, the name, and the form of most lines."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return "spec"
    if path.name in ("Makefile", "makefile", "GNUmakefile") or path.suffix == ".mk":
        raise UnreadableInput("this is a makefile, which make reads and not a shell")
    first = text.lstrip("\ufeff").split("\n", 1)[0].rstrip("\r")
    if first.startswith("#!"):
        if SHELL_LINE.match(first):
            return "script"
        raise UnreadableInput(
            f"this is not a shell script: its first line is {first[:60]!r}; lint reads sh, bash, dash, ksh and zsh"
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
    raise UnreadableInput(
        "this is neither a shell script nor an environment file (lines NAME=value) nor a spec (.yaml)"
    )


def _is_dump(lines: list[str]) -> bool:
    """Return whether this is a dump of `env` (multi-line values are unquoted), by its first line and some names."""
    names = {line.partition("=")[0] for line in lines}
    return bool(ENVIRONMENT_LINE.match(lines[0])) and len(names & {"PATH", "HOME", "PWD", "USER", "SHELL"}) >= 2


PLACEHOLDER = lazy_regex(
    r"(?<![<\w$])<[A-Za-z][\w ./:|$-]{0,60}>|(?<=[/=\"'])<<[A-Za-z][\w -]{0,40}>>|\{\{-?\s*[\w. $|()'\",+*/-]{1,60}\s*-?\}\}|(?<![\w$])\{ [A-Za-z_][\w.]* \}"
    r"|\bX{3,}[a-z]\w{0,40}?X{3,}(?![A-Za-z0-9])|(?<=[= ])[Yy]our (?:e-?mail|name|account|project|partition|job)\w*"
    r"|(?<![A-Za-z0-9_])[A-Za-z_/-]*X{3,}(?![A-Za-z0-9])|\b(?:YOUR|REPLACE|INSERT|CHANGE)[-_ ]?[A-Z_-]{2,}\b|\b[Yy]our[-_]\w+(?:[-_]\w+)*"
    r"|/path[-_]?to(?:/[\w./-]*|\b)|\bproject_46[0-9]{0,4}x+|\bTODO\b|(?<![\w$}\])])\{[A-Z][a-z]+(?: [A-Za-z][a-z]+){1,4}\}"
    r"|%\([A-Za-z_]\w*\)[sdi]|\{\d{1,2}\.[ ]?[A-Za-z][\w '.,-]{0,60}\}"
    r"|(?<=\w=)# ?[A-Za-z]{2,}[/\w.-]* [^\n]*"
    r"|(?<![\w$}\])])[\[{](?i:your|replace|fill|insert|enter|put|specify|change|choose)\b[\w ,./'-]{0,60}[\]}]"
)


def find_placeholders(text: str, comments: set[int]) -> list[tuple[int, str]]:
    """Return places and texts of the parts that a template leaves open; comments other than #SBATCH are left out."""
    placeholders: list[tuple[int, str]] = []
    for offset, line in _lines_with_placeholders(text):
        start = line.lstrip()
        if not start.startswith("#") or start.startswith("#SBATCH"):
            end = min((c - offset for c in comments if offset < c < offset + len(line)), default=len(line))
            end = len(line) if start.startswith("#SBATCH") else end
            placeholders += [
                (offset + m.start(), m[0]) for m in PLACEHOLDER.finditer(line[:end]) if "mktemp" not in line
            ]
    return placeholders


@lru_cache(maxsize=4)
def _lines_with_placeholders(text: str) -> tuple[tuple[int, str], ...]:
    """Return offsets and texts of the lines; every script that a file submits asks for those of the whole file."""
    lines = ((m.start(), m[0]) for m in re.finditer(r"(?m)^.*$", text))
    return tuple((offset, line) for offset, line in lines if PLACEHOLDER.search(line))


def neutralise_placeholders(text: str) -> str:
    """Return the text with placeholders' signs that a shell reads replaced: <, >, %( ), and those behind ``=#``."""
    return PLACEHOLDER.sub(_neutral, text)


def _neutral(match: re.Match[str]) -> str:
    if match[0].startswith("<"):
        return re.sub(r"[<>|]", "_", match[0])
    if match[0].startswith("#"):
        return re.sub(r"[^\w/]", "_", match[0])
    return re.sub(r"[%()]", "_", match[0]) if match[0].startswith("%(") else match[0]
