"""Models, adapters, dropout, losses and checkpoints in one process, with real transformers and PEFT."""

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config

from allranks.errors import SpecError
from allranks.planning.memory.activations import INDEXED_DROPOUT
from allranks.spec.records import TrainSpec
from allranks.train.data.batches import IGNORE, Batch, collate, collate_labelled, packed_rows
from allranks.train.data.prepared import TokenSet, _map, _save
from allranks.train.data.tokenization import EncodedRow
from allranks.train.distributed import rng_state, set_rng_state
from allranks.train.loop import adamw
from allranks.train.models import adapter_dropout
from allranks.train.models.adapter_dropout import LowMemoryDropout, drop_, dropped
from allranks.train.models.attention_flops import AttentionCost, attention_cost
from allranks.train.models.losses import LossModel
from allranks.train.models.packed_attention import use_packed_attention
from allranks.train.models.precision import cast_trained_weights, use_autocast
from allranks.train.step_metrics import TokenCounts
from allranks.train.strategies.base import clip_and_update, total_norm, trained_parameters
from allranks.train.strategies.data_parallel import PyTorchZero1
from tests.dist.architecture_configs import CONFIGS
from tests.unit.small_models import EXPERTS, Watch, tiny, with_lora

FAMILIES = ["mistral", "llama", "glm4_moe"]


def tokens_of(tmp_path: Path, packs: list[list[int]]) -> TokenSet:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(1 + max(r for p in packs for r in p)):
        ids = rng.integers(4, 255, 7 + 5 * i).astype(np.int32)
        mask = np.ones(len(ids), np.uint8)
        mask[:3] = 0
        rows.append(EncodedRow(ids=ids, mask=mask))
    _save(tmp_path, "train", rows, packs)
    return _map(tmp_path, "train")


def rows(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def test_pairs_of_attention_are_those_within_rows(tmp_path: Path) -> None:
    """Rows of 7, 12 and 17 tokens. Padding attends to nothing that counts."""
    tokens = tokens_of(tmp_path, [[0, 1, 2], [1]])
    each = [7 * 8 // 2, 12 * 13 // 2, 17 * 18 // 2]
    assert collate(tokens, rows(0), 0, 64).attention_pairs == sum(each)
    assert collate(tokens, rows(0, 1), 0, None).attention_pairs == sum(each) + each[1]
    counts = TokenCounts()
    for _ in range(2):
        counts.add(collate(tokens, rows(1), 0, 50))
    assert counts.attention_pairs == 2 * each[1]
    tokens = replace(tokens, labels=rows(0, 0, 0))
    assert collate_labelled(tokens, rows(0, 2), 0).attention_pairs == 7**2 + 17**2


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_give_the_sum_of_their_losses_and_do_not_see_each_other(family: str, tmp_path: Path) -> None:
    """With plain positions (the planted bug) they do."""
    loss_model = LossModel(tiny(family), classifier=False).eval()
    tokens = tokens_of(tmp_path, [[0, 2, 1], [0], [1], [2]])
    with torch.no_grad():
        packed = loss_model(batch := collate(tokens, rows(0), 0, None))
        apart = sum(loss_model(collate(tokens, rows(i), 0, None)) for i in (1, 2, 3))
        padded = loss_model(collate(tokens, rows(1, 2, 3), 0, 50))
        leaking = loss_model(replace(batch, position_ids=None, rows=None))
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(padded, apart, rtol=1e-5, atol=1e-4)
    assert (leaking - apart).abs() > 1e-3


def test_loss_equals_transformers_own_and_skipped_positions_change_nothing(tmp_path: Path) -> None:
    model = tiny("llama").eval()
    batch = collate(tokens_of(tmp_path, [[1]]), rows(0), 0, 32)
    labels = torch.full_like(batch.input_ids, IGNORE)
    labels[:, 1:] = batch.targets[:, :-1]
    with torch.no_grad():
        ours = LossModel(model, classifier=False)(batch) / batch.tokens_trained
        theirs = model(input_ids=batch.input_ids, labels=labels).loss
    torch.testing.assert_close(ours, theirs)
    assert (batch.tokens_trained, batch.tokens_padded) == (12 - 3, 32 - 12)


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("mistral", {"targets": ["q_proj", "v_proj"]}),
        ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
        ("glm4_moe", {"targets": ["q_proj"], "target_parameters": EXPERTS}),
    ],
)
def test_saved_adapters_give_equal_logits_in_plain_peft(family: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    base = tiny(family)
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base, r=4, **adapter)
    named = trained_parameters(model)
    assert all("lora" in n or "modules_to_save" in n for n, _ in named)
    if family == "glm4_moe":
        assert any("experts" in n for n, _ in named)
    ids = torch.arange(10, 30).unsqueeze(0)
    optimizer = adamw(TrainSpec(lr=0.05))(named)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        clip_and_update(optimizer, (p for _, p in named), None)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    again, untouched = (AutoModelForCausalLM.from_pretrained(tmp_path / "base") for _ in range(2))
    plain = PeftModel.from_pretrained(again, str(tmp_path / "adapter"))
    with torch.no_grad():
        ours, theirs, before = (m.eval()(input_ids=ids).logits for m in (model, plain, untouched))
    torch.testing.assert_close(ours, theirs)  # equal up to rounding: adapters of experts are computed in another order
    assert not torch.equal(ours, before)


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(SpecError, match="tiny:mistral"):
        tiny("mistrall")
    with pytest.raises(SpecError, match=r"hidden_sise.*hidden_size"):
        tiny("mistral", hidden_sise=3)
    with pytest.raises(SpecError, match="q_proj"):
        with_lora(tiny("mistral"), targets=["query"])


