"""Run commands on the nodes of a job with srun, in bounded time.

A program is passed on standard input, so a node only needs an interpreter; if it lacks the launcher's, another is used
and the answer says so. The srun of the agents' job step ends in bounded time even without reaching its tasks.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import subprocess
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import EXIT_FAILED, EnvironmentNotAble
from allranks.utils.text import format_ranges

CLOCK_VARIABLE = "ALLRANKS_CLOCK_OFFSET_S"
"""Environment variable with the clock offset in seconds that a node of a test cluster reports."""
STEP_END_S = 15.0  # a reachable node kills its tasks within seconds


class SrunStep:
    """srun with one agent per node."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._killed_at = math.inf

    def poll(self) -> int | None:
        """Return the exit code; None while it is running."""
        if time.monotonic() > self._killed_at:
            self._process.kill()  # it waits for an unreachable node or controller
        code = self._process.poll()
        return EXIT_FAILED if code is not None and code < 0 else code

    def end(self, within_s: float = STEP_END_S) -> None:
        """Have srun kill its tasks. (scancel with KILL would end the batch script too.)"""
        if self._killed_at == math.inf:
            self._killed_at = time.monotonic() + within_s
            self._process.terminate()

    def close(self) -> None:
        """End it within a time limit."""
        if self._process.poll() is None:
            self.end()
            try:
                self._process.wait(timeout=STEP_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=STEP_END_S)


GRACE_S = 3.0
MAX_STDERR = 2**20
"""srun reports each unreachable node in a separate line of about 100 bytes."""
PIECE_BYTES = 800
"""Slurm passes on at most 1024 bytes of a line at once; longer lines of several nodes would be mixed."""
FIND_PYTHON = f"""
q="$1"; shift
old='import sys; sys.exit(sys.version_info < (3, 8))'
if ! command -v "$q" >/dev/null 2>&1; then
    for q in python3 python ''; do "$q" -c "$old" >/dev/null 2>&1 </dev/null && break; done
fi
if [ -n "$q" ]; then "$q" - "$@"
else printf '{{"host": "%s", "node_id": %s}}\\n' "${{SLURMD_NODENAME:-$(uname -n)}}" "${{SLURM_NODEID:-0}}"
fi | fold -b -w {PIECE_BYTES} | sed "s/^/@${{SLURM_PROCID:-0}} /"
"""
REQUEST_LINE = '\nREQUEST = ""\n'
_PIECE_LINE = re.compile(r"@(\d+) (.*)")
_NUMBERED_HOST = re.compile(r"([A-Za-z0-9_.-]*?)(\d{1,15})")


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of standard output, with the launcher's clock when it arrived."""

    text: str
    received: float

    def facts(self) -> dict[str, Any] | None:
        """Return the JSON object, if the line is one."""
        try:
            value = json.loads(self.text)
        except ValueError:
            return None
        return value if isinstance(value, dict) and "host" in value else None


class NodeAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """The result: lines of the nodes, and other messages."""

    lines: list[OutputLine]
    returncode: int | None
    """None: the time limit was reached; lines received before are kept."""
    said: str
    seconds: float

    def by_host(self) -> dict[str, OutputLine]:
        """Return the last JSON line of each node."""
        return {facts["host"]: line for line in self.lines if (facts := line.facts())}


def node_clock() -> float:
    """Return this node's clock, including a simulated offset."""
    return time.time() + float(os.environ.get(CLOCK_VARIABLE) or 0)


def program_text(name: str, request: Any = None) -> str:
    """Return the text of a program of `nodes.probes`.

    Args:
        name: its file name.
        request: data that grows with the number of nodes. It replaces the program's line ``REQUEST = ""`` and is so
            passed on standard input: Linux refuses an argument of more than 128 KiB, 1,700 nodes' addresses.
    """
    text = (Path(__file__).parents[1] / "probes" / name).read_text(encoding="utf-8")
    if request is None:
        return text
    before, line, after = text.partition(REQUEST_LINE)
    assert line, f"{name} takes no request"
    return f'{before}\nREQUEST = "{encode_request(request)}"\n{after}'


def encode_request(request: Any) -> str:
    """Return JSON, compressed, in base64: about 13 bytes for a node's name, address and two ports."""
    return base64.b64encode(zlib.compress(json.dumps(request, separators=(",", ":")).encode(), 9)).decode()


def python_command(python: str, request: dict[str, Any] | None = None) -> list[str]:
    """Return a node's command: the launcher's interpreter, or another one, reading the program from standard input.

    `request` is one argument: nothing in it may grow with the number of nodes.
    """
    args = [] if request is None else ["--json-args", json.dumps(request)]
    return ["sh", "-c", FIND_PYTHON, "allranks-probe", python, *args]


