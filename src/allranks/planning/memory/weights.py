"""List every weight of a model by name and shape, from its config, determine which ones are trained, and compute their
bytes under a strategy.

Names are those of transformers, because adapters select weights by name. Either all weights are trained, or LoRA's next
to a frozen base, by PEFT's rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import msgspec

from allranks.planning.memory.families import ENCODERS, MLP, Experts, Family, family_of
from allranks.planning.memory.model_config import ModelConfig
from allranks.spec.records import NF4_BLOCK, NF4_PIECE, QUANTIZE_NONE, AdapterSpec, nf4_row_bytes
from allranks.spec.strategies.base import ModelSizes, UnitSizes

CLASSIFICATION_HEADS = ("classifier", "score")
"""PEFT trains a new classification head in full, in a copy next to the frozen one."""
FUSED_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Projections that transformers fuses in experts."""


class Weight(msgspec.Struct, frozen=True):
    """One parameter. ``kind``: linear | bias | norm | embedding | experts | router."""

    name: str
    shape: tuple[int, ...]
    kind: str = "linear"

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Unit(msgspec.Struct, frozen=True):
    """Weights that are gathered together: a block, or all weights outside blocks. ``kind``: block | moe | rest."""

    kind: str
    weights: tuple[Weight, ...]

    @property
    def numel(self) -> int:
        return sum(w.numel for w in self.weights)


class Shapes(msgspec.Struct, frozen=True):
    """A model: layers before its blocks, the blocks in order, and layers after them."""

    config: ModelConfig
    before: tuple[Weight, ...]
    blocks: tuple[Unit, ...]
    behind: tuple[Weight, ...]

    @property
    def rest(self) -> Unit:
        """Return the weights outside blocks."""
        return Unit("rest", (*self.before, *self.behind))

    def weights(self) -> Iterator[Weight]:
        """Return all parameters; tied ones once."""
        yield from self.before
        for block in self.blocks:
            yield from block.weights
        yield from self.behind

    @property
    def numel(self) -> int:
        return sum(w.numel for w in self.weights())


def output_projection(model: Shapes) -> Weight | None:
    """Return the weight that computes logits, which may be the embedding; None for encoders and perceptrons."""
    if model.config.family in (*ENCODERS, MLP):
        return None
    return next((w for w in model.behind if w.name in ("lm_head.weight", "score.weight")), model.before[0])


def shapes_of(config: ModelConfig) -> Shapes:
    """Return the model's weights."""
    if config.family in ENCODERS:
        return _encoder(config)
    if config.family == MLP:
        return _perceptron(config)
    return _decoder(config)


def _linear(name: str, out: int, into: int, bias: bool) -> list[Weight]:
    weights = [Weight(f"{name}.weight", (out, into))]
    return [*weights, Weight(f"{name}.bias", (out,), "bias")] if bias else weights


def _norms(names: Iterable[str], size: int, family: Family) -> list[Weight]:
    parts = ("weight", "bias") if family.norm.bias else ("weight",)
    return [Weight(f"{name}.{part}", (size,), "norm") for name in names for part in parts]


def _decoder(c: ModelConfig) -> Shapes:
    f = family_of(c.family)
    norms = _norms((*f.norms, *f.norms_after), c.hidden, f)
    dense = Unit("block", (*_attention(c, f), *_dense_mlp(c, f.mlp, c.intermediate), *norms))
    blocks = [dense] * c.layers
    if f.experts:
        moe = Unit("moe", (*_attention(c, f), *_moe_mlp(c, f.experts), *norms))
        blocks = [dense if i < c.dense_layers else moe for i in range(c.layers)]
    before = [Weight(f"{f.embeddings}.weight", (c.vocab_size, c.hidden), "embedding")]
    if f.position_embeddings:
        before.append(Weight(f"{f.position_embeddings}.weight", (c.positions, c.hidden), "embedding"))
    head = [] if c.labels else _head(c, f)
    scores = [Weight("score.weight", (c.labels, c.hidden))] if c.labels else []
    return Shapes(c, tuple(before), tuple(blocks), (*_norms([f.last_norm], c.hidden, f), *head, *scores))


def _head(c: ModelConfig, f: Family) -> list[Weight]:
    weight, *bias = _linear("lm_head", c.vocab_size, c.hidden, f.head_bias)
    return bias if c.tied else [weight, *bias]


