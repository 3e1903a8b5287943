"""The list of all failure classes that `diagnose` knows, and all rules of the scanner."""

from __future__ import annotations

from allranks.analysis.diagnose.catalogue import collectives, data, gpu, memory, network, programs, slurm
from allranks.analysis.diagnose.catalogue.messages import BENIGN_MESSAGES, FACT_PATTERNS, PROGRESS_PATTERN
from allranks.analysis.diagnose.catalogue.signs import FAILURE_SIGNS
from allranks.analysis.diagnose.patterns import FailureClass, ScanRule
from allranks.analysis.diagnose.structured import STRUCTURED

_ENTRIES: tuple[FailureClass, ...] = (
    collectives.FIRST_COLLECTIVE_FAILED,
    collectives.MODEL_DIFFERS,
    collectives.COLLECTIVE_MISMATCH,
    collectives.CHECKPOINT_COLLECTIVE,
    collectives.COLLECTIVE_HANG,
    collectives.RANK_DIED,
    collectives.PEER_DIED_FIRST,
    network.RENDEZVOUS_UNREACHABLE,
    network.PORT_IN_USE,
    network.WRONG_INTERFACE,
    network.BROKEN_NODE_NETWORK,
    network.RDMA_UNREACHABLE,
    network.ROCE_GID_INDEX,
    network.MEMLOCK_LIMIT,
    network.SILENT_SOCKET_FALLBACK,
    network.SLOW_TRANSPORT,
    gpu.P2P_UNSUPPORTED,
    gpu.DUPLICATE_GPU,
    gpu.INVALID_DEVICE,
    gpu.NO_GPU,
    gpu.FABRIC_MANAGER,
    gpu.GPU_HARDWARE_FAULT,
    gpu.GPU_APPLICATION_FAULT,
    gpu.GPU_THROTTLED,
    gpu.STRAGGLER,
    memory.CUDA_OOM,
    memory.CUDA_OOM_OPTIMIZER_STEP,
    memory.HOST_OOM,
    memory.SHM_TOO_SMALL,
    memory.SHM_REMOVED,
    memory.SIGBUS_MEMORY,
    memory.DISK_FULL,
    data.DATASET_RACE,
    data.DATALOADER_HANG,
    data.HUB_UNREACHABLE,
    data.STALE_FILE_SYSTEM,
    data.STORAGE_STALLED,
    data.PACKAGE_LOCK,
    data.OUTPUT_NOT_WRITABLE,
    programs.DDP_READY_TWICE,
    programs.DDP_UNUSED_PARAMS,
    programs.FSDP_MIXED_DTYPE,
    programs.DTYPE_MISMATCH,
    programs.DEEPSPEED_BATCH,
    programs.DEEPSPEED_NEEDS_OPTIMIZER,
    programs.NUMPY_CLASH,
    programs.NCCL_LIBRARY_MISMATCH,
    programs.LIBRARY_MISSING,
    programs.EXTENSION_BUILD_LOCK,
    programs.SCRIPT_NOT_FOUND,
    programs.SSH_LAUNCHER,
    slurm.SLURM_TIME_LIMIT,
    slurm.SLURM_PREEMPTED,
    slurm.SLURM_CANCELLED,
    slurm.SLURM_SUBMIT_REJECTED,
    slurm.SLURM_ALLOCATION_GONE,
    slurm.SLURM_CREDENTIAL,
    slurm.SLURM_CONTROLLER_ERROR,
    slurm.NODE_UNHEALTHY,
    programs.LOSS_NOT_FINITE,
    programs.APPLICATION_ERROR,
)
CATALOGUE: dict[str, FailureClass] = {entry.id: entry for entry in _ENTRIES}


def all_rules() -> list[ScanRule]:
    """Return all patterns in a fixed order, so that an index is the same in each process."""
    pairs = [("class", e.id, p) for e in CATALOGUE.values() for p in e.patterns]
    pairs += [("fact", name, p) for name, patterns in FACT_PATTERNS.items() for p in patterns]
    pairs += [("benign", b.id, p) for b in BENIGN_MESSAGES.values() for p in b.patterns]
    pairs += [("sign", s.id, p) for s in FAILURE_SIGNS.values() for p in s.patterns]
    pairs += [("structured", m.id, m.pattern) for m in STRUCTURED.values()]
    pairs.append(("progress", "progress", PROGRESS_PATTERN))
    return [ScanRule(i, *pair) for i, pair in enumerate(pairs)]