def test_gradients_are_clipped_and_one_that_is_not_finite_changes_nothing_then_or_later() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = adamw(TrainSpec(lr=0.1))([("w", weight)])
    weight.grad = torch.ones(3)
    clip_and_update(optimizer, [weight], 1.0)
    good = weight.detach().clone()
    assert not torch.equal(good, torch.ones(3))
    for gradient in (torch.tensor([1.0, float("nan"), 1.0]), torch.ones(3)):
        weight.grad = gradient
        clip_and_update(optimizer, [weight], 1.0)
        assert torch.equal(weight.detach(), good)
    assert float(optimizer.state[weight]["step"]) == 1.0
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.full((2, 2), 3.0)
    assert float(clip_and_update(torch.optim.SGD([weight], lr=1.0, fused=True), [weight], 1.0)) == pytest.approx(6.0)
    assert float(weight.detach().norm()) == pytest.approx(1.0, rel=1e-4)


def test_random_states_come_back() -> None:
    state = rng_state()
    first = (random.random(), np.random.rand(), torch.rand(3))
    set_rng_state(state)
    again = (random.random(), np.random.rand(), torch.rand(3))
    assert first[:2] == again[:2] and torch.equal(first[2], again[2])


@pytest.mark.parametrize("p", [0.001, 0.05, INDEXED_DROPOUT, 0.2, 0.5])
def test_dropout_drops_and_scales_as_asked(p: float) -> None:
    torch.manual_seed(0)
    layer, x = LowMemoryDropout(p), torch.ones(1000, 1003, requires_grad=True)
    y = layer(x)
    assert abs(float((y == 0).float().mean()) - p) < 5 * (p * (1 - p) / 1_003_000) ** 0.5
    assert abs(float(y.mean()) - 1.0) < 0.003
    y.sum().backward()
    assert torch.equal(x.grad, y)  # type: ignore[arg-type]
    assert not torch.equal(layer(x), y)
    torch.manual_seed(0)
    assert torch.equal(layer(x), y)
    assert layer.eval()(x) is x
    assert LowMemoryDropout(0.0)(x) is x


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_neighbours_are_dropped_independently(p: float) -> None:
    torch.manual_seed(1)
    zero = (LowMemoryDropout(p)(torch.ones(2_000_000)) == 0).double()
    for shift in (1, 2, 3, 4, 8):
        assert abs(float((zero[:-shift] * zero[shift:]).mean()) - p * p) < 0.002 * 2 * p, shift


