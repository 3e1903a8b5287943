"""What the kernel knows of a process and of a node. Linux; what cannot be read is left out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil

WORDS = {
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
MOST_BLOCKED = 12


def state_of(pid: int) -> str:
    """The kernel's letter and word for a process; `GONE` where there is none."""
    letter = _field(pid, "State")[:1]
    return f"{letter} {WORDS.get(letter, '')}".strip() if letter else GONE


def has_ended(pid: int) -> bool:
    """Whether it will not run again."""
    return ended(state_of(pid))


def ended(state: str) -> bool:
    """Whether that is the state of a process that will not run again."""
    return state == GONE or state[:1] in ("Z", "X")


def wait_channel(pid: int) -> str:
    """The kernel function in which it sleeps."""
    found = _read(f"/proc/{pid}/wchan").strip()
    return "" if found == "0" else found[:80]


def kernel_stack(pid: int) -> list[str]:
    """Its stack in the kernel, where this user may see it (root mostly)."""
    return [line.strip()[:120] for line in _read(f"/proc/{pid}/stack").splitlines()[:16]]


def threads(pid: int) -> int | None:
    """Its threads."""
    found = _field(pid, "Threads")
    return int(found) if found.isdigit() else None


def memory_bytes(pid: int) -> int | None:
    """Its resident memory."""
    found = _field(pid, "VmRSS").split()
    return int(found[0]) * 1024 if found and found[0].isdigit() else None


def work_done(pid: int) -> tuple[float, int]:
    """Seconds of CPU and bytes read and written so far, its children's too."""
    try:
        process = psutil.Process(pid)
        found = [_own_work(p) for p in (process, *process.children(recursive=True))]
    except psutil.Error:
        return 0.0, 0
    return sum(cpu for cpu, _ in found), sum(size for _, size in found)


def _own_work(process: psutil.Process) -> tuple[float, int]:
    try:
        times = process.cpu_times()
        text = _read(f"/proc/{process.pid}/io")
    except psutil.Error:
        return 0.0, 0
    sizes = [int(v) for k, _, v in (line.partition(": ") for line in text.splitlines()) if k in ("rchar", "wchar")]
    return times.user + times.system, sum(sizes)


def blocked() -> list[str]:
    """Processes of this node in uninterruptible sleep: pid, name and where in the kernel."""
    found = []
    for process in psutil.process_iter(["pid", "name", "status"]):
        if process.info["status"] == psutil.STATUS_DISK_SLEEP and len(found) < MOST_BLOCKED:
            pid = process.info["pid"]
            found.append(f"{pid} {process.info['name']} {wait_channel(pid)}".strip())
    return found


def oom_kills() -> int | None:
    """Processes that the kernel has ended for want of memory since the node started."""
    for line in _read("/proc/vmstat").splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None


def interfaces() -> dict[str, dict[str, Any]]:
    """Network interfaces with their counters."""
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


def load1() -> float | None:
    """The load of the last minute."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _field(pid: int, name: str) -> str:
    for line in _read(f"/proc/{pid}/status").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
