"""Starting programs: always a timeout, always the whole process group ended, output kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class ProgramFailed(RuntimeError):
    """A program ended with an error or ran past its time; the message ends with the last lines it wrote."""


def exit_on_sigterm() -> None:
    """Turn SIGTERM into an ordinary exit, so that programs started here are ended too."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def usual_environment() -> dict[str, str]:
    """The environment, but compiled code is kept, as it is for any installed package.

    Container images often set PYTHONDONTWRITEBYTECODE. In a checkout, each start of a program would then compile every
    file that has changed since somebody last ran it without the variable.
    """
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def end_group(process: subprocess.Popen[bytes], grace_s: float = 10.0) -> None:
    """Ask the whole process group to end, then end it."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            process.wait(grace_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run(command: list[str], log: Path, timeout_s: float, env: dict[str, str] | None = None) -> float:
    """Run in the repository's root with output into ``log``; wall seconds.

    Raises:
        ProgramFailed: it exited with an error, or ran longer than ``timeout_s``.
    """
    begin = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**usual_environment(), **(env or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
            why = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"no end after {timeout_s:.0f} s"
        finally:
            end_group(process)
    if why:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ProgramFailed(f"{' '.join([Path(command[0]).name, *command[1:6]])} ...: {why}\n{tail}")
    return time.perf_counter() - begin


def console_script(name: str = "allranks") -> str:
    """The console script that was installed beside this interpreter."""
    script = Path(sys.executable).parent / name
    if not script.exists():
        raise FileNotFoundError(f"{name} is not installed beside {sys.executable}; pip install -e '.[train]'")
    return str(script)
