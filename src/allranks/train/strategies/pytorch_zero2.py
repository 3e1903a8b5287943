"""``pytorch_zero2``: FSDP2 (``fully_shard``) that keeps gathered weights until the backward.

Communication per micro-step: an all-gather a block before its forward, a reduce-scatter a block in backward: about
A (P + T) g (W-1)/W sent by each rank, P parameters of g bytes, T trained, A micro-steps.
Memory per rank (fp32 AdamW): (4P + 12T)/W bytes between steps, and up to the whole weights between forward and backward.
Predecessor (``pytorch_zero1``): every rank keeps whole gradients.
"""

from __future__ import annotations

from allranks.train.strategies.fsdp2 import FSDP2


class PyTorchZero2(FSDP2):
    """fully_shard with reshard_after_forward=False."""

    reshard_after_forward = False
