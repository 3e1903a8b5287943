"""Starts one program on every node with one srun, or on this machine, and gives the lines that came.

The program travels on standard input, so a node needs nothing of ours but an interpreter; where the launcher's is not
there, any other takes its place and the answer says so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import EnvironmentNotAble
from allranks.testcluster.box import CLOCK_VARIABLE

GRACE_S = 3.0
MAX_SAID = 2000
PIECE = 800
"""Slurm passes at most 1024 bytes of a line on at once, and what several nodes say would be mixed within their lines."""
FIND_PYTHON = f"""
q="$1"; shift
old='import sys; sys.exit(sys.version_info < (3, 8))'
if ! command -v "$q" >/dev/null 2>&1; then
    for q in python3 python ''; do "$q" -c "$old" >/dev/null 2>&1 </dev/null && break; done
fi
if [ -n "$q" ]; then "$q" - "$@"
else printf '{{"host": "%s", "node_id": %s}}\\n' "${{SLURMD_NODENAME:-$(uname -n)}}" "${{SLURM_NODEID:-0}}"
fi | fold -b -w {PIECE} | sed "s/^/@${{SLURM_PROCID:-0}} /"
"""
_PIECE = re.compile(r"@(\d+) (.*)")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of standard output, with the launcher's clock when it came."""

    text: str
    received: float

    def facts(self) -> dict[str, Any] | None:
        """The JSON object, if it is one."""
        try:
            value = json.loads(self.text)
        except ValueError:
            return None
        return value if isinstance(value, dict) and "host" in value else None


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What came back: lines of the nodes, and what was said beside them."""

    lines: list[Line]
    returncode: int | None
    """None: the time limit came first; the lines that had come are kept."""
    said: str
    seconds: float

    def by_host(self) -> dict[str, Line]:
        """The last JSON line of each node."""
        return {facts["host"]: line for line in self.lines if (facts := line.facts())}


def now() -> float:
    """This node's clock, as wrong as it is said to be."""
    return time.time() + float(os.environ.get(CLOCK_VARIABLE) or 0)


def program(name: str) -> str:
    """Text of a program of this folder that runs on the nodes."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def with_python(python: str, wish: dict[str, Any]) -> list[str]:
    """Command of a node: the launcher's interpreter, or any, reading the program from standard input."""
    return ["sh", "-c", FIND_PYTHON, "allranks-probe", python, "--json-args", json.dumps(wish)]


def run_on_nodes(
    slurm_prefix: Sequence[str],
    n: int,
    argv: Sequence[str],
    timeout_s: float,
    extra_srun_args: Sequence[str] = (),
    *,
    text: str | None = None,
    cpus: int = 1,
) -> Answers:
    """One srun, one task a node. `text` is every task's standard input; without, it is closed. `--export` is not touched.

    `extra_srun_args` say where: ``--jobid=12``, or nothing inside the allocation. Never raises for what nodes do.
    """
    command = [
        *slurm_prefix,
        "srun",
        f"--nodes={n}",
        f"--ntasks={n}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        "--overlap",
        "--kill-on-bad-exit=0",
        f"--wait={int(timeout_s)}",
        "--quit-on-interrupt",
        *(["--input=none"] if text is None else []),
        *extra_srun_args,
        *argv,
    ]
    return run_command(command, timeout_s, text)


def run_here(argv: Sequence[str], timeout_s: float, text: str | None = None) -> Answers:
    """The same on this machine."""
    return run_command(list(argv), timeout_s, text)


def run_command(command: list[str], timeout_s: float, text: str | None) -> Answers:
    """Runs it, and keeps each line with the time at which it came; after the limit it is ended."""
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise EnvironmentNotAble(f"{command[0]} cannot be started: {error.strerror}") from None
    lines: list[Line] = []
    said: list[str] = []
    threads = [
        threading.Thread(target=_keep_lines, args=(process.stdout, lines), daemon=True),
        threading.Thread(target=lambda: said.extend(process.stderr or []), daemon=True),
        threading.Thread(target=_feed, args=(process.stdin, text), daemon=True),
    ]
    for thread in threads:
        thread.start()
    code = _end(process, timeout_s)
    for thread in threads:
        thread.join(GRACE_S)
    return Answers(
        lines=joined(lines), returncode=code, said="".join(said)[-MAX_SAID:], seconds=time.monotonic() - began
    )


def joined(lines: Sequence[Line]) -> list[Line]:
    """Whole lines from the pieces of all tasks, which come in any order among tasks; a whole one came with its end."""
    whole: list[Line] = []
    begun: dict[str, str] = {}
    for line in lines:
        found = _PIECE.fullmatch(line.text)
        if found is None:
            whole.append(line)
            continue
        task, piece = found.groups()
        begun[task] = begun.get(task, "") + piece
        if len(piece) < PIECE:
            whole.append(Line(text=begun.pop(task), received=line.received))
    whole += [Line(text=text, received=lines[-1].received) for text in begun.values()]
    return whole


def _keep_lines(stream: Any, lines: list[Line]) -> None:
    for line in stream:
        lines.append(Line(text=line.rstrip("\n"), received=now()))  # noqa: PERF401 - each with its own time


def _feed(stream: Any, text: str | None) -> None:
    if text is None:
        return
    try:
        stream.write(text)
        stream.close()
    except OSError:
        pass  # it ended before it had read all


def _end(process: subprocess.Popen[str], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None
