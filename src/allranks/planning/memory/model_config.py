"""Find a model's config without network access, and check its sizes.

It is built in, in a folder, in the hub's cache, or in a table of well-known models, so that `plan` works before a download. Sizes are
integers in a plausible range; otherwise a message names the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import SpecError
from allranks.planning.memory.families import ENCODERS, FAMILIES, MLP, Experts, Family, Flag
from allranks.spec.models import MlpShape, is_mlp, mlp_shape, tiny_defaults, tiny_family
from allranks.spec.records import ModelSpec, RunSpec
from allranks.utils.filesystem import hub_cache
from allranks.utils.inputs import FileTooLarge, read_text
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
    embedding: int = 0
    """Size of the embedding, if it differs from the hidden size."""
    activation: str = ""
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
    names = FAMILIES[family]
    for key, value in names.only:
        if raw.get(key) not in (None, value):
            raise UnknownFamily(f"{family} ({key}: {_shown(raw[key])})")
    reader = _Reader(raw, where, names)
    config = reader.config(family, labels)
    if reader.problems:
        raise SpecError(f"{where}: " + "; ".join(reader.problems))
    return config


class _Reader:
    """Reader of one config that collects all problems for one message."""

    def __init__(self, raw: Mapping[str, Any], where: str, names: Family) -> None:
        self._raw, self._where, self._names = raw, where, names
        self.problems: list[str] = []

    def config(self, family: str, labels: int) -> ModelConfig:
        n = self._names
        hidden, heads = self._size(n.hidden), self._size(n.heads)
        vocab = self._size("vocab_size", MAX_SIZES["vocab_size"])
        default_inner = hidden * n.intermediate_times or None
        kv_heads = self._size(n.kv_heads, default=heads) if n.kv_heads else heads
        head_dim = max(1, hidden // heads)
        found = ModelConfig(
            family=family,
            hidden=hidden,
            layers=self._size(n.layers, MAX_SIZES["layers"]),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self._size(n.head_dim, default=head_dim) if n.head_dim else head_dim,
            intermediate=self._size(n.intermediate, default=default_inner),
            vocab_size=vocab,
            tied=self._flag(Flag("tie_word_embeddings", n.tied)),
            attention_bias=self._flag(n.attention_bias),
            mlp_bias=self._flag(n.mlp_bias),
            positions=self._size(n.positions) + n.extra_positions if n.positions else 0,
            token_types=self._size(n.token_types, default=2) if n.token_types else 0,
            embedding=self._size(n.embedding, default=n.embedding_default) if n.embedding else 0,
            activation=self._activation(),
            qk_norm=self._flag(n.qk_norm),
            dropout=self._share(n.dropout, n.dropout_default) if n.dropout else 0.0,
            attention_dropout=self._share(n.attention_dropout, n.attention_dropout_default),
            labels=labels,
            **(self._experts(n.experts) if n.experts else {}),
        )
        if heads % kv_heads:
            self.problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        return found

    def _experts(self, n: Experts) -> dict[str, Any]:
        other_name = n.count not in self._raw and "num_local_experts" in self._raw
        inner = self._size(n.intermediate)
        shared = inner * self._size(n.shared_count, default=1, least=0) if n.shared_count else 0
        return {
            "experts": self._size("num_local_experts" if other_name else n.count, default=n.count_default),
            "experts_per_token": self._size("num_experts_per_tok", default=n.per_token_default),
            "expert_intermediate": inner,
            "shared_intermediate": self._size(n.shared_intermediate) if n.shared_intermediate else shared,
            "dense_layers": self._size(n.dense_layers, default=1, least=0) if n.dense_layers else 0,
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

    def _flag(self, flag: Flag | bool) -> bool:
        if isinstance(flag, bool):
            return flag
        value = self._raw.get(flag.key)
        if value is None:
            return flag.default
        if not isinstance(value, bool):
            self.problems.append(f"{flag.key} is {_shown(value)}, expected true or false")
        return value is True

    def _activation(self) -> str:
        value = self._raw.get(self._names.activation)
        return value if isinstance(value, str) else self._names.activation_default

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


def _llama(
    h: int,
    i: int,
    layers: int,
    heads: int,
    kv: int,
    vocab: int,
    *,
    tied: bool = False,
    kind: str = "llama",
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": h,
        "intermediate_size": i,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **more,
    }


def _gpt2(h: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": h,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


def _bert(
    h: int, i: int, layers: int, heads: int, vocab: int, kind: str = "bert", positions: int = 512, types: int = 2
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": h,
        "intermediate_size": i,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "type_vocab_size": types,
    }


KNOWN: dict[str, dict[str, Any]] = {
    "mistralai/mistral-7b-v0.1": _llama(4096, 14336, 32, 32, 8, 32000, kind="mistral"),
    "mistralai/mistral-7b-instruct-v0.2": _llama(4096, 14336, 32, 32, 8, 32000, kind="mistral"),
    "mistralai/mistral-7b-v0.3": _llama(4096, 14336, 32, 32, 8, 32768, kind="mistral"),
    "mistralai/mistral-7b-instruct-v0.3": _llama(4096, 14336, 32, 32, 8, 32768, kind="mistral"),
    "mistralai/mixtral-8x7b-v0.1": _llama(4096, 14336, 32, 32, 8, 32000, kind="mixtral", num_local_experts=8, num_experts_per_tok=2),
    "meta-llama/llama-2-7b-hf": _llama(4096, 11008, 32, 32, 32, 32000),
    "meta-llama/llama-2-13b-hf": _llama(5120, 13824, 40, 40, 40, 32000),
    "meta-llama/llama-2-70b-hf": _llama(8192, 28672, 80, 64, 8, 32000),
    "meta-llama/llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "meta-llama/llama-3.1-8b-instruct": _llama(4096, 14336, 32, 32, 8, 128256),
    "meta-llama/meta-llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "meta-llama/llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "meta-llama/llama-3.3-70b-instruct": _llama(8192, 28672, 80, 64, 8, 128256),
    "meta-llama/llama-3.1-405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "meta-llama/llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, tied=True),
    "meta-llama/llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, tied=True, head_dim=128),
    "tinyllama/tinyllama-1.1b-chat-v1.0": _llama(2048, 5632, 22, 32, 4, 32000),
    "huggingfacetb/smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, tied=True),
    "huggingfacetb/smollm2-360m": _llama(960, 2560, 32, 15, 5, 49152, tied=True),
    "huggingfacetb/smollm2-1.7b": _llama(2048, 8192, 24, 32, 32, 49152, tied=True),
    "qwen/qwen2.5-0.5b": _llama(896, 4864, 24, 14, 2, 151936, tied=True, kind="qwen2"),
    "qwen/qwen2.5-1.5b": _llama(1536, 8960, 28, 12, 2, 151936, tied=True, kind="qwen2"),
    "qwen/qwen2.5-3b": _llama(2048, 11008, 36, 16, 2, 151936, tied=True, kind="qwen2"),
    "qwen/qwen2.5-7b": _llama(3584, 18944, 28, 28, 4, 152064, kind="qwen2"),
    "qwen/qwen2.5-14b": _llama(5120, 13824, 48, 40, 8, 152064, kind="qwen2"),
    "qwen/qwen2.5-32b": _llama(5120, 27648, 64, 40, 8, 152064, kind="qwen2"),
    "qwen/qwen2.5-72b": _llama(8192, 29568, 80, 64, 8, 152064, kind="qwen2"),
    "qwen/qwen3-0.6b": _llama(1024, 3072, 28, 16, 8, 151936, tied=True, kind="qwen3", head_dim=128),
    "qwen/qwen3-1.7b": _llama(2048, 6144, 28, 16, 8, 151936, tied=True, kind="qwen3", head_dim=128),
    "qwen/qwen3-4b": _llama(2560, 9728, 36, 32, 8, 151936, tied=True, kind="qwen3", head_dim=128),
    "qwen/qwen3-8b": _llama(4096, 12288, 36, 32, 8, 151936, kind="qwen3", head_dim=128),
    "qwen/qwen3-14b": _llama(5120, 17408, 40, 40, 8, 151936, kind="qwen3", head_dim=128),
    "qwen/qwen3-32b": _llama(5120, 25600, 64, 64, 8, 151936, kind="qwen3", head_dim=128),
    "microsoft/phi-3-mini-4k-instruct": _llama(3072, 8192, 32, 32, 32, 32064, kind="phi3"),
    "google/gemma-2b": _llama(2048, 16384, 18, 8, 1, 256000, tied=True, kind="gemma", head_dim=256),
    "zai-org/glm-4.5-air": _llama(
        4096, 10944, 46, 96, 8, 151552, kind="glm4_moe", head_dim=128, attention_bias=True, moe_intermediate_size=1408,
        n_routed_experts=128, num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=False,
    ),
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
    "google-bert/bert-base-uncased": _bert(768, 3072, 12, 12, 30522),
    "google-bert/bert-large-uncased": _bert(1024, 4096, 24, 16, 30522),
    "facebookai/roberta-base": _bert(768, 3072, 12, 12, 50265, "roberta", 514, 1),
    "distilbert/distilbert-base-uncased": {
        "model_type": "distilbert", "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12, "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
}  # fmt: skip
_SHORT = {"gpt2": "openai-community/gpt2", "bert-base-uncased": "google-bert/bert-base-uncased"}
_SHORT |= {f"gpt2-{size}": f"openai-community/gpt2-{size}" for size in ("medium", "large", "xl")}


def known_config(name: str) -> dict[str, Any] | None:
    """Return the config of a hub name (case-insensitive), or None if unknown. Fine-tuned models have the sizes of their base."""
    low = name.lower()
    low = _SHORT.get(low, low)
    return KNOWN.get(low) or KNOWN.get(low.removesuffix("-instruct").replace("-chat-hf", "-hf"))


MAX_CONFIG_BYTES = 4 << 20
_TINY_DEFAULTS: dict[str, dict[str, Any]] = {"bert": {"type_vocab_size": 2}}


class ConfigSource(msgspec.Struct, frozen=True, kw_only=True):
    """A config and where it was found; or None and the reason."""

    config: ModelConfig | None
    source: str
    unknown: str | None = None


def find_config(spec: RunSpec) -> ConfigSource:
    """Return the config of ``spec.model``.

    Raises:
        SpecError: the config is invalid; the message names file and keys.
    """
    model = spec.model
    if model is None:
        return ConfigSource(config=None, source="", unknown="the model of a user's own script is unknown")
    labels = 2 if spec.data is not None and spec.data.template == "classification" else 0
    if is_mlp(model.name):
        return ConfigSource(config=_of_mlp(mlp_shape(model.name, model.config)), source="built from the spec")
    if model.name.startswith("tiny:"):
        raw = {
            "model_type": tiny_family(model.name),
            **tiny_defaults(model.name),
            **_TINY_DEFAULTS.get(tiny_family(model.name), {}),
        }
        raw |= {"vocab_size": _default_vocab(), **model.config}
        return _read(raw, f"model {model.name} with model.config", "built from the spec", 0)
    return _of_files(spec, model, labels)


def _of_files(spec: RunSpec, model: ModelSpec, labels: int) -> ConfigSource:
    folder = model_folder(model, spec.cluster.cache)
    if folder is not None:
        path = folder / "config.json"
        local = folder == Path(model.name).expanduser()
        where = f"model.name {path}" if local else f"model.name {model.name}: {path}"
        return _read(
            read_config_file(path),
            where,
            "the folder's config.json" if local else "its config.json in the cache",
            labels,
        )
    known = known_config(model.name)
    if known is not None:
        return _read(known, model.name, "the table of well-known models", labels)
    return ConfigSource(
        config=None,
        source="",
        unknown=f"the config of {model.name} is neither in this machine's cache nor in the table of well-known models",
    )


def _of_mlp(shape: MlpShape) -> ModelConfig:
    return ModelConfig(
        family=MLP,
        hidden=shape.width,
        layers=shape.layers,
        heads=1,
        kv_heads=1,
        head_dim=shape.width,
        intermediate=shape.width * shape.expansion,
        vocab_size=0,
        tied=False,
        mlp_bias=True,
        wide=shape.shape == "wide",
    )


def _default_vocab() -> int:
    from allranks.spec.models import DEFAULT_VOCAB

    return DEFAULT_VOCAB


def _read(raw: dict[str, Any], where: str, source: str, labels: int) -> ConfigSource:
    if raw.get("model_type") in ENCODERS:
        labels = labels or 2
    try:
        return ConfigSource(config=read_model_config(raw, where, labels=labels), source=source)
    except UnknownFamily as kind:
        return ConfigSource(
            config=None, source=source, unknown=f"allranks does not know the shapes of a {str(kind)[:60]} model"
        )


def model_folder(model: ModelSpec, cache: str | None) -> Path | None:
    """Return the folder of a model's files on this machine: the folder that the spec names, or the hub cache's snapshot."""
    folder = Path(model.name).expanduser()
    if folder.is_dir():
        return folder
    cached = cached_config(model.name, model.revision, cache)
    return cached.parent if cached is not None else None


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the JSON object in a model's config.json.

    Raises:
        SpecError: it cannot be read, is not JSON, or not an object.
    """
    try:
        found = json.loads(read_text(path, MAX_CONFIG_BYTES))
    except FileTooLarge:
        raise SpecError(
            f"model.name: {path} is larger than {MAX_CONFIG_BYTES >> 20} MiB; this is not a model config"
        ) from None
    except OSError as error:
        raise SpecError(f"model.name: {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"model.name: {path} is not valid JSON: {str(error)[:120]}") from None
    if not isinstance(found, dict):
        raise SpecError(f"model.name: {path} expected a JSON object, found a {type(found).__name__}")
    return found


def cached_config(name: str, revision: str | None, cache: str | None) -> Path | None:
    """Return the config.json of a hub model from this machine's cache, if it is there."""
    folder = hub_cache(cache) / ("models--" + name.replace("/", "--"))
    try:
        wanted = revision or "main"
        ref = folder / "refs" / wanted
        commit = read_text(ref, 4096).strip() if ref.is_file() else wanted
        path = folder / "snapshots" / commit / "config.json"
        return path if path.is_file() else None
    except (OSError, ValueError):
        return None
