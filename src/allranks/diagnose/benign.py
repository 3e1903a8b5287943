"""Messages that look alarming and are harmless, each with the reason."""

from __future__ import annotations

from msgspec import Struct

from allranks.diagnose.catalogue.entry import Pattern


class Harmless(Struct, frozen=True, kw_only=True):
    """A harmless message. ``general`` ones yield where a line also matches a class of failure."""

    id: str
    why: str
    patterns: tuple[Pattern, ...]
    example: str
    general: bool = False


_ENTRIES = (
    Harmless(
        id="deprecation_warning",
        why="A notice about a future version; nothing is wrong now.",
        patterns=(
            Pattern(r"(Future|Deprecation|PendingDeprecation|User)Warning\b", "*warning"),
            Pattern(r"\b(is|are|being) deprecated\b", "deprecated"),
        ),
        example="FutureWarning: The pynvml package is deprecated. Please install nvidia-ml-py instead.",
        general=True,
    ),
    Harmless(
        id="deepspeed_hostfile",
        why="DeepSpeed looked for a host file and goes on with this node alone; under torchrun that is as it should be.",
        patterns=(Pattern(r"Unable to find hostfile", "unable to find hostfile"),),
        example="[WARNING] Unable to find hostfile, will proceed with training with local resources only.",
    ),
    Harmless(
        id="omp_threads",
        why="torchrun sets one thread a rank unless told otherwise.",
        patterns=(
            Pattern(r"Setting OMP_NUM_THREADS environment variable for each process", "setting omp_num_threads"),
        ),
        example="Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded",
    ),
    Harmless(
        id="unused_parameters_search",
        why="DDP searched for unused parameters and found none: it costs time, nothing else.",
        patterns=(Pattern(r"did not find any unused parameters", "did not find any unused"),),
        example="find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters",
    ),
    Harmless(
        id="nccl_plugin_absent",
        why="An optional plugin is not there; NCCL uses what it brings.",
        patterns=(
            Pattern(
                r"(No plugin found|Could not find:? .{0,80}(net|tuner|profiler|env)|Using internal (network|tuner|net) plugin|using internal implementation)",
                "no plugin found",
                "could not find",
                "using internal",
            ),
        ),
        example="NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so. Using internal tuner plugin.",
    ),
    Harmless(
        id="group_not_destroyed",
        why="The program ended without destroy_process_group(); a leak at exit, no failure.",
        patterns=(
            Pattern(
                r"destroy_process_group\(\) was not called|process group has NOT been destroyed",
                "destroy_process_group()",
                "has not been destroyed",
            ),
        ),
        example="WARNING: destroy_process_group() was not called before program exit, which can leak resources.",
    ),
    Harmless(
        id="nccl_abort_complete",
        why="A communicator was taken down; after destroy_process_group that is its normal end.",
        patterns=(Pattern(r"- (Abort|Destroy) COMPLETE", "abort complete", "destroy complete"),),
        example="NCCL INFO comm 0x5c rank 0 nranks 2 cudaDev 0 busId 1000 - Abort COMPLETE",
    ),
    Harmless(
        id="barrier_device_guess",
        why="A barrier without device_ids uses the device guessed from the rank; it hangs only where that guess is wrong.",
        patterns=(
            Pattern(
                r"using GPU \d+ (to perform barrier|as device used by this process is currently unknown)|barrier\(\): using the device under current context",
                "using gpu",
                "barrier(): using",
            ),
        ),
        example="[rank1]: using GPU 1 as device used by this process is currently unknown.",
    ),
    Harmless(
        id="xid_cleanup",
        why="Xid 45 is the driver clearing up after a process that ended; Xid 43 without others comes from a program.",
        patterns=(Pattern(r"\bXid\b\s*(?:\([^)]*\))?\s*:?\s*45\b", "xid", unless="previous Xid"),),
        example="NVRM: Xid (PCI:0000:17:00): 45, pid=77, name=python, Ch 00000010",
    ),
    Harmless(
        id="sxid_nonfatal",
        why="A non-fatal event of the NVSwitch.",
        patterns=(Pattern(r"\bSXid\b.{0,80}non.?fatal", "sxid"),),
        example="nvidia-nvswitch3: SXid (PCI:0000:86:00.0): 12028, Non-fatal, Link 31 egress non-posted PRIV error",
    ),
    Harmless(
        id="clone_fallback",
        why=(
            "FSDP could not copy one entry of a state dict and goes on with the entry itself: training is unharmed, but what was saved may hold "
            "another's memory. Read that checkpoint again and compare before it is trusted."
        ),
        patterns=(Pattern(r"Failed to clone\(\)? (the )?tensor", "failed to clone"),),
        example="Failed to clone() tensor with name base.lora_A. CUDA out of memory. Tried to allocate 2.00 MiB.",
    ),
    Harmless(
        id="tokenizers_fork",
        why="The tokenizers library went to one thread after a fork.",
        patterns=(Pattern(r"huggingface/tokenizers: The current process just got forked", "just got forked"),),
        example="huggingface/tokenizers: The current process just got forked, after parallelism has already been used.",
    ),
    Harmless(
        id="uninitialised_head",
        why="A new head on a pretrained model starts with random weights, as it must.",
        patterns=(
            Pattern(
                r"Some weights of .{0,120} were not (initialized|used)",
                "some weights of",
                unless="ForCausalLM|LMHead|ForConditionalGeneration",  # those have no new head: weights are missing
            ),
        ),
        example="Some weights of BertForSequenceClassification were not initialized from the model checkpoint",
    ),
    Harmless(
        id="ras_mismatch",
        why="NCCL's RAS saw ranks one operation apart: a snapshot of a running job nearly always shows that.",
        patterns=(
            Pattern(r"(RAS|MISMATCH).{0,120}(operation|collective) counts?", "operation count", "collective count"),
        ),
        example="MISMATCH: communicator ranks have different collective operation counts",
    ),
)
BENIGN: dict[str, Harmless] = {entry.id: entry for entry in _ENTRIES}
