"""Mixtures of experts in one process: routers in float32, adapters on experts, and who got how many tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from allranks.analysis.metrics import expert_load
from allranks.errors import SpecError
from allranks.planning.model_checks import check_model
from allranks.spec import parse_spec
from allranks.spec.records import AdapterSpec, ModelSpec, RunSpec, TrainSpec
from allranks.train.data.batches import Batch
from allranks.train.data.tokenization import train_tokenizer
from allranks.train.loop import adamw
from allranks.train.models.adapters import adapter_remarks, add_adapter
from allranks.train.models.block_forward import set_block_forward
from allranks.train.models.losses import LossModel
from allranks.train.models.moe import (
    ExpertLoad,
    RouterLoss,
    active_parameters,
    count_parameters,
    router_coefficient,
    routers_of,
)
from allranks.train.strategies.sharded_optimizer import FlatParameter
from tests.dist.making import build_model

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["hello world 123"], 300, classifier=False)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def glm(tokenizer: Any, dtype: str = "float32", checkpointing: bool = False, **config: Any) -> Any:
    spec = ModelSpec(name="tiny:glm4_moe", config={**SMALL, **config})
    model = build_model(spec, tokenizer, dtype=dtype, labels={}, seed=1)
    set_block_forward(model, "full" if checkpointing else "none")
    return model


def batch_of(tokenizer: Any) -> Batch:
    """Two rows, the second of which ends with five tokens of padding; the first ends with that token, too, as where
    padding is the end token."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, 255, (2, 12)))
    ids[1, 7:] = ids[0, 11] = tokenizer.pad_token_id
    targets = torch.where(ids == tokenizer.pad_token_id, -100, ids)
    return Batch(ids, targets, None, None, 19, 18, lengths=torch.tensor([12, 7]))


def test_routers_stay_in_float32_whatever_the_models_dtype(tokenizer: Any) -> None:
    model = glm(tokenizer, "bfloat16")
    routers = routers_of(model)
    assert list(routers) == ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    assert {n for n, d in dtypes.items() if d == torch.float32} == {f"{n}.weight" for n in routers}
    assert model(input_ids=torch.arange(10, 20).unsqueeze(0)).logits.dtype == torch.bfloat16


def test_a_router_is_read_from_a_file_without_rounding(tokenizer: Any, tmp_path: Path) -> None:
    model = glm(tokenizer, "bfloat16")
    router = model.model.layers[1].mlp.gate.weight
    with torch.no_grad():
        router.add_(1e-4)
    assert not torch.equal(router, router.bfloat16().float())
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again: Any = build_model(ModelSpec(name=str(tmp_path)), tokenizer, dtype="bfloat16", labels={}, seed=1)
    assert torch.equal(again.model.layers[1].mlp.gate.weight, router)
    assert "mlp.gate.weight" not in type(again)._keep_in_fp32_modules_strict


