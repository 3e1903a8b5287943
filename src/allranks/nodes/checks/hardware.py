"""Check a node's hardware and limits: shared memory, open files, cores, GPUs, InfiniBand."""

from __future__ import annotations

import re
from typing import Any

from allranks.nodes.checks import ChecksByHost, NodeSurvey, each_node, failed_check, majority_value, passed_check
from allranks.nodes.records import Check, Probe
from allranks.planning.memory.estimate import CLOSE, FITS, TOO_LARGE, verdict
from allranks.utils.text import format_bytes_word

MIN_SHM_BYTES = 32 * 2**20
MIN_SHM_GPU_BYTES = 256 * 2**20
MIN_FILES = 1024
MIN_MEMLOCK_BYTES = 2**30


@each_node
def shm(survey: NodeSurvey, probe: Probe) -> Check:
    """Check shared memory: NCCL and data loaders pass tensors through it; if it is full, ranks die with a bus error."""
    least = MIN_SHM_GPU_BYTES if survey.need.device == "cuda" else MIN_SHM_BYTES
    shown = format_bytes_word(probe.shm_free_bytes)
    if probe.shm_free_bytes >= least:
        return passed_check("shm", shown)
    cure = (
        f"{probe.host} has {shown} free in /dev/shm, but needs {format_bytes_word(least)}: remove files there, "
        "mount -o remount,size=8G /dev/shm, or start the container with --shm-size=8g"
    )
    return failed_check("shm", f"SMALL({shown})", cure)


@each_node
def files(survey: NodeSurvey, probe: Probe) -> Check:
    """Check the limit of open files: a rank has a socket to every other rank, and one per file that it reads."""
    if probe.open_files is None:
        return passed_check("files", "unlimited")
    if probe.open_files >= MIN_FILES:
        return passed_check("files", str(probe.open_files))
    when = "(add it to cluster.setup)" if survey.remote else "before the run"
    return failed_check("files", f"FEW({probe.open_files})", f"ulimit -n 65536 on {probe.host} {when}")


