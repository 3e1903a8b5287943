"""Describe model types: how their configs name sizes, and how transformers builds and computes their blocks.

One entry of `FAMILIES` is all that the estimate needs of a type; tests compare each with transformers' models.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Flag(msgspec.Struct, frozen=True):
    """A key of a config that is true or false."""

    key: str
    default: bool = False


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """What a norm keeps for backward.

    ``float32``: tensors in float32 of its input's size; 0: its input. ``scales_float32``: the dtype of what its weight multiplies,
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


RMS = Norm()
RMS_SCALED_FLOAT32 = Norm(scales_float32=True)
LAYER = Norm(float32=0, bias=True)  # torch's own, in one operation
CENTERED = Norm(float32=2, scales_float32=True)  # the difference from the mean is computed twice

ACTIVATION_TENSORS = {"gelu_new": 4, "gelu_fast": 4, "gelu_python": 4}
"""Tensors that an activation function of several operations keeps, without its output; others keep their input."""
KEEPS_OUTPUT = "relu"  # instead of its input


class Experts(msgspec.Struct, frozen=True, kw_only=True):
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


class Family(msgspec.Struct, frozen=True, kw_only=True):
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
    only: tuple[tuple[str, Any], ...] = ()  # keys with another value than this make another kind of block: unknown

    encoder: bool = False
    embeddings: str = "embed_tokens"
    position_embeddings: str = ""
    attention: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    """Layers that read the sublayer's input, and the last one. One that reads: queries, keys and values are parts of its output."""
    mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    """The same of the MLP; if it is gated, one that reads computes gate and values."""
    gated: bool = True
    conv1d: bool = False
    """Its linear layers are transformers' ``Conv1D``."""
    rotary: bool = True
    joined: bool = False
    """Queries and keys are joined from a rotated and another part, which puts them, and the output of ``sdpa``, in another order."""
    norm: Norm = RMS
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


