"""Every weight of a model by name and shape, from its config. The names are transformers' own: adapters go by them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod

import msgspec

from allranks.fit.config import ENCODERS, MLP, ModelConfig


class Weight(msgspec.Struct, frozen=True):
    """One parameter. ``kind``: linear | bias | norm | embedding | experts | router."""

    name: str
    shape: tuple[int, ...]
    kind: str = "linear"

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Unit(msgspec.Struct, frozen=True):
    """Weights that are gathered together: a block, or all that is in no block. ``kind``: block | moe | rest."""

    kind: str
    weights: tuple[Weight, ...]

    @property
    def numel(self) -> int:
        return sum(w.numel for w in self.weights)


class Shapes(msgspec.Struct, frozen=True):
    """A model: what stands before its blocks, the blocks in order, and what stands behind them."""

    config: ModelConfig
    before: tuple[Weight, ...]
    blocks: tuple[Unit, ...]
    behind: tuple[Weight, ...]

    @property
    def rest(self) -> Unit:
        """What is in no block."""
        return Unit("rest", (*self.before, *self.behind))

    def weights(self) -> Iterator[Weight]:
        """All parameters, a tied one once."""
        yield from self.before
        for block in self.blocks:
            yield from block.weights
        yield from self.behind

    @property
    def numel(self) -> int:
        return sum(w.numel for w in self.weights())


def shapes_of(config: ModelConfig) -> Shapes:
    """The model's weights."""
    if config.family in ENCODERS:
        return _encoder(config)
    if config.family == "gpt2":
        return _gpt2(config)
    if config.family == MLP:
        return _perceptron(config)
    return _decoder(config)


def _linear(name: str, out: int, into: int, bias: bool) -> list[Weight]:
    found = [Weight(f"{name}.weight", (out, into))]
    return [*found, Weight(f"{name}.bias", (out,), "bias")] if bias else found


def _norm(name: str, size: int, bias: bool = False) -> list[Weight]:
    found = [Weight(f"{name}.weight", (size,), "norm")]
    return [*found, Weight(f"{name}.bias", (size,), "norm")] if bias else found


def _decoder(c: ModelConfig) -> Shapes:
    dense = Unit("block", (*_attention(c), *_dense_mlp(c), *_decoder_norms(c)))
    blocks = [dense] * c.layers
    if c.experts:
        moe = Unit("moe", (*_attention(c), *_moe_mlp(c), *_decoder_norms(c)))
        blocks = [dense if i < c.dense_layers else moe for i in range(c.layers)]
    embedding = Weight("embed_tokens.weight", (c.vocab_size, c.hidden), "embedding")
    head = [] if c.tied or c.labels else [Weight("lm_head.weight", (c.vocab_size, c.hidden))]
    scores = [Weight("score.weight", (c.labels, c.hidden))] if c.labels else []
    return Shapes(c, (embedding,), tuple(blocks), (*_norm("norm", c.hidden), *head, *scores))


def _attention(c: ModelConfig) -> list[Weight]:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    o_bias = c.attention_bias and c.family not in ("qwen2", "glm4_moe")
    if c.family == "phi3":
        return [
            *_linear("self_attn.qkv_proj", q + 2 * kv, c.hidden, False),
            *_linear("self_attn.o_proj", c.hidden, q, False),
        ]
    norms = [*_norm("self_attn.q_norm", c.head_dim), *_norm("self_attn.k_norm", c.head_dim)] if c.qk_norm else []
    return [
        *_linear("self_attn.q_proj", q, c.hidden, c.attention_bias),
        *_linear("self_attn.k_proj", kv, c.hidden, c.attention_bias),
        *_linear("self_attn.v_proj", kv, c.hidden, c.attention_bias),
        *_linear("self_attn.o_proj", c.hidden, q, o_bias),
        *norms,
    ]


