"""Estimate the bytes that forward keeps for backward, operation by operation, as transformers 5 implements its models.

The counts follow what autograd saves (a test compares each tensor): a linear layer keeps its input only
if its weight is trained, a norm in bfloat16 keeps a float32 copy of its input, LoRA keeps its own input, and so on.
Published tables (34 bytes per token and hidden unit, Korthikanti et al. 2022) assume a fused layer, which these models
do not have.

LoRA layers that read one tensor keep it once, in the dtype of compute, and their rank-r products (`train.models.lora`);
GPT-2's ``Conv1D`` layers, and all of them under DeepSpeed's stage 3, are PEFT's own, which keep a copy in the adapter's
dtype each.

Under autocast the residual stream behind a trained embedding, and norms on it, are float32. A linear layer casts its
input by itself and keeps the copy: queries, keys and values keep three copies of one tensor. The casts of weights are
no activations (`ModelMemory.weight_copies_of`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from allranks.planning.memory.families import ACTIVATION_TENSORS, ENCODERS, KEEPS_OUTPUT, MLP, family_of
from allranks.planning.memory.model_config import ModelConfig
from allranks.planning.memory.weights import Shapes, TrainedWeights, Unit, Weight, output_projection, shared_mlp
from allranks.spec.records import keeps_product


class MicroBatch(msgspec.Struct, frozen=True):
    """One micro-batch as the model receives it. ``packed``: rows share sequences; attention gets a dense mask."""

    sequences: int
    length: int
    element: int  # bytes of one number in the dtype of compute
    device: str
    packed: bool = False
    within_rows: bool = False  # rows share sequences, and attention is computed within each row
    attention: str = "sdpa"
    float8: bool = False
    autocast: bool = False  # forward passes run under autocast
    stream_element: int | None = None  # bytes of one number of the residual stream, if not `element`
    adapter_element: int = 4  # bytes of one number of an adapter; PEFT makes new ones float32, whatever the base is
    plain_adapters: bool = False  # LoRA layers use PEFT's own forward

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def stream(self) -> int:
        return self.stream_element or self.element


class BlockActivations:
    """Tensors of one block for one micro-batch."""

    def __init__(self, config: ModelConfig, unit: Unit, what: TrainedWeights, batch: MicroBatch) -> None:
        self._c, self._unit, self._what, self._batch = config, unit, what, batch
        self._family = family_of(config.family)
        self._e, self._stream = batch.element, batch.stream
        self._trains_norms = any(w.kind == "norm" and what.is_trained(w) for w in unit.weights)
        self._by_name = {w.name.removesuffix(".weight"): w for w in unit.weights}
        self._plain_adapters = batch.plain_adapters or self._family.conv1d

    def kept(self) -> int:
        """Return the bytes that backward needs from this block, including its input."""
        if self._c.family == MLP:
            return self._batch.tokens * self._linears()
        mlp = self._experts() if self._unit.kind == "moe" else self._dense(self._family.mlp, self._c.intermediate)
        per_token = self._norms() + self._attention() + mlp
        if self._c.dropout:  # the masks before each residual addition
            per_token += 2 * self._c.hidden * (self._e if self._batch.device == "cpu" else 1)
        return self._batch.tokens * per_token + self._attention_matrices()

    def products(self) -> int:
        """Return output bytes of matrix products and attention that selective recomputation keeps beside the input."""
        c, e, b = self._c, self._e, self._batch
        per_token = 0
        for weight in self._unit.weights:
            if weight.kind == "linear":
                out, into = weight.shape
                per_token += out * e + self._adapter_products(weight, into, out)
        if c.family != MLP:
            attention_element = 4 if self._plain_attention() else e
            fused = b.attention != "eager" and attention_element == e
            per_token += (c.heads * c.head_dim * e + c.heads * 4) if fused else 0
        adapted = any(self._what.has_lora(w) for w in self._fused())  # then they are one operation
        if self._unit.kind == "moe" and not adapted:
            per_token += c.experts_per_token * (2 * c.expert_intermediate + c.hidden) * e
        return b.tokens * per_token

    def _adapter_products(self, weight: Weight, into: int, out: int) -> int:
        """Return kept bytes per token of an adapter's products; the second is the layer's, except in PEFT's forward."""
        r, own = self._what.r, self._batch.adapter_element
        if not self._what.has_lora(weight):
            return 0
        if self._plain_adapters:
            return (r * keeps_product(into, r) + out * keeps_product(r, out)) * own
        return r * keeps_product(into, r) * self._e

    def _linears(self) -> int:
        """Return the inputs that linear layers and activation functions keep."""
        sizes = [w.shape for w in self._unit.weights if w.kind == "linear"]
        gelus = len(sizes) if self._c.wide else len(sizes) - 1
        return self._e * (sum(into for _, into in sizes) + gelus * self._c.intermediate)

    def passing(self) -> int:
        """Return the peak of backward's temporary tensors: gradients of the widest tensors."""
        c = self._c
        inner = max(c.intermediate, c.expert_intermediate * c.experts_per_token, c.heads * c.head_dim)
        gated = 2 if self._family.gated else 1
        return self._batch.tokens * (gated * inner * self._e + c.hidden * self._stream)

    def _norms(self) -> int:
        """Return what the norms keep, without their outputs, which the following linear layers keep."""
        f = self._family
        states = 1 if f.parallel else len(f.norms)  # of the residual stream; each is kept once
        after = self._stream if f.encoder else self._e  # an encoder's norms follow the residual addition
        kept_before, kept_after = (f.norm.kept(element, self._trains_norms) for element in (self._stream, after))
        return self._c.hidden * (states * kept_before + len(f.norms_after) * kept_after)

    def _attention(self) -> int:
        c, e, f = self._c, self._e, self._family
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        keys = 2 * (q if self._repeats_keys() else kv)
        total = (q + keys) * (4 if self._plain_attention() else e)
        total += q * e + (0 if self._plain_attention() else c.heads * 4)  # the output, and the softmax's sums
        *readers, output = f.attention
        if len(readers) == 1 and f.rotary and not self._repeats_keys():
            total += (q + kv) * e  # the values are a view of the three together
        if c.qk_norm:
            total += (q + kv) * f.norm.kept(e, self._trains_norms)
        if self._reads_norm_of_attention():
            readers += f.mlp[:-1]
        output_is_kept = not self._what.lora if f.encoder else not f.joined or self._batch.within_rows
        total += self._inputs(dict.fromkeys(readers, c.hidden), of_stream=True)
        return total + self._inputs({output: q}, kept_anyway=output_is_kept)

    def _plain_attention(self) -> bool:
        """Return whether attention is products and a softmax in float32: CPUs have no fused kernel with dropout."""
        return bool(self._c.attention_dropout) and self._batch.device == "cpu"

    def _reads_norm_of_attention(self) -> bool:
        """Return whether the MLP reads the same tensor as attention."""
        return self._family.parallel and len(self._family.norms) == 1

    def _repeats_keys(self) -> bool:
        """Return whether attention copies the keys for every group of queries: for a mask, or in float32 on a GPU."""
        b = self._batch
        copied = b.packed or (b.device == "cuda" and b.element == 4 and b.attention == "sdpa")
        return copied and self._c.heads != self._c.kv_heads

    def _dense(self, names: Sequence[str], inner: int, *, beside: Sequence[str] = ()) -> int:
        """Return what an MLP keeps per token.

        Args:
            names: of its layers.
            beside: other layers that read its input.
        """
        *readers, output = names
        keeps_output = not self._family.gated and self._c.activation == KEEPS_OUTPUT
        gated = 1 if self._family.gated else 0  # the gate's values come beside, and its activation is kept, too
        of_function = 1 if gated else ACTIVATION_TENSORS.get(self._c.activation, 1)
        total = (of_function + 2 * gated) * inner * self._e + self._inputs({output: inner}, kept_anyway=keeps_output)
        if self._reads_norm_of_attention():
            return total
        return total + self._inputs(dict.fromkeys((*readers, *beside), self._c.hidden), of_stream=True)

    def _experts(self) -> int:
        """Return what fused experts (grouped matrix products) keep: each token once per selected expert."""
        c, e = self._c, self._e
        fused = self._fused()
        keep_inputs = any(self._what.is_trained(w) or self._what.has_lora(w) for w in fused)
        kept = (4 if keep_inputs else 3) * c.expert_intermediate + (2 if keep_inputs else 1) * c.hidden
        kept += sum(self._what.rank_of(w) for w in fused)
        router = 4 * c.experts + c.experts_per_token * 8 * 5  # indices that sort tokens by expert and back
        return c.experts_per_token * kept * e + router + self._read_by_all_tokens()

    def _fused(self) -> list[Weight]:
        return [w for w in self._unit.weights if w.kind == "experts"]

    def _read_by_all_tokens(self) -> int:
        """Return what the router and shared experts keep per token."""
        c, experts = self._c, self._family.experts
        assert experts is not None
        total = 4 * c.hidden if experts.router_float32 and self._e == 2 else 0
        readers = [] if experts.router_float32 else ["mlp.gate"]
        if not c.shared_intermediate:
            return total + self._inputs(dict.fromkeys(readers, c.hidden), of_stream=True)
        if experts.shared_gate:
            readers.append(experts.shared_gate)
            total += c.hidden * self._e  # the output that the gate scales
        return total + self._dense(shared_mlp(experts), c.shared_intermediate, beside=readers)

    def _inputs(self, layers: dict[str, int], *, of_stream: bool = False, kept_anyway: bool = False) -> int:
        """Return bytes per token of the inputs that linear layers keep; all `layers` share one input.

        Args:
            of_stream: the input comes from the residual stream through a norm, in its dtype.
            kept_anyway: the previous operation already keeps the same tensor.
        """
        e, what, total, shared = self._e, self._what, 0, False
        cast = of_stream and self._stream != e  # by autocast, for each layer
        adapted = {name: width for name, width in layers.items() if what.has_lora(self._by_name[name])}
        for name, width in layers.items():
            if what.is_trained(self._by_name[name]):
                if cast:
                    total += width * e
                else:
                    shared = True
        if self._plain_adapters:
            return total + self._inputs_of_peft(adapted, max(layers.values()), shared=shared, kept_anyway=kept_anyway)
        if adapted:
            dropout = dropout_bytes(what.dropout, self._batch.device)
            total += sum(what.r * e + round(width * dropout) for width in adapted.values())
            if cast:
                total += max(adapted.values()) * e  # once for all of them
            else:
                shared = True
        return total + (max(layers.values()) * e if shared and not kept_anyway else 0)

    def _inputs_of_peft(self, adapted: dict[str, int], width_of_all: int, *, shared: bool, kept_anyway: bool) -> int:
        """Return what PEFT's own forward keeps per token; `shared`: another layer keeps the common input."""
        e, what, total = self._e, self._what, 0
        own, autocast = self._batch.adapter_element, self._batch.autocast
        for width in adapted.values():
            total += what.r * (e if autocast else own)
            total += round(width * dropout_bytes(what.dropout, self._batch.device))
            if autocast:
                total += width * e  # the input in the adapter's dtype, cast back
            elif what.dropout or own != e:
                total += width * own  # what dropout leaves of the input, or the input in the adapter's dtype
            else:
                shared = True
        return total + (width_of_all * e if shared and not kept_anyway else 0)

    def _attention_matrices(self) -> int:
        """Return the bytes of the length x length matrices that attention keeps."""
        c, b = self._c, self._batch
        square = b.sequences * b.length * b.length
        if b.attention == "eager":
            return square * c.heads * (b.element + 4)
        if self._plain_attention():  # softmax, mask, and their product
            return 3 * square * c.heads * 4  # always in float32
        return square * b.element if b.packed else 0


