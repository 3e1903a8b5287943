"""The forty failures that the field notes behind this project tell of, and where each is prevented, refused or named."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Way = Literal["prevented", "refused", "named"]


class Failure(Struct, frozen=True):
    """One failure. ``where`` says what keeps it away or finds it; ``classes`` are those that `diagnose` names it by."""

    number: int
    what: str
    way: Way
    where: str
    classes: tuple[str, ...] = ()


FAILURES: tuple[Failure, ...] = (
    Failure(1, "ranks race in datasets.map on one cache", "prevented", "the shared cache: one rank prepares under a lock, published by one rename", ("dataset_race",)),
    Failure(2, "out of memory in the optimizer step of a full fine-tune", "named", "diagnose, from the traceback", ("cuda_oom_optimizer_step",)),
    Failure(3, "NCCL picks a wrong or unreachable interface", "refused", "the doctor's checks net and reach; the interface is resolved on each node", ("wrong_interface",)),
    Failure(4, "DDP, LoRA and gradient checkpointing: marked ready twice", "prevented", "checkpointing is never re-entrant", ("ddp_ready_twice",)),
    Failure(5, "every rank loads the whole model onto its GPU", "named", "diagnose: GPU memory exhausted", ("cuda_oom",)),
    Failure(6, "FSDP: mixed dtypes in one flat parameter", "prevented", "pytorch_zero2 and pytorch_zero3 use FSDP2, which has no flat parameter", ("fsdp_mixed_dtype",)),
    Failure(7, "perplexity absurd: padded or prompt labels not masked", "prevented", "labels are masked when rows are encoded; losses are weighted by tokens"),
    Failure(8, "evaluation communicates every batch", "prevented", "one all-reduce an evaluation"),
    Failure(9, "checkpoint gathers the whole model and times out", "prevented", "ranks write their own ranges; adapters are saved without a gather", ("checkpoint_collective",)),
    Failure(10, "evaluation subset changes between evaluations", "prevented", "the subset is chosen once, by data.seed"),
    Failure(11, "harmless warnings mistaken for failures", "named", "diagnose lists them as harmless, with the reason"),
    Failure(12, "silent fall-back from RDMA to sockets", "named", "diagnose, from NCCL's own lines", ("silent_socket_fallback",)),
    Failure(13, "checkpoints fill the disk", "prevented", "checkpoint.keep bounds their number", ("disk_full",)),
    Failure(14, "hang: P2P/CUMEM across sockets, GPUs at 100 %", "named", "diagnose: the first collective never finished", ("first_collective_failed", "p2p_unsupported")),
    Failure(15, "wrong RoCE GID index, wrong or slow NIC", "named", "diagnose; allranks never sets NCCL_IB_GID_INDEX", ("roce_gid_index", "rdma_unreachable")),
    Failure(16, "project or packages missing on a node", "refused", "the doctor's checks proj and pkgs; staging sends them", ("script_not_found", "library_missing")),
    Failure(17, "library versions that clash, or differ between nodes", "refused", "the doctor's checks torch and imports", ("numpy_clash", "library_missing", "nccl_library_mismatch")),
    Failure(18, "rendezvous port in use", "prevented", "the port is found free on the first node; a foreign store is refused", ("port_in_use",)),
    Failure(19, "ranks hang at init: address does not resolve, firewall", "refused", "the doctor's checks name and reach", ("rendezvous_unreachable",)),
    Failure(20, "too many threads per rank", "prevented", "OMP_NUM_THREADS from the cores of a rank; the doctor's check threads"),
    Failure(21, "output folder not writable, model not saved", "refused", "the doctor's check run writes and reads there on each node", ("output_not_writable",)),
    Failure(22, "torch.cpu.set_device missing on CPU nodes", "prevented", "allranks sets a device only on GPUs", ("library_missing",)),
    Failure(23, "one bad node in the allocation", "refused", "the doctor names it; --exclude-bad goes on without", ("node_unhealthy", "gpu_hardware_fault", "broken_node_network")),
    Failure(24, "collectives time out after Init COMPLETE", "named", "diagnose: the first collective never finished", ("first_collective_failed", "collective_hang")),
    Failure(25, "DeepSpeed ZeRO without an optimizer", "prevented", "the engine's configuration is completed from the spec", ("deepspeed_needs_optimizer",)),
    Failure(26, "bf16 model, float32 inputs", "prevented", "inputs are token ids; the loss is computed in the model's dtype", ("dtype_mismatch",)),
    Failure(27, "a collective checkpoint called by rank 0 alone", "prevented", "every rank calls state_dict; only the write depends on the rank", ("checkpoint_collective", "collective_mismatch")),
    Failure(28, "train_batch_size is not micro x ranks x accumulation", "refused", "plan does the arithmetic", ("deepspeed_batch_mismatch",)),
    Failure(29, "script or data in a node-local folder", "refused", "the doctor compares content, not names; staging packs what lies in /tmp", ("script_not_found",)),
    Failure(30, "hard-coded interface name that a node lacks", "refused", "the doctor's check net", ("wrong_interface",)),
    Failure(31, "launcher needs SSH between nodes", "prevented", "srun, or one command a node by hand", ("ssh_launcher",)),
    Failure(32, "environment does not reach the ranks", "prevented", "each node's agent sets it for its ranks, from a file"),
    Failure(33, "environment modules in the wrong order, or missing", "named", "diagnose, from the module system's words", ("library_missing",)),
    Failure(34, "invalid account or partition", "named", "diagnose, and the words of sbatch at submission", ("slurm_submit_rejected",)),
    Failure(35, "stale file handle on a network file system", "named", "diagnose", ("stale_file_handle",)),
    Failure(36, "ranks build different models", "prevented", "equal weights are proved at step 0", ("model_differs_between_ranks",)),
    Failure(37, "checkpoint saved with a wrapper's prefix, or one shard of it", "prevented", "a checkpoint counts only after it was read again"),
    Failure(38, "output lost in buffers when a rank is killed", "prevented", "ranks write unbuffered, one file each"),
    Failure(39, "known harmless warnings (hostfile, pynvml)", "named", "diagnose lists them as harmless"),
    Failure(40, "first-run compilation counted as training time; import errors of DeepSpeed", "prevented", "the first 5 steps are no part of the rate", ("library_missing",)),
)  # fmt: skip
