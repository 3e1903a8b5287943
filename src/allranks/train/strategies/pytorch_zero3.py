"""``pytorch_zero3``: FSDP2 (``fully_shard``) that frees a block's weights after its forward and gathers them again.

Communication per micro-step: an all-gather a block before its forward and again before its backward, a reduce-scatter a
block in backward: about A (2 P + T) g (W-1)/W sent by each rank, P parameters of g bytes, T trained, A micro-steps.
Memory per rank (fp32 AdamW): (4P + 12T)/W bytes, and two or three blocks whole.
Predecessor (``pytorch_zero2``): all weights are whole between forward and backward.
"""

from __future__ import annotations

from allranks.train.strategies.fsdp2 import FSDP2


class PyTorchZero3(FSDP2):
    """fully_shard with reshard_after_forward=True."""

    reshard_after_forward = True
