"""What a strategy holds of weights, gradients and state, as bytes at each moment. One small class a way of sharing.

`strategies.py` says which strategy shares in which way. All formulas follow the code in ``train/strategies``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from allranks.fit.adapters import Adapted, Sizes
from allranks.fit.journey import Journey
from allranks.fit.shapes import Shapes, Weight

MOMENTS = 2  # AdamW's
NO_OPTIMIZER_TEMPORARY = 0  # fused AdamW updates in place


class Model:
    """All that sharing depends on. ``blocks`` in order, and ``rest``: what is in no block. Sums are made once.

    Args:
        element: bytes of a weight of the base.
        trained_element: bytes of a trained number: adapters are float32.
        accumulates: several micro-steps make a step.
        gloo: the collectives are gloo's, which adds up a copy of what a reduce-scatter sends.
        device: cpu | cuda.
    """

    def __init__(
        self,
        shapes: Shapes,
        what: Adapted,
        *,
        element: int,
        trained_element: int,
        world: int,
        accumulates: bool,
        gloo: bool,
        device: str,
    ) -> None:
        self.shapes, self.what, self.world, self.accumulates = shapes, what, world, accumulates
        self.element, self.trained_element, self.copies = element, trained_element, 2 if gloo else 1
        self.device = device
        distinct = {id(block): what.unit(block) for block in {id(b): b for b in shapes.blocks}.values()}
        self.blocks: tuple[Sizes, ...] = tuple(distinct[id(block)] for block in shapes.blocks)
        self.rest: Sizes = what.unit(shapes.rest)
        every = (*self.blocks, self.rest)
        self.base = sum(u.base for u in every) * element
        self.adapters = sum(u.adapters for u in every) * trained_element
        self.parameters = sum(u.base + u.adapters for u in every)
        self.trained = sum(u.trained for u in every)  # numbers, not bytes
        self.gradients = self.trained * trained_element
        self.largest_gradient = max(u.largest_trained for u in every) * trained_element
        head = sum(w.numel if what.is_trained(w) else 0 for w in shapes.behind)
        self.head_gradient = head * trained_element  # what comes as soon as backward begins
        backwards = accumulate((self.gradient_of(b) for b in self.blocks[::-1]), initial=self.head_gradient)
        self._come = list(backwards)[-2::-1]

    def gradient_of(self, unit: Sizes) -> int:
        """Bytes of a unit's gradients."""
        return unit.trained * self.trained_element

    def bytes_of(self, unit: Sizes) -> int:
        """A unit's weights, adapters among them."""
        return unit.base * self.element + unit.adapters * self.trained_element

    def come_before(self, at: int) -> int:
        """Bytes of the gradients that have come when backward reaches block `at`."""
        return self._come[at]

    def first_of(self, at: int) -> int:
        """Bytes of the largest gradient of block `at`."""
        return self.blocks[at].largest_trained * self.trained_element


Parts = dict[str, int]


class Sharing(Protocol):
    """Parts that this rank holds. ``at`` counts blocks from the front; backward goes from the last to 0."""

    def kept(self) -> Parts:
        """Weights, and the optimizer's state."""
        ...

    def setup(self) -> Parts:
        """The most while the strategy is set up; the model is whole on the device then."""
        ...

    def in_loss(self) -> Parts:
        """Between forward and backward of the last micro-step."""
        ...

    def at_head(self) -> Parts:
        """When the gradient of what is behind the last block has come, and all activations are still there."""
        ...

    def in_backward(self, at: int) -> Parts:
        """In the midst of block `at`, when its activations are most; of its gradients the first has come."""
        ...

    def at_end(self) -> Parts:
        """When the gradient of what is before the first block comes."""
        ...

    def at_update(self) -> Parts:
        """While the optimizer updates."""
        ...


class Replicated:
    """Everything on every rank; each parameter has its own gradient. `single`, and all-reduces a parameter."""

    def __init__(self, model: Model, *, optimizer_temporary: int = NO_OPTIMIZER_TEMPORARY) -> None:
        self._m, self._temporary = model, optimizer_temporary

    def kept(self) -> Parts:
        m = self._m
        return {"weights": m.base, "adapters": m.adapters, "optimizer_state": MOMENTS * m.gradients}

    def setup(self) -> Parts:
        return {"weights": self._m.base, "adapters": self._m.adapters}

    def in_loss(self) -> Parts:
        return {"gradients": self._m.gradients if self._m.accumulates else 0}

    def at_head(self) -> Parts:
        return {"gradients": self._m.head_gradient + self.in_loss()["gradients"]}

    def in_backward(self, at: int) -> Parts:
        m = self._m
        if m.accumulates:
            return {"gradients": m.gradients + m.first_of(at)}
        return {"gradients": m.come_before(at) + m.first_of(at)}

    def at_end(self) -> Parts:
        return {"gradients": self._m.gradients + (self._m.largest_gradient if self._m.accumulates else 0)}

    def at_update(self) -> Parts:
        return {"gradients": self._m.gradients, "optimizer_temporaries": self._temporary}


