"""Plain multilayer perceptrons ``mlp:<width>x<layers>``: their layers and sizes. No torch: plan and fit read it too.

Two shapes, both of the field's smoke tests (``model.config: {shape: ..., expansion: 4}``):

``blocks``  `layers` times width -> expansion x width -> width, a GELU within each pair and none between pairs (default).
``wide``    `layers` linear layers; all between the first and the last are expansion x width wide, a GELU between any two.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, Literal

import msgspec

from allranks.errors import SpecError

PREFIX, NOISE = "mlp:", "builtin:noise"
_NAME = re.compile(r"mlp:(\d{1,6})x(\d{1,4})")


class MlpShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one model."""

    width: int
    layers: int
    shape: Literal["blocks", "wide"] = "blocks"
    expansion: int = 4

    def blocks(self) -> list[list[tuple[int, int]]]:
        """(inputs, outputs) of the linear layers, by block; every layer has a bias."""
        wide = self.width * self.expansion
        if self.shape == "blocks":
            return [[(self.width, wide), (wide, self.width)]] * self.layers
        ends = [self.width, *[wide] * (self.layers - 1), self.width]
        return [[pair] for pair in pairwise(ends)]

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return sum(into * out + out for block in self.blocks() for into, out in block)


def is_mlp(name: str) -> bool:
    """Whether ``model.name`` means such a model."""
    return name.startswith(PREFIX)


def mlp_shape(name: str, config: dict[str, Any]) -> MlpShape:
    """The sizes behind ``model.name`` and ``model.config``.

    Raises:
        SpecError: another form of name, an unknown setting, or a size that makes no model.
    """
    found = _NAME.fullmatch(name)
    if not found or 0 in (int(found[1]), int(found[2])):
        raise SpecError(f"model.name {name}: write mlp:<width>x<layers>, such as mlp:4096x6")
    known = ("shape", "expansion")
    for key in config:
        if key not in known:
            raise SpecError(f"model.config.{key}: {name} has no such setting (known: {', '.join(known)})")
    try:
        shape = msgspec.convert({"width": int(found[1]), "layers": int(found[2]), **config}, MlpShape)
    except msgspec.ValidationError as error:
        raise SpecError(f"model.config: {error}") from None
    if shape.expansion < 1:
        raise SpecError(f"model.config.expansion is {shape.expansion}; it must be 1 or more")
    if shape.shape == "wide" and shape.layers < 2:
        raise SpecError(f"model.name {name}: a wide one has at least 2 layers, the first and the last")
    return shape
