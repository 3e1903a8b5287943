"""Read how much CPU time this process got, waited for, and what others used, from the Linux kernel. Standard library only.

What cannot be read is None: absence is not evidence. `allranks.utils.load_rules` judges the differences of two samples.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from allranks.utils.formatting import format_ranges

NS = 1e-9
BUSY_THREAD_SHARE = 0.1
"""Share of the time that a thread must have run or waited for a core to count as busy."""


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time during some seconds, in seconds: of this process, and of all processes on the cores that it may use.

    ``queued_s`` is the time in which threads of this process could run but had no core (run-queue wait), summed over threads, and
    ``queued_main_s`` the same for the main thread. ``machine_s`` and ``steal_s`` are of the cores in ``cores``.
    """

    seconds: float
    cores: str
    core_count: int
    cpu_s: float
    queued_s: float | None = None
    queued_main_s: float | None = None
    busy_threads: int | None = None
    machine_s: float | None = None
    steal_s: float | None = None
    throttled_s: float | None = None


class CpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """Counters at one moment. ``threads`` has for each thread the seconds that it ran and that it waited for a core."""

    at_s: float
    cores: tuple[int, ...]
    cpu_s: float
    threads: dict[int, tuple[float, float]] | None
    machine_s: float | None
    steal_s: float | None
    throttled_s: float | None


class RunQueueClock:
    """The time that the calling thread could run but had no core, in seconds; None if the kernel does not report it.

    The file stays open, so that one call costs about a microsecond.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        with suppress(OSError):
            file = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self.available = self.read() is not None

    def read(self) -> float | None:
        """Return the seconds so far; only differences are meaningful."""
        if self._fd is None:
            return None
        try:
            return int(os.pread(self._fd, 80, 0).split()[1]) * NS
        except (OSError, IndexError, ValueError):
            return None


def sample_cpu() -> CpuSample:
    """Return the counters of this process and of its cores."""
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    machine_s, steal_s = _machine(cores)
    return CpuSample(
        at_s=time.monotonic(),
        cores=cores,
        cpu_s=time.process_time(),
        threads=_threads(),
        machine_s=machine_s,
        steal_s=steal_s,
        throttled_s=_throttled(),
    )


def use_between(first: CpuSample, last: CpuSample) -> CpuUse:
    """Return the CPU time between two samples of the same process. Counters that went back or are missing give None."""
    seconds = max(last.at_s - first.at_s, 0.0)
    queued = main = busy = None
    if first.threads is not None and last.threads is not None:
        grown = {tid: _grown_thread(first.threads.get(tid), now) for tid, now in last.threads.items()}
        queued = sum(q for _, q in grown.values())
        main = grown[os.getpid()][1] if os.getpid() in grown else None
        busy = sum(ran + q > BUSY_THREAD_SHARE * seconds for ran, q in grown.values()) if seconds else 0
    return CpuUse(
        seconds=round(seconds, 6),
        cores=core_list(last.cores),
        core_count=len(last.cores),
        cpu_s=round(max(last.cpu_s - first.cpu_s, 0.0), 6),
        queued_s=_rounded(queued),
        queued_main_s=_rounded(main),
        busy_threads=busy,
        machine_s=_grown(first.machine_s, last.machine_s) if first.cores == last.cores else None,
        steal_s=_grown(first.steal_s, last.steal_s) if first.cores == last.cores else None,
        throttled_s=_grown(first.throttled_s, last.throttled_s),
    )


def _grown_thread(before: tuple[float, float] | None, now: tuple[float, float]) -> tuple[float, float]:
    ran, queued = before or (0.0, 0.0)
    if now[0] < ran or now[1] < queued:  # another thread with the number of one that has ended
        return now
    return now[0] - ran, now[1] - queued


def _grown(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None or now < before else round(now - before, 6)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def core_list(cores: tuple[int, ...]) -> str:
    """Return core numbers as the kernel writes them: ``0-3,8``."""
    return format_ranges(cores)


def cores_of(text: str) -> frozenset[int]:
    """Return the core numbers of a list as `core_list` writes it; none if it is malformed."""
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.partition("-")
        high = high if dash else low
        if not low.isdecimal() or not high.isdecimal() or int(high) - int(low) > 1 << 16:
            return frozenset()
        found |= set(range(int(low), int(high) + 1))
    return frozenset(found)


def _threads() -> dict[int, tuple[float, float]] | None:
    found: dict[int, tuple[float, float]] = {}
    try:
        tasks = list(Path("/proc/self/task").iterdir())
    except OSError:
        return None
    for task in tasks:
        try:
            ran, queued, *_ = (task / "schedstat").read_bytes().split()
            found[int(task.name)] = (int(ran) * NS, int(queued) * NS)
        except (OSError, ValueError):  # the thread has ended
            continue
    return found or None


def _machine(cores: tuple[int, ...]) -> tuple[float | None, float | None]:
    """Return the seconds that all processes ran on these cores, and the seconds that the hypervisor took."""
    try:
        text = Path("/proc/stat").read_text()
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None, None
    return read_stat(text, cores, tick_s)


def read_stat(text: str, cores: tuple[int, ...], tick_s: float) -> tuple[float | None, float | None]:
    """Return busy and stolen seconds of these cores from /proc/stat; None if a core is missing.

    Interrupts are not counted: no process causes them alone.
    """
    wanted, busy, steal = set(cores), 0, 0
    for line in text.splitlines():
        name, *rest = line.split() or [""]
        if not name.startswith("cpu"):
            break
        if name[3:].isdecimal() and int(name[3:]) in wanted and len(rest) >= 8 and all(v.isdecimal() for v in rest):
            user, nice, system, _, _, _, _, stolen = (int(v) for v in rest[:8])
            busy, steal = busy + user + nice + system, steal + stolen
            wanted.discard(int(name[3:]))
    return (busy * tick_s, steal * tick_s) if cores and not wanted else (None, None)


def _throttled() -> float | None:
    """Return how long a CPU quota has stopped this process's group; None without a quota."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            places = [Path("/sys/fs/cgroup" + path), Path("/sys/fs/cgroup")]
        elif "cpu" in names.split(","):
            places = [
                Path(f"/sys/fs/cgroup/{names}{path}"),
                Path(f"/sys/fs/cgroup/cpu{path}"),
                Path("/sys/fs/cgroup/cpu"),
            ]
        else:
            continue
        for place in places:
            with suppress(OSError):
                return read_throttling((place / "cpu.stat").read_text())
    return None


def read_throttling(text: str) -> float | None:
    """Return the throttled seconds of a cpu.stat file of either version of cgroups."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in ("throttled_usec", "throttled_time") and value.strip().isdecimal():
            return int(value) * (1e-6 if name == "throttled_usec" else NS)
    return None
