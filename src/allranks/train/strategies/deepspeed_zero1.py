"""``deepspeed_zero1``: DeepSpeed's ZeRO stage 1, the optimizer's state in parts.

Communication per step: all-reduces of buckets after the last micro-step's backward (T g bytes, T trained parameters of g
bytes), an all-reduce of 4 bytes a parameter group for the gradient's norm, an all-gather of the updated weights a group (T g).
Memory per rank (P parameters, float32 AdamW): 4P + 4T + 12T/W bytes; at the update itself 4P + 16T/W. In float32 too DeepSpeed
updates a copy of its part of the weights (4T/W), and copies it back.
Predecessor (``zero1``): the same in 130 lines, without that copy. What DeepSpeed has beside it is its JSON and its offloading.
"""

from __future__ import annotations

from allranks.train.strategies.deepspeed_engine import DeepSpeedReplicated


class DeepSpeedZero1(DeepSpeedReplicated):
    """One reduction an optimizer step."""

    stage = 1
    reduces_each_micro_step = False
