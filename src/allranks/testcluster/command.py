"""Runs one command with a time limit, and turns its failure into one sentence."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from allranks.errors import EnvironmentNotAble, RunFailed

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_TIMEOUT_S = 30.0


def program(name: str) -> str:
    """Full path of a system program; ordinary users often lack the sbin folders on their PATH."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")
    if path is None:
        raise EnvironmentNotAble(
            f"The program '{name}' is missing here. Run scripts/install-slurm.sh, or see the docs."
        )
    return path


def run(argv: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S, text: str | None = None, what: str = "") -> str:
    """Standard output of a command that must succeed; ``text`` is its input, ``what`` its name in the error."""
    done = attempt(argv, timeout_s=timeout_s, text=text)
    if done.returncode != 0:
        raise RunFailed(
            f"{what or repr(_short(argv))} ended with exit code {done.returncode}: {last_lines(done.stderr or done.stdout)}"
        )
    return done.stdout


def attempt(
    argv: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """A command that may fail; only a missing program or the time limit raises."""
    try:
        return subprocess.run(
            list(argv),
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise EnvironmentNotAble(f"The program '{argv[0]}' is missing here.") from None
    except subprocess.TimeoutExpired:
        raise RunFailed(f"'{_short(argv)}' did not end within {timeout_s:g} s.") from None


def last_lines(text: str, count: int = 2) -> str:
    """The last lines of an output, as part of a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-count:]) or "it said nothing"


def _short(argv: Sequence[str]) -> str:
    line = shlex.join(argv)
    return line if len(line) <= 160 else f"{line[:60]} ... {line[-90:]}"
