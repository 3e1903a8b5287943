"""What cases are made of: worlds, models, rows, and strategies that train them."""

import itertools
import json
import sys
import traceback
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.planning.planner import make_plan
from allranks.planning.records import BatchPlan
from allranks.rundir.events import EventLog, read_events
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.spec.records import AdapterSpec, CheckpointSpec, ModelSpec, TrainSpec
from allranks.train import strategies
from allranks.train.checkpoint import Saver
from allranks.train.checkpoint.saver import CheckpointContent
from allranks.train.data.batches import Batch, SampleOrder, collate
from allranks.train.data.prepared import TokenSet, _map, _save
from allranks.train.data.tokenization import EncodedRow, train_tokenizer
from allranks.train.distributed import SINGLE_PROCESS, DistContext, join_process_group, leave_process_group, seed_rank
from allranks.train.engines import engine_of
from allranks.train.loop import adamw
from allranks.train.models import moe, precision
from allranks.train.models.adapters import add_adapter
from allranks.train.models.block_forward import Compilation, set_block_forward
from allranks.train.models.build import load_model
from allranks.train.models.losses import LossModel
from allranks.train.models.moe import routers_of
from allranks.train.step_metrics import LoopPlan, TrainingRows
from allranks.train.strategies import shards
from allranks.utils.machine import MachineFacts
from tests.dist import plants

MICRO = 2
CONFIG = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def world_of(planned: int | None = None) -> DistContext:
    facts = MachineFacts(host="h", cpus=2, memory_bytes=0, gpus=[], cpu_model="", system="")
    spec = parse_spec({"model": {"name": "tiny:mistral"}, "data": {"source": "x"}, "cluster": {"timeout_s": 60}})
    return join_process_group(make_plan(spec, facts))


def build_model(spec: ModelSpec, tokenizer: Any, *, dtype: str, labels: dict[str, int], seed: int) -> torch.nn.Module:
    model, loader = load_model(SINGLE_PROCESS, spec, tokenizer, dtype=dtype, labels=labels, seed=seed)
    return loader.load_all(model)


def model_of(seed: int = 1, family: str = "mistral", **config: Any) -> tuple[Any, Any]:
    """A copy: building takes five times as long."""
    model, tokenizer = _first_model(seed, family, json.dumps(config))
    return deepcopy(model), tokenizer


@cache
def _first_model(seed: int, family: str, config: str) -> tuple[Any, Any]:
    tokenizer = train_tokenizer(["hello"], 300, classifier=False)
    spec = ModelSpec(name=f"tiny:{family}", config={**CONFIG, **json.loads(config)})
    return build_model(spec, tokenizer, dtype="float32", labels={}, seed=seed), tokenizer


def mixtral_of(coefficient: float) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    wanted = {"output_router_logits": True, "router_aux_loss_coef": coefficient, "initializer_range": 0.3}
    config = AutoConfig.for_model("mixtral", **CONFIG, **wanted, num_local_experts=4, vocab_size=256, use_cache=False)
    return AutoModelForCausalLM.from_config(config)


def save_family(folder: Path, family: str, config: dict[str, Any], dtype: torch.dtype, **how: Any) -> Path:
    """Write a model of any family as transformers writes it, with random numbers in every weight."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(2)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config, **ids), dtype=dtype)
    for parameter in model.parameters():  # some are initialized with one value
        torch.nn.init.normal_(parameter.detach())
    model.save_pretrained(folder, **how)
    return folder


def tokens_of(folder: Path, n: int) -> TokenSet:
    """Rows of uneven length with uneven numbers of targets, the same on every rank."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(n):
        length = int(rng.integers(4, 40))
        mask = np.ones(length, np.uint8)
        mask[: int(rng.integers(1, length))] = 0
        mask[-1] = 1
        rows.append(EncodedRow(ids=rng.integers(4, 255, length).astype(np.int32), mask=mask))
    _save(folder, "train", rows, [[i] for i in range(n)])
    return _map(folder, "train")


def batch_of(accum: int, world: int, micro: int = MICRO) -> BatchPlan:
    return BatchPlan(micro_batch_size=micro, grad_accum=accum, global_batch_size=micro * accum * world)


def seven_numbers(model: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(0.1, 0.7, 7, dtype=next(model.parameters()).dtype))


class Sometimes(LossModel):
    """A model with a weight more, of 7 numbers, that takes part in some batches only."""

    def __init__(self, model: Any, salt: int | None) -> None:
        super().__init__(model, classifier=False)
        self.extra, self.salt = seven_numbers(model), salt

    def forward(self, batch: Batch) -> torch.Tensor:
        loss = super().forward(batch)
        return loss * (1 + self.extra.float().sum()) if takes_part(batch.input_ids, self.salt) else loss