_QUERY = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FOUR_NORMS: dict[str, Any] = {
    "norms": ("input_layernorm", "pre_feedforward_layernorm"),
    "norms_after": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
_BERT: dict[str, Any] = {
    "encoder": True,
    "kv_heads": "",
    "head_dim": "",
    "positions": "max_position_embeddings",
    "tied": True,
    "attention_bias": True,
    "mlp_bias": True,
    "dropout": "hidden_dropout_prob",
    "dropout_default": 0.1,
    "attention_dropout": "attention_probs_dropout_prob",
    "attention_dropout_default": 0.1,
    "token_types": "type_vocab_size",
    "gated": False,
    "rotary": False,
    "norm": LAYER,
    "attention": ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    "mlp": ("intermediate.dense", "output.dense"),
    "norms": (),
    "norms_after": ("attention.output.LayerNorm", "output.LayerNorm"),
}
_ROBERTA: dict[str, Any] = {**_BERT, "pooler": "classifier.dense", "classifier": "classifier.out_proj"}
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(attention_bias=False),
    "granite": Family(),
    "olmo2": Family(
        norm=RMS_SCALED_FLOAT32,
        norms=(),
        norms_after=("post_attention_layernorm", "post_feedforward_layernorm"),
        qk_norm=True,
        norm_per_head=False,
    ),
    "qwen2": Family(attention_bias=True, output_bias=False),
    "qwen3": Family(qk_norm=True),
    "gemma": Family(tied=True, norm=RMS_SCALED_FLOAT32),
    "gemma3_text": Family(
        tied=True, norm=RMS_SCALED_FLOAT32, qk_norm=True, only=(("final_logit_softcapping", None),), **_FOUR_NORMS
    ),
    "phi3": Family(
        attention_bias=False,
        joined=True,
        attention=("self_attn.qkv_proj", "self_attn.o_proj"),
        mlp=("mlp.gate_up_proj", "mlp.down_proj"),
    ),
    "glm4": Family(
        attention_bias=Flag("attention_bias", True),
        output_bias=False,
        joined=True,
        mlp=("mlp.gate_up_proj", "mlp.down_proj"),
        norms_after=("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "smollm3": Family(tied=True),
    "cohere": Family(
        tied=True, norm=CENTERED, norms=("input_layernorm",), parallel=True, only=(("use_qk_norm", False),)
    ),
    "stablelm": Family(
        head_dim="",
        attention_bias=Flag("use_qkv_bias"),
        output_bias=False,
        joined=True,
        norm=LAYER,
        only=(("qk_layernorm", False), ("use_parallel_residual", False), ("hidden_dropout", 0)),
    ),
    "starcoder2": Family(
        tied=True,
        attention_bias=Flag("use_bias", True),
        mlp_bias=Flag("use_bias", True),
        dropout="residual_dropout",
        activation="hidden_act",
        activation_default="gelu_pytorch_tanh",
        gated=False,
        norm=LAYER,
        mlp=("mlp.c_fc", "mlp.c_proj"),
    ),
    "phi": Family(
        attention_bias=True,
        mlp_bias=True,
        head_bias=True,
        dropout="resid_pdrop",
        activation="hidden_act",
        activation_default="gelu_new",
        gated=False,
        joined=True,
        norm=LAYER,
        attention=(*_QUERY, "self_attn.dense"),
        mlp=("mlp.fc1", "mlp.fc2"),
        norms=("input_layernorm",),
        parallel=True,
        last_norm="final_layernorm",
        only=(("qk_layernorm", False),),
    ),
    "gpt_neox": Family(
        kv_heads="",
        head_dim="",
        attention_bias=Flag("attention_bias", True),
        mlp_bias=True,
        dropout="hidden_dropout",
        activation="hidden_act",
        activation_default="gelu",
        gated=False,
        joined=True,
        norm=LAYER,
        embeddings="embed_in",
        attention=("attention.query_key_value", "attention.dense"),
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        parallel=True,
        last_norm="final_layer_norm",
        only=(("use_parallel_residual", True),),
    ),
    "opt": Family(
        kv_heads="",
        head_dim="",
        intermediate="ffn_dim",
        positions="max_position_embeddings",
        extra_positions=2,
        tied=True,
        attention_bias=Flag("enable_bias", True),
        mlp_bias=Flag("enable_bias", True),
        dropout="dropout",
        dropout_default=0.1,
        activation="activation_function",
        activation_default="relu",
        gated=False,
        rotary=False,
        norm=LAYER,
        position_embeddings="embed_positions",
        attention=(*_QUERY, "self_attn.out_proj"),
        mlp=("fc1", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        last_norm="final_layer_norm",
        only=(
            ("do_layer_norm_before", True),
            ("_remove_final_layer_norm", False),
            ("layer_norm_elementwise_affine", True),
        ),
    ),
    "gpt2": Family(
        hidden="n_embd",
        layers="n_layer",
        heads="n_head",
        kv_heads="",
        head_dim="",
        intermediate="n_inner",
        intermediate_times=4,
        positions="n_positions",
        tied=True,
        attention_bias=True,
        mlp_bias=True,
        dropout="resid_pdrop",
        dropout_default=0.1,
        attention_dropout="attn_pdrop",
        attention_dropout_default=0.1,
        activation="activation_function",
        activation_default="gelu_new",
        gated=False,
        rotary=False,
        norm=LAYER,
        embeddings="wte",
        position_embeddings="wpe",
        conv1d=True,
        attention=("attn.c_attn", "attn.c_proj"),
        mlp=("mlp.c_fc", "mlp.c_proj"),
        norms=("ln_1", "ln_2"),
        last_norm="ln_f",
    ),
    "mixtral": Family(
        attention_bias=False,
        experts=Experts(
            count="num_local_experts", count_default=8, per_token_default=2, intermediate="intermediate_size"
        ),
    ),
    "olmoe": Family(
        qk_norm=True,
        norm_per_head=False,
        experts=Experts(count_default=64, per_token_default=8, intermediate="intermediate_size"),
    ),
    "qwen2_moe": Family(
        attention_bias=Flag("qkv_bias", True),
        output_bias=False,
        experts=Experts(
            shared_intermediate="shared_expert_intermediate_size",
            shared="mlp.shared_expert",
            shared_gate="mlp.shared_expert_gate",
            targets=False,
        ),
        only=(("decoder_sparse_step", 1), ("mlp_only_layers", [])),
    ),
    "qwen3_moe": Family(qk_norm=True, experts=Experts()),
    "glm4_moe": Family(
        output_bias=False,
        joined=True,
        experts=Experts(
            count="n_routed_experts",
            shared_count="n_shared_experts",
            shared="mlp.shared_experts",
            dense_layers="first_k_dense_replace",
            router_float32=True,
        ),
    ),
    "bert": Family(**_BERT, pooler="pooler.dense"),
    "roberta": Family(**_ROBERTA),
    "xlm-roberta": Family(**_ROBERTA),
    "electra": Family(**_ROBERTA, embedding="embedding_size", embedding_default=128),
    "distilbert": Family(
        **_BERT
        | {
            "hidden": "dim",
            "layers": "n_layers",
            "heads": "n_heads",
            "intermediate": "hidden_dim",
            "dropout": "dropout",
            "attention_dropout": "attention_dropout",
            "token_types": "",
            "attention": ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
            "mlp": ("ffn.lin1", "ffn.lin2"),
            "norms_after": ("sa_layer_norm", "output_layer_norm"),
            "pooler": "pre_classifier",
        }
    ),
}
ENCODERS = tuple(name for name, family in FAMILIES.items() if family.encoder)
MLP = "mlp"
_PERCEPTRON = Family(gated=False)


def family_of(name: str) -> Family:
    """Return the entry of a model type that is in `FAMILIES`, or of ``mlp:`` models."""
    return FAMILIES.get(name, _PERCEPTRON)
