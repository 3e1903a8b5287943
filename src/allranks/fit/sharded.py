"""Weights in parts, whole only while they are used: the hand-written ZeRO 3 and FSDP2."""

from __future__ import annotations

from itertools import accumulate

from allranks.fit.adapters import Sizes
from allranks.fit.journey import Journey
from allranks.fit.shapes import Weight
from allranks.fit.sharing import MOMENTS, Model, Parts, _add, _share, cut

SMALL_ADAPTERS = 64 << 20  # as in train/strategies/fsdp2_adapters.py


def setup_in_parts(m: Model, unit: int) -> Parts:
    """Weights reach a GPU part by part, a unit at a time; on CPUs the first rank builds a model from its config whole."""
    if m.device == "cpu":
        return {"weights": m.base, "adapters": m.adapters, "gathered_weights": _share(m.base, m.world)}
    return {"weights": _share(m.base, m.world), "adapters": _share(m.adapters, m.world), "gathered_weights": unit}


class Zero3:
    """Hand-written: a block and the next one whole, and all that is in no block."""

    def __init__(self, model: Model) -> None:
        self._m = model
        self._block = max((model.bytes_of(b) for b in model.blocks), default=0)
        before, behind = (self._flats(weights) for weights in (model.shapes.before, model.shapes.behind))
        blocks = [model.gradient_of(b) for b in model.blocks[::-1] if model.gradient_of(b)]
        self._journey = Journey([*behind[::-1], *blocks, *before[::-1]], model.world, copies=model.copies)

    def _flats(self, weights: tuple[Weight, ...]) -> list[int]:
        own = [w.numel * self._m.trained_element for w in weights if self._m.what.is_trained(w)]
        return cut(own, self._block)

    def kept(self) -> Parts:
        m = self._m
        return {
            "weights": _share(m.base, m.world),
            "adapters": _share(m.adapters, m.world),
            "optimizer_state": MOMENTS * _share(m.gradients, m.world),
        }

    def setup(self) -> Parts:
        return setup_in_parts(self._m, self._block)

    def _whole(self, blocks: int) -> int:
        return self._m.bytes_of(self._m.rest) + min(blocks, len(self._m.blocks)) * self._block

    def _all(self) -> int:
        return _share(self._m.gradients, self._m.world)

    def in_loss(self) -> Parts:
        """Buffers of the micro-step before have arrived, but nothing has taken their place yet."""
        if not self._m.accumulates:
            return {"gathered_weights": self._whole(0)}
        buffers = self._journey.at(self._m.gradients, filling=False)[1]
        return {"gradients": self._all(), "gathered_weights": self._whole(0), "communication": buffers}

    def at_head(self) -> Parts:
        m = self._m
        more = {"gathered_weights": self._block, "gradients": m.head_gradient, "communication": m.head_gradient}
        return _add(self.in_loss(), more)

    def in_backward(self, at: int) -> Parts:
        m = self._m
        parts, buffers = self._journey.at(m.come_before(at), filling=True)
        return {
            "gradients": self._all() if m.accumulates else parts,
            "gathered_weights": self._whole(2 if at else 1),
            "communication": buffers + m.first_of(at),
        }

    def at_end(self) -> Parts:
        buffers = self._journey.launched_last()[1]
        return {"gradients": self._all(), "gathered_weights": self._whole(1), "communication": buffers}

    def at_update(self) -> Parts:
        return {"gradients": self._all()}


class FSDP2:
    """torch's fully_shard a block, the rest as the root; ``reshard`` False keeps blocks whole until backward."""

    def __init__(self, model: Model, *, reshard: bool, adapters: str) -> None:
        self._m, self._reshard = model, reshard
        self._kept_whole = model.what.lora and (adapters == "ignored" or (adapters == "auto" and self._small()))
        self._blocks = [self._unit(b) for b in model.blocks]
        self._largest = max(self._blocks, default=0)
        self._fresh = max((self._gradient(b) for b in model.blocks), default=0)
        self._up_to = list(accumulate(self._blocks))
        self._root = self._unit(model.rest)

    def _small(self) -> bool:
        held = 4 * self._m.gradients
        return held <= max(SMALL_ADAPTERS, 0.1 * self._m.base / self._m.world)

    def _unit(self, unit: Sizes) -> int:
        return unit.base * self._m.element if self._kept_whole else self._m.bytes_of(unit)

    def _gradient(self, unit: Sizes) -> int:
        return 0 if self._kept_whole else self._m.gradient_of(unit)

    def kept(self) -> Parts:
        m = self._m
        own = m.gradients if self._kept_whole else _share(m.gradients, m.world)
        adapters = m.adapters if self._kept_whole else _share(m.adapters, m.world)
        return {"weights": _share(m.base, m.world), "adapters": adapters, "optimizer_state": MOMENTS * own}

    def setup(self) -> Parts:
        return setup_in_parts(self._m, self._largest)

    def _whole(self) -> int:
        return self._root + (0 if self._reshard else sum(self._blocks))

    def _ready(self, gradients: int) -> int:
        """Bytes of reduced gradients of this rank."""
        return gradients if self._kept_whole else _share(gradients, self._m.world)

    def in_loss(self) -> Parts:
        return {
            "gradients": self._ready(self._m.gradients) if self._m.accumulates else 0,
            "gathered_weights": self._whole() + self._largest,  # what the last block was copied out of
        }

    def at_head(self) -> Parts:
        return _add(self.in_loss(), {"gradients": 0 if self._kept_whole else self._m.head_gradient})

    def in_backward(self, at: int) -> Parts:
        m = self._m
        done, fresh = m.come_before(at) - m.head_gradient, self._fresh
        root = 0 if self._kept_whole else m.head_gradient
        # whole: the root, this block, the next one's all-gather; blocks behind have been freed
        blocks = (2 if at else 1) * self._largest if self._reshard else self._up_to[at]
        flying = fresh * (2 if at < len(m.blocks) - 1 else 1)  # what travels, and what is copied for the next journey
        return {
            "gradients": self._ready(m.gradients if m.accumulates else done) + fresh + root,
            "gathered_weights": self._root + blocks,
            "communication": flying,
        }

    def at_end(self) -> Parts:
        m = self._m
        root = self._gradient(m.rest)
        return {
            "gradients": self._ready(m.gradients) + root,
            "gathered_weights": 0 if root else self._root,
            "communication": root + (m.gradients if self._kept_whole else 0),
        }

    def at_update(self) -> Parts:
        m = self._m
        whole = m.gradients if self._kept_whole else _share(m.gradients, m.world)
        return {"gradients": whole, "communication": m.gradients if self._kept_whole else 0}
