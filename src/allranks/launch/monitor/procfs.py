"""Read process and node state from the Linux kernel; what cannot be read is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import psutil

STATE_NAMES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep (waits for a disk, a file system or a driver)",
    "T": "stopped by a signal (SIGSTOP or SIGTSTP)",
    "t": "stopped by a debugger",
    "Z": "a zombie",
    "X": "dead",
    "I": "idle",
}
GONE = "gone"
MAX_BLOCKED = 12
BUSY_SHARE = 0.02  # of a core
BUSY_BYTES = 1 << 16


def state_of(pid: int) -> str:
    """Return the kernel's state letter and name of a process; `GONE` if it does not exist."""
    match = re.search(r"^State:\s*(\w)", _read(f"/proc/{pid}/status"), re.MULTILINE)
    letter = match[1] if match else ""
    return f"{letter} {STATE_NAMES.get(letter, '')}".strip() if letter else GONE


def has_ended(pid: int) -> bool:
    """Return whether a process will not run again."""
    return is_ended_state(state_of(pid))


def is_ended_state(state: str) -> bool:
    """Return whether this state belongs to a process that will not run again."""
    return state == GONE or state[:1] in ("Z", "X")


def wait_channel(pid: int) -> str:
    """Return the kernel function in which a process sleeps."""
    channel = _read(f"/proc/{pid}/wchan").strip()
    return "" if channel == "0" else channel[:80]


def kernel_stack(pid: int) -> list[str]:
    """Return a process's kernel stack, if this user may read it (usually only root)."""
    return [line.strip()[:120] for line in _read(f"/proc/{pid}/stack").splitlines()[:16]]


class ProcessWork(NamedTuple):
    """What a process has done so far: CPU seconds, own and children's; bytes that all of them read and wrote.

    The seconds in which it could run and other processes had the cores count too: it is not idle then.
    """

    own_cpu_s: float = 0.0
    children_cpu_s: float = 0.0
    io_bytes: int = 0

    @property
    def cpu_s(self) -> float:
        """Return the CPU seconds of the process and its children."""
        return self.own_cpu_s + self.children_cpu_s

    def is_busy(self, before: ProcessWork, seconds: float, *, own_cpu: bool) -> bool:
        """Return whether it worked in the time since `before`. CPU time of its children (compilers) always counts."""
        cpu_s = self.cpu_s - before.cpu_s if own_cpu else self.children_cpu_s - before.children_cpu_s
        return cpu_s > BUSY_SHARE * seconds or self.io_bytes - before.io_bytes > BUSY_BYTES


def work_of(pid: int) -> ProcessWork:
    """Return the work of a process and its children, also of ended ones, unless a child did not wait for them."""
    try:
        process = psutil.Process(pid)
        own, *children = (_cpu_and_io(p) for p in (process, *process.children(recursive=True)))
    except psutil.Error:
        return ProcessWork()
    return ProcessWork(
        own_cpu_s=own[0],
        children_cpu_s=own[1] + sum(cpu_s + ended_s for cpu_s, ended_s, _ in children),
        io_bytes=own[2] + sum(size for *_, size in children),
    )


def _cpu_and_io(process: psutil.Process) -> tuple[float, float, int]:
    """Return the seconds in which a process ran or could run, those of its children that have ended, and the bytes it
    read and wrote."""
    try:
        times = process.cpu_times()
        text = _read(f"/proc/{process.pid}/io")
    except psutil.Error:
        return 0.0, 0.0, 0
    sizes = [int(v) for k, _, v in (line.partition(": ") for line in text.splitlines()) if k in ("rchar", "wchar")]
    _, queued_ns, *_ = map(int, _read(f"/proc/{process.pid}/schedstat").split() or (0, 0))
    return times.user + times.system + queued_ns / 1e9, times.children_user + times.children_system, sum(sizes)


def blocked_processes() -> list[str]:
    """Return this node's processes in uninterruptible sleep: pid, name and kernel function."""
    blocked = []
    for process in psutil.process_iter(["pid", "name", "status"]):
        if process.info["status"] == psutil.STATUS_DISK_SLEEP and len(blocked) < MAX_BLOCKED:
            pid = process.info["pid"]
            blocked.append(f"{pid} {process.info['name']} {wait_channel(pid)}".strip())
    return blocked


def interfaces() -> dict[str, dict[str, Any]]:
    """Return network interfaces with their counters."""
    try:
        counters, states = psutil.net_io_counters(pernic=True), psutil.net_if_stats()
    except OSError:
        return {}
    return {
        name: {
            "up": name in states and states[name].isup,
            "sent_bytes": c.bytes_sent,
            "received_bytes": c.bytes_recv,
            "errors": c.errin + c.errout,
            "dropped": c.dropin + c.dropout,
        }
        for name, c in counters.items()
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
