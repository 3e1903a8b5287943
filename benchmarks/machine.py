"""The machine a measurement ran on, and how much it was disturbed meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("allranks", "torch", "transformers", "tokenizers", "datasets", "accelerate", "peft", "trl", "numpy")


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def facts() -> dict[str, Any]:
    """Processor, cores, memory, versions and the date. No host name, no path."""
    import psutil

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {p: v for p in PACKAGES if (v := _version(p))},
    }


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class CpuClock:
    """CPU seconds of the whole machine and of our finished children, at one moment. Linux only; else all zero."""

    wall: float
    busy: float
    steal: float
    children: float

    @classmethod
    def now(cls) -> CpuClock:
        """Read the counters."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = steal = 0.0
        stat = Path("/proc/stat")
        if stat.exists():
            user, nice, system, _idle, _iowait, irq, softirq, stolen = map(
                int, stat.read_text().split("\n", 1)[0].split()[1:9]
            )
            hertz = os.sysconf("SC_CLK_TCK")
            busy = (user + nice + system + irq + softirq) / hertz
            steal = stolen / hertz
        return cls(time.perf_counter(), busy, steal, usage.ru_utime + usage.ru_stime)

    def disturbance(self) -> dict[str, float]:
        """Since this reading, as shares of all cores: what programs but our children used, what the host took."""
        end = CpuClock.now()
        capacity = max(end.wall - self.wall, 1e-9) * (os.cpu_count() or 1)
        others = (end.busy - self.busy) - (end.children - self.children)
        return {
            "others_share": round(max(others, 0.0) / capacity, 4),
            "steal_share": round((end.steal - self.steal) / capacity, 4),
        }


def wait_until_quiet(limit_s: float, share: float = 0.1, window_s: float = 2.0) -> float:
    """Wait until others use less than ``share`` of the cores over a window, ``limit_s`` at most; seconds waited."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < limit_s:
        clock = CpuClock.now()
        time.sleep(window_s)
        if clock.disturbance()["others_share"] < share:
            break
    return round(time.perf_counter() - begin, 1)
