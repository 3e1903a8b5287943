"""Read and check a model's config: integers in a plausible range, or a message that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from allranks.errors import SpecError
from allranks.utils.text import nearest_name

MAX_SIZES = {"layers": 2_000, "vocab_size": 20_000_000}
MAX_SIZE = 1_000_000  # limit of every other size: far above any real model


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that determine memory, under the same names for all model families."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    tied: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    positions: int = 0
    token_types: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    qk_norm: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    labels: int = 0
    wide: bool = False
    """True for an ``mlp:`` model whose inner layers are all wide."""


class ConfigKeys(msgspec.Struct, frozen=True):
    """Key names of a model family, with the defaults of transformers' config classes."""

    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    intermediate: str = "intermediate_size"
    positions: str = "max_position_embeddings"
    intermediate_times: int = 0  # multiple of the hidden size, if the config may omit it
    tied: bool = False
    moe: bool = False
    attention_bias: bool | None = None  # None: the key attention_bias decides
    qk_norm: bool = False
    dropout: str = ""
    attention_dropout: str = "attention_dropout"
    learned_positions: bool = False
    kv_heads_key: bool = True


_BERT = ConfigKeys(
    tied=True,
    attention_bias=True,
    dropout="hidden_dropout_prob",
    attention_dropout="attention_probs_dropout_prob",
    learned_positions=True,
    kv_heads_key=False,
)
FAMILIES: dict[str, ConfigKeys] = {
    "llama": ConfigKeys(),
    "mistral": ConfigKeys(attention_bias=False),
    "qwen2": ConfigKeys(attention_bias=True),
    "qwen3": ConfigKeys(qk_norm=True),
    "gemma": ConfigKeys(tied=True),
    "phi3": ConfigKeys(attention_bias=False),
    "smollm3": ConfigKeys(tied=True),
    "mixtral": ConfigKeys(attention_bias=False, moe=True),
    "qwen3_moe": ConfigKeys(qk_norm=True, moe=True),
    "glm4_moe": ConfigKeys(moe=True),
    "gpt2": ConfigKeys(
        hidden="n_embd",
        layers="n_layer",
        heads="n_head",
        intermediate="n_inner",
        positions="n_positions",
        intermediate_times=4,
        tied=True,
        attention_bias=True,
        dropout="resid_pdrop",
        attention_dropout="attn_pdrop",
        learned_positions=True,
        kv_heads_key=False,
    ),
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": ConfigKeys(
        hidden="dim",
        layers="n_layers",
        heads="n_heads",
        intermediate="hidden_dim",
        tied=True,
        attention_bias=True,
        dropout="dropout",
        learned_positions=True,
        kv_heads_key=False,
    ),
}
ENCODERS = ("bert", "roberta", "distilbert")
MLP = "mlp"


class UnknownFamily(Exception):
    """The config is valid, but allranks does not know the shapes of this model family."""


def read_model_config(raw: Mapping[str, Any], where: str, *, labels: int = 0) -> ModelConfig:
    """Return the sizes in a config as transformers writes it.

    Raises:
        SpecError: a size is missing, not an integer or out of range; the message names `where` and every such key.
        UnknownFamily: the model family is unknown.
    """
    family = raw.get("model_type")
    if not isinstance(family, str):
        raise SpecError(f"{where}: model_type is {_shown(family)}; it must be the model type")
    if family not in FAMILIES:
        near = nearest_name(family, FAMILIES, 0.9)
        raise UnknownFamily(family + (f" (did you mean {near}?)" if near else ""))
    reader = _Reader(raw, where, FAMILIES[family])
    config = reader.config(family, labels)
    if reader.problems:
        raise SpecError(f"{where}: " + "; ".join(reader.problems))
    return config


class _Reader:
    """Reader of one config that collects all problems for one message."""

    def __init__(self, raw: Mapping[str, Any], where: str, names: ConfigKeys) -> None:
        self._raw, self._where, self._names = raw, where, names
        self.problems: list[str] = []

    def config(self, family: str, labels: int) -> ModelConfig:
        n = self._names
        hidden, heads = self._size(n.hidden), self._size(n.heads)
        vocab = self._size("vocab_size", MAX_SIZES["vocab_size"])
        default_inner = hidden * n.intermediate_times or None
        kv_heads = self._size("num_key_value_heads", default=heads) if n.kv_heads_key else heads
        found = ModelConfig(
            family=family,
            hidden=hidden,
            layers=self._size(n.layers, MAX_SIZES["layers"]),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self._size("head_dim", default=max(1, hidden // heads))
            if n.kv_heads_key
            else max(1, hidden // heads),
            intermediate=self._size(n.intermediate, default=default_inner),
            vocab_size=vocab,
            tied=self._flag("tie_word_embeddings", n.tied),
            attention_bias=self._flag("attention_bias", False) if n.attention_bias is None else n.attention_bias,
            mlp_bias=self._flag("mlp_bias", False),
            positions=self._size(n.positions) if n.learned_positions else 0,
            token_types=self._size("type_vocab_size", default=2) if family in ("bert", "roberta") else 0,
            qk_norm=n.qk_norm or self._flag("use_qk_norm", False),
            dropout=self._share(n.dropout, 0.1) if n.dropout else 0.0,
            attention_dropout=self._share(n.attention_dropout, 0.1 if n.dropout else 0.0),
            labels=labels,
            **(self._experts(family) if n.moe else {}),
        )
        if heads % kv_heads:
            self.problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        return found

    def _experts(self, family: str) -> dict[str, Any]:
        if family == "mixtral":
            return {
                "experts": self._size("num_local_experts", default=8),
                "experts_per_token": self._size("num_experts_per_tok", default=2),
                "expert_intermediate": self._size("intermediate_size"),
            }
        key = "n_routed_experts" if family == "glm4_moe" else "num_experts"
        key = key if key in self._raw else "num_local_experts" if "num_local_experts" in self._raw else key
        inner = self._size("moe_intermediate_size")
        shared = self._size("n_shared_experts", default=1, least=0) if family == "glm4_moe" else 0
        return {
            "experts": self._size(key),
            "experts_per_token": self._size("num_experts_per_tok"),
            "expert_intermediate": inner,
            "shared_intermediate": inner * shared,
            "dense_layers": self._size("first_k_dense_replace", default=1, least=0) if family == "glm4_moe" else 0,
        }

    def _size(self, key: str, limit: int = MAX_SIZE, *, default: int | None = None, least: int = 1) -> int:
        value = self._raw.get(key)
        if value is None:
            if default is None:
                self.problems.append(f"{key} is missing")
            return default or least
        if isinstance(value, bool) or not isinstance(value, int):
            self.problems.append(f"{key} is {_shown(value)}, expected an integer")
        elif not least <= value <= limit:
            self.problems.append(f"{key} is {_shown(value)}; it must be from {least} to {limit}")
        else:
            return value
        return max(least, 1)

    def _flag(self, key: str, default: bool) -> bool:
        value = self._raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{key} is {_shown(value)}, expected true or false")
        return value is True

    def _share(self, key: str, default: float) -> float:
        value = self._raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            self.problems.append(f"{key} is {_shown(value)}, expected a number from 0 to 1")
            return default
        return float(value)


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
