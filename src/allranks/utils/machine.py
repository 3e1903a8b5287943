"""Detect what this machine has (usable CPUs, memory, GPUs), and save CPU time in short processes that import torch."""

from __future__ import annotations

import atexit
import gc
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil

RARELY = 100_000
"""Container objects that a short process allocates between two collections of the youngest generation (default of Python: 700)."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One NVIDIA GPU as the driver reports it."""

    index: int
    name: str
    memory_bytes: int


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that planning needs: of this machine, and of the partition if Slurm was queried."""

    host: str
    cpus: int
    memory_bytes: int
    gpus: list[Gpu]
    cpu_model: str
    system: str
    partition: str | None = None
    """The partition of `partition_gpus`, if a variable of sbatch names it instead of the spec."""
    partition_gpus: int | None = None
    """GPUs of each node of the spec's partition, for ``launcher: slurm``; None if Slurm was not queried or did not report it."""


def host_name() -> str:
    """Return this node's short name, safe inside file names."""
    name = socket.gethostname().split(".")[0] or "localhost"
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def usable_cpus() -> int:
    """Return the number of CPUs this process may use: affinity (Slurm, taskset) and cgroup quota (containers)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, count)


def cpu_model() -> str:
    """Return the processor's name from /proc/cpuinfo, or the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows, from nvidia-smi; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=15, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.count(",") >= 3]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = []
    for index, uuid, name, memory in rows:
        if (
            wanted is not None
            and index not in wanted.split(",")
            and not any(w and uuid.startswith(w) for w in wanted.split(","))
        ):
            continue
        mebibytes = int(memory) if memory.isdigit() else 0
        gpus.append(Gpu(index=int(index), name=name, memory_bytes=mebibytes * 2**20))
    return gpus


def machine_facts() -> MachineFacts:
    """Return the facts of this machine."""
    return MachineFacts(
        host=host_name(),
        cpus=usable_cpus(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=visible_gpus(),
        cpu_model=cpu_model(),
        system=f"{platform.system()} {platform.release()}",
    )


def oom_kills() -> int | None:
    """Return how many processes the kernel has ended for lack of memory since it started, in any cgroup; None if it does not say."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return None
    found = next((line for line in text.splitlines() if line.startswith("oom_kill ")), "")
    return int(found.split()[1]) if found else None


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Import without garbage collection, and exclude the imported objects from all later collections.

    They live as long as the process. Collecting while they are imported takes a quarter of the time of the imports, and each full collection
    during training would visit them again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_short_process(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a process that imports torch for a short task, and exit with its code.

    Garbage is collected rarely. After the exit handlers the process ends at once: the interpreter would free every imported object, which
    takes about a second. An exception ends the process as usual.
    """
    gc.set_threshold(RARELY)
    code = main() or 0
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader has gone, or main closed it
            stream.flush()
    os._exit(code)
