"""List every weight of a model by name and shape, from its config, determine which ones are trained, and compute their bytes under a strategy.

Names are those of transformers, because adapters select weights by name. Either all weights are trained, or LoRA's next to a
frozen base, by PEFT's rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import msgspec

from allranks.planning.memory.model_config import ENCODERS, MLP, ModelConfig
from allranks.spec.records import AdapterSpec
from allranks.spec.strategies.base import UnitSizes

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
CLASSIFICATION_HEADS = (
    "classifier",
    "score",
)  # PEFT trains a new classification head in full, in a copy next to the frozen one
FUSED_EXPERT_NAMES = (
    "gate_proj",
    "up_proj",
    "down_proj",
    "w1",
    "w2",
    "w3",
)  # projections that transformers fuses in experts


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


class TrainedWeights(msgspec.Struct, frozen=True):
    """Effect of LoRA on a model; ``lora`` False: every weight is trained."""

    lora: bool
    r: int = 0
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None
    parameters: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    classifier: bool = False
    moe: bool = False

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
        if self.targets is None and self.parameters:
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

    def unit(self, unit: Unit) -> UnitSizes:
        """Return the element counts of a unit."""
        return _sizes(self, unit)


def _sizes(adapted: TrainedWeights, unit: Unit) -> UnitSizes:
    trained = [w.numel for w in unit.weights if adapted.is_trained(w)]
    added = [adapted.numel(w) for w in unit.weights]
    largest_added = max((_larger_half(adapted, w) for w in unit.weights), default=0)
    frozen_too = (
        sum(trained) if adapted.lora else 0
    )  # PEFT trains a copy of such a module; the original is kept as well
    return UnitSizes(unit.numel + frozen_too, sum(added), sum(trained), max([*trained, largest_added], default=0))


def _larger_half(adapted: TrainedWeights, weight: Weight) -> int:
    if not adapted.has_lora(weight):
        return adapted.numel(weight)
    *several, out, into = weight.shape
    return adapted.rank_of(weight) * max(out, into) * (several[0] if several else 1)


def trained_weights_of(spec: AdapterSpec, shapes: Shapes) -> TrainedWeights:
    """Return which of these weights the spec's adapter trains."""
    if spec.type == "none":
        return TrainedWeights(False)
    return TrainedWeights(
        lora=True,
        r=spec.r,
        dropout=spec.dropout,
        targets=None if spec.targets is None else tuple(spec.targets),
        parameters=tuple(spec.target_parameters),
        whole=tuple(spec.modules_to_save),
        classifier=shapes.config.family in ENCODERS or bool(shapes.config.labels),
        moe=bool(shapes.config.experts),
    )


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of one element of the weights.

    Attributes:
        frozen: of a weight of the base that is not trained.
        trained: of a trained weight, its gradient, and each of its moments.
        autocast: in the dtype of compute, where forward passes run under autocast; else None.
    """

    frozen: int
    trained: int
    autocast: int | None


class ModelMemory:
    """Model data that memory layouts depend on. ``blocks`` in order; ``rest``: weights outside blocks. Sums are cached.

    Args:
        accumulates: a step has several micro-steps.
        gloo: collectives use gloo, which reduces a copy of a reduce-scatter's input.
        device: cpu | cuda.
    """

    def __init__(
        self,
        shapes: Shapes,
        what: TrainedWeights,
        element: ElementBytes,
        *,
        world: int,
        node_ranks: int,
        accumulates: bool,
        gloo: bool,
        device: str,
    ) -> None:
        self.shapes, self.what, self.world, self.accumulates = shapes, what, world, accumulates
        self.node_ranks = node_ranks
        self.element, self.trained_element, self.autocast = element.frozen, element.trained, element.autocast
        self.device, self.copies = device, 2 if gloo else 1
        distinct = {id(block): what.unit(block) for block in {id(b): b for b in shapes.blocks}.values()}
        self.blocks: tuple[UnitSizes, ...] = tuple(distinct[id(block)] for block in shapes.blocks)
        self.rest: UnitSizes = what.unit(shapes.rest)
        every = (*self.blocks, self.rest)
        self.base = sum(self._base_bytes(u) for u in every)
        self.adapters = sum(u.adapters for u in every) * element.trained
        self.parameters = sum(u.base + u.adapters for u in every)
        self.trained = sum(u.trained for u in every)  # numbers, not bytes
        self.gradients = self.trained * element.trained
        self.largest_gradient = max(u.largest_trained for u in every) * element.trained
        self._head = sum(w.numel if what.is_trained(w) else 0 for w in shapes.behind)
        self.head_gradient_bytes = self._head * element.trained  # the first gradients of backward
        backwards = accumulate((self.gradient_of(b) for b in self.blocks[::-1]), initial=self.head_gradient_bytes)
        self._come = list(backwards)[-2::-1]

    def gradient_of(self, unit: UnitSizes) -> int:
        """Return bytes of a unit's gradients."""
        return unit.trained * self.trained_element

    def _base_bytes(self, unit: UnitSizes) -> int:
        return (unit.base - unit.trained_base) * self.element + unit.trained_base * self.trained_element

    def bytes_of(self, unit: UnitSizes) -> int:
        """Return bytes of a unit's weights as they are stored, including adapters."""
        return self._base_bytes(unit) + unit.adapters * self.trained_element

    def gathered_bytes_of(self, unit: UnitSizes) -> int:
        """Return bytes of a unit's weights gathered for a forward pass, in the dtype of compute."""
        return (unit.base + unit.adapters) * self.autocast if self.autocast else self.bytes_of(unit)

    def weight_copies_of(self, at: int) -> int:
        """Return bytes of the casts of block `at`'s weights that autocast makes and backward needs."""
        weights = self.shapes.blocks[at].weights
        if at == 0 and self.shapes.config.family == MLP:
            weights = weights[1:]  # the inputs of the first layer need no gradient, so its weight is not kept
        return sum(self.what.numel_in_products(w) for w in weights) * (self.autocast or 0)

    def weight_copies_after_blocks(self) -> int:
        """Return the same of the layers after the last block, without a language model's output projection."""
        head = output_projection(self.shapes)
        weights = [w for w in self.shapes.behind if w.kind == "linear" and w is not head]
        return sum(self.what.numel_in_products(w) for w in weights) * (self.autocast or 0)

    def weight_copy_of_head(self) -> int:
        """Return bytes of the cast of a language model's output projection, which exists during the loss only."""
        head = output_projection(self.shapes)
        return head.numel * self.autocast if head is not None and self.autocast and self.what.is_trained(head) else 0

    def tied_gradient(self, *, gathered: bool) -> int:
        """Return bytes of the gradient that a tied embedding gets from the output projection, and keeps until backward ends.

        Autograd adds up the gradients of a weight before it passes them on.

        Args:
            gathered: weights are gathered in the dtype of compute, so their gradients come in it.
        """
        head = output_projection(self.shapes)
        if head is None or head in self.shapes.behind or not self.what.is_trained(head):
            return 0
        return head.numel * (self.autocast if gathered and self.autocast else self.trained_element)

    def gradient_bytes_before(self, at: int) -> int:
        """Return bytes of the gradients that exist when backward reaches block `at`."""
        return self._come[at]

    def first_of(self, at: int, *, gathered: bool = False) -> int:
        """Return bytes of the largest gradient of block `at` when backward has computed it.

        Args:
            gathered: weights are gathered in the dtype of compute, so their gradients come in it. Otherwise autocast casts them:
                both exist.
        """
        return self.blocks[at].largest_trained * self._fresh_element(gathered)

    def head_gradient(self, *, gathered: bool = False) -> int:
        """Return bytes of the gradients that come as soon as backward begins, as `first_of`."""
        return self._head * self._fresh_element(gathered)

    def _fresh_element(self, gathered: bool) -> int:
        if self.autocast is None:
            return self.trained_element
        return self.autocast if gathered else self.autocast + self.trained_element

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained next to a frozen base."""
        return self.what.lora

    @property
    def largest_weight(self) -> int:
        """Elements of the largest weight."""
        return max(w.numel for w in self.shapes.weights())

    def trained_bytes(self) -> list[int]:
        """Return bytes of every trained parameter, in the model's order."""
        known: dict[int, list[int]] = {}
        found = self._trained(self.shapes.before)
        for block in self.shapes.blocks:
            if id(block) not in known:
                known[id(block)] = self._trained(block.weights)
            found += known[id(block)]
        return found + self._trained(self.shapes.behind)

    def _trained(self, weights: Sequence[Weight]) -> list[int]:
        numels = (w.numel if self.what.is_trained(w) else self.what.numel(w) for w in weights)
        return [n * self.trained_element for n in numels if n]

    def trained_base_bytes(self) -> tuple[list[int], list[int]]:
        """Return bytes of the trained parameters of the base (before the first block, after the last one)."""
        before, behind = (
            [w.numel * self.trained_element for w in weights if self.what.is_trained(w)]
            for weights in (self.shapes.before, self.shapes.behind)
        )
        return before, behind
