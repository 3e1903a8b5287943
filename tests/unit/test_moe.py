"""Mixtures of experts in one process: routers in float32, adapters on experts, and who got how many tokens."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from allranks.errors import SpecError
from allranks.planning.model_checks import check_model
from allranks.spec import parse_spec
from allranks.spec.records import AdapterSpec, RunSpec, TrainSpec
from allranks.train.data.batches import Batch
from allranks.train.loop import adamw
from allranks.train.models import moe
from allranks.train.models.adapters import adapter_remarks, add_adapter
from allranks.train.models.block_forward import set_block_forward
from allranks.train.models.losses import LossModel
from allranks.train.models.moe import ExpertLoad, RouterLoss, router_coefficient, routers_of
from allranks.train.strategies.sharded_optimizer import FlatParameter
from tests.unit.small_models import EXPERTS, TOKENIZER, load, tiny, with_lora

PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def glm(dtype: str = "float32", **config: Any) -> Any:
    return tiny("glm4_moe", dtype, num_hidden_layers=3, **config)


def mixture(kind: str = "mixtral", **config: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"vocab_size": 300, "num_hidden_layers": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    config = {**sizes, "use_cache": False, **config}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).train()


def plain_spec(name: str, wanted: Any = "auto", **adapter: Any) -> RunSpec:
    model = {"name": name, "router_aux_loss": wanted}
    lora = {"adapter": {"type": "lora", **adapter}} if adapter else {}
    return parse_spec({"model": model, "data": {"source": "builtin:reviews"}, **lora})


def batch_of() -> Batch:
    """Two rows; the second ends with five tokens of padding, the first with that token, too, as if it were the end."""
    ids = torch.randint(4, 255, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[1, 7:] = ids[0, 11] = TOKENIZER.pad_token_id
    targets = torch.where(ids == TOKENIZER.pad_token_id, -100, ids)
    return Batch(ids, targets, None, None, 19, 18, lengths=torch.tensor([12, 7]))


def test_routers_stay_in_float32_whatever_the_models_dtype() -> None:
    model = glm("bfloat16")
    routers = routers_of(model)
    assert list(routers) == ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    assert {n for n, d in dtypes.items() if d == torch.float32} == {f"{n}.weight" for n in routers}
    assert model(input_ids=torch.arange(10, 20).unsqueeze(0)).logits.dtype == torch.bfloat16


def test_a_router_is_read_from_a_file_without_rounding(tmp_path: Path) -> None:
    model = glm("bfloat16")
    router = model.model.layers[1].mlp.gate.weight
    with torch.no_grad():
        router.add_(1e-4)
    assert not torch.equal(router, router.bfloat16().float())
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    again: Any = load(tmp_path, "bfloat16")
    assert torch.equal(again.model.layers[1].mlp.gate.weight, router)
    assert "mlp.gate.weight" not in type(again)._keep_in_fp32_modules_strict


@pytest.mark.parametrize(
    ("spec", "left", "says"),
    [
        (AdapterSpec(type="lora", targets=["q_proj"], target_parameters=EXPERTS), 0, ""),
        (AdapterSpec(type="lora", target_parameters=EXPERTS), 0, ""),
        (AdapterSpec(type="lora", targets=["q_proj", "gate_proj", "up_proj", "down_proj"]), 9, "for q_proj, gate_proj"),
        (AdapterSpec(type="lora"), 9, "for every linear layer"),
    ],
)  # fmt: skip
def test_what_peft_adapts_instead_is_said(spec: AdapterSpec, left: int, says: str) -> None:
    """Three projections of the dense block and of two shared experts bear names that PEFT takes for the experts'."""
    model = add_adapter(glm(), spec, classifier=False, base="b", seed=1)
    found = adapter_remarks(model, spec)
    adapted = {n.split(".lora_")[0] for n, _ in model.named_parameters() if ".lora_" in n}
    bare = [n for n, m in glm().named_modules() if type(m) is nn.Linear and n.rsplit(".", 1)[-1] in PROJECTIONS]
    assert len(bare) == 9 and not any(f"base_model.model.{n}" in adapted for n in bare)
    assert bool(found) == bool(left)
    for text in found:
        assert says in text and f"skips {left} linear layers, first model.layers.0.mlp.gate_proj" in text
        assert "gate_up_proj" in text


DENSE = r"adapter\.target_parameters: .* has no parameter .*it is dense"
NO_PARAMETER = r"adapter\.target_parameters: .*'mlp\.experts\.gate_up_pro'; did you mean '?mlp\.experts\.gate_up_proj"
NO_MODULE = r"adapter\.targets: .* has no module 'q_porj'; did you mean '?q_proj"
FUSED = r"{0}_proj'.*adapter\.target_parameters: \[mlp\.experts\.{0}_proj\]"


