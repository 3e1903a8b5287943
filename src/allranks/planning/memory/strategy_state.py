"""Compute the bytes of weights, gradients and optimizer state that a rank holds in each phase of a step.

One class per memory layout; `strategies.py` maps strategies to layouts. The formulas follow ``train/strategies``: at most two
full gradient buffers are in flight, and a buffer is freed only when a later one replaces it. `OffloadedState` covers optimizer
state, or also the weight shard, in host memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from allranks.planning.memory.model_config import MLP
from allranks.planning.memory.weights import Shapes, TrainedWeights, UnitSizes, Weight, output_projection

BUFFERS_IN_FLIGHT = 2


class GradientBuffers:
    """Flat gradient buffers in the order in which backward fills them, in bytes.

    Args:
        copies: copies of each buffer in flight: gloo reduces a copy of its input.
    """

    def __init__(self, flats: Sequence[int], world: int, *, copies: int) -> None:
        self._flats, self._world, self._copies = list(flats), world, copies
        self._ends = list(accumulate(self._flats))

    def at(self, done: int, *, filling: bool) -> tuple[int, int]:
        """Return (shards that this rank keeps, buffers) after `done` bytes of gradients.

        Args:
            filling: more gradients are being written to the buffer after the full ones.
        """
        full = bisect_right(self._ends, done)
        total = self._ends[full - 1] if full else 0
        travelling = sum(self._flats[max(0, full - BUFFERS_IN_FLIGHT) : full]) * self._copies
        begun = self._flats[full] if full < len(self._flats) and (filling or done > total) else 0
        return share_per_rank(total, self._world), travelling + begun

    def after_last_launch(self) -> tuple[int, int]:
        """Return the same at the start of the last transfer, before the oldest buffer is freed."""
        return share_per_rank(sum(self._flats), self._world), sum(self._flats[-BUFFERS_IN_FLIGHT - 1 :]) * self._copies


ADAM_MOMENTS = 2  # AdamW's
NO_OPTIMIZER_TEMPORARY = 0  # fused AdamW updates in place


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


Parts = dict[str, int]


class StrategyState(Protocol):
    """Memory that this rank holds. ``at`` counts blocks from the front; backward goes from the last block to 0.

    ``copies_weights``: trained weights are in their own dtype in forward passes, so that autocast casts them.
    """

    copies_weights: bool

    def kept(self) -> Parts:
        """Return bytes of weights and optimizer state."""
        ...

    def setup(self) -> Parts:
        """Return the peak while the strategy is set up, when the full model is on the device."""
        ...

    def in_loss(self) -> Parts:
        """Return memory between forward and backward of the last micro-step."""
        ...

    def at_head(self) -> Parts:
        """Return memory when the gradient of the layers after the last block exists, and all activations still exist."""
        ...

    def in_backward(self, at: int) -> Parts:
        """Return memory inside backward of block `at`, at its activation peak, after its first gradient."""
        ...

    def at_end(self) -> Parts:
        """Return memory when the gradient of the layers before the first block is computed."""
        ...

    def at_update(self) -> Parts:
        """Return memory during the optimizer update."""
        ...


class Replicated:
    """Everything on every rank; each parameter has its own gradient. For `single` and per-parameter all-reduce."""

    copies_weights = True

    def __init__(self, model: ModelMemory, *, optimizer_temporary: int = NO_OPTIMIZER_TEMPORARY) -> None:
        self._m, self._temporary = model, optimizer_temporary

    def kept(self) -> Parts:
        m = self._m
        return {"weights": m.base, "adapters": m.adapters, "optimizer_state": ADAM_MOMENTS * m.gradients}

    def setup(self) -> Parts:
        return {"weights": self._m.base, "adapters": self._m.adapters}

    def in_loss(self) -> Parts:
        return {"gradients": self._m.gradients if self._m.accumulates else 0}

    def at_head(self) -> Parts:
        return {"gradients": self._m.head_gradient() + self.in_loss()["gradients"]}

    def in_backward(self, at: int) -> Parts:
        m = self._m
        if m.accumulates:
            return {"gradients": m.gradients + m.first_of(at)}
        return {"gradients": m.gradient_bytes_before(at) + m.first_of(at)}

    def at_end(self) -> Parts:
        return {"gradients": self._m.gradients + (self._m.largest_gradient if self._m.accumulates else 0)}

    def at_update(self) -> Parts:
        return {"gradients": self._m.gradients, "optimizer_temporaries": self._temporary}


class Bucketed(Replicated):
    """Gradients are views of buckets; a new gradient is copied there. For hand-written buckets and DDP.

    Args:
        own_too: gradients of micro-steps that are not reduced stay outside of the buckets (DDP's ``no_sync``).
        state_share: share of the optimizer state that this rank keeps.
    """

    def __init__(
        self,
        model: ModelMemory,
        *,
        keeps_local_gradients: bool = False,
        state: int | None = None,
        optimizer_temporary: int = 0,
    ) -> None:
        super().__init__(model, optimizer_temporary=optimizer_temporary)
        self._own_too = keeps_local_gradients and model.accumulates
        self._state = ADAM_MOMENTS * model.gradients if state is None else state

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


class CopiedBuckets(Replicated):
    """DDP whose gradients are not views of its buckets, so both exist. The Hugging Face Trainer wraps models this way."""

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


class ReduceScattered(Replicated):
    """ZeRO 2: gradients are reduced bucket by bucket; this rank keeps only its shard."""

    def __init__(self, model: ModelMemory, bucket_bytes: float) -> None:
        super().__init__(model)
        flats = cut_into_buckets(trained_weights(model)[::-1], bucket_bytes)
        self._largest = max(flats, default=0)
        self._journey = GradientBuffers(flats, model.world, copies=model.copies)

    def kept(self) -> Parts:
        share = share_per_rank(self._m.gradients, self._m.world)
        return super().kept() | {"optimizer_state": ADAM_MOMENTS * share}

    def setup(self) -> Parts:
        return {"weights": self._m.base + self._largest, "adapters": self._m.adapters}

    def _all(self) -> int:
        return share_per_rank(self._m.gradients, self._m.world)

    def in_loss(self) -> Parts:
        """Return memory when the previous micro-step's buffers have arrived and are not yet reused."""
        if not self._m.accumulates:
            return {}
        return {"gradients": self._all(), "communication": self._journey.at(self._m.gradients, filling=False)[1]}

    def at_head(self) -> Parts:
        m = self._m
        return add_parts(self.in_loss(), {"gradients": m.head_gradient(), "communication": m.head_gradient_bytes})

    def in_backward(self, at: int) -> Parts:
        m = self._m
        parts, buffers = self._journey.at(m.gradient_bytes_before(at), filling=True)
        return {"gradients": self._all() if m.accumulates else parts, "communication": buffers + m.first_of(at)}

    def at_end(self) -> Parts:
        return {"gradients": self._all(), "communication": self._journey.after_last_launch()[1]}

    def at_update(self) -> Parts:
        return {"gradients": self._all()}


def add_parts(a: Parts, b: Parts) -> Parts:
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}


