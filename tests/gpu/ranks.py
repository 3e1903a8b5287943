"""The ranks of tests/gpu: ``python -m tests.gpu.ranks RESULTS ARGS``; appends one JSON line per strategy."""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from allranks.errors import EnvironmentNotAble
from allranks.spec.records import TrainSpec
from allranks.train import strategies
from allranks.train.benchmark.baseline import update_error
from allranks.train.distributed import DistContext
from allranks.train.loop import adamw
from allranks.train.models import precision
from allranks.train.models.losses import LossModel
from tests.dist.cases import reference_of
from tests.dist.making import STEPS, built, options_of, run_steps, tokens_of
from tests.dist.variants import GPU_VARIANTS

LEARNING_RATE = 1e-2


def join(device: torch.device, backend: str) -> DistContext:
    """A process group from torchrun's variables; all ranks use one device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60), device_id=device if backend == "nccl" else None)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None and isinstance(control, dist.ProcessGroup)
    return DistContext(dist.get_rank(), dist.get_rank(), dist.get_world_size(), "here", device, group, control)


def module_of(variant: str, device: torch.device) -> LossModel:
    """The model on the device, in the variant's precision, as a run builds it."""
    module = built(GPU_VARIANTS[variant])
    if variant == "mixed":
        precision.use_autocast(module.model, torch.bfloat16, device)
    return module.to(device)


Trained = tuple[dict[str, Any], list[float]]


def trained(name: str, world: DistContext, tokens: Any, variant: str, folder: Path) -> Trained:
    """Weights (rank 0) and gradient norms of a strategy."""
    how = GPU_VARIANTS[variant]
    strategy = strategies.create(name, options_of(name, how))
    module = module_of(variant, world.device)
    wanted = {n for n, p in module.named_parameters() if p.requires_grad}
    strategy.setup(module, adamw(TrainSpec(lr=LEARNING_RATE)), world.group, how.get("clip", 1.0))
    own = folder / f"events-{name}-{variant}"
    norms = [e["grad_norm"] for e in run_steps(name, strategy, world, tokens, how, own, STEPS)]
    return {n: w.detach().cpu() for n, w in strategy.weights(trained_only=True).items() if n in wanted}, norms


def compare(name: str, variant: str, world: DistContext, tokens: Any, folder: Path) -> dict[str, Any]:
    """How far a strategy is from one process, in weights (of what the training changed) and in gradient norms."""
    how = GPU_VARIANTS[variant]
    start, reference, right_norms, _ = reference_of(world, tokens, how, module_of(variant, world.device))
    start, reference = ({n: w.cpu() for n, w in weights.items()} for weights in (start, reference))
    ours, norms = trained(name, world, tokens, variant, folder)
    assert len(norms) == STEPS, norms
    error = update_error(ours, reference, start) if ours else None
    norm_error = max(abs(n - r) / r for n, r in zip(norms, right_norms, strict=True))
    dtypes = sorted({str(w.dtype) for w in ours.values()})
    return {"strategy": name, "variant": variant, "error": error, "norm_error": norm_error, "dtypes": dtypes}


def main() -> None:
    """Every rank does every pair; rank 0 writes. A pair that fails is recorded, and the next one is tried."""
    results, args = Path(sys.argv[1]), json.loads(sys.argv[2])
    world = join(torch.device("cpu") if args["device"] == "cpu" else torch.device("cuda", 0), args["backend"])
    tokens = tokens_of(results.parent / f"rows{world.rank}", 37)
    for name, variant in args["pairs"]:
        try:
            found = compare(name, variant, world, tokens, results.parent)
        except EnvironmentNotAble as error:  # such as another version of a library than the tested ones
            found = {"strategy": name, "variant": variant, "unable": str(error)[:600]}
        except Exception as error:  # noqa: BLE001 - one strategy's failure must not hide what the others do
            traceback.print_exc()
            found = {"strategy": name, "variant": variant, "failed": f"{type(error).__name__}: {str(error)[:600]}"}
        if world.is_first:
            with results.open("a") as file:
                file.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # ranks whose communicators a failed strategy has left behind may wait for each other at the end


if __name__ == "__main__":
    main()
