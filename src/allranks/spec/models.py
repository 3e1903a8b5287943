"""Describe the models that allranks builds itself, ``mlp:`` and ``tiny:``: families, layers and sizes. No torch.

``tiny:<family>`` is a small model with random weights, built from the family's config; nothing is downloaded.
``mlp:<width>x<layers>`` is a multilayer perceptron in one of two shapes (``model.config: {shape: ..., expansion: 4}``):

``blocks``  `layers` times width -> expansion x width -> width, with a GELU inside each pair and none between pairs (default).
``wide``    `layers` linear layers; the inner ones are expansion x width wide, with a GELU between any two.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from allranks.errors import SpecError
from allranks.spec.architectures import SUPPORTED, require_modality
from allranks.utils.text import did_you_mean, nearest_file_hint

MLP_PREFIX, NOISE_SOURCE = "mlp:", "builtin:noise"
_NAME = re.compile(r"mlp:(\d{1,6})x(\d{1,4})")


class MlpShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one ``mlp:`` model."""

    width: int
    layers: int
    shape: Literal["blocks", "wide"] = "blocks"
    expansion: int = 4

    def blocks(self) -> list[list[tuple[int, int]]]:
        """Return (inputs, outputs) of the linear layers, by block; every layer has a bias."""
        wide = self.width * self.expansion
        if self.shape == "blocks":
            return [[(self.width, wide), (wide, self.width)]] * self.layers
        ends = [self.width, *[wide] * (self.layers - 1), self.width]
        return [[pair] for pair in pairwise(ends)]

    @property
    def parameters(self) -> int:
        """Return the number of weights and biases."""
        return sum(into * out + out for block in self.blocks() for into, out in block)


def is_mlp(name: str) -> bool:
    """Return whether ``model.name`` is an ``mlp:`` model."""
    return name.startswith(MLP_PREFIX)


def mlp_shape(name: str, config: dict[str, Any]) -> MlpShape:
    """Return the sizes that ``model.name`` and ``model.config`` describe.

    Raises:
        SpecError: the name is malformed, a setting is unknown, or a size is invalid.
    """
    found = _NAME.fullmatch(name)
    if not found or 0 in (int(found[1]), int(found[2])):
        raise SpecError(f"model.name {name}: write mlp:<width>x<layers>, such as mlp:4096x6")
    known = ("shape", "expansion")
    for key in config:
        if key not in known:
            raise SpecError(f"model.config.{key}: unknown setting of {name} (known: {', '.join(known)})")
    try:
        shape = msgspec.convert({"width": int(found[1]), "layers": int(found[2]), **config}, MlpShape)
    except msgspec.ValidationError as error:
        raise SpecError(f"model.config: {error}") from None
    if shape.expansion < 1:
        raise SpecError(f"model.config.expansion is {shape.expansion}; it must be 1 or more")
    if shape.shape == "wide" and shape.layers < 2:
        raise SpecError(f"model.name {name}: shape wide needs at least 2 layers, the first and the last")
    return shape


_DENSE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {**_DENSE, "sliding_window": None}),
    "llama": ("llama", _DENSE),
    "glm4_moe": (
        "glm4_moe",
        {
            **_DENSE,
            "hidden_size": 128,
            "intermediate_size": 352,
            "head_dim": 32,
            "moe_intermediate_size": 96,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "bert": (
        "bert",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 256,
            "max_position_embeddings": 512,
        },
    ),
}
TINY_ENCODERS = {"bert"}


def tiny_family(name: str) -> str:
    """Return the family in ``tiny:<family>``.

    Raises:
        SpecError: unknown family.
    """
    wanted = name.removeprefix("tiny:")
    if wanted not in _FAMILIES:
        hint = did_you_mean(wanted, _FAMILIES, form="tiny:{}")
        raise SpecError(f"model.name: unknown model {name!r}{hint} (known: {', '.join(tiny_names())})")
    return wanted


def tiny_names() -> tuple[str, ...]:
    """Return ``tiny:<family>`` of every family."""
    return tuple(f"tiny:{family}" for family in _FAMILIES)


def tiny_defaults(name: str) -> dict[str, Any]:
    """Return the default sizes of a tiny model; its vocabulary is its tokenizer's.

    Raises:
        SpecError: unknown family.
    """
    return dict(_FAMILIES[tiny_family(name)][1])


class TaskTypes(msgspec.Struct, frozen=True):
    """The model types for which transformers has a causal language model, a masked one, a sequence classifier."""

    causal: Collection[str]
    masked: Collection[str]
    classifiers: Collection[str]


ENCODER_DECODERS = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fsmt", "led", "longt5", "m2m_100", "marian", "mbart", "mt5", "mvp",
    "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "speech_to_text", "switch_transformers", "t5", "t5gemma", "umt5",
    "whisper",
}  # fmt: skip
"""Model types that are encoder-decoders where their config does not say otherwise."""


def model_task(config: Mapping[str, Any], types: TaskTypes, where: str) -> Literal["text", "classification"]:
    """Return the task of a model: the next token, or classes of sequences (encoders, masked language models).

    Args:
        config: as config.json has it.

    Raises:
        SpecError: an encoder-decoder, a model of images or audio, or neither of the two.
    """
    kind = config.get("model_type")
    if config.get("is_encoder_decoder", kind in ENCODER_DECODERS):
        raise SpecError(f"{where}: a {kind} is an encoder-decoder, which allranks does not train; {SUPPORTED}")
    require_modality(config, where)
    wanted = str((config.get("architectures") or [""])[0])
    if "SequenceClassification" in wanted or "MaskedLM" in wanted or "ForPreTraining" in wanted:
        if kind not in types.classifiers:
            raise SpecError(f"{where}: a {kind} ({wanted}) has no sequence classifier in transformers; {SUPPORTED}")
        return "classification"
    if kind in types.masked and kind in types.classifiers and not config.get("is_decoder"):
        return "classification"  # bert has a causal form, too, but its attention sees the next token unless is_decoder is true
    if kind in types.causal:
        return "text"
    if kind in types.classifiers:
        return "classification"
    raise SpecError(f"{where}: a {kind} is neither a causal language model nor a sequence classifier; {SUPPORTED}")


def check_model_folder(name: str) -> None:
    """Refuse a local path without a model; accept hub names."""
    if name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not Path(name).exists():
        return
    path = Path(name).expanduser()
    if not path.is_dir():
        raise SpecError(f"model.name {name}: there is no such folder{nearest_file_hint(path)}")
    if not (path / "config.json").is_file() and (path / "adapter_config.json").is_file():
        raise SpecError(
            f"model.name {name}: this folder holds an adapter, not a model; merge it into its base model (allranks export RUN --merge), or "
            "name the base model"
        )
    if not (path / "config.json").is_file():
        raise SpecError(f"model.name {name}: this folder has no config.json, so it is not a model")


DEFAULT_VOCAB = 2048
