"""``deepspeed_zero2``: DeepSpeed's ZeRO stage 2, the optimizer's state and the gradients in parts.

Communication per step: all-reduces of buckets after each micro-step's backward (A T g bytes, A micro-steps, T trained parameters
of g bytes; DeepSpeed all-reduces a bucket that several ranks own parts of, where the paper has a reduce-scatter), an
all-reduce of 4 bytes a parameter group for the norm, an all-gather of the updated weights a group (T g).
Memory per rank (P parameters, float32 AdamW): 4P + 16T/W bytes between backward and update, and a bucket of gradients.
Predecessor (``deepspeed_zero1``): whole gradients until the last micro-step.
"""

from __future__ import annotations

from allranks.train.strategies.deepspeed_engine import DeepSpeedReplicated


class DeepSpeedZero2(DeepSpeedReplicated):
    """A reduction a micro-step, after which each rank keeps its part."""

    stage = 2
    reduces_each_micro_step = True