def test_positions_go_on_where_a_round_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_dropout.math, "sqrt", lambda x: -x / 10)
    torch.manual_seed(3)
    positions = adapter_dropout._positions(100_000, 0.05)
    assert len(positions) == len(set(positions.tolist())) and abs(len(positions) - 5000) < 350
    assert int(positions[0]) >= 0 and 99_000 < int(positions[-1]) < 100_000
    assert torch.equal(positions, positions.sort().values)


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_what_is_dropped_is_the_same_for_copies_and_in_place(p: float) -> None:
    torch.manual_seed(4)
    layer, x = LowMemoryDropout(p), torch.randn(3, 50, 70)
    which, _ = layer.draw(x)
    copy = dropped(x, which)
    assert torch.equal(drop_(x.clone(), which), copy) and bool((x != 0).all())
    assert torch.equal(dropped(x.transpose(0, 1), which), dropped(x.transpose(0, 1).contiguous(), which))
    assert 0 < int((copy == 0).sum()) < copy.numel()


def test_lora_uses_it_and_hooks_on_the_layers_within_are_called() -> None:
    """DeepSpeed's stage 3 gathers a layer's weights in them."""
    model = with_lora(tiny("llama"), dropout=0.1, targets=["q_proj"])
    assert sum(isinstance(m, LowMemoryDropout) for m in model.modules()) == 2
    assert not any(type(m) is torch.nn.Dropout and m.p > 0 for m in model.modules())
    (layer,) = [m for n, m in model.named_modules() if n.endswith("layers.0.self_attn.q_proj")]
    called: list[str] = []
    for name in ("lora_A.default", "lora_B.default", "base_layer"):
        handle = layer.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
        model(torch.arange(10)[None])
        handle.remove()
    assert called == ["lora_A.default", "lora_B.default", "base_layer"]


def test_the_norm_of_joined_gradients_is_that_of_each() -> None:
    """Sharded strategies join gradients to long tensors, for which torch's own norm on a CPU is wrong by 6e-5."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, generator=generator) * 1e-3 for n in (7, 1024, 1_000_003, 2_000_000)]
    joined = torch.cat(parts)
    for gradients in ([joined], parts, [joined.view(1, -1)]):
        assert float(total_norm(gradients, joined=True)) == pytest.approx(float(joined.double().norm()), rel=1e-6)
    assert not torch.isfinite(total_norm([*parts, torch.tensor([float("inf")])], joined=True))


def test_a_trained_embedding_before_frozen_layer_norms() -> None:
    """The embedding's float32 output meets layer norms in bfloat16, for which CPUs have no kernel."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    plain = transformers.GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    lora = LoraConfig(r=4, target_modules=["c_attn"], modules_to_save=["wte"])
    adapted = get_peft_model(copy.deepcopy(plain).to(torch.bfloat16), lora)
    cast_trained_weights(adapted, torch.float32)
    assert use_autocast(adapted, torch.bfloat16, torch.device("cpu"))
    ids = torch.arange(16)[None]
    loss = adapted(input_ids=ids, labels=ids).loss
    loss.backward()
    assert abs(float(loss) - float(plain(input_ids=ids, labels=ids).loss)) < 0.02
    dtypes = {name: p.grad is not None and p.grad.dtype for name, p in adapted.named_parameters() if p.requires_grad}
    assert any("wte" in name for name in dtypes) and set(dtypes.values()) == {torch.float32}


def test_two_dtypes_are_refused_under_zero1_with_the_names_of_both() -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 2).bfloat16(), "adapter": nn.Linear(2, 2)})
    nobody: Any = None  # no rank is asked before
    with pytest.raises(SpecError, match=r"adapter.weight is torch.float32, head.weight is torch.bfloat16.*pytorch_ddp"):
        PyTorchZero1(25, False).setup(model, nobody, nobody, None)


READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.is_nonzero)
"""Operations after which a host waits for a GPU."""


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["mistral", "llama", "glm4_moe"])
def test_a_step_reads_no_value_on_the_host(family: str, packed: bool) -> None:
    loss_model = LossModel(tiny(family), classifier=False)
    loss_model._keeps = False  # on a CPU, logits are computed where there are targets, which are looked up
    ids, positions, layout = torch.arange(24).view(2, 12) + 10, None, None
    if packed:
        assert use_packed_attention(loss_model.model, torch.device("cpu"), torch.float32).within_rows
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 1, 2]])
        layout = packed_rows([[3, 6, 3], [8, 1, 3]], 12)
    batch = Batch(ids, ids.clone(), positions, None, 24, 24, rows=layout, scored=torch.arange(24))
    named = list(loss_model.named_parameters())
    optimizer = adamw(TrainSpec())(named)
    reads: list[Any] = []
    with Watch(lambda func, args, out: func in READS and reads.append(func)):
        loss_model(batch).backward()
        clip_and_update(optimizer, [p for _, p in named], 1.0)
        assert reads == []
        float(torch.ones(()))  # is counted
    assert len(reads) == 1


TOKENS = 24
ENCODERS = ("bert", "distilbert", "electra", "roberta", "albert", "deberta-v2")


def built(family: str, layers: int = 2, **more: Any) -> Any:
    config = AutoConfig.for_model(family, **{**CONFIGS[family], "vocab_size": 300, "pad_token_id": 0, **more})
    config.num_hidden_layers = layers
    kind = AutoModelForSequenceClassification if family in ENCODERS else AutoModelForCausalLM
    return kind.from_config(config, attn_implementation="eager")


def counted(model: Any) -> float:
    """FLOPs of batched products in a step, for a pair: eager attention computes all pairs, also those that it masks."""
    ids = torch.randint(1, 300, (1, TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    return counter.get_flop_counts()["Global"][torch.ops.aten.bmm] / TOKENS**2


def cost(model: Any) -> int:
    found = attention_cost(model)
    assert found is not None
    return found.flops_per_pair


@pytest.mark.parametrize("family", ["mistral", "llama", "qwen3", "bert", "distilbert"])
def test_a_trained_model_takes_12_flops_per_pair_head_and_width(family: str) -> None:
    model = built(family)
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert cost(model) == counted(model) == 12 * 2 * config.num_attention_heads * width


def test_queries_and_values_of_other_widths_and_windows_are_known() -> None:
    for window in (None, 16):
        found = attention_cost(built("mistral", sliding_window=window))
        assert found == AttentionCost(flops_per_pair=12 * 2 * 4 * 8, window=window)
    model = built("deepseek_v3", v_head_dim=4)
    assert cost(model) == 6 * 2 * model.config.num_attention_heads * ((8 + 8) + 4)  # keys with a rotary part; values


def test_blocks_below_all_adapters_have_a_forward_pass_only() -> None:
    model = built("mistral", layers=3)
    size = 2 * 4 * 8  # of one product
    peft = get_peft_model(model, LoraConfig(target_modules=r".*(q_proj|k_proj|v_proj)", r=2))
    assert cost(peft) == counted(peft) == size * (6 + 6 + 6)
    for name, parameter in peft.named_parameters():
        parameter.requires_grad_("layers.1" in name and "lora" in name)
    assert cost(peft) == counted(peft) == size * (2 + 6 + 6)


@pytest.mark.parametrize(
    ("family", "trained", "products"),
    [
        ("mistral", "embed_tokens", 12),
        ("mistral", "layers.0.input_layernorm", 12),
        ("mistral", "lm_head", 4),
        ("mistral", "model.norm", 4),
        ("gpt2", "c_attn", None),  # fused projections count for all
    ],
)
def test_what_is_trained_below_needs_all_products_above(family: str, trained: str, products: int | None) -> None:
    model = built(family, tie_word_embeddings=family == "gpt2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    assert cost(model) == counted(model)
    assert products is None or cost(model) == 2 * 4 * 8 * products


def test_models_that_do_more_or_less_than_attention_are_not_known() -> None:
    assert attention_cost(torch.nn.Linear(2, 2)) is None
    for family in ("mamba", "albert", "deberta-v2", "gpt_neo"):
        assert attention_cost(built(family)) is None, family
