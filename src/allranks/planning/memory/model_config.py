"""Find a model's config without network access, and check its sizes.

It is built in, in a folder, in the hub's cache, or in a table of well-known models (known_models.json). Sizes are
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
from allranks.spec.models import DEFAULT_VOCAB, MlpShape, is_mlp, mlp_shape, tiny_defaults, tiny_family
from allranks.spec.records import ModelSpec, RunSpec
from allranks.utils.filesystem import hub_cache
from allranks.utils.inputs import read_json_object, read_text

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
        raise UnknownFamily(family)
    names = FAMILIES[family]
    for key, value in names.only.items():
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
        config = ModelConfig(
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
        return config

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
        if value is None and default is not None:
            return default or least
        if not isinstance(value, bool) and isinstance(value, int) and least <= value <= limit:
            return value
        self.problems.append(f"{key} is {_shown(value)}; it must be an integer from {least} to {limit}")
        return max(least, 1)

    def _flag(self, flag: Flag | bool) -> bool:
        if isinstance(flag, bool):
            return flag
        value = self._raw.get(flag.key)
        if not isinstance(value, bool | None):
            self.problems.append(f"{flag.key} is {_shown(value)}, expected true or false")
        return flag.default if value is None else value is True

    def _activation(self) -> str:
        value = self._raw.get(self._names.activation)
        return value if isinstance(value, str) else self._names.activation_default

    def _share(self, key: str, default: float) -> float:
        value = self._raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= 1:
            return float(value)
        self.problems.append(f"{key} is {_shown(value)}, expected a number from 0 to 1")
        return default


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


KNOWN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "known_models.json").read_text())
"""Configs of well-known models by hub name in lower case, so that `plan` works before a download."""
_SHORT = {"gpt2": "openai-community/gpt2", "bert-base-uncased": "google-bert/bert-base-uncased"}
_SHORT |= {f"gpt2-{size}": f"openai-community/gpt2-{size}" for size in ("medium", "large", "xl")}


def known_config(name: str) -> dict[str, Any] | None:
    """Return the config of a hub name (any case), None if unknown. Fine-tuned models have the sizes of their base."""
    low = name.lower()
    low = _SHORT.get(low, low)
    return KNOWN.get(low) or KNOWN.get(low.removesuffix("-instruct").replace("-chat-hf", "-hf"))


MAX_CONFIG_BYTES = 4 << 20


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model's raw config and its files' folder, None if the model is built from the spec or known by name only."""

    config: Mapping[str, Any]
    folder: Path | None = None
    where: str
    """The model, for messages."""
    source: str
    """Where the config is from."""


def find_files(spec: RunSpec) -> ModelFiles | None:
    """Return the config of ``spec.model``; None for a user's own script, an ``mlp:`` model, and an unknown hub model
    that is not in the cache.

    Raises:
        SpecError: config.json cannot be read.
    """
    model = spec.model
    if model is None or is_mlp(model.name):
        return None
    where = f"model {model.name}"
    if model.name.startswith("tiny:"):
        config = {
            "model_type": tiny_family(model.name),
            "vocab_size": DEFAULT_VOCAB,
            **tiny_defaults(model.name),
            **model.config,
        }
        return ModelFiles(config=config, where=where, source="built from the spec")
    local = Path(model.name).expanduser()
    path = local / "config.json" if local.is_dir() else _cached_config(model, spec.cluster.cache)
    if path is None:
        known = known_config(model.name)
        if known is None:
            return None
        return ModelFiles(config=known, where=where, source="the table of well-known models")
    raw = read_json_object(path, MAX_CONFIG_BYTES, "model.name")
    nested = raw.get("text_config")  # models of text and images keep the sizes of the language model there
    config = {**raw, **nested, "model_type": raw.get("model_type")} if isinstance(nested, dict) else raw
    source = "the folder's config.json" if local.is_dir() else "its config.json in the cache"
    return ModelFiles(config=config, folder=path.parent, where=where, source=source)


def _cached_config(model: ModelSpec, cache: str | None) -> Path | None:
    """Return the config.json of a hub model from this machine's cache, if it is there."""
    folder = hub_cache(cache) / ("models--" + model.name.replace("/", "--"))
    try:
        wanted = model.revision or "main"
        ref = folder / "refs" / wanted
        commit = read_text(ref, 4096).strip() if ref.is_file() else wanted
        path = folder / "snapshots" / commit / "config.json"
        return path if path.is_file() else None
    except (OSError, ValueError):
        return None


class ConfigSource(msgspec.Struct, frozen=True, kw_only=True):
    """A config and where it was found; or None and the reason."""

    config: ModelConfig | None
    source: str
    unknown: str | None = None


def find_config(spec: RunSpec) -> ConfigSource:
    """Return the sizes of ``spec.model``.

    Raises:
        SpecError: the config is invalid; the message names file and keys.
    """
    model = spec.model
    if model is None:
        return ConfigSource(config=None, source="", unknown="the model of a user's own script is unknown")
    if is_mlp(model.name):
        return ConfigSource(config=_of_mlp(mlp_shape(model.name, model.config)), source="built from the spec")
    files = find_files(spec)
    if files is None:
        unknown = f"the config of {model.name} is neither in this machine's cache nor in the table of well-known models"
        return ConfigSource(config=None, source="", unknown=unknown)
    classes = spec.data is not None and spec.data.template == "classification"
    labels = 2 if classes or files.config.get("model_type") in ENCODERS else 0
    try:
        return ConfigSource(
            config=read_model_config(files.config, f"{files.where}, {files.source}", labels=labels), source=files.source
        )
    except UnknownFamily as kind:
        unknown = f"allranks does not know the shapes of a {str(kind)[:60]} model"
        return ConfigSource(config=None, source=files.source, unknown=unknown)


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