def kept_after_blocks(model: Shapes, what: TrainedWeights, batch: MicroBatch) -> int:
    """Return what the last norm keeps, and the gradient of the output projection's input, computed with the loss."""
    c, e = model.config, batch.element
    if c.family in (*ENCODERS, MLP):
        return batch.sequences * batch.length * c.hidden * e
    norm = family_of(c.family).norm.kept(batch.stream, what.is_trained(model.behind[0]))
    return batch.tokens * c.hidden * (norm + e)


INDEXED_DROPOUT = 0.1
"""Highest probability at which, on a CPU, adapter dropout keeps the positions it drops, not a byte per element."""


def dropout_bytes(p: float, device: str) -> float:
    """Return the bytes per element with which LoRA layers keep for backward what dropout drops."""
    if device == "cpu" and p <= INDEXED_DROPOUT:
        return 8 * p
    return 1.0 if p else 0.0


LOSS_CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
"""Bytes of float32 logits that exist at a time."""
MIN_LOSS_CHUNK = 64


def loss_chunk_tokens(vocabulary: int, device: str) -> int:
    """Return for how many tokens the output projection and the loss are computed at a time."""
    return max(MIN_LOSS_CHUNK, LOSS_CHUNK_BYTES.get(device, LOSS_CHUNK_BYTES["cuda"]) // (4 * vocabulary))


def probabilities_in_place(element: int, device: str) -> bool:
    """Return whether the loss writes probabilities over logits of `element` bytes."""
    return element == 4 and device == "cpu"


def logits_bytes(model: Shapes, batch: MicroBatch) -> int:
    """Return bytes of the logits that exist at a time, in the dtype of compute and float32, and log-probabilities.

    The logits' gradient overwrites their log-probabilities, and probabilities may overwrite the logits: no more memory.
    """
    c = model.config
    if c.family in (*ENCODERS, MLP) or c.labels:
        return 0
    tokens = min(batch.tokens, loss_chunk_tokens(c.vocab_size, batch.device))
    each = 4 if probabilities_in_place(batch.element, batch.device) else 8
    return tokens * c.vocab_size * (each + (batch.element if batch.element != 4 else 0))


def loss_bytes(model: Shapes, what: TrainedWeights, batch: MicroBatch) -> tuple[int, int]:
    """Return bytes, during the loss only, of hidden states and of the output projection's float32 weight gradient.

    Hidden states: the projection's input and the copy of those that are scored. The gradient becomes the weight's.
    """
    head = output_projection(model)
    if head is None or model.config.labels:
        return 0, 0
    gradient = 4 * head.numel if what.is_trained(head) else 0
    return 2 * batch.tokens * model.config.hidden * batch.element, gradient
