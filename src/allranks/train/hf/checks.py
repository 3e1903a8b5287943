"""What must hold of a Trainer before and while it trains; several launch settings break it without a word."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from allranks.errors import ProofFailed
from allranks.train.control import Agreed
from allranks.train.ledger import StepWork
from allranks.train.world import World

APART = 1e-5  # of the mean norm; averaged gradients are equal to the last bit


def check_wrapped(trainer: Any, world: World, find_unused_parameters: bool) -> None:
    """The Trainer counts all ranks, and its model averages gradients over them.

    Raises:
        ProofFailed: it trains alone, on another device, or without the wrapper.
    """
    found = trainer.accelerator.num_processes
    if found != world.size:
        raise ProofFailed(
            f"hf_trainer: Accelerate counts {found} processes of {world.size} ranks: this one would train alone on all rows"
        )
    ours, its = world.device, trainer.args.device
    if ours.type != its.type or (ours.type == "cuda" and ours.index != its.index):
        raise ProofFailed(f"hf_trainer: the Trainer computes on {its}, this rank on {ours}")
    if world.size == 1:
        return
    wrapped = trainer.model_wrapped
    if not isinstance(wrapped, DistributedDataParallel):
        raise ProofFailed(
            f"hf_trainer: the Trainer left the model as a {type(wrapped).__name__} instead of wrapping it in DistributedDataParallel: "
            "the ranks' weights would drift apart in silence (on CPUs it wraps with use_cpu alone)"
        )
    size = dist.get_world_size(wrapped.process_group)
    if size != world.size:
        raise ProofFailed(f"hf_trainer: the wrapper averages over {size} of {world.size} ranks")
    if bool(wrapped.find_unused_parameters) != find_unused_parameters:
        raise ProofFailed(
            f"hf_trainer: the wrapper has find_unused_parameters={wrapped.find_unused_parameters}, asked was {find_unused_parameters}"
        )


def bucket_bytes(wrapped: Any) -> int:
    """What the wrapper keeps for communication beside the gradients: nothing where gradients are views into it."""
    if not isinstance(wrapped, DistributedDataParallel) or wrapped.gradient_as_bucket_view:
        return 0
    sizes = wrapped._get_ddp_logging_data().get("bucket_sizes", "")
    return sum(int(size) for size in str(sizes).split(",") if size.strip())


def check_norms(rank: int, work: StepWork, agreed: Agreed) -> None:
    """This rank's gradient norm is that of all ranks: gradients that were averaged are the same everywhere.

    The mean over ranks comes with each step's agreement, so this costs nothing.

    Raises:
        ProofFailed: it is another, so the weights drift apart.
    """
    own = float(work.grad_norm)
    if abs(own - agreed.grad_norm) > APART * max(abs(agreed.grad_norm), torch.finfo(torch.float32).tiny):
        raise ProofFailed(
            f"step {agreed.step + 1}: rank {rank} has a gradient norm of {own:.8g}, the mean over ranks is {agreed.grad_norm:.8g}: "
            "gradients are not averaged over the ranks, so their weights drift apart"
        )
