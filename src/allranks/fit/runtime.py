"""What is there beside tensors: libraries, contexts, and memory that an allocator holds without use.

On a CPU that is glibc's heap. A tensor of less than 32 MiB comes from it (larger ones are mapped, and go back at once), and what
backward frees in small pieces does not serve the larger gradients and moments. With checkpointing blocks are computed again and again
between tensors that stay, and the heap grows to several times one block. The numbers were found on models other than those of
``benchmarks/fit_cases.json``; `RECOMPUTED` after that benchmark's first cases had shown that it was needed.
"""

from __future__ import annotations

import msgspec

from allranks.fit.moments import LOSS, SETUP
from allranks.fit.records import Moment

CUDA_CONTEXT = 600 << 20  # an H100 with torch's kernels; from reports, not measured here
NCCL = 400 << 20  # buffers of its channels; grows with the number of peers
CUDA_SLACK = 0.05  # of what comes and goes; from reports, not measured here
CPU_IMPORTS = 350 << 20  # Python, torch, transformers and PEFT as imported; ranks share some of these pages
# What another library's engine adds to that, imported and started: the whole process of a real rank that trains next to nothing,
# beside one under `pytorch_ddp` (`python -m benchmarks.engine_memory`: 67 to 69 and 122 MiB; a tiny Llama with LoRA: 65 and 106).
ENGINE_IMPORTS = {"deepspeed": 66 << 20, "hf_trainer": 114 << 20}
CPU_RUNTIME = 30 << 20  # pages of libraries that the first steps touch, and threads
HEAP_LIMIT = 32 << 20  # glibc's largest mmap threshold
HOLES = 0.45  # of the activations, while they are there
HELD = 1.2  # of the most activations, once they are gone
RECOMPUTED = 2.5  # of the most activations, where blocks are computed again
COMES_AND_GOES = ("activations", "logits", "gathered_weights", "communication")


class Heap(msgspec.Struct, frozen=True):
    """Where a rank's tensors come from, and how large the usual ones are."""

    device: str
    ranks: int
    narrow_bytes: int  # the hidden state of a micro-batch
    wide_bytes: int  # the widest tensor within a block
    checkpointing: bool
    strategy: str

    @property
    def imports(self) -> int:
        """Bytes of the interpreter and all libraries that a CPU rank imports."""
        return CPU_IMPORTS + sum(size for engine, size in ENGINE_IMPORTS.items() if self.strategy.startswith(engine))

    @property
    def small_share(self) -> float:
        """About the part of the activations that comes from the heap."""
        return ((self.narrow_bytes < HEAP_LIMIT) + (self.wide_bytes < HEAP_LIMIT)) / 2


def with_runtime(moments: list[Moment], heap: Heap) -> list[Moment]:
    """The moments, in their order, with what the process holds beside its tensors."""
    if heap.device == "cuda":
        fixed = CUDA_CONTEXT + (NCCL if heap.ranks > 1 else 0)
        return [
            _more(m, {"runtime": fixed}, sum(m.parts.get(k, 0) for k in COMES_AND_GOES) * CUDA_SLACK) for m in moments
        ]
    most, found = 0, []
    for moment in moments:
        now = moment.parts.get("activations", 0)
        most = max(most, now)
        fixed = {"imports": heap.imports, "runtime": CPU_RUNTIME}
        slack = (
            RECOMPUTED * most
            if heap.checkpointing and moment.name not in (SETUP, LOSS)
            else max(HOLES * now, HELD * most - now)
        )
        found.append(_more(moment, fixed, slack * heap.small_share))
    return found


def _more(moment: Moment, fixed: dict[str, int], slack: float) -> Moment:
    more = fixed | {"slack": int(slack)} if slack >= 1 else fixed
    return msgspec.structs.replace(moment, parts={**moment.parts, **more})