def _attention(c: ModelConfig, f: Family) -> list[Weight]:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    *readers, output = f.attention
    weights = []
    for name, out in zip(readers, (q, kv, kv) if len(readers) > 1 else (q + 2 * kv,), strict=True):
        weights += _linear(name, out, c.hidden, c.attention_bias)
    weights += _linear(output, c.hidden, q, c.attention_bias and f.output_bias)
    if c.qk_norm:
        sizes = (c.head_dim, c.head_dim) if f.norm_per_head else (q, kv)
        for name, size in zip(("self_attn.q_norm", "self_attn.k_norm"), sizes, strict=True):
            weights += _norms([name], size, f)
    return weights


def _dense_mlp(c: ModelConfig, names: Sequence[str], inner: int) -> list[Weight]:
    *readers, output = names
    width = inner * (2 if family_of(c.family).gated and len(readers) == 1 else 1)
    weights = [w for name in readers for w in _linear(name, width, c.hidden, c.mlp_bias)]
    return [*weights, *_linear(output, c.hidden, inner, c.mlp_bias)]


def shared_mlp(experts: Experts) -> list[str]:
    """Return the names of the layers of a mixture's shared experts."""
    return [f"{experts.shared}.{name}" for name in ("gate_proj", "up_proj", "down_proj")]


def _moe_mlp(c: ModelConfig, experts: Experts) -> list[Weight]:
    inner = c.expert_intermediate
    shared = _dense_mlp(c, shared_mlp(experts), c.shared_intermediate) if c.shared_intermediate else []
    return [
        Weight("mlp.gate.weight", (c.experts, c.hidden), "router"),
        Weight("mlp.experts.gate_up_proj", (c.experts, 2 * inner, c.hidden), "experts"),
        Weight("mlp.experts.down_proj", (c.experts, c.hidden, inner), "experts"),
        *shared,
        *(_linear(experts.shared_gate, 1, c.hidden, False) if experts.shared_gate else []),
    ]


def _perceptron(c: ModelConfig) -> Shapes:
    wide = [c.hidden, *[c.intermediate] * (c.layers - 1), c.hidden]
    pairs = pairwise(wide) if c.wide else []
    units = [Unit("block", tuple(_linear("0", out, into, True))) for into, out in pairs]
    pair = (*_linear("0", c.intermediate, c.hidden, True), *_linear("2", c.hidden, c.intermediate, True))
    return Shapes(c, (), tuple(units) if c.wide else (Unit("block", pair),) * c.layers, ())


def _encoder(c: ModelConfig) -> Shapes:
    h, f = c.hidden, family_of(c.family)
    embedding = c.embedding or h
    block = Unit("block", (*_attention(c, f), *_dense_mlp(c, f.mlp, c.intermediate), *_norms(f.norms_after, h, f)))
    tables = {
        "word_embeddings": c.vocab_size,
        "position_embeddings": c.positions,
        "token_type_embeddings": c.token_types,
    }
    before = [
        Weight(f"embeddings.{name}.weight", (rows, embedding), "embedding") for name, rows in tables.items() if rows
    ]
    before += _norms(["embeddings.LayerNorm"], embedding, f)
    if embedding != h:
        before += _linear("embeddings_project", h, embedding, True)
    behind = [*_linear(f.pooler, h, h, True), *_linear(f.classifier, max(c.labels, 2), h, True)]
    return Shapes(c, tuple(before), (block,) * c.layers, tuple(behind))


