"""Detect what this machine has (usable CPUs, memory, GPUs), and save CPU time in short processes that import torch."""

from __future__ import annotations

import atexit
import gc
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import msgspec

MIG = " MIG "
"""Part of the name of a MIG instance, as torch shows it: ``NVIDIA A100-SXM4-40GB MIG 3g.20gb``."""
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
AMD_FILTERS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that hide AMD GPUs. The last two number what the first leaves; the third counts only without the second."""
UNPRIVILEGED_PORT = 1024
"""The lowest port on which others than root may listen (net.ipv4.ip_unprivileged_port_start, which few change)."""
RARELY = 100_000
"""Container objects that a short process allocates between two youngest-generation collections (Python: 700)."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or one MIG instance of a GPU, as the driver of NVIDIA or AMD reports it."""

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
    """GPUs per node of the spec's partition, for ``launcher: slurm``; None if Slurm was not queried or did not say."""
    c_compiler: bool | None = None
    """Whether this machine has a C compiler, which torch.compile needs; None if nobody looked."""


def host_name() -> str:
    """Return this node's short name, safe inside file names."""
    name = os.uname().nodename.split(".")[0] or "localhost"
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
    """Return the GPUs that the environment allows, from NVIDIA's driver, else from AMD's; none without a driver."""
    return _nvidia_gpus() or amd_gpus()


def _nvidia_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows, from nvidia-smi. MIG instances take the place of their GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = "index,uuid,name,memory.total,mig.mode.current"
    answer = _nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.count(",") >= 4]
    instances = _mig_instances(_nvidia_smi("-L")) if any(mig == "Enabled" for *_, mig in rows) else {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = None if visible is None else [word.strip() for word in visible.split(",") if word.strip()]
    gpus: list[Gpu] = []
    for index, uuid, name, memory, *_ in rows:
        whole = wanted is None or index in wanted or any(uuid.startswith(word) for word in wanted)
        parts = instances.get(index)
        if parts is None:
            mebibytes = int(memory) if memory.isdigit() else 0
            gpus += [Gpu(index=int(index), name=name, memory_bytes=mebibytes * 2**20)] * whole
            continue
        for own, profile in parts:
            if whole or any(own.startswith(word) for word in wanted or ()):
                gpus.append(Gpu(index=int(index), name=f"{name}{MIG}{profile}", memory_bytes=_profile_bytes(profile)))
    return gpus


def _nvidia_smi(*words: str) -> str:
    import subprocess

    try:
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=15, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _mig_instances(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return UUID and profile (``3g.20gb``) of each MIG instance by the index of its GPU, from ``nvidia-smi -L``."""
    instances: dict[str, list[tuple[str, str]]] = {}
    gpu = ""
    for line in text.splitlines():
        if head := re.match(r"GPU (\d+):", line):
            gpu = head[1]
        elif part := re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line):
            instances.setdefault(gpu, []).append((part[2], part[1]))
    return instances


def _profile_bytes(profile: str) -> int:
    """Return the memory that a profile of MIG names, which is a little less than the instance has."""
    size = re.search(r"(\d+)gb", profile)
    return int(size[1]) * 10**9 if size else 0


def amd_gpus(nodes: Path = KFD_NODES, devices: Path = Path("/dev/dri")) -> list[Gpu]:
    """Return the AMD GPUs that this process may use, as the kernel driver (KFD) lists them."""
    gpus: list[tuple[str, str, int]] = []
    for node in sorted((p for p in _entries(nodes) if p.name.isdigit()), key=lambda p: int(p.name)):
        facts = dict(line.split(maxsplit=1) for line in _text(node / "properties").splitlines() if " " in line)
        if int(facts.get("simd_count", 0)) and _opens(devices / f"renderD{facts.get('drm_render_minor', '')}"):
            render = Path(f"/sys/class/drm/renderD{facts['drm_render_minor']}/device/product_name")
            version = int(facts.get("gfx_target_version", 0))
            name = _text(render) or f"AMD gfx{version // 10000}{version // 100 % 100}{version % 100:x}"
            banks = [
                re.search(r"^size_in_bytes (\d+)", _text(b / "properties"), re.M) for b in _entries(node / "mem_banks")
            ]
            uuid = f"GPU-{int(facts.get('unique_id', 0)):016x}"
            gpus.append((uuid, name, max((int(size[1]) for size in banks if size), default=0)))
    rocr, hip, cuda = (os.environ.get(name) for name in AMD_FILTERS)
    for words in (rocr, hip if hip is not None else cuda):
        if words is not None:
            wanted = [word.strip() for word in words.split(",")]
            gpus = [gpu for place, gpu in enumerate(gpus) if str(place) in wanted or gpu[0] in wanted]
    return [Gpu(index=i, name=name, memory_bytes=size) for i, (_, name, size) in enumerate(gpus)]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _opens(device: Path) -> bool:
    """Return whether a device file can be opened: in a job or a container, others are there and forbidden."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def memory_bytes() -> int:
    """Return the size of the host's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def machine_facts() -> MachineFacts:
    """Return the facts of this machine."""
    return MachineFacts(
        host=host_name(),
        cpus=usable_cpus(),
        memory_bytes=memory_bytes(),
        gpus=visible_gpus(),
        cpu_model=cpu_model(),
        system=f"{platform.system()} {platform.release()}",
        c_compiler=any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")),
    )


def oom_kills() -> int | None:
    """Return how many processes the kernel ended for lack of memory since its start, in any cgroup; None if unknown."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return None
    kills = next((line for line in text.splitlines() if line.startswith("oom_kill ")), "")
    return int(kills.split()[1]) if kills else None


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Import without garbage collection, and exclude the imported objects from all later collections.

    They live as long as the process. Collecting while they are imported takes a quarter of the time of the imports, and
    each full collection during training would visit them again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_short_process(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a process that imports torch for a short task, and exit with its code.

    Garbage is collected rarely. After the exit handlers the process ends at once: the interpreter would free every
    imported object, which takes about a second. An exception ends the process as usual.
    """
    gc.set_threshold(RARELY)
    code = main() or 0
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader has gone, or main closed it
            stream.flush()
    os._exit(code)
