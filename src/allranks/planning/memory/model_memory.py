"""Compute the bytes of a model's weights and gradients from its shapes, as memory layouts of strategies read them (`ModelSizes`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from allranks.planning.memory.model_config import MLP
from allranks.planning.memory.weights import Shapes, TrainedWeights, Weight, output_projection
from allranks.spec.strategies.base import UnitSizes


class ModelMemory:
    """Model data that memory layouts depend on. ``blocks`` in order; ``rest``: weights outside blocks. Sums are cached.

    Args:
        element: bytes of a weight of the base that is not trained.
        trained_element: bytes of a trained element, its gradient, and each of its moments.
        autocast: bytes of an element in the dtype of compute, where forward passes run under autocast; else None.
        accumulates: a step has several micro-steps.
        gloo: collectives use gloo, which reduces a copy of a reduce-scatter's input.
        device: cpu | cuda.
    """

    def __init__(
        self,
        shapes: Shapes,
        what: TrainedWeights,
        *,
        element: int,
        trained_element: int,
        world: int,
        accumulates: bool,
        gloo: bool,
        device: str,
        autocast: int | None = None,
    ) -> None:
        self.shapes, self.what, self.world, self.accumulates = shapes, what, world, accumulates
        self.element, self.trained_element, self.copies = element, trained_element, 2 if gloo else 1
        self.device, self.autocast = device, autocast
        distinct = {id(block): what.unit(block) for block in {id(b): b for b in shapes.blocks}.values()}
        self.blocks: tuple[UnitSizes, ...] = tuple(distinct[id(block)] for block in shapes.blocks)
        self.rest: UnitSizes = what.unit(shapes.rest)
        every = (*self.blocks, self.rest)
        self.base = sum(self._base_bytes(u) for u in every)
        self.adapters = sum(u.adapters for u in every) * trained_element
        self.parameters = sum(u.base + u.adapters for u in every)
        self.trained = sum(u.trained for u in every)  # numbers, not bytes
        self.gradients = self.trained * trained_element
        self.largest_gradient = max(u.largest_trained for u in every) * trained_element
        self._head = sum(w.numel if what.is_trained(w) else 0 for w in shapes.behind)
        self.head_gradient_bytes = self._head * trained_element  # the first gradients of backward
        backwards = accumulate((self.gradient_of(b) for b in self.blocks[::-1]), initial=self.head_gradient_bytes)
        self._come = list(backwards)[-2::-1]

    def gradient_of(self, unit: UnitSizes) -> int:
        """Return bytes of a unit's gradients."""
        return unit.trained * self.trained_element

    def _base_bytes(self, unit: UnitSizes) -> int:
        return (unit.base - unit.trained_base) * self.element + unit.trained_base * self.trained_element

    def bytes_of(self, unit: UnitSizes) -> int:
        """Return bytes of a unit's weights as they are stored, including adapters."""
        return self._base_bytes(unit) + unit.adapters * self.trained_element

    def gathered_bytes_of(self, unit: UnitSizes) -> int:
        """Return bytes of a unit's weights gathered for a forward pass, in the dtype of compute."""
        return (unit.base + unit.adapters) * self.autocast if self.autocast else self.bytes_of(unit)

    def weight_copies_of(self, at: int) -> int:
        """Return bytes of the casts of block `at`'s weights that autocast makes and backward needs."""
        weights = self.shapes.blocks[at].weights
        if at == 0 and self.shapes.config.family == MLP:
            weights = weights[1:]  # the inputs of the first layer need no gradient, so its weight is not kept
        return sum(self.what.numel_in_products(w) for w in weights) * (self.autocast or 0)

    def weight_copies_after_blocks(self) -> int:
        """Return the same of the layers after the last block."""
        weights = [w for w in self.shapes.behind if w.kind == "linear"]
        head = output_projection(self.shapes)
        tied = head.numel if head is not None and head not in weights and self.what.is_trained(head) else 0
        return (tied + sum(self.what.numel_in_products(w) for w in weights)) * (self.autocast or 0)

    def gradient_bytes_before(self, at: int) -> int:
        """Return bytes of the gradients that exist when backward reaches block `at`."""
        return self._come[at]

    def first_of(self, at: int, *, gathered: bool = False) -> int:
        """Return bytes of the largest gradient of block `at` when backward has computed it.

        Args:
            gathered: weights are gathered in the dtype of compute, so their gradients come in it. Otherwise autocast casts them:
                both exist.
        """
        return self.blocks[at].largest_trained * self._fresh_element(gathered)

    def head_gradient(self, *, gathered: bool = False) -> int:
        """Return bytes of the gradients that come as soon as backward begins, as `first_of`."""
        return self._head * self._fresh_element(gathered)

    def _fresh_element(self, gathered: bool) -> int:
        if self.autocast is None:
            return self.trained_element
        return self.autocast if gathered else self.autocast + self.trained_element

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained next to a frozen base."""
        return self.what.lora

    @property
    def largest_weight(self) -> int:
        """Elements of the largest weight."""
        return max(w.numel for w in self.shapes.weights())

    def trained_bytes(self) -> list[int]:
        """Return bytes of every trained parameter, in the model's order."""
        known: dict[int, list[int]] = {}
        found = self._trained(self.shapes.before)
        for block in self.shapes.blocks:
            if id(block) not in known:
                known[id(block)] = self._trained(block.weights)
            found += known[id(block)]
        return found + self._trained(self.shapes.behind)

    def _trained(self, weights: Sequence[Weight]) -> list[int]:
        numels = (w.numel if self.what.is_trained(w) else self.what.numel(w) for w in weights)
        return [n * self.trained_element for n in numels if n]

    def trained_base_bytes(self) -> tuple[list[int], list[int]]:
        """Return bytes of the trained parameters of the base (before the first block, after the last one)."""
        before, behind = (
            [w.numel * self.trained_element for w in weights if self.what.is_trained(w)]
            for weights in (self.shapes.before, self.shapes.behind)
        )
        return before, behind
