"""What the ranks of the QLoRA tests do: train adapters next to a base in 4 bits, or next to the values of one."""

from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.spec.records import AdapterSpec, ModelSpec, TrainSpec
from allranks.train import strategies
from allranks.train.distributed import DistContext
from allranks.train.loop import adamw
from allranks.train.models import quantized_base
from allranks.train.models.adapters import add_adapter
from allranks.train.models.build import load_model
from allranks.train.models.losses import LossModel
from allranks.train.setup import set_up_strategy
from tests.dist.making import STEPS, main, model_of, options_of, run_steps, tokens_of
from tests.dist.plants import instead

ADAPTER = AdapterSpec(type="lora", r=4, targets=["q_proj", "k_proj", "v_proj", "gate_proj"])  # others have none


def trained(world: DistContext, args: dict[str, Any]) -> Any:
    """For each strategy (with a colon: adapters sharded) the steps, and the bytes of parameters on this rank."""
    if args.get("wrong"):
        instead(quantized_base, "quantize", lambda usual, *how: (usual(*how)[0].roll(1), usual(*how)[1]))
    return {name: one(world, args, *name.split(":")) for name in args["names"]}


def one(world: DistContext, args: dict[str, Any], name: str, adapters: str = "") -> Any:
    spec, folder = ModelSpec(name=args["model"]), Path(args["folder"])
    model, loader = load_model(world, spec, model_of()[1], dtype="float32", labels={}, seed=1)
    model = add_adapter(model, ADAPTER, classifier=False, base="b", seed=1)
    module = LossModel(model, classifier=False)
    quantized_base.quantize_base(model, loader, args["mode"], world.device)
    strategy: Any = strategies.create(name, options_of(name, {"options": {"adapters": adapters} if adapters else {}}))
    try:
        _, report = set_up_strategy(strategy, loader, module, model, adamw(TrainSpec(lr=1e-2)), world.group, 1.0)
    except AllranksError as error:
        return {"error": str(error)}
    kept = sum(getattr(p.data, "_local_tensor", p.data).nbytes for p in module.parameters())
    steps = run_steps(name, strategy, world, tokens_of(folder / f"rows{world.rank}", 40), args, folder, STEPS)
    weights = {n: float(t.double().abs().sum()) for n, t in strategy.weights(trained_only=True).items()}
    numbers = [(e["loss"], e["grad_norm"]) for e in steps]
    return {"steps": numbers, "bytes": kept, "base": report.digest, "weights": weights}


if __name__ == "__main__":
    main(globals())
