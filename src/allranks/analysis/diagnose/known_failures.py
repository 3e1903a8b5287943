"""List the forty known failures of the field notes, and how each is prevented, refused or diagnosed.

Failures 1 to 20: data, memory, DDP and FSDP, evaluation, checkpoints, and the paths between GPUs and nodes.
Failures 21 to 40: devices, DeepSpeed, launching, Slurm, and messages that are mistaken for failures.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Handling = Literal["P", "R", "D"]
HANDLING_WORDS: dict[Handling, str] = {"P": "prevented", "R": "refused", "D": "diagnosed"}


class KnownFailure(Struct, frozen=True, kw_only=True):
    """One failure, and how allranks deals with it.

    ``how`` is P (prevented by construction), R (refused before the ranks start) or D (named by `diagnose`).
    ``where`` says how it is prevented or found.
    ``evidence``: whether the tests that `page` lists reproduce the failure, or replay logs and facts of it because it needs
    GPUs or a fabric.
    ``classes`` are the failure classes by which `diagnose` reports it outside of allranks.
    """

    number: int
    title: str
    how: Handling
    where: str
    evidence: Literal["injected", "replayed"] = "injected"
    classes: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        """Return the section of the documentation."""
        return f"docs/failures.md#failure-{self.number}"


FAILURES_1_TO_20: tuple[KnownFailure, ...] = (
    KnownFailure(
        number=1,
        title="ranks race in datasets.map on one cache",
        how="P",
        where="the cache of prepared data: one rank builds it under a lock and renames it atomically, the others wait",
        classes=("dataset_race",),
    ),
    KnownFailure(
        number=2,
        title="out of memory in the optimizer step of a full fine-tune",
        how="R",
        where="the memory estimate before the start (`plan` shows it); in logs diagnose",
        classes=(
            "cuda_oom_optimizer_step",
            "host_oom",
        ),
    ),
    KnownFailure(
        number=3,
        title="NCCL picks a wrong or unreachable interface",
        how="R",
        where="the doctor: the network common to all nodes, its interface name on each node, real connections (net, reach)",
        classes=("wrong_interface",),
    ),
    KnownFailure(
        number=4,
        title="DDP, LoRA and gradient checkpointing: marked ready twice",
        how="P",
        where="checkpointing is never reentrant, in any strategy or engine",
        classes=("ddp_ready_twice",),
    ),
    KnownFailure(
        number=5,
        title="every rank loads the whole model onto its GPU",
        how="P",
        where="weights are loaded part by part into an already sharded model",
        classes=(
            "cuda_oom",
            "host_oom",
        ),
    ),
    KnownFailure(
        number=6,
        title="FSDP: mixed dtypes in one flat parameter",
        how="P",
        where="FSDP2 has no flat parameter; two dtypes in one reduction are refused with an error",
        classes=("fsdp_mixed_dtype",),
    ),
    KnownFailure(
        number=7,
        title="perplexity absurd: padded or prompt labels not masked",
        how="P",
        where="labels are masked when rows are encoded; the loss is the sum over targets, divided once",
    ),
    KnownFailure(
        number=8,
        title="evaluation communicates every batch",
        how="P",
        where="an evaluation sums on each rank and communicates once, at its end",
    ),
    KnownFailure(
        number=9,
        title="checkpoint gathers the whole model and times out",
        how="P",
        where="every rank writes its own shards; adapters are saved without a gather",
        classes=("checkpoint_collective",),
    ),
    KnownFailure(
        number=10,
        title="evaluation subset changes between evaluations",
        how="P",
        where="the held-out rows are chosen once, when data is prepared, from data.seed only",
    ),
    KnownFailure(
        number=11,
        title="harmless warnings mistaken for failures",
        how="D",
        where="diagnose lists them as harmless, with the reason, if the job continued after them",
    ),
    KnownFailure(
        number=12,
        title="silent fall-back from RDMA to sockets",
        how="D",
        where="after each run, the network that NCCL used is compared with the hardware of the nodes; in logs diagnose",
        evidence="replayed",
        classes=("silent_socket_fallback",),
    ),
    KnownFailure(
        number=13,
        title="checkpoints fill the disk",
        how="P",
        where="checkpoint.keep limits their number; disk space is checked and freed before a checkpoint is written",
        classes=("disk_full",),
    ),
    KnownFailure(
        number=14,
        title="hang: P2P/CUMEM across sockets, GPUs at 100 %",
        how="D",
        where="diagnose; doctor --collectives copies between all pairs of GPUs, and later runs avoid failed pairs",
        evidence="replayed",
        classes=(
            "first_collective_failed",
            "p2p_unsupported",
        ),
    ),
    KnownFailure(
        number=15,
        title="wrong RoCE GID index, wrong or slow NIC",
        how="P",
        where="NCCL chooses the index, or it is determined on each node; ports of other networks are excluded",
        evidence="replayed",
        classes=(
            "roce_gid_index",
            "rdma_unreachable",
        ),
    ),
    KnownFailure(
        number=16,
        title="project or packages missing on a node",
        how="R",
        where="the doctor's checks proj, py and pkgs; staging sends missing parts",
        classes=(
            "script_not_found",
            "library_missing",
        ),
    ),
    KnownFailure(
        number=17,
        title="library versions that clash, or differ between nodes",
        how="R",
        where="the doctor's checks pkgs, imports and gpus; conflicts are refused when a bundle is packed",
        classes=(
            "numpy_clash",
            "library_missing",
            "nccl_library_mismatch",
        ),
    ),
    KnownFailure(
        number=18,
        title="rendezvous port in use",
        how="P",
        where="the port is bound on the first node before any rank starts; the control channel sends it to agents that know the run's token",
        classes=("port_in_use",),
    ),
    KnownFailure(
        number=19,
        title="ranks hang at init: address does not resolve, firewall",
        how="R",
        where="the doctor's check reach: real connections between all nodes; ranks get addresses, not names",
        classes=("rendezvous_unreachable",),
    ),
    KnownFailure(
        number=20,
        title="too many threads per rank",
        how="P",
        where="OMP_NUM_THREADS is set from the job's cores on each node; the doctor's check threads",
    ),
)


FAILURES_21_TO_40: tuple[KnownFailure, ...] = (
    KnownFailure(
        number=21,
        title="output folder not writable, model not saved",
        how="R",
        where="the doctor's check run writes and reads there on each node; a failed save is reported on all ranks",
        classes=("output_not_writable",),
    ),
    KnownFailure(
        number=22,
        title="torch.cpu.set_device missing on CPU nodes",
        how="P",
        where="a device is only set for CUDA; the Trainer's own call gets a function without effect",
        classes=("library_missing",),
    ),
    KnownFailure(
        number=23,
        title="one bad node in the allocation",
        how="R",
        where="the doctor reports it; --exclude-bad continues without it",
        classes=(
            "node_unhealthy",
            "gpu_hardware_fault",
            "broken_node_network",
        ),
    ),
    KnownFailure(
        number=24,
        title="collectives time out after Init COMPLETE",
        how="D",
        where="diagnose: the first collective never finished; doctor --collectives copies between all pairs of GPUs",
        evidence="replayed",
        classes=(
            "first_collective_failed",
            "collective_hang",
        ),
    ),
    KnownFailure(
        number=25,
        title="DeepSpeed ZeRO without an optimizer",
        how="P",
        where="the engine always gets an optimizer; the configuration is completed from the spec",
        classes=("deepspeed_needs_optimizer",),
    ),
    KnownFailure(
        number=26,
        title="bf16 model, float32 inputs",
        how="P",
        where="inputs are token IDs, which need no cast; each strategy is trained in bf16",
        classes=("dtype_mismatch",),
    ),
    KnownFailure(
        number=27,
        title="a collective checkpoint called by rank 0 alone",
        how="P",
        where="every rank saves, and only the write depends on the rank; a missing rank is reported",
        classes=(
            "checkpoint_collective",
            "collective_mismatch",
        ),
    ),
    KnownFailure(
        number=28,
        title="train_batch_size is not micro x ranks x accumulation",
        how="R",
        where="plan computes the batch sizes",
        classes=("deepspeed_batch_mismatch",),
    ),
    KnownFailure(
        number=29,
        title="script or data in a node-local folder",
        how="R",
        where="the doctor compares content, not names; staging packs missing parts",
        classes=("script_not_found",),
    ),
    KnownFailure(
        number=30,
        title="hard-coded interface name that a node lacks",
        how="R",
        where="the doctor's check ifname; without a name, the interface is determined on each node",
        classes=("wrong_interface",),
    ),
    KnownFailure(
        number=31,
        title="launcher needs SSH between nodes",
        how="P",
        where="srun, or one manual command per node; allranks never calls ssh",
        classes=("ssh_launcher",),
    ),
    KnownFailure(
        number=32,
        title="environment does not reach the ranks",
        how="P",
        where="plain exports, SLURM_EXPORT_ENV=ALL, and each node's agent",
    ),
    KnownFailure(
        number=33,
        title="environment modules in the wrong order, or missing",
        how="R",
        where="the batch script ends with an error at the first of cluster.modules that cannot be loaded",
        classes=("library_missing",),
    ),
    KnownFailure(
        number=34,
        title="invalid account or partition",
        how="R",
        where="sbatch refuses it at submission; the message contains its error and the key to set",
        classes=("slurm_submit_rejected",),
    ),
    KnownFailure(
        number=35,
        title="stale file handle on a network file system",
        how="D",
        where="diagnose; the doctor's checks of folders, each with a time limit",
        classes=("stale_file_handle",),
    ),
    KnownFailure(
        number=36,
        title="ranks build different models",
        how="P",
        where="one seed for all, and equal weights are verified before the first step",
        classes=("model_differs_between_ranks",),
    ),
    KnownFailure(
        number=37,
        title="checkpoint saved with a wrapper's prefix, or one shard of it",
        how="P",
        where="a checkpoint is valid only after it was read again and compared",
    ),
    KnownFailure(
        number=38,
        title="output lost in buffers when a rank is killed",
        how="P",
        where="ranks write unbuffered, one file each",
    ),
    KnownFailure(
        number=39,
        title="known harmless warnings (hostfile, pynvml)",
        how="D",
        where="diagnose lists them as harmless, with the reason",
        evidence="replayed",
    ),
    KnownFailure(
        number=40,
        title="first-run compilation counted as training time; import errors of DeepSpeed",
        how="P",
        where="the rate excludes the first 5 steps; a failing import ends the run with exit code 3",
        classes=("library_missing",),
    ),
)


KNOWN_FAILURES: tuple[KnownFailure, ...] = FAILURES_1_TO_20 + FAILURES_21_TO_40

__all__ = ["HANDLING_WORDS", "KNOWN_FAILURES", "Handling", "KnownFailure"]