class SometimesInABlock(LossModel):
    """A model of which a block has a weight more, of 7 numbers, that takes part in some batches only."""

    def __init__(self, model: Any, salt: int | None) -> None:
        super().__init__(model, classifier=False)
        self.salt, self._on = salt, True
        mlp = model.get_submodule("model.layers.1.mlp")
        mlp.extra = seven_numbers(model)
        mlp.register_forward_hook(lambda m, args, output: output * (1 + m.extra.sum()) if self._on else output)

    def forward(self, batch: Batch) -> torch.Tensor:
        self._on = takes_part(batch.input_ids, self.salt)
        return super().forward(batch)


def takes_part(ids: torch.Tensor, salt: int | None) -> bool:
    return salt is None or (int(ids.sum()) + salt) % 3 != 0


def a_salt(world: DistContext, tokens: TokenSet, how: dict[str, Any]) -> int:
    """One with which in every step some micro-batch uses the weight, and in some step some rank does not at all."""
    orders = orders_of(world, tokens, how)

    def used_by(order: SampleOrder, step: int, salt: int) -> list[bool]:
        return [takes_part(collate(tokens, rows, 0, None).input_ids, salt) for rows in order.micro_batches(step)]

    for salt in range(3):
        used = [[used_by(order, step, salt) for order in orders] for step in range(STEPS)]
        if all(any(any(r) for r in step) for step in used) and any(not any(r) for step in used for r in step):
            return salt
    raise AssertionError("no salt fits")


# DeepSpeed would keep parameters as small as these whole on every rank, and never free what it has gathered
PARTS = {
    "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 1000,
}  # fmt: skip


def options_of(name: str, how: dict[str, Any]) -> dict[str, Any]:
    given = how.get("options", {})
    if not name.startswith("deepspeed"):
        return given
    accum, world = how.get("accum", 1), dist.get_world_size()
    batch = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": accum}
    batch["train_batch_size"] = MICRO * accum * world
    parts = {"zero_optimization": PARTS} if name == "deepspeed_zero3" else {}
    return {"config": {**batch, **parts, **how.get("config_of_deepspeed", {})}, **given}


STEPS = 3