class Bucketed(Replicated):
    """Gradients have their place in buckets from the start; a new one is copied there. Hand-written buckets, and DDP.

    Args:
        own_too: gradients of micro-steps that are not reduced stay outside of the buckets (DDP's ``no_sync``).
        state_share: part of the optimizer's state that this rank keeps.
    """

    def __init__(
        self, model: Model, *, own_too: bool = False, state: int | None = None, optimizer_temporary: int = 0
    ) -> None:
        super().__init__(model, optimizer_temporary=optimizer_temporary)
        self._own_too = own_too and model.accumulates
        self._state = MOMENTS * model.gradients if state is None else state

    def kept(self) -> Parts:
        return super().kept() | {"optimizer_state": self._state}

    def setup(self) -> Parts:
        return super().setup() | {"gradients": self._m.gradients}

    def in_loss(self) -> Parts:
        return {"gradients": self._m.gradients * (2 if self._own_too else 1)}

    def in_backward(self, at: int) -> Parts:
        return {"gradients": self.in_loss()["gradients"] + self._m.first_of(at)}

    def at_end(self) -> Parts:
        return {"gradients": self.in_loss()["gradients"] + self._m.largest_gradient}

    def at_update(self) -> Parts:
        return {"gradients": self._m.gradients, "optimizer_temporaries": self._temporary}


class Twice(Replicated):
    """DDP whose gradients are not views of its buckets: both are there. Hugging Face's Trainer wraps models so."""

    def _with_buckets(self, parts: Parts) -> Parts:
        return parts | {"communication": self._m.gradients}

    def setup(self) -> Parts:
        return self._with_buckets(super().setup())

    def in_loss(self) -> Parts:
        return self._with_buckets(super().in_loss())

    def at_head(self) -> Parts:
        return self._with_buckets(super().at_head())

    def in_backward(self, at: int) -> Parts:
        return self._with_buckets(super().in_backward(at))

    def at_end(self) -> Parts:
        return self._with_buckets(super().at_end())

    def at_update(self) -> Parts:
        return self._with_buckets(super().at_update())


class Scattered(Replicated):
    """ZeRO 2: gradients are reduced bucket by bucket, and only this rank's part stays."""

    def __init__(self, model: Model, bucket_bytes: float) -> None:
        super().__init__(model)
        flats = cut(trained_weights(model)[::-1], bucket_bytes)
        self._largest = max(flats, default=0)
        self._journey = Journey(flats, model.world, copies=model.copies)

    def kept(self) -> Parts:
        share = _share(self._m.gradients, self._m.world)
        return super().kept() | {"optimizer_state": MOMENTS * share}

    def setup(self) -> Parts:
        return {"weights": self._m.base + self._largest, "adapters": self._m.adapters}

    def _all(self) -> int:
        return _share(self._m.gradients, self._m.world)

    def in_loss(self) -> Parts:
        """Buffers of the micro-step before have arrived, but nothing has taken their place yet."""
        if not self._m.accumulates:
            return {}
        return {"gradients": self._all(), "communication": self._journey.at(self._m.gradients, filling=False)[1]}

    def at_head(self) -> Parts:
        m = self._m
        return _add(self.in_loss(), {"gradients": m.head_gradient, "communication": m.head_gradient})

    def in_backward(self, at: int) -> Parts:
        m = self._m
        parts, buffers = self._journey.at(m.come_before(at), filling=True)
        return {"gradients": self._all() if m.accumulates else parts, "communication": buffers + m.first_of(at)}

    def at_end(self) -> Parts:
        return {"gradients": self._all(), "communication": self._journey.launched_last()[1]}

    def at_update(self) -> Parts:
        return {"gradients": self._all()}


def _add(a: Parts, b: Parts) -> Parts:
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}


def trained_weights(model: Model) -> list[int]:
    """Bytes of every trained parameter, in the model's order."""
    known: dict[int, list[int]] = {}
    found = _trained(model, model.shapes.before)
    for block in model.shapes.blocks:
        if id(block) not in known:
            known[id(block)] = _trained(model, block.weights)
        found += known[id(block)]
    return found + _trained(model, model.shapes.behind)


def _trained(model: Model, weights: Sequence[Weight]) -> list[int]:
    numels = (w.numel if model.what.is_trained(w) else model.what.numel(w) for w in weights)
    return [n * model.trained_element for n in numels if n]


def cut(sizes: Sequence[int], bucket_bytes: float) -> list[int]:
    """Buckets of neighbours, up to `bucket_bytes` each; one that is larger stands alone."""
    found: list[int] = []
    for size in sizes:
        if found and found[-1] + size <= bucket_bytes:
            found[-1] += size
        else:
            found.append(size)
    return found


def _share(n: int, world: int) -> int:
    return -(-n // world)
