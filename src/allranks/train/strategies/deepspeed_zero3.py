"""TODO"""

from __future__ import annotations

import torch
import torch.distributed as dist

from allranks.train.strategies.deepspeed_engine import DeepSpeedZero


class DeepSpeedZero3(DeepSpeedZero):
    """TODO"""

    stage = 3
    replicated, lockstep = False, True
    claims_overlap = True

    @property
    def shards(self) -> list[torch.Tensor]:
        return [*super().shards, *(p.ds_tensor for p in self._model.parameters())]  # type: ignore[attr-defined]

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        from deepspeed.runtime.zero import GatheredParameters  # type: ignore[import-not-found]

        first, whole = dist.get_rank(self._group) == 0, {}
        for name, p in self._model.named_parameters():
            if p.requires_grad or not trained_only:
                with GatheredParameters([p]):
                    if first:
                        whole[name] = p.detach().to("cpu", copy=True)
        return whole

    def _put_weights(self, weights: dict[str, torch.Tensor]) -> None:
        from deepspeed.runtime.zero import GatheredParameters  # type: ignore[import-not-found]

        for name, p in self._named:
            with GatheredParameters([p], modifier_rank=0):
                if dist.get_rank(self._group) == 0:
                    p.data.copy_(weights[name])