class TrainedWeights(msgspec.Struct, frozen=True):
    """Effect of LoRA on a model; ``lora`` False: every weight is trained."""

    lora: bool
    r: int = 0
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None
    parameters: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    classifier: bool = False
    moe: bool = False  # projections' names mean those of fused experts
    quantize: str = QUANTIZE_NONE  # of the linear layers in blocks

    def rank_of(self, weight: Weight) -> int:
        """Return the rank of this weight's LoRA matrices, or 0 if it has none."""
        if not self.lora:
            return 0
        module = weight.name.removesuffix(".weight")
        if weight.kind in ("experts", "router"):
            return self._rank_in_experts(weight, module)
        if weight.kind != "linear" or not weight.name.endswith(".weight"):
            return 0
        if self.moe and module.rsplit(".", 1)[-1] in FUSED_EXPERT_NAMES:
            return 0  # PEFT applies these names to the experts only, not to other layers with that name
        if self.targets is not None:
            return self.r if any(_ends(module, t) for t in self.targets) else 0
        apart = module.split(".")[0] in CLASSIFICATION_HEADS or _ends(module, "lm_head")
        return 0 if apart or self.parameters else self.r

    def _rank_in_experts(self, weight: Weight, module: str) -> int:
        """Return the rank for fused projections: the sum of their ranks if all of them are named."""
        if any(_ends(module, name) or _ends(weight.name, name) for name in self.parameters):
            return self.r
        named = (
            set(FUSED_EXPERT_NAMES) | {"gate"} if self.targets is None else {t.rsplit(".", 1)[-1] for t in self.targets}
        )
        if not self.moe or (self.targets is None and self.parameters):
            return 0
        if weight.kind == "router":
            return self.r if "gate" in named else 0
        if _ends(module, "gate_up_proj"):
            return 2 * self.r if {"gate_proj", "up_proj"} <= named or {"w1", "w3"} <= named else 0
        return self.r if named & {"down_proj", "w2"} else 0

    def has_lora(self, weight: Weight) -> bool:
        """Return whether this weight has LoRA matrices."""
        return self.rank_of(weight) > 0

    def is_trained(self, weight: Weight) -> bool:
        """Return whether the weight itself gets a gradient."""
        if not self.lora:
            return True
        module = weight.name.rsplit(".", 1)[0]
        return any(_ends(module, name) for name in self.whole)

    def quantized(self, unit: Unit) -> list[Weight]:
        """Return the weights of a unit in 4 bits."""
        if self.quantize == QUANTIZE_NONE or unit.kind == "rest":
            return []
        matrices = [w for w in unit.weights if w.kind == "linear" and not self.is_trained(w)]
        return [w for w in matrices if w.shape[-1] % NF4_BLOCK == 0]

    @property
    def only_adapters(self) -> bool:
        """Return whether LoRA matrices are all that is trained, and no module as a whole."""
        return self.lora and not self.whole and not self.classifier

    def trains_embedding(self, model: Shapes) -> bool:
        """Return whether the embedding of tokens is trained."""
        return bool(model.before) and self.is_trained(model.before[0])

    def numel_in_products(self, weight: Weight) -> int:
        """Return the number of trained elements that matrix products use: what autocast casts.

        Adapters are not among them: their copies exist during a product only.
        """
        if weight.kind not in ("linear", "experts"):
            return 0
        head = 0 if self.has_lora(weight) else self.numel(weight)
        return head + (weight.numel if self.is_trained(weight) else 0)

    def numel(self, weight: Weight) -> int:
        """Return the number of parameters that LoRA adds for this weight."""
        if rank := self.rank_of(weight):
            *several, out, into = weight.shape
            return rank * (out + into) * (several[0] if several else 1)
        if self.classifier and self.lora and weight.name.split(".")[0] in CLASSIFICATION_HEADS:
            return weight.numel  # the trained copy
        return 0

    def trained_of_base(self, weights: Sequence[Weight]) -> tuple[int, ...]:
        """Return the elements of each weight of the base that is trained."""
        return tuple(w.numel for w in weights if self.is_trained(w))

    def trained_elements(self, weights: Sequence[Weight]) -> list[int]:
        """Return the elements of each trained parameter, in the order of the weights."""
        elements = (w.numel if self.is_trained(w) else self.numel(w) for w in weights)
        return [n for n in elements if n]

    def unit(self, unit: Unit) -> UnitSizes:
        """Return the element counts of a unit."""
        trained = self.trained_of_base(unit.weights)
        adapters = sum(self.numel(w) for w in unit.weights)
        # PEFT trains a copy of a module that is trained in full; the original is kept as well
        base = unit.numel + (sum(trained) if self.lora else 0)
        largest = max([*trained, *map(self._largest_added, unit.weights)], default=0)
        quantized = self.quantized(unit)
        stored = sum(w.shape[0] * sum(nf4_row_bytes(w.shape[1], self.quantize)) for w in quantized)
        return UnitSizes(base, adapters, sum(trained), largest, sum(w.numel for w in quantized), stored)

    def _largest_added(self, weight: Weight) -> int:
        if not self.has_lora(weight):
            return self.numel(weight)
        *several, out, into = weight.shape
        return self.rank_of(weight) * max(out, into) * (several[0] if several else 1)