RAW: dict[str, Any] = {"model": {"name": "tiny:glm4_moe"}, "data": {"source": "x"}}
LORA: dict[str, Any] = {"type": "lora", "target_parameters": EXPERTS}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"adapter": {**LORA, "dropout": 0.1}}, "adapter.dropout is 0.1"),
        ({"strategy": {"name": "pytorch_zero3", "adapters": "ignored"}}, "adapter.type is none"),
        ({"adapter": LORA, "strategy": {"name": "pytorch_zero3", "adapters": "ignored", "offload": "optimizer"}}, "nothing to keep in host memory"),
        ({"strategy": {"name": "pytorch_ddp", "offload": "optimizer"}}, "pytorch_ddp has no option 'offload'"),
        ({"strategy": {"name": "zero3", "offload": "all"}}, "expected one of none, optimizer, got 'all'"),
    ],
)  # fmt: skip
def test_what_cannot_be_together_is_refused_before_anything_runs(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        parse_spec({**RAW, **sections})


@pytest.mark.parametrize(
    ("spec", "left", "says"),
    [
        (AdapterSpec(type="lora", targets=["q_proj"], target_parameters=EXPERTS), 0, ""),
        (AdapterSpec(type="lora", target_parameters=EXPERTS), 0, ""),
        (AdapterSpec(type="lora", targets=["q_proj", "gate_proj", "up_proj", "down_proj"]), 9, "for q_proj, gate_proj"),
        (AdapterSpec(type="lora"), 9, "for every linear layer"),
    ],
)  # fmt: skip
def test_what_peft_adapts_instead_is_said(tokenizer: Any, spec: AdapterSpec, left: int, says: str) -> None:
    """Three projections of the dense block and of the two blocks' shared experts bear names that PEFT takes for the
    experts'."""
    model = add_adapter(glm(tokenizer), spec, classifier=False, base="b", seed=1)
    found = adapter_remarks(model, spec)
    adapted = {n.split(".lora_")[0] for n, _ in model.named_parameters() if ".lora_" in n}
    bare = [
        n
        for n, m in glm(tokenizer).named_modules()
        if type(m) is torch.nn.Linear and n.rsplit(".", 1)[-1] in PROJECTIONS
    ]
    assert len(bare) == 9 and not any(f"base_model.model.{n}" in adapted for n in bare)
    assert bool(found) == bool(left)
    for text in found:
        assert says in text and f"skips {left} linear layers, first model.layers.0.mlp.gate_proj" in text
        assert "gate_up_proj" in text


def test_a_target_that_the_model_does_not_have_is_refused_with_the_nearest_name(tokenizer: Any) -> None:
    """Before any rank starts where the family is known, and on the rank; PEFT itself accepts each of them."""

    def says(model: Any, where: str, key: str, words: str, **adapter: Any) -> None:
        spec = {"model": {"name": where}, "data": {"source": "builtin:reviews"}, "adapter": {"type": "lora", **adapter}}
        wanted = rf"adapter\.{key}: .* has no (parameter|module) {words}"
        with pytest.raises(SpecError, match=wanted):
            check_model(parse_spec(spec))
        with pytest.raises(SpecError, match=wanted):
            add_adapter(model, AdapterSpec(type="lora", **adapter), classifier=False, base="b", seed=1)

    dense = build_model(ModelSpec(name="tiny:llama", config=SMALL), tokenizer, dtype="float32", labels={}, seed=1)
    layers = {"targets": ["q_proj"]}
    says(dense, "tiny:llama", "target_parameters", r".*it is dense", target_parameters=EXPERTS, **layers)
    near = r"'mlp\.experts\.gate_up_pro'; did you mean '?mlp\.experts\.gate_up_proj"
    says(
        glm(tokenizer),
        "tiny:glm4_moe",
        "target_parameters",
        near,
        target_parameters=["mlp.experts.gate_up_pro"],
        **layers,
    )
    near = r"'q_porj'; did you mean '?q_proj"
    says(glm(tokenizer), "tiny:glm4_moe", "targets", near, targets=["q_porj", "v_proj"], target_parameters=EXPERTS)


def test_dropout_that_peft_cannot_give_to_experts_is_refused(tokenizer: Any) -> None:
    with pytest.raises(SpecError, match=r"dropout is 0\.1, but PEFT adapts the fused experts"):
        add_adapter(glm(tokenizer), AdapterSpec(type="lora", dropout=0.1), classifier=False, base="b", seed=1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tokens_are_counted_once_and_padding_is_not(
    tokenizer: Any, checkpointing: bool, group: dist.ProcessGroup
) -> None:
    """Also where blocks are computed again in backward, and where evaluation and answers come between."""
    spec = AdapterSpec(type="lora", targets=["q_proj"], target_parameters=EXPERTS)
    model = add_adapter(glm(tokenizer, checkpointing=checkpointing), spec, classifier=False, base="b", seed=1)
    loss_model, batch = LossModel(model, classifier=False), batch_of(tokenizer)
    chosen: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, router in routers_of(model).items():
            router.register_forward_hook(lambda m, a, out, name=name: chosen.update({name: out[2]}))
        loss_model(batch)
    load = ExpertLoad(loss_model, torch.device("cpu"))
    loss_model.train()
    for _ in range(2):
        loss_model(batch).backward()
        with torch.no_grad():
            loss_model.eval().token_logits(batch)
            model(input_ids=batch.input_ids)
            loss_model(batch)
        loss_model.train()
    found = load.counts(2, group)
    real = batch.real_tokens().flatten()
    for layer, indices in zip(("1", "2"), chosen.values(), strict=True):
        wanted = 2 * torch.bincount(indices[real].flatten(), minlength=8)
        assert found.layers[layer] == wanted.tolist()
        assert sum(found.layers[layer]) == 2 * 2 * batch.tokens_real
    assert (found.from_step, found.step) == (0, 2)
    assert not any(sum(layer) for layer in load.counts(3, group).layers.values())


def test_biases_of_experts_are_not_decayed(group: dist.ProcessGroup) -> None:
    """They have two dimensions. The same in the flat tensors of zero1 to zero3, whose pieces have no names."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    config = AutoConfig.for_model("gpt_oss", vocab_size=300, num_hidden_layers=2, num_local_experts=4, **sizes)
    named = list(AutoModelForCausalLM.from_config(config).named_parameters())
    named.append(("layers.0.q_norm.weight", nn.Parameter(torch.ones(2, 16))))
    matrices = {name for name, p in named if p.ndim > 1 and not name.endswith(("_bias", "norm.weight"))}
    decayed, plain = adamw(TrainSpec(weight_decay=0.1))(named).param_groups
    by_id = {id(p): name for name, p in named}
    assert {by_id[id(p)] for p in decayed["params"]} == matrices
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    flat = FlatParameter(named, group)
    first, second = flat.make_pieces(flat.own())
    assert first.numel() == sum(p.numel() for name, p in named if name in matrices)
    pieces = adamw(TrainSpec(weight_decay=0.1))([("flat0.0", first), ("flat0.1", second)]).param_groups
    assert [g["weight_decay"] for g in pieces] == [0.1, 0.0] and pieces[0]["params"][0] is first


def mixtral(**config: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    asked = {"vocab_size": 300, "num_hidden_layers": 2, "num_local_experts": 4, "use_cache": False, **sizes, **config}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **asked)).train()


@pytest.mark.parametrize("recomputation", ["none", "selective", "full"])
@pytest.mark.parametrize("whole_logits", [False, True])
def test_the_router_loss_is_that_of_transformers(tokenizer: Any, recomputation: str, whole_logits: bool) -> None:
    """With the mask of padding, and without it: the loss of a batch, and the gradients of all weights."""
    plain = mixtral(output_router_logits=True, router_aux_loss_coef=0.5)
    ours, padded = copy.deepcopy(plain), batch_of(tokenizer)
    set_block_forward(ours, recomputation)
    loss_model = LossModel(ours, classifier=False)
    if whole_logits:
        loss_model._head = None
    coefficient, says = router_coefficient(ours, "auto")
    assert (coefficient, says) == (0.5, "routers: a load-balancing loss is added, with coefficient 0.5 (config.json)")
    loss_model.router_loss = RouterLoss(ours, coefficient)
    full = Batch(padded.input_ids[:1], padded.targets[:1], None, None, 12, 11, lengths=torch.tensor([12]))
    reported = torch.zeros(())
    for batch, mask in ((padded, padded.real_tokens().long()), (full, None)):
        wanted = plain(input_ids=batch.input_ids, attention_mask=mask, labels=batch.targets, shift_labels=batch.targets)
        (wanted.loss * batch.tokens_trained).backward()
        loss = loss_model(batch)
        loss.backward()
        torch.testing.assert_close(loss, wanted.loss * batch.tokens_trained)
        reported += 0.5 * wanted.aux_loss.detach() * batch.tokens_trained
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)
    loss_model.eval().token_losses(padded)
    torch.testing.assert_close(loss_model.router_loss.take(), reported)
    assert loss_model.router_loss.take() is None


def test_the_router_loss_is_what_is_asked_for_or_refused(tokenizer: Any) -> None:
    quiet = mixtral(router_aux_loss_coef=0.02)
    assert router_coefficient(quiet, 0.1)[0] == 0.1
    assert router_coefficient(mixtral(output_router_logits=True), "off")[0] == 0
    coefficient, says = router_coefficient(quiet, "auto")
    assert coefficient == 0 and says.endswith(
        "does not set output_router_logits; model.router_aux_loss: 0.02 would add one"
    )
    coefficient, says = router_coefficient(glm(tokenizer), "auto")
    assert coefficient == 0 and "balanced by a correction bias (e_score_correction_bias)" in says
    with pytest.raises(SpecError, match=r"0\.1, but Glm4MoeForCausalLM has no load-balancing loss .* correction bias"):
        router_coefficient(glm(tokenizer), 0.1)
    dense = build_model(ModelSpec(name="tiny:llama", config=SMALL), tokenizer, dtype="float32", labels={}, seed=1)
    assert router_coefficient(dense, "auto") == (0.0, "")
    with pytest.raises(SpecError, match=r"0\.1, but LlamaForCausalLM is not a mixture of experts"):
        router_coefficient(dense, 0.1)


def plain_spec(name: str, wanted: Any = "auto", **adapter: Any) -> RunSpec:
    lora = {"adapter": {"type": "lora", **adapter}} if adapter else {}
    return parse_spec(
        {"model": {"name": name, "router_aux_loss": wanted}, "data": {"source": "builtin:reviews"}, **lora}
    )


@pytest.mark.parametrize("target", ["gate_up_proj", "mlp.experts.down_proj"])
def test_a_fused_parameter_among_layers_is_named_where_it_belongs(tokenizer: Any, target: str) -> None:
    own = rf"{target}'.*adapter\.target_parameters: \[mlp\.experts\.{target.rpartition('.')[2]}\]"
    for targets in ([target], ["q_proj", target]):
        with pytest.raises(SpecError, match=own):
            check_model(plain_spec("tiny:glm4_moe", targets=targets))
        if target == "gate_up_proj":  # the other one PEFT itself applies to the parameter
            spec = AdapterSpec(type="lora", targets=targets)
            with pytest.raises(SpecError, match=own):
                add_adapter(glm(tokenizer), spec, classifier=False, base="b", seed=1)
    check_model(plain_spec("tiny:glm4_moe", targets=["down_proj"]))


def test_a_dense_model_has_no_load(tokenizer: Any) -> None:
    dense = build_model(ModelSpec(name="tiny:llama", config=SMALL), tokenizer, dtype="float32", labels={}, seed=1)
    assert not ExpertLoad(LossModel(dense, classifier=False), torch.device("cpu"))
    assert expert_load([{"event": "step", "step": 1}]) is None


MIXTRAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 32000,
           "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
GLM_AIR = {
    "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "attention_bias": True,
}  # fmt: skip
QWEN = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "all_", "active"),
    [("mixtral", MIXTRAL, 46.7e9, 12.9e9), ("glm4_moe", GLM_AIR, 106e9, 12e9), ("qwen3_moe", QWEN, 30.5e9, 3.3e9)],
)  # as their authors publish them, GLM's without embeddings (1.2e9)
def test_of_the_experts_only_those_of_a_token_are_active(
    kind: str, config: dict[str, Any], all_: float, active: float
) -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config))
    found = active_parameters(model)
    assert found is not None
    assert count_parameters(model)[0] == pytest.approx(all_, rel=0.01)
    assert found[0] == found[1] == pytest.approx(active, rel=0.12)


def test_adapters_of_experts_count_by_their_share_and_unknown_routers_give_nothing(tokenizer: Any) -> None:
    model = glm(tokenizer, n_routed_experts=8, num_experts_per_tok=2)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert active_parameters(model) == (count_parameters(model)[0] - experts * 6 // 8,) * 2
    spec = AdapterSpec(type="lora", r=4, target_parameters=EXPERTS)
    adapted = add_adapter(model, spec, classifier=False, base="b", seed=1)
    trained = [(n, p.numel()) for n, p in adapted.named_parameters() if p.requires_grad]
    assert all(".experts." in n for n, _ in trained)
    found = active_parameters(adapted)
    assert found is not None and found[1] == sum(size for _, size in trained) // 4
    for router in routers_of(adapted).values():
        router.__class__ = type("Gate", (type(router),), {})  # by that name it is not known
    assert active_parameters(adapted) is None
