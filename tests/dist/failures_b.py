"""Failures 21 to 40 that two real ranks can have: made to happen by hand, and what allranks does in their place."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.errors import AllranksError
from allranks.train.data.batches import collate
from allranks.train.distributed import DistContext
from allranks.train.sync_proof import prove_ranks
from tests.dist.making import built, main, model_of, orders_of, raised, tokens_of, train_with

__all__ = ["happened", "main", "of_deepspeed"]


def happened(world: DistContext, args: dict[str, Any]) -> Any:
    """What each mistake raises on this rank, and what allranks says or does in its place."""
    folder = Path(args["folder"])
    impatient = dist.new_group(timeout=timedelta(seconds=2))
    return {
        "dtype": raised(float32_inputs),
        "dtype_ours": raised(lambda: token_ids_into(torch.bfloat16, folder / f"rank{world.rank}")),
        "models": raised(lambda: DistributedDataParallel(layers(2 + world.rank), process_group=dist.new_group())),
        "models_ours": told(world, tokens_of(folder / f"rank{world.rank}", 21)),
        "checkpoint": raised(lambda: save_checkpoint(impatient)) if world.is_first else "",
        "set_device": raised(lambda: without_set_device(lambda: torch.cpu.set_device("cpu"))),
        "set_device_ours": without_set_device(lambda: [trained(n, world, folder) for n in args["names"]]),
    }


def float32_inputs() -> None:
    nn.Linear(8, 8).to(torch.bfloat16)(torch.randn(4, 8))


def token_ids_into(dtype: torch.dtype, folder: Path) -> None:
    """The loss of a model in `dtype` on a batch as allranks makes it, and its gradients."""
    model = built({"dtype": str(dtype).removeprefix("torch.")})
    loss = model(collate(tokens_of(folder, 21), torch.arange(4).numpy(), 0, None))
    loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}
    assert bool(torch.isfinite(loss))


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def told(world: DistContext, tokens: Any) -> str:
    """What the step-0 proof says of a second rank that has a layer more."""
    model, _ = model_of(num_hidden_layers=2 + world.rank)
    try:
        prove_ranks(world, world.size, model, orders_of(world, tokens, {})[world.rank])
    except AllranksError as error:
        return str(error)
    return ""


def save_checkpoint(group: Any) -> None:
    """A checkpoint that gathers, as sharded models do; by hand it was called under `if rank == 0:`."""
    dist.all_gather([torch.zeros(64) for _ in range(2)], torch.ones(64), group=group)


def without_set_device(action: Callable[[], Any]) -> Any:
    kept = torch.cpu.set_device
    del torch.cpu.set_device
    try:
        return action()
    finally:
        torch.cpu.set_device = kept


def trained(name: str, world: DistContext, folder: Path) -> list[float]:
    return train_with(name, world, tokens_of(folder / f"rank{world.rank}", 37), {}, folder)[2]


def of_deepspeed(world: DistContext, args: dict[str, Any]) -> Any:
    """What DeepSpeed itself raises where its configuration is taken as it stands; both ranks make the same mistake."""
    import deepspeed
    from deepspeed.launcher.runner import fetch_hostfile

    from allranks.train.engines.deepspeed_engine import load_deepspeed

    load_deepspeed()

    def engine(config: dict[str, Any], *, optimizer: bool) -> Any:
        net = nn.Linear(8, 8)
        given = torch.optim.AdamW(net.parameters()) if optimizer else None
        batch = {"train_batch_size": 2, "zero_optimization": {"stage": args["stage"]}}
        return deepspeed.initialize(model=net, optimizer=given, config={**batch, **config})[0]

    def step_without_optimizer() -> None:
        one = engine({}, optimizer=False)
        one.backward(one(torch.randn(2, 8)).sum())
        one.step()

    deepspeed.utils.logger.setLevel("WARNING")
    mismatch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    return {
        "optimizer": raised(step_without_optimizer),
        "batch": raised(lambda: engine(mismatch, optimizer=True)),
        "hostfile": raised(lambda: fetch_hostfile("/nowhere/hostfile")),
        "ours": trained(f"deepspeed_zero{args['stage']}", world, Path(args["folder"])),
    }
