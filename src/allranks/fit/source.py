"""Where a model's config comes from: built in, a folder, the hub's cache, or the table of well-known ones. Reads files, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from allranks.caches import hub_cache
from allranks.errors import SpecError
from allranks.fit.config import ENCODERS, MLP, ModelConfig, UnknownFamily, read
from allranks.fit.known import known_config
from allranks.mlp import MlpShape, is_mlp, mlp_shape
from allranks.spec.records import ModelSpec, RunSpec
from allranks.train.tiny import family, plain_values

MAX_BYTES = 4 << 20
_TINY_DEFAULTS: dict[str, dict[str, Any]] = {"bert": {"type_vocab_size": 2}}


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A config and where it was found; or None, and why not."""

    config: ModelConfig | None
    source: str
    unknown: str | None = None


def find(spec: RunSpec) -> Found:
    """The config of ``spec.model``.

    Raises:
        SpecError: a config that was found is broken; names file and keys.
    """
    model = spec.model
    if model is None:
        return Found(config=None, source="", unknown="a script of the user's own: its model is not known")
    labels = 2 if spec.data is not None and spec.data.template == "classification" else 0
    if is_mlp(model.name):
        return Found(config=_of_mlp(mlp_shape(model.name, model.config)), source="built from the spec")
    if model.name.startswith("tiny:"):
        raw = {
            "model_type": family(model.name),
            **plain_values(model.name),
            **_TINY_DEFAULTS.get(family(model.name), {}),
        }
        raw |= {"vocab_size": _default_vocab(), **model.config}
        return _read(raw, f"model {model.name} with model.config", "built from the spec", 0)
    return _of_files(spec, model, labels)


def _of_files(spec: RunSpec, model: ModelSpec, labels: int) -> Found:
    folder = Path(model.name).expanduser()
    if folder.is_dir():
        return _read(
            _json(folder / "config.json"), f"model.name {folder / 'config.json'}", "the folder's config.json", labels
        )
    cached = cached_config(model.name, model.revision, spec.cluster.cache)
    if cached is not None:
        return _read(_json(cached), f"model.name {model.name}: {cached}", "its config.json in the cache", labels)
    known = known_config(model.name)
    if known is not None:
        return _read(known, model.name, "the table of well-known models", labels)
    return Found(
        config=None,
        source="",
        unknown=f"the config of {model.name} is not in the cache here, and it is not among the well-known models",
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
    from allranks.train.data.tokenizer import DEFAULT_VOCAB

    return DEFAULT_VOCAB


def _read(raw: dict[str, Any], where: str, source: str, labels: int) -> Found:
    if raw.get("model_type") in ENCODERS:
        labels = labels or 2
    try:
        return Found(config=read(raw, where, labels=labels), source=source)
    except UnknownFamily as kind:
        return Found(config=None, source=source, unknown=f"the shapes of a {str(kind)[:60]} are not known here")


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SpecError(f"model.name: {path} is larger than {MAX_BYTES >> 20} MiB; this is no model's config")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"model.name: {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"model.name: {path} is not JSON that can be read: {str(error)[:120]}") from None
    if not isinstance(found, dict):
        raise SpecError(f"model.name: {path} holds a {type(found).__name__}, not an object of keys")
    return found


def cached_config(name: str, revision: str | None, cache: str | None) -> Path | None:
    """The config.json of a hub model, if the cache on this machine holds it."""
    folder = hub_cache(cache) / ("models--" + name.replace("/", "--"))
    try:
        wanted = revision or "main"
        ref = folder / "refs" / wanted
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else wanted
        path = folder / "snapshots" / commit / "config.json"
        return path if path.is_file() else None
    except (OSError, ValueError):
        return None
