"""FLOPs of attention: against those that torch counts, with any weights frozen, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from allranks.train.models.attention_flops import AttentionCost, attention_cost
from tests.dist.architecture_configs import CONFIGS

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


def test_queries_and_values_of_other_widths_count_with_their_own() -> None:
    model = built("deepseek_v3", v_head_dim=4)
    heads, layers = model.config.num_attention_heads, 2
    assert cost(model) == 6 * layers * heads * ((8 + 8) + 4)  # keys with a rotary part; values


def test_blocks_below_all_adapters_have_a_forward_pass_only() -> None:
    model = built("mistral", layers=3)
    size = 2 * 4 * 8  # of one product
    peft = get_peft_model(model, LoraConfig(target_modules=r".*(q_proj|k_proj|v_proj)", r=2))
    assert cost(peft) == counted(peft) == size * (6 + 6 + 6)
    for name, parameter in peft.named_parameters():
        parameter.requires_grad_("layers.1" in name and "lora" in name)
    assert cost(peft) == counted(peft) == size * (2 + 6 + 6)


@pytest.mark.parametrize(
    ("trained", "products"), [("embed_tokens", 12), ("layers.0.input_layernorm", 12), ("lm_head", 4), ("model.norm", 4)]
)
def test_what_is_trained_below_needs_all_products_above(trained: str, products: int) -> None:
    model = built("mistral", tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    assert cost(model) == counted(model) == 2 * 4 * 8 * products


def test_fused_projections_count_for_all() -> None:
    model = built("gpt2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("c_attn" in name)
    assert cost(model) == counted(model)


def test_models_that_do_more_or_less_than_attention_are_not_known() -> None:
    assert attention_cost(torch.nn.Linear(2, 2)) is None
    for family in ("mamba", "albert", "deberta-v2", "gpt_neo"):
        assert attention_cost(built(family)) is None, family


@pytest.mark.parametrize("window", [None, 16])
def test_a_sliding_window_is_told(window: int | None) -> None:
    model = built("mistral", sliding_window=window)
    assert attention_cost(model) == AttentionCost(flops_per_pair=12 * 2 * 4 * 8, window=window)