def quantize_problem(config: ModelConfig) -> str:
    """Return why ``model.quantize`` is useless for a model, as the end of a sentence; empty if it is not."""
    if config.experts:
        return "its experts, which are most of its weights, are fused parameters instead of linear layers"
    if family_of(config.family).conv1d:
        return "its layers are transformers' Conv1D instead of linear layers"
    if config.hidden % NF4_BLOCK:
        return f"its hidden size {config.hidden} is not a multiple of {NF4_BLOCK}"
    return ""


def trained_weights_of(spec: AdapterSpec, shapes: Shapes, quantize: str = QUANTIZE_NONE) -> TrainedWeights:
    """Return which of these weights the spec's adapter trains, and how the others are stored."""
    if spec.type == "none":
        return TrainedWeights(False)
    experts = family_of(shapes.config.family).experts
    return TrainedWeights(
        lora=True,
        r=spec.r,
        dropout=spec.dropout,
        targets=None if spec.targets is None else tuple(spec.targets),
        parameters=tuple(spec.target_parameters),
        whole=tuple(spec.modules_to_save),
        classifier=shapes.config.family in ENCODERS or bool(shapes.config.labels),
        moe=experts is not None and experts.targets,
        quantize=quantize,
    )


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


class ModelMemory(ModelSizes, frozen=True, kw_only=True, dict=True):
    """The sizes of a model with its weights by name."""

    shapes: Shapes
    what: TrainedWeights

    def weight_copies_of(self, at: int) -> int:
        """Return bytes of the casts of block `at`'s weights that autocast makes and backward needs."""
        weights = self.shapes.blocks[at].weights
        if at == 0 and self.shapes.config.family == MLP:
            weights = weights[1:]  # the inputs of the first layer need no gradient, so its weight is not kept
        return sum(self.what.numel_in_products(w) for w in weights) * (self.autocast or 0)

    def dequantized_of(self, at: int, element: int) -> int:
        """Return bytes of the largest weight of block `at` while it is dequantised: with one piece in float32."""
        sizes = [w.numel for w in self.what.quantized(self.shapes.blocks[at])]
        return max((n * element + min(n, NF4_PIECE) * 4 for n in sizes), default=0)

    def cast_of(self, at: int, tokens: int) -> int:
        """Return bytes of a weight of block `at` and its input in 8-bit floats, with one piece in float32."""
        sizes = [w.numel + tokens * max(w.shape) for w in self.shapes.blocks[at].weights if w.kind == "linear"]
        return max((n + min(n, NF4_PIECE) * 8 for n in sizes), default=0)

    def weight_copies_outside_blocks(self) -> int:
        """Return the same outside blocks; that of a language model's output projection exists during the loss only."""
        head = output_projection(self.shapes)
        linear = [w for w in self.shapes.rest.weights if w.kind == "linear" and w is not head]
        elements = sum(self.what.numel_in_products(w) for w in linear)
        elements += head.numel if head is not None and self.what.is_trained(head) else 0
        return elements * (self.autocast or 0)

    def tied_gradient(self, *, gathered: bool) -> int:
        """Return bytes of the gradient that a tied embedding gets from the output projection, and keeps until backward
        ends.

        Autograd adds up the gradients of a weight before it passes them on.

        Args:
            gathered: weights are gathered in the dtype of compute, so their gradients come in it.
        """
        head = output_projection(self.shapes)
        if head is None or head in self.shapes.behind or not self.what.is_trained(head):
            return 0
        return head.numel * (self.autocast if gathered and self.autocast else self.trained_element)


def model_memory(shapes: Shapes, what: TrainedWeights, **plan: Any) -> ModelMemory:
    """Return what a plan makes of a model's weights; `plan`: fields of `ModelSizes` that do not depend on them."""
    sizes = {id(block): what.unit(block) for block in shapes.blocks}  # equal blocks are one object
    trained = {id(block): what.trained_elements(block.weights) for block in shapes.blocks}
    inside = [n for block in shapes.blocks for n in trained[id(block)]]
    return ModelMemory(
        shapes=shapes,
        what=what,
        blocks=tuple(sizes[id(block)] for block in shapes.blocks),
        rest=what.unit(shapes.rest),
        trained_elements=(*what.trained_elements(shapes.before), *inside, *what.trained_elements(shapes.behind)),
        trained_outside=(what.trained_of_base(shapes.before), what.trained_of_base(shapes.behind)),
        largest_weight=max(w.numel for w in shapes.weights()),
        has_adapters=what.lora,
        **plan,
    )
