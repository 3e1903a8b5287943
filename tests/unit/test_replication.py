"""FSDP2 with copies of the weights on every node: when it is chosen, what the plan says, and what it costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from allranks.errors import SpecError
from allranks.planning.memory import fit, make_plan
from allranks.planning.memory.estimate import model_of
from allranks.planning.memory.model_config import find_config
from allranks.planning.records import LaunchPlan
from allranks.spec import parse_spec
from allranks.spec.records import RunSpec
from allranks.spec.strategies import strategy_info
from allranks.train.strategies import create
from allranks.train.strategies.fsdp2 import FSDP2
from tests.unit.fit_specs import facts

NODES = {"launcher": "slurm", "nodes": 2, "procs_per_node": 8, "device": "cuda", "device_memory_gib": 141}


def planned(strategy: Any = None, adapter: Any = None, **cluster: Any) -> tuple[RunSpec, LaunchPlan]:
    spec = parse_spec(
        {
            "model": {"name": "zai-org/GLM-4.5-Air", "gradient_checkpointing": True},
            "data": {"source": "builtin:instructions", "max_length": 1024}, "adapter": adapter or {"type": "lora"},
            "strategy": {"name": "pytorch_zero3", **(strategy or {})}, "train": {"micro_batch_size": 1},
            "cluster": NODES | cluster,
        }
    )  # fmt: skip
    return spec, make_plan(spec, facts())


def sent_by_a_node(spec: RunSpec, plan: LaunchPlan) -> tuple[Any, Callable[..., int]]:
    """The sizes of a model, and what a node sends per step: with options of the strategy, nodes and accumulation."""
    config, sends = find_config(spec).config, strategy_info("pytorch_zero3").node_sends
    assert config is not None and sends is not None
    model = model_of(spec, plan, config)
    return model, lambda options, nodes, accum: sends(model, plan.strategy_options | options, nodes, accum)


@pytest.mark.parametrize(
    ("strategy", "cluster", "chosen", "says"),
    [
        ({}, {}, "nodes", "every node holds a copy of the weights, sharded over its 8 ranks (HSDP): a rank then needs"),
        ({}, {"device_memory_gib": 24}, "none", "a node cannot hold a copy, because a rank then needs"),
        ({}, {"device_memory_gib": None}, "none", "the memory of a rank's device is unknown (set cluster"),
        ({"replicate": "nodes"}, {"device_memory_gib": None}, "nodes", "(strategy.replicate: nodes); a node sends"),
        ({"replicate": "none"}, {}, "none", "over all ranks (strategy.replicate: none); a node sends"),
        ({}, {"procs_per_node": 1}, "none", "a node has one rank"),
        ({}, {"nodes": 1}, "none", ""),
        ({"replicate": "nodes"}, {"nodes": 1}, "none", ""),
    ],
)  # fmt: skip
def test_a_plan_decides_by_memory_and_says_why(strategy: Any, cluster: Any, chosen: str, says: str) -> None:
    _, plan = planned(strategy, **cluster)
    assert plan.strategy_options["replicate"] == chosen
    assert says in plan.replication and bool(says) == bool(plan.replication)
    assert plan.shard_ranks == (plan.procs_per_node if chosen == "nodes" else plan.world_size)


def test_only_gradients_cross_between_nodes_and_once_per_step() -> None:
    model, sends = sent_by_a_node(*planned({"adapters": "sharded"}))
    copies = [sends({"replicate": "nodes"}, 2, accum) for accum in (1, 4)]
    shards = [sends({"replicate": "none"}, 2, accum) for accum in (1, 4)]
    assert copies == [model.gradients] * 2  # a ring all-reduce over two nodes sends half of the bytes twice
    assert shards[1] == pytest.approx(4 * shards[0], rel=1e-6)
    assert shards[0] == pytest.approx(15 / 16 * 2 * model.base, rel=0.03)  # each block is gathered twice
    assert sends({"replicate": "nodes"}, 3, 1) == int(4 / 3 * model.gradients)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"replicate": "nodes"}, True),  # a tenth of a node's share is more than four times the adapters
        ({"replicate": "none"}, False),  # a tenth of a share of all ranks is less
        ({"replicate": "nodes", "adapters": "sharded"}, False),
        ({"replicate": "none", "adapters": "ignored"}, True),
        ({"replicate": "nodes", "offload": "optimizer"}, False),
    ],
)
def test_the_plans_bytes_its_memory_and_training_decide_alike_on_whole_adapters(options: Any, expected: bool) -> None:
    wide = {"type": "lora", "r": 64, "alpha": 64, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    spec, plan = planned(options, adapter=wide)
    model, sends = sent_by_a_node(spec, plan)
    assert model.base / 160 < 4 * model.adapters < model.base / 80

    strategy = create("pytorch_zero3", plan.strategy_options)
    assert isinstance(strategy, FSDP2)
    strategy._shards = plan.shard_ranks
    assert strategy._keeps_whole(_without_memory(frozen=model.base, trained=model.adapters)) == expected

    kept = fit(spec, plan, facts()).moments[-1].parts["adapters"]
    assert kept == (model.adapters if expected else model.adapters / plan.shard_ranks)

    between = 2 * 15 / 16 * model.adapters if expected else 0  # a ring all-reduce over all ranks
    if options["replicate"] == "none":
        between += 15 / 16 * 2 * model.base
    elif not expected:
        between = model.adapters
    assert sends({}, 2, 1) == pytest.approx(between, rel=0.03)


def _without_memory(*, frozen: int, trained: int) -> torch.nn.Module:
    """A model with adapters whose parameters take so many bytes, on the meta device."""
    model = torch.nn.Module()
    model.peft_config = {}  # type: ignore[assignment]
    for name, size in (("frozen", frozen), ("trained", trained)):
        weight = torch.empty(size // 4, device="meta")
        model.register_parameter(name, torch.nn.Parameter(weight, requires_grad=name == "trained"))
    return model


def test_one_rank_per_node_cannot_replicate() -> None:
    with pytest.raises(SpecError, match="use pytorch_ddp, which replicates them"):
        planned({"replicate": "nodes"}, procs_per_node=1)