def trained_weights(model: ModelMemory) -> list[int]:
    """Return bytes of every trained parameter, in the model's order."""
    known: dict[int, list[int]] = {}
    found = _trained(model, model.shapes.before)
    for block in model.shapes.blocks:
        if id(block) not in known:
            known[id(block)] = _trained(model, block.weights)
        found += known[id(block)]
    return found + _trained(model, model.shapes.behind)


def _trained(model: ModelMemory, weights: Sequence[Weight]) -> list[int]:
    numels = (w.numel if model.what.is_trained(w) else model.what.numel(w) for w in weights)
    return [n * model.trained_element for n in numels if n]


def cut_into_buckets(sizes: Sequence[int], bucket_bytes: float) -> list[int]:
    """Return buckets of adjacent parameters, up to `bucket_bytes` each; a larger parameter gets its own bucket."""
    found: list[int] = []
    for size in sizes:
        if found and found[-1] + size <= bucket_bytes:
            found[-1] += size
        else:
            found.append(size)
    return found


def share_per_rank(n: int, world: int) -> int:
    return -(-n // world)


class OffloadedState:
    """A memory layout minus what is offloaded to the host. On CPUs nothing is saved, and the optimizer's weight copy is extra."""

    def __init__(self, inner: StrategyState, offload: str, model: ModelMemory) -> None:
        self._inner, self._offload, self._m = inner, offload, model
        self.copies_weights = inner.copies_weights
        self.setup, self.in_loss, self.at_head = inner.setup, inner.in_loss, inner.at_head
        self.in_backward, self.at_end, self.at_update = inner.in_backward, inner.at_end, inner.at_update

    def kept(self) -> Parts:
        """Return bytes of weights and optimizer state on the device."""
        parts = self._inner.kept()
        if self._m.device == "cpu":
            copied = share_per_rank(self._m.gradients, self._m.world) if self._offload == "optimizer" else 0
            return parts | {"optimizer_state": parts["optimizer_state"] + copied}
        gone = ("optimizer_state",) if self._offload == "optimizer" else ("optimizer_state", "weights", "adapters")
        return {key: n for key, n in parts.items() if key not in gone}
