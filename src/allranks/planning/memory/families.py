"""Describe model types: how their configs name sizes, and how transformers builds and computes their blocks.

One entry of families.json is all that the estimate needs of a type; tests compare each with transformers' models. It
has what differs from the defaults of `Family`, or from the type that ``like`` names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec


class Flag(msgspec.Struct, frozen=True, array_like=True):
    """A key of a config that is true or false, and its default; in families.json ``["key", true]``."""

    key: str
    default: bool = False


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """What a norm keeps for backward.

    ``float32``: tensors in float32 of its input's size; 0: its input. ``scales_float32``: the dtype of what its weight
    multiplies,
    which is kept if the weight is trained, is float32, and not the input's.
    """

    float32: int = 1
    scales_float32: bool = False
    bias: bool = False

    def kept(self, element: int, trained: bool) -> int:
        """Return bytes per element of its input, which has `element` bytes."""
        if not self.float32:
            return element
        return 4 * self.float32 + ((4 if self.scales_float32 else element) if trained else 0)


NORMS = {
    "rms": Norm(),
    "rms_scaled_float32": Norm(scales_float32=True),
    "layer": Norm(float32=0, bias=True),  # torch's own, in one operation
    "centered": Norm(float32=2, scales_float32=True),  # the difference from the mean is computed twice
}

ACTIVATION_TENSORS = {"gelu_new": 4, "gelu_fast": 4, "gelu_python": 4}
"""Tensors that an activation function of several operations keeps, without its output; others keep their input."""
KEEPS_OUTPUT = "relu"  # instead of its input


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a mixture of experts. An empty key: the type does not have it."""

    count: str = "num_experts"
    count_default: int | None = None
    per_token_default: int | None = None
    intermediate: str = "moe_intermediate_size"
    shared_count: str = ""
    shared_intermediate: str = ""
    shared: str = ""  # name of the experts that see every token
    shared_gate: str = ""  # name of the layer whose output scales theirs
    dense_layers: str = ""  # first layers without experts
    router_float32: bool = False  # the router computes in float32
    targets: bool = True  # PEFT applies names of projections to the fused experts, not to other layers


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model type: key names with the defaults of transformers' config classes, then names and order of its layers."""

    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"  # empty: as many as heads
    head_dim: str = "head_dim"  # empty: the hidden size divided by the heads
    intermediate: str = "intermediate_size"
    intermediate_times: int = 0  # multiple of the hidden size, if the config may omit it
    positions: str = ""  # learned ones
    extra_positions: int = 0
    token_types: str = ""
    embedding: str = ""  # size of the embedding, if it differs from the hidden size
    embedding_default: int = 0
    tied: bool = False
    attention_bias: Flag | bool = Flag("attention_bias")
    output_bias: bool = True  # the projection after attention has a bias, too
    mlp_bias: Flag | bool = Flag("mlp_bias")
    head_bias: bool = False
    qk_norm: Flag | bool = Flag("use_qk_norm")
    activation: str = ""  # key
    activation_default: str = "silu"
    dropout: str = ""
    dropout_default: float = 0.0
    attention_dropout: str = "attention_dropout"
    attention_dropout_default: float = 0.0
    experts: Experts | None = None
    only: dict[str, Any] = {}  # keys with another value than this make another kind of block: unknown

    encoder: bool = False
    embeddings: str = "embed_tokens"
    position_embeddings: str = ""
    attention: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    """Layers that read the sublayer's input, and the last one. If one reads, its output has queries, keys, values."""
    mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    """The same of the MLP; if it is gated, one that reads computes gate and values."""
    gated: bool = True
    conv1d: bool = False
    """Its linear layers are transformers' ``Conv1D``."""
    rotary: bool = True
    joined: bool = False
    """Queries and keys join a rotated and another part, which reorders them and the output of ``sdpa``."""
    norm_kind: str = msgspec.field(default="rms", name="norm")
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Before sublayers. One for both: they read the same tensor."""
    norms_after: tuple[str, ...] = ()
    """After sublayers, before the sum."""
    parallel: bool = False
    """Attention and MLP read the same residual state."""
    last_norm: str = "norm"
    norm_per_head: bool = True  # if queries and keys have a norm: its weight has the size of a head, not of all heads
    pooler: str = ""
    classifier: str = "classifier"

    @property
    def norm(self) -> Norm:
        """Return what its norms keep."""
        return NORMS[self.norm_kind]


def _load() -> dict[str, Family]:
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in json.loads((Path(__file__).parent / "families.json").read_text()).items():
        entries[name] = entries.get(entry.pop("like", ""), {}) | entry
    return msgspec.convert(entries, dict[str, Family])


FAMILIES = _load()
ENCODERS = tuple(name for name, family in FAMILIES.items() if family.encoder)
MLP = "mlp"
_PERCEPTRON = Family(gated=False)


def family_of(name: str) -> Family:
    """Return the entry of a model type that is in `FAMILIES`, or of ``mlp:`` models."""
    return FAMILIES.get(name, _PERCEPTRON)
