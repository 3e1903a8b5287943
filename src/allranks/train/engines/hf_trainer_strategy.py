"""Implement ``hf_trainer``: Hugging Face's Trainer, which wraps the model in DistributedDataParallel with Accelerate.

Communication: that of `pytorch_ddp`: one all-reduce per bucket (25 MB) of the trained gradients, during the last
micro-step's backward; 2 T g (W-1)/W bytes per rank on a ring, with T trained parameters of g bytes, W ranks.
Memory per rank (P parameters, fp32 AdamW): 4P + 16T bytes as `pytorch_ddp`, and 4T for buckets, because with Accelerate
gradients are not views of the buckets.
Predecessor (`pytorch_ddp` in this project's own loop): here the Trainer runs the steps, so that it can be compared with the
other strategies on equal work.

The Trainer runs the steps (`allranks.train.engines.hf_trainer.TrainerLoop`).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from allranks.errors import EnvironmentNotAble
from allranks.train.strategies.base import MakeOptimizer, ReplicatedWeights, Sizes, Traffic, trained_parameters


def _require_accelerate() -> None:
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise EnvironmentNotAble(
            f"hf_trainer needs Accelerate, which cannot be imported: {str(error).splitlines()[0]}; "
            "pip install 'allranks[train]', or use pytorch_ddp"
        ) from None


class HFTrainer(ReplicatedWeights):
    """Hold model, optimizer and state for a `TrainerLoop`."""

    claims_overlap = True

    def __init__(self, find_unused_parameters: bool, args: dict[str, Any] | None) -> None:
        _require_accelerate()  # before the model is loaded
        self.find_unused_parameters, self.args = find_unused_parameters, args
        self.engine_config = args

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self._hold(model, trained_parameters(model), make_optimizer, group, clip_norm)
        self.clip_norm = clip_norm

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "backward", None, sizes.trained_bytes)]