def compress_hosts(hosts: Iterable[str]) -> str:
    """Return names in Slurm's compressed form: ``n1,n2,n3,login`` becomes ``n[1-3],login``.

    Only a number at the end of a name is compressed; leading zeros are kept. 10,000 uncompressed names can exceed
    Linux's limit of 128 KiB for one argument.
    """
    plain: list[str] = []
    groups: dict[tuple[str, int], list[int]] = {}
    for host in dict.fromkeys(hosts):
        match = _NUMBERED_HOST.fullmatch(host)
        if match is None:
            plain.append(host)
            continue
        prefix, digits = match.groups()
        groups.setdefault((prefix, len(digits) if digits.startswith("0") else 0), []).append(int(digits))
    return ",".join([*(_compress_numbers(*key, numbers) for key, numbers in groups.items()), *plain])


def _compress_numbers(prefix: str, width: int, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]:0{width}d}"
    return f"{prefix}[{format_ranges(numbers, width=width)}]"


def srun_command(
    nodes: Sequence[str] | int,
    command: Sequence[str],
    *,
    prefix: Sequence[str] = (),
    job_id: str | None = None,
    cpus: int | str = 1,
    options: Sequence[str] = (),
) -> list[str]:
    """Return an srun that starts a command once on each node; if it fails on one, the others continue.

    Args:
        nodes: names of nodes, or how many of the job's nodes.
        prefix: precedes every command of this Slurm.
        job_id: the job; None for the one in which this process runs.
        cpus: cores of each task; since Slurm 22.05, srun does not inherit sbatch's value.
        options: further options of srun.
    """
    count = nodes if isinstance(nodes, int) else len(nodes)
    return [
        *(*prefix, "srun"),
        *([] if job_id is None else [f"--jobid={job_id}"]),
        *([] if isinstance(nodes, int) else [f"--nodelist={compress_hosts(nodes)}"]),
        *(f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"),
        *("--kill-on-bad-exit=0", *options, *command),
    ]


def run_with_srun(
    hosts: Sequence[str],
    argv: Sequence[str],
    timeout_s: float,
    *,
    prefix: Sequence[str] = (),
    job_id: str | None = None,
    text: str | None = None,
    cpus: int = 1,
) -> NodeAnswers:
    """Run one srun with one task per node. `text` is every task's standard input; without, it is closed. `--export` is
    not changed.

    The nodes belong to the job, or to that of this process. Failures on nodes raise no exception.
    """
    options = ["--overlap", f"--wait={int(timeout_s)}", "--quit-on-interrupt"]
    options += ["--input=none"] if text is None else []
    command = srun_command(hosts, argv, prefix=prefix, job_id=job_id, cpus=cpus, options=options)
    return run_command(command, timeout_s, text)


def run_command(command: list[str], timeout_s: float, text: str | None) -> NodeAnswers:
    """Run a command, and keep each line with its arrival time; after the limit it is ended."""
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
    lines: list[OutputLine] = []
    said: list[str] = []

    def keep_lines() -> None:
        for line in process.stdout or ():
            lines.append(OutputLine(text=line.rstrip("\n"), received=node_clock()))  # noqa: PERF401 - its own time

    threads = [
        threading.Thread(target=keep_lines, daemon=True),
        threading.Thread(target=lambda: said.extend(process.stderr or []), daemon=True),
        threading.Thread(target=write_stdin, args=(process.stdin, text), daemon=True),
    ]
    for thread in threads:
        thread.start()
    code = wait_or_end(process, timeout_s)
    for thread in threads:
        thread.join(GRACE_S)
    return NodeAnswers(
        lines=join_pieces(lines), returncode=code, said="".join(said)[-MAX_STDERR:], seconds=time.monotonic() - began
    )


def join_pieces(lines: Sequence[OutputLine]) -> list[OutputLine]:
    """Join the pieces of all tasks, in any order among tasks, to lines; the time is that of the last piece."""
    whole: list[OutputLine] = []
    begun: dict[str, str] = {}
    for line in lines:
        match = _PIECE_LINE.fullmatch(line.text)
        if match is None:
            whole.append(line)
            continue
        task, piece = match.groups()
        begun[task] = begun.get(task, "") + piece
        if len(piece) < PIECE_BYTES:
            whole.append(OutputLine(text=begun.pop(task), received=line.received))
    whole += [OutputLine(text=text, received=lines[-1].received) for text in begun.values()]
    return whole


def write_stdin(stream: Any, text: str | None) -> None:
    """Write all of a program's standard input, and close it."""
    if text is None:
        return
    try:
        stream.write(text)
        stream.close()
    except OSError:
        pass  # the program ended before reading everything


def wait_or_end(process: subprocess.Popen[Any], timeout_s: float, grace_s: float = GRACE_S) -> int | None:
    """Return the exit code of a process; None if it was ended after the time limit, by SIGTERM and then by SIGKILL."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None