def _dense_mlp(c: ModelConfig, prefix: str = "mlp", inner: int | None = None) -> list[Weight]:
    inner = c.intermediate if inner is None else inner
    if c.family == "phi3":
        gates = _linear(f"{prefix}.gate_up_proj", 2 * inner, c.hidden, False)
    else:
        gates = [
            *_linear(f"{prefix}.gate_proj", inner, c.hidden, c.mlp_bias),
            *_linear(f"{prefix}.up_proj", inner, c.hidden, c.mlp_bias),
        ]
    return [*gates, *_linear(f"{prefix}.down_proj", c.hidden, inner, c.mlp_bias)]


def _moe_mlp(c: ModelConfig) -> list[Weight]:
    inner = c.expert_intermediate
    shared = _dense_mlp(c, "mlp.shared_experts", c.shared_intermediate) if c.shared_intermediate else []
    return [
        Weight("mlp.gate.weight", (c.experts, c.hidden), "router"),
        Weight("mlp.experts.gate_up_proj", (c.experts, 2 * inner, c.hidden), "experts"),
        Weight("mlp.experts.down_proj", (c.experts, c.hidden, inner), "experts"),
        *shared,
    ]


def _perceptron(c: ModelConfig) -> Shapes:
    wide = [c.hidden, *[c.intermediate] * (c.layers - 1), c.hidden]
    pairs = pairwise(wide) if c.wide else []
    units = [Unit("block", tuple(_linear("0", out, into, True))) for into, out in pairs]
    pair = (*_linear("0", c.intermediate, c.hidden, True), *_linear("2", c.hidden, c.intermediate, True))
    return Shapes(c, (), tuple(units) if c.wide else (Unit("block", pair),) * c.layers, ())


def _decoder_norms(c: ModelConfig) -> list[Weight]:
    return [w for name in ("input_layernorm", "post_attention_layernorm") for w in _norm(name, c.hidden)]


def _gpt2(c: ModelConfig) -> Shapes:
    h, inner = c.hidden, c.intermediate
    block = Unit(
        "block",
        (
            *_norm("ln_1", h, bias=True),
            *_linear("attn.c_attn", 3 * h, h, True),
            *_linear("attn.c_proj", h, h, True),
            *_norm("ln_2", h, bias=True),
            *_linear("mlp.c_fc", inner, h, True),
            *_linear("mlp.c_proj", h, inner, True),
        ),
    )
    before = (Weight("wte.weight", (c.vocab_size, h), "embedding"), Weight("wpe.weight", (c.positions, h), "embedding"))
    head = [] if c.tied or c.labels else [Weight("lm_head.weight", (c.vocab_size, h))]
    scores = [Weight("score.weight", (c.labels, h))] if c.labels else []
    return Shapes(c, before, (block,) * c.layers, (*_norm("ln_f", h, bias=True), *head, *scores))


def _encoder(c: ModelConfig) -> Shapes:
    h = c.hidden
    names = _DISTIL if c.family == "distilbert" else _BERT
    block = [w for name in names["attention"] for w in _linear(name, h, h, True)]
    block += [*_linear(names["up"], c.intermediate, h, True), *_linear(names["down"], h, c.intermediate, True)]
    block += [w for name in names["norms"] for w in _norm(name, h, bias=True)]
    before = [
        Weight("embeddings.word_embeddings.weight", (c.vocab_size, h), "embedding"),
        Weight("embeddings.position_embeddings.weight", (c.positions, h), "embedding"),
    ]
    if c.token_types:
        before.append(Weight("embeddings.token_type_embeddings.weight", (c.token_types, h), "embedding"))
    before += _norm("embeddings.LayerNorm", h, bias=True)
    pooler = {"bert": "pooler.dense", "roberta": "classifier.dense", "distilbert": "pre_classifier"}[c.family]
    last = "classifier.out_proj" if c.family == "roberta" else "classifier"
    behind = [*_linear(pooler, h, h, True), *_linear(last, max(c.labels, 2), h, True)]
    return Shapes(c, tuple(before), (Unit("block", tuple(block)),) * c.layers, tuple(behind))


_BERT = {
    "attention": ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"],
    "up": "intermediate.dense",
    "down": "output.dense",
    "norms": ["attention.output.LayerNorm", "output.LayerNorm"],
}
_DISTIL = {
    "attention": ["attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"],
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "norms": ["sa_layer_norm", "output_layer_norm"],
}
