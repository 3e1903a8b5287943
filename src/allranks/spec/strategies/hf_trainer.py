"""``hf_trainer``: Hugging Face's Trainer."""

from __future__ import annotations

from allranks.spec.strategies.base import (
    ModelSizes,
    Options,
    Parts,
    Replicated,
    StrategyInfo,
    StrategyState,
)


class CopiedBuckets(Replicated):
    """DDP whose gradients are not views of its buckets, so both exist. The Hugging Face Trainer wraps models this way."""

    def _with_buckets(self, parts: Parts) -> Parts:
        return parts | {"communication": self._m.gradients}

    def setup(self) -> Parts:
        return self._with_buckets(super().setup())

    def in_loss(self) -> Parts:
        return self._with_buckets(super().in_loss())

    def at_head(self) -> Parts:
        return self._with_buckets(super().at_head())

    def in_backward(self, at: int) -> Parts:
        return self._with_buckets(super().in_backward(at))

    def at_end(self) -> Parts:
        return self._with_buckets(super().at_end())

    def at_update(self) -> Parts:
        return self._with_buckets(super().at_update())


def _memory(m: ModelSizes, o: Options) -> StrategyState:
    return Replicated(m) if m.world == 1 else CopiedBuckets(m)


HF_TRAINER = StrategyInfo(
    "allranks.train.engines.hf_trainer:HFTrainer",
    "Hugging Face Trainer and Accelerate in place of the loop",
    {"find_unused_parameters": False, "args": None},
    memory=_memory,
    package="accelerate",
    imports_bytes=114 << 20,  # measured by benchmarks/engine_memory.py
    planner="allranks.spec.trainer_arguments",
    engine="allranks.train.engines.hf_trainer:TrainerLoop",
)
