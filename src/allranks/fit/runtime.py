"""What is there beside tensors: libraries, contexts, and memory that an allocator holds without use."""

from __future__ import annotations

import msgspec

from allranks.fit.records import Moment
from allranks.planning import LaunchPlan

CUDA_CONTEXT = 600 << 20  # an H100 with torch's kernels; from reports, not measured here
NCCL = 400 << 20  # buffers of its channels; grows with the number of peers
CPU_RUNTIME = 60 << 20  # pages of libraries that the first steps touch, and threads
SLACK = {"cuda": 0.03, "cpu": 0.04}


def with_runtime(moment: Moment, plan: LaunchPlan) -> Moment:
    """The moment with what the process needs beside its tensors."""
    on_gpu = plan.device == "cuda"
    fixed = (CUDA_CONTEXT + (NCCL if plan.world_size > 1 else 0)) if on_gpu else CPU_RUNTIME
    busy = moment.parts.get("activations", 0) + moment.parts.get("gradients", 0) + moment.parts.get("logits", 0)
    busy += moment.parts.get("gathered_weights", 0) + moment.parts.get("communication", 0)
    slack = int(SLACK[plan.device] * busy)
    return msgspec.structs.replace(moment, parts={**moment.parts, "runtime": fixed, "slack": slack})
