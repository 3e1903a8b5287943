"""Time and memory of a fresh process and of all it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.programs import ROOT, usual_environment

SAMPLE_S = 0.005


@dataclass(frozen=True)
class Measured:
    """What a process took. ``peak_bytes`` is the largest sum over the process and its children at one moment."""

    code: int
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float
    peak_bytes: int


def measure(command: list[str], timeout_s: float, env: dict[str, str] | None = None) -> Measured:
    """Run a command to its end.

    Memory is PSS (pages shared after a fork count once), sampled each 5 ms, and never less than the largest resident
    size that the kernel noted for any one of the processes. (``ru_maxrss`` would count this process too: a child
    inherits it.) Compiled code is kept.
    """
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**usual_environment(), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    texts: dict[str, str] = {}
    peaks = [0]
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            peaks.append(_tree_bytes(process.pid))

    threads = [
        threading.Thread(target=lambda name=name, pipe=pipe: texts.__setitem__(name, pipe.read()))
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
        if pipe is not None
    ]
    threads.append(threading.Thread(target=sample))
    killer = threading.Timer(timeout_s, lambda: os.killpg(process.pid, signal.SIGKILL))
    for thread in [*threads, killer]:
        thread.start()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    ended.set()
    killer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    for thread in threads:
        thread.join()
    cpu = usage.ru_utime + usage.ru_stime
    return Measured(process.returncode, texts["stdout"], texts["stderr"], wall, cpu, max(peaks))


def _tree_bytes(pid: int) -> int:
    try:
        root = psutil.Process(pid)
        pids = [p.pid for p in [root, *root.children(recursive=True)]]
    except psutil.Error:
        return 0
    return max(sum(_kib(p, "smaps_rollup", "Pss:") for p in pids), *(_kib(p, "status", "VmHWM:") for p in pids)) * 1024


def resident_bytes(pid: int | str) -> tuple[int, int]:
    """Return the resident memory of a process, now and at its peak, in bytes; 0 if it has ended."""
    return _kib(pid, "status", "VmRSS:") * 1024, _kib(pid, "status", "VmHWM:") * 1024


def count_peak_anew() -> None:
    """Let the kernel count the peak of this process's resident memory from here."""
    Path("/proc/self/clear_refs").write_text("5")


def _kib(pid: int | str, file: str, field: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0