@each_node
def memlock(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check the locked-memory limit: if it is low, RDMA cannot register buffers, and fails or falls back to sockets."""
    if not any(port.active for port in probe.infiniband):
        return None
    if probe.memlock_bytes is None or probe.memlock_bytes >= MIN_MEMLOCK_BYTES:
        return passed_check("memlock", "ok")
    cure = f"ulimit -l unlimited on {probe.host}; under Slurm the administrator sets LimitMEMLOCK=infinity for slurmd"
    return failed_check("memlock", f"SMALL({format_bytes_word(probe.memlock_bytes)})", cure)


@each_node
def threads(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check ranks times threads against the cores that this job may use on the node."""
    procs, each = survey.need.procs_per_node, survey.need.threads
    if not each:
        return None
    shown = f"{procs}x{each}/{probe.cpus}"
    if each == 1 or procs * each <= probe.cpus:
        return passed_check("threads", shown)
    cure = (
        f"{probe.host} gives this job {probe.cpus} cores: --set "
        f"cluster.env.OMP_NUM_THREADS={max(1, probe.cpus // procs)}, or request more (cluster.slurm.cpus_per_task)"
    )
    return failed_check("threads", f"MANY({shown})", cure, blocks=False)


def gpus(survey: NodeSurvey) -> ChecksByHost:
    """Check that there are as many GPUs as ranks, of one model and driver, without memory errors."""
    if survey.need.device != "cuda" and not any(p.gpus or p.gpu_error for p in survey.probes):
        return {}
    usual = majority_value({p.host: _kinds(p) for p in survey.probes if p.gpus})
    return {probe.host: _gpu_check(survey, probe, usual) for probe in survey.probes}


def _kinds(probe: Probe) -> tuple[str, ...]:
    return tuple(sorted({f"{gpu.get('name')}, driver {gpu.get('driver')}" for gpu in probe.gpus}))


def _gpu_check(survey: NodeSurvey, probe: Probe, usual: tuple[str, ...] | None) -> Check:
    needs = survey.need.procs_per_node if survey.need.device == "cuda" else 0
    if survey.need.share_gpus:
        needs = min(needs, 1)
    broken = [str(gpu.get("index")) for gpu in probe.gpus if _ecc_errors(gpu)]
    blocks = survey.need.device == "cuda"
    if probe.gpu_error:
        cure = f"the driver of {probe.host} does not answer: {probe.gpu_error}; exclude the node (--exclude-bad)"
        return failed_check("gpus", "DRIVER", cure, blocks=blocks)
    if len(probe.gpus) < needs:
        wanted = f"{needs} ranks need {needs} GPUs" if needs > 1 else "the ranks need a GPU"
        cure = f"{wanted}: set cluster.slurm.gpus_per_node or cluster.procs_per_node, or exclude {probe.host}"
        return failed_check("gpus", f"FEW({len(probe.gpus)})", cure)
    if broken:
        cure = (
            f"uncorrectable memory errors on GPU {', '.join(broken)} of {probe.host}: reset or replace it; exclude the "
            "node (--exclude-bad)"
        )
        return failed_check("gpus", f"ECC({','.join(broken)})", cure, blocks=blocks)
    if probe.gpus and _kinds(probe) != usual:
        cure = (
            f"the other nodes have {' and '.join(usual or ())}: choose nodes with equal GPUs (cluster.slurm.constraint)"
        )
        return failed_check("gpus", f"DIFFERS({'; '.join(_kinds(probe))})", cure, blocks=False)
    kind = re.sub(r"^NVIDIA ", "", str(probe.gpus[0].get("name"))).replace(" ", "-") if probe.gpus else ""
    return passed_check("gpus", f"{len(probe.gpus)}x{kind}" if kind else "none")


def _ecc_errors(gpu: dict[str, Any]) -> int:
    count = str(gpu.get("ecc_errors", "")).strip()
    return int(count) if count.isdigit() else 0  # [N/A] if the GPU does not count them


@each_node
def memory(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check the estimated memory of a rank against the memory of its node, which a login node does not know."""
    needed, procs = survey.need.rank_memory_bytes, survey.need.procs_per_node
    if not needed:
        return None
    there = _device_bytes(probe, procs) if survey.need.device == "cuda" else probe.memory_bytes // procs
    word = verdict(needed, there or None)
    need, has = format_bytes_word(needed), format_bytes_word(there)
    if word in (TOO_LARGE, CLOSE):
        cure = (
            f"a rank needs about {need}, {probe.host} has {has}: see `allranks plan` for changes that make it fit; "
            "`--force` ignores this"
        )
        name = "SMALL" if word == TOO_LARGE else "CLOSE"
        return failed_check("memory", f"{name}({need}/{has})", cure, blocks=word == TOO_LARGE)
    return passed_check("memory", f"{need}/{has}") if word == FITS and survey.need.device == "cuda" else None


def _device_bytes(probe: Probe, procs: int) -> int:
    """Return the memory of the smallest GPU, divided if there are more ranks than GPUs; 0: unknown."""
    sizes = [int(str(gpu.get("memory_mb"))) << 20 for gpu in probe.gpus if str(gpu.get("memory_mb")).isdigit()]
    return min(sizes) // -(-procs // len(probe.gpus)) if sizes else 0


@each_node
def p2p(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check that GPUs of a node can access each other's memory; otherwise NCCL silently copies through the host."""
    if not probe.p2p:
        return None
    rows = [line.split() for line in probe.p2p.splitlines() if re.match(r"\s*GPU\d+\s+(X|[A-Z]+)", line)]
    states = [word for row in rows for word in row[1:] if word in ("OK", "NS", "CNS", "GNS", "TNS", "DR")]
    missing = sum(word != "OK" for word in states)
    shown = f"{len(states) - missing}/{len(states)}"
    if not missing:
        return passed_check("p2p", shown)
    cure = (
        f"{missing} of {len(states)} pairs on {probe.host} have no peer access: `nvidia-smi topo -p2p r`; "
        "NCCL copies through the host there"
    )
    return failed_check("p2p", f"NONE({shown})", cure, blocks=False)


def ib(survey: NodeSurvey) -> ChecksByHost:
    """Check InfiniBand and RoCE ports: one down here and up elsewhere makes NCCL silently fall back to sockets."""
    active = {probe.host: {port.name for port in probe.infiniband if port.active} for probe in survey.probes}
    up = set[str]().union(*active.values())
    verdicts: ChecksByHost = {}
    for host, mine in active.items() if up else ():
        if mine == up:
            verdicts[host] = passed_check("ib", f"{len(mine)}-up")
        else:
            cure = f"these ports are up on other nodes: `ibstat` on {host}, or exclude the node (--exclude-bad)"
            verdicts[host] = failed_check("ib", f"DOWN({','.join(sorted(up - mine))})", cure, blocks=False)
    return verdicts