@pytest.mark.parametrize(
    ("family", "targets", "parameters", "words"),
    [
        ("llama", ["q_proj"], EXPERTS, DENSE),
        ("glm4_moe", ["q_proj"], ["mlp.experts.gate_up_pro"], NO_PARAMETER),
        ("glm4_moe", ["q_porj", "v_proj"], EXPERTS, NO_MODULE),
        ("glm4_moe", ["q_proj", "gate_up_proj"], [], FUSED.format("gate_up")),
        ("glm4_moe", ["mlp.experts.down_proj"], [], FUSED.format("down")),  # PEFT applies it to the parameter
    ],
)
def test_an_unknown_target_is_refused(family: str, targets: list[str], parameters: list[str], words: str) -> None:
    """Before any rank starts where the family is known, and on the rank; PEFT itself accepts most of them."""
    adapter = {"targets": targets, "target_parameters": parameters}
    with pytest.raises(SpecError, match=words):
        check_model(plain_spec(f"tiny:{family}", **adapter))
    if targets != ["mlp.experts.down_proj"]:
        with pytest.raises(SpecError, match=words):
            with_lora(tiny(family), **adapter)
    check_model(plain_spec("tiny:glm4_moe", targets=["down_proj"]))


def test_dropout_that_peft_cannot_give_to_experts_is_refused() -> None:
    with pytest.raises(SpecError, match=r"dropout is 0\.1, but PEFT adapts the fused experts"):
        with_lora(glm(), dropout=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tokens_are_counted_once_and_padding_is_not(checkpointing: bool, group: dist.ProcessGroup) -> None:
    """Also where blocks are computed again in backward, and where evaluation and answers come between."""
    model = glm()
    set_block_forward(model, "full" if checkpointing else "none")
    model = with_lora(model, targets=["q_proj"], target_parameters=EXPERTS)
    loss_model, batch = LossModel(model, classifier=False), batch_of()
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
    named = list(mixture("gpt_oss", head_dim=16).named_parameters())
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


@pytest.mark.parametrize("recomputation", ["none", "selective", "full"])
@pytest.mark.parametrize("whole_logits", [False, True])
def test_the_router_loss_is_that_of_transformers(recomputation: str, whole_logits: bool) -> None:
    """With the mask of padding, and without it: the loss of a batch, and the gradients of all weights."""
    plain = mixture(output_router_logits=True, router_aux_loss_coef=0.5)
    ours, padded = copy.deepcopy(plain), batch_of()
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


def test_the_router_loss_is_what_is_asked_for_or_refused() -> None:
    quiet = mixture(router_aux_loss_coef=0.02)
    assert router_coefficient(quiet, 0.1)[0] == 0.1
    assert router_coefficient(mixture(output_router_logits=True), "off")[0] == 0
    coefficient, says = router_coefficient(quiet, "auto")
    end = "does not set output_router_logits; model.router_aux_loss: 0.02 would add one"
    assert coefficient == 0 and says.endswith(end)
    coefficient, says = router_coefficient(glm(), "auto")
    assert coefficient == 0 and "balanced by a correction bias (e_score_correction_bias)" in says
    with pytest.raises(SpecError, match=r"0\.1, but Glm4MoeForCausalLM has no load-balancing loss .* correction bias"):
        router_coefficient(glm(), 0.1)
    dense = tiny("llama")
    assert not ExpertLoad(LossModel(dense, classifier=False), torch.device("cpu"))
    assert router_coefficient(dense, "auto") == (0.0, "")
    with pytest.raises(SpecError, match=r"0\.1, but LlamaForCausalLM is not a mixture of experts"):
        router_coefficient(dense, 0.1)


MIXTRAL = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
GLM_AIR = {
    "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "n_routed_experts": 128,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "all_", "active"), [("mixtral", MIXTRAL, 46.7e9, 12.9e9), ("glm4_moe", GLM_AIR, 106e9, 12e9)]
)  # as their authors publish them, GLM's without embeddings (1.2e9)
def test_only_the_experts_of_a_token_are_active(kind: str, config: dict[str, Any], all_: float, active: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    found = moe.active_parameters(model)
    assert found is not None
    assert moe.count_parameters(model)[0] == pytest.approx(all_, rel=0.01)
    assert found[0] == found[1] == pytest.approx(active, rel=0.12)


def test_adapters_of_experts_count_by_their_share_and_unknown_routers_give_nothing() -> None:
    model = glm(n_routed_experts=8, num_experts_per_tok=2)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert moe.active_parameters(model) == (moe.count_parameters(model)[0] - experts * 6 // 8,) * 2
    adapted = with_lora(model, r=4, target_parameters=EXPERTS)
    trained = [(n, p.numel()) for n, p in adapted.named_parameters() if p.requires_grad]
    assert all(".experts." in n for n, _ in trained)
    found = moe.active_parameters(adapted)
    assert found is not None and found[1] == sum(size for _, size in trained) // 4
    for router in routers_of(adapted).values():
        router.__class__ = type("Gate", (type(router),), {})  # by that name it is not known
    assert moe.active_parameters(adapted) is None
