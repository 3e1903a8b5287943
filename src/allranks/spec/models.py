"""Describe the models that allranks builds itself, ``mlp:`` and ``tiny:``: families, layers and sizes. No torch.

``tiny:<family>`` is a small model with random weights, built from the family's config; nothing is downloaded.
``mlp:<width>x<layers>`` is a multilayer perceptron in one of two shapes (``model.config: {shape: ..., expansion: 4}``):

``blocks``  `layers` times width -> expansion x width -> width, with a GELU inside each pair and none between pairs (default).
``wide``    `layers` linear layers; the inner ones are expansion x width wide, with a GELU between any two.
"""

from __future__ import annotations

import difflib
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from allranks.errors import SpecError

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
        near = difflib.get_close_matches(wanted, _FAMILIES, n=1)
        hint = f"; did you mean tiny:{near[0]}?" if near else ""
        raise SpecError(
            f"model.name: unknown model {name!r}{hint} (known: {', '.join('tiny:' + f for f in _FAMILIES)})"
        )
    return wanted


def tiny_defaults(name: str) -> dict[str, Any]:
    """Return the default sizes of a tiny model; its vocabulary is its tokenizer's.

    Raises:
        SpecError: unknown family.
    """
    return dict(_FAMILIES[tiny_family(name)][1])


def check_model_folder(name: str) -> None:
    """Refuse a local path without a model; accept hub names."""
    if name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not Path(name).exists():
        return
    path = Path(name).expanduser()
    if not path.is_dir():
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        raise SpecError(
            f"model.name {name}: there is no such folder"
            + (f"; did you mean {path.with_name(near[0])}?" if near else "")
        )
    if not (path / "config.json").is_file():
        raise SpecError(f"model.name {name}: this folder has no config.json, so it is not a model")


DEFAULT_VOCAB = 2048
