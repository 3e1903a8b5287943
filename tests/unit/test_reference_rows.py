"""The rows, rates and models that a comparison's reference computes for itself are those of the package's own code."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from allranks.planning.records import BatchPlan
from allranks.spec import parse_spec
from allranks.spec.records import TrainSpec
from allranks.train.benchmark import reference
from allranks.train.benchmark.baseline import uneven_shape
from allranks.train.data.batches import SampleOrder
from allranks.train.data.prepared import PreparedData
from allranks.train.loop import learning_rate
from allranks.train.models import adapters
from allranks.train.tasks import task_of, whole_model

DATA: dict[str, dict[str, Any]] = {
    "isolated": {"data": {"source": "builtin:instructions", "subset": 90, "max_length": 80}},
    "wrapped": {"data": {"source": "builtin:instructions", "subset": 90, "max_length": 80, "packing": "wrapped"}},
    "none": {
        "data": {"source": "builtin:reviews", "max_length": 40, "packing": "none", "template": "text", "subset": 90},
    },
    "whole": {"data": {"source": "builtin:instructions", "subset": 90, "max_length": 80, "mask_prompt": False}},
    "labels": {"data": {"source": "builtin:news", "subset": 90, "max_length": 40}, "model": {"name": "tiny:bert"}},
    "no held-out rows": {
        "data": {"source": "builtin:instructions", "subset": 90, "max_length": 80, "eval_fraction": 0.0, "seed": 3},
    },
    "noise": {"data": {"source": "builtin:noise", "subset": 30}, "model": {"name": "mlp:8x2"}},
}  # fmt: skip


def prepared(tmp_path: Path, more: dict[str, Any]) -> tuple[Any, Any, PreparedData]:
    spec = parse_spec({"model": {"name": "tiny:llama"}, **more})
    task = task_of(spec)
    return spec, task, task.prepare(tmp_path, lambda text: None)


@pytest.mark.parametrize("kind", DATA)
def test_rows_are_those_that_are_prepared(tmp_path: Path, kind: str) -> None:
    spec, task, data = prepared(tmp_path, DATA[kind])
    sequences, problem = reference.plain_sequences(spec, data, classifier=task.classifier)
    assert problem is None
    assert [sum(row.targets for row in s) for s in sequences] == data.train.trained.tolist()
    assert [sum(row.tokens for row in s) for s in sequences] == data.train.real.tolist()


def test_prepared_data_that_break_the_rules_are_named(tmp_path: Path) -> None:
    spec, _, data = prepared(tmp_path, DATA["isolated"])
    train = data.train
    for name, words in (("mask", "other trained tokens"), ("ids", "other tokens"), ("pack_rows", "sequence")):
        kept = getattr(train, name)
        damaged = np.array(kept)
        damaged[-1] ^= 1
        object.__setattr__(train, name, damaged)
        problem = reference.plain_sequences(spec, data, classifier=False)[1]
        assert problem and words in problem
        object.__setattr__(train, name, kept)


@pytest.mark.parametrize(("n", "world", "accum"), [(19, 2, 3), (7, 3, 1), (64, 4, 2)])
def test_each_rank_has_the_documented_rows(n: int, world: int, accum: int) -> None:
    batch = BatchPlan(micro_batch_size=2, grad_accum=accum, global_batch_size=2 * accum * world)
    ours = reference.PlannedRows(n, 5, batch, world)
    for rank in range(world):
        order = SampleOrder(n, 5, batch, rank, world)
        for step in range(9):
            assert ours.of_rank(step, rank) == [rows.tolist() for rows in order.micro_batches(step)]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warm", [0, 1, 3, 20])
def test_rates(schedule: Any, warm: int) -> None:
    train = TrainSpec(lr=0.3, schedule=schedule, warmup_steps=warm)
    ours = [reference.plain_rate(train, step + 1, 10) for step in range(10)]
    assert ours == pytest.approx([learning_rate(train, step, 10) for step in range(10)])


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16, 30])
def test_no_number_of_ranks_divides_the_uneven_perceptron(world: int) -> None:
    shape = uneven_shape(world)
    assert shape.parameters % world and (shape.parameters // shape.layers) % world


@pytest.mark.parametrize("lora", [False, True])
def test_the_plain_model_answers_the_same(tmp_path: Path, lora: bool) -> None:
    more = {**DATA["isolated"], "model": {"name": "tiny:mistral"}, "adapter": {"type": "lora" if lora else "none"}}
    spec, task, data = prepared(tmp_path, more)
    model = whole_model(task, data, "float32")
    module = task.loss_model(adapters.add_adapter(model, spec.adapter, classifier=False, base="x", seed=1))
    if lora:
        for name, p in module.named_parameters():
            p.data.normal_(std=0.1) if "lora_B" in name else None
    plain = reference.plain_module(module, spec, classifier=False)
    ours, theirs = ([(n, p.requires_grad) for n, p in m.named_parameters()] for m in (plain, module))
    assert ours == theirs
    ids = torch.tensor([data.train.ids[:40].tolist()])
    torch.testing.assert_close(plain.model(input_ids=ids).logits, module.model(input_ids=ids).logits)


LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
PHI = {"rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.3, "original_max_position_embeddings": 8}}


@pytest.mark.parametrize(("kind", "more"), [("mixtral", {}), ("phimoe", {**PHI, "max_position_embeddings": 64})])
def test_a_router_loss_is_that_of_the_micro_batch_however_rows_are_trained(kind: str, more: dict[str, Any]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 4, "initializer_range": 0.3}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, **more, output_router_logits=True, router_aux_loss_coef=5.0)
    model = AutoModelForCausalLM.from_config(config)
    reference.without_random_numbers(model)
    rows = [reference.PlainRow(torch.randint(3, 64, (n,)).tolist(), [True] * n) for n in (5, 14, 4, 20)]
    total = sum(row.targets for row in rows)
    out = [model.train()(torch.tensor([row.ids]), labels=torch.tensor([row.ids])) for row in rows]
    logits = tuple(torch.cat(layer) for layer in zip(*(one.router_logits for one in out), strict=True))
    balance = sys.modules[type(model).__module__].load_balancing_loss_func(logits, 4, 2)
    entropy = sum((one.loss - 5.0 * one.aux_loss) * row.targets for one, row in zip(out, rows, strict=True))
    spec = parse_spec({"model": {"name": "x"}, "data": {"source": "x", "max_length": 20}, "train": {"lr": 1e-12}})
    order = reference.PlannedRows(4, 0, BatchPlan(micro_batch_size=4, grad_accum=1, global_batch_size=4), 1)
    trainer = reference.PlainTrainer(spec, [[row] for row in rows], order, 0, torch.device("cpu"), torch.float32)
    for variant in reference.Variant:
        (loss,) = trainer.run(reference.PlainModule(model), 1, variant).losses
        assert loss == pytest.approx(float(entropy / total + 5.0 * balance), rel=1e-5)
