"""``hf_trainer``: Hugging Face's Trainer."""

from __future__ import annotations

from allranks.spec.strategies.base import (
    ONE_MICRO_STEP,
    OR_TORCH_ERROR,
    ModelSizes,
    Options,
    Parts,
    Replicated,
    StrategyInfo,
    StrategyPage,
    StrategyState,
    bars,
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
    page=StrategyPage(
        new="the Trainer in place of the loop",
        idea="Hugging Face's Trainer runs the steps in place of this project's loop; its Accelerate wraps "
        "the model in torch's DistributedDataParallel. Data, loss, learning rates, records, "
        "evaluation, checkpoints and proofs are those of every strategy; see [HF "
        "Trainer](../hf_trainer.md).",
        improves="Nothing; it compares the Trainer with other strategies on equal work, and refuses a Trainer "
        "whose ranks train independently.",
        bytes="T g, in about T g / 25 MB all-reduces started within backward",
        memory="4P + 16T: as `pytorch_ddp`, and buckets beside the gradients",
        ratio="5/4",
        unused=OR_TORCH_ERROR,
        compute=(*ONE_MICRO_STEP, ("wait", 60, 63), ("optimizer", 63, 73)),
        communication=bars("all-reduce", 9, 30, 42, 54),
        options={"args": "more TrainingArguments"},
    ),
)