def orders_of(world: DistContext, tokens: TokenSet, how: dict[str, Any]) -> list[SampleOrder]:
    batch = batch_of(how.get("accum", 1), world.size)
    return [SampleOrder(len(tokens), 5, batch, rank, world.size) for rank in range(world.size)]


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def built(how: dict[str, Any]) -> LossModel:
    family = "glm4_moe" if how.get("moe") else "mistral"
    if how.get("router_loss"):
        model = mixtral_of(how["router_loss"])
    else:
        model, _ = model_of(1, family, tie_word_embeddings=bool(how.get("tied")), **how.get("config", {}))
    if how.get("shared"):
        first, second = model.model.layers[:2]
        second.mlp.down_proj.weight = first.mlp.down_proj.weight
    dtype = getattr(torch, how.get("base_dtype") or how.get("dtype") or "float32")
    # not `model.to`: the frequencies of rotary embeddings stay in float32, as in a run
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    moe.keep_routers_in_float32(model)
    if how.get("lora"):  # of a base in bfloat16 PEFT's are in float32
        adapter = AdapterSpec(
            type="lora", r=4, targets=["q_proj", "v_proj"], target_parameters=EXPERTS if how.get("moe") else [],
            modules_to_save=how.get("modules_to_save", []),
        )  # fmt: skip
        model = add_adapter(model, adapter, classifier=False, base="b", seed=1)
    if how.get("mixed"):
        precision.cast_trained_weights(model, torch.float32)
        precision.use_autocast(model, torch.bfloat16, torch.device("cpu"))
    compilation = Compilation(static=False, report=pytest.fail, backend="aot_eager") if how.get("compiled") else None
    set_block_forward(model, how.get("recompute", "none"), compilation)
    if how.get("frozen"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0" not in name)
    if how.get("extra") == "in_block":
        return SometimesInABlock(model, how.get("salt"))
    module = Sometimes(model, how.get("salt")) if how.get("extra") else LossModel(model, classifier=False)
    if how.get("router_loss"):
        coefficient, module.routers = moe.router_coefficient(model, "auto")
        module.router_loss = moe.RouterLoss(model, coefficient)
    return module


def warm_up(strategy: Any, world: DistContext, tokens: TokenSet, how: dict[str, Any]) -> None:
    rows = orders_of(world, tokens, how)[world.rank].micro_batches(0)[0]
    strategy.warm_up(collate(tokens, rows, 0, None), resumed=True)


def run_steps(
    name: str, strategy: Any, world: DistContext, tokens: TokenSet, how: dict[str, Any], folder: Path, last: int, *,
    first: int = 0, lr: float = 1e-2, reader: int | None = None, seed_of_rank: int | None = None, watcher: Any = None,
    router_loss: Any = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run optimizer steps in the strategy's engine; return their events on this rank."""
    order = orders_of(world, tokens, how)[world.rank if reader is None else reader]
    rows = TrainingRows(order, tokens, lambda rows: collate(tokens, rows, 0, None))
    train = TrainSpec(lr=lr, schedule="constant")
    plan = LoopPlan(train=train, first_step=first, total_steps=last, router_loss=router_loss)
    seed_rank(1, world.rank if seed_of_rank is None else seed_of_rank)
    file = folder / f"events{world.rank}.jsonl"
    with EventLog(file, world.rank) as events:
        engine_of(name)(world, strategy, rows, plan, events, watcher).run()
    return [e for e in read_events(file) if e["event"] == "step"][first - last :]


def train_with(
    name: str, world: DistContext, tokens: TokenSet, how: dict[str, Any], folder: Path
) -> tuple[dict[str, torch.Tensor], float, list[float], list[str], list[list[float]]]:
    """Weights after some steps, on rank 0; how far the ranks' own copies are apart; the gradients' norm of each step,
    as AdamW hides its factor; the dtype that routers computed in; the loss and the load-balancing loss of each step."""
    strategy, module = prepared(name, world, how)
    wanted = {n for n, p in module.named_parameters() if p.requires_grad}
    routers: set[str] = set()
    for router in routers_of(module).values():
        router.register_forward_pre_hook(lambda m, args: routers.add(str(m.weight.dtype)))
    more = {"reader": plants.reader(world), "router_loss": module.router_loss}
    logged = run_steps(name, strategy, world, tokens, how, folder, STEPS, **more)
    norms, losses = [e["grad_norm"] for e in logged], [[e["loss"], e.get("router_aux_loss", 0.0)] for e in logged]
    whole = {n: w for n, w in strategy.weights(trained_only=True).items() if n in wanted}
    assert world.rank != 0 or whole.keys() == wanted
    spread = 0.0
    if strategy.replicated:
        mine = torch.tensor([float(p.double().sum()) for p in module.parameters()], dtype=torch.float64)
        every = [torch.zeros_like(mine) for _ in range(world.size)]
        dist.all_gather(every, mine)
        spread = max(float((t - mine).abs().max()) for t in every)
        groups = (world.group, getattr(strategy, "_shard_group", world.group))
        limits = {str(g._get_backend(world.device).options._timeout) for g in groups}
        assert len(limits) == 1, f"timeouts of the groups differ: {limits}"
    return whole, spread, norms, sorted(routers), losses


def prepared(name: str, world: DistContext, how: dict[str, Any], lr: float = 1e-2) -> tuple[Any, LossModel]:
    strategy: Any = strategies.create(name, options_of(name, how))
    module, strategy.named_here = built(how), name
    strategy.setup(module, adamw(TrainSpec(lr=lr)), world.group, how.get("clip", 1.0))
    return strategy, module


def go_on(
    strategy: Any, world: DistContext, tokens: TokenSet, how: dict[str, Any], first: int, last: int, folder: Path,
    seed_of_rank: int | None = None,
) -> None:  # fmt: skip
    """Train some steps. Ranks have their own random numbers, or all those of one of them."""
    warm_up(strategy, world, tokens, how)
    run_steps(strategy.named_here, strategy, world, tokens, how, folder, last, first=first, seed_of_rank=seed_of_rank)


def whole_state(strategy: Any, world: DistContext) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state of all ranks, flattened, by the keys of a checkpoint; every rank calls."""
    parts = [*strategy.weight_shards(), *shards.state_shards(strategy.state_ranges())]
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, [(s.key, s.numel, s.offset, s.tensor.cpu().clone()) for s in parts], world.control)
    whole: dict[str, torch.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    for key, numel, offset, part in itertools.chain(*every):
        end = offset + part.numel()
        whole.setdefault(key, part.new_zeros(numel))[offset:end] = part
        held.setdefault(key, torch.zeros(numel, dtype=torch.bool))[offset:end] = True
    assert not (missing := [key for key, there in held.items() if not there.all()]), missing
    return whole


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def saver_of(run: RunDir, world: DistContext, strategy: Any, module: Any, published: Any, **spec: Any) -> Saver:
    content = CheckpointContent(strategy, module.model, model_of()[1], published, {})
    return Saver(run, world, content, CheckpointSpec(**{"keep": 2, **spec}))


def raised(action: Callable[[], Any]) -> str:
    """The traceback as Python prints it, or ""."""
    try:
        action()
    except Exception:  # noqa: BLE001 - whatever it is, it is what a user would read
        return traceback.format_exc()
    return ""


def main(known: dict[str, Any]) -> None:
    case, result, args = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    world = world_of()
    plants.plant(args.get("plant") or "", world)
    try:
        result.write_text(json.dumps(known[case](world, args)))
        dist.barrier()
    finally:
        leave_process_group()
