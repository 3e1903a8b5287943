"""DeepSpeed's three stages: flat weights, a bucket as large as all gradients, and master weights of its own."""

from __future__ import annotations

from allranks.fit.adapters import Sizes
from allranks.fit.sharing import MOMENTS, Model, Parts, _share

BUCKET = 500_000_000  # elements, unless the configuration says less; never more than is trained (deepspeed_engine.py)
PERSISTENT = 100_000  # stage 3: smaller parameters stay whole
LIVE = 1_000_000_000  # stage 3: so many elements may be whole before any is freed


class DeepSpeedReplicated:
    """Stages 1 and 2: weights on every rank; master weights and moments, in float32, in parts."""

    def __init__(self, model: Model, stage: int, bucket: int | None) -> None:
        self._m, self._stage = model, stage
        self._bucket = min(bucket or BUCKET, model.trained) * model.trained_element
        self._part = _share(model.trained, model.world)

    def kept(self) -> Parts:
        m = self._m
        return {"weights": m.base, "adapters": m.adapters, "optimizer_state": (1 + MOMENTS) * 4 * self._part}

    def setup(self) -> Parts:
        m = self._m
        return {
            "weights": m.base,
            "adapters": m.adapters,
            "optimizer_state": 3 * 4 * self._part,
            "gathered_weights": m.gradients,
        }

    def in_loss(self) -> Parts:
        m = self._m
        kept = (m.gradients if self._stage == 1 else _share(m.gradients, m.world)) if m.accumulates else 0
        return {"gradients": kept, "communication": 0}

    def in_backward(self, at: int) -> Parts:
        m = self._m
        done = m.head_gradient + sum(m.gradient_of(b) for b in m.blocks[at:])
        kept = (
            _share(m.gradients if m.accumulates else done, m.world)
            if self._stage == 2
            else (m.gradients if m.accumulates else done)
        )
        return {"gradients": kept, "communication": self._bucket}

    def at_end(self) -> Parts:
        m = self._m
        kept = m.gradients if self._stage == 1 else _share(m.gradients, m.world)
        return {"gradients": kept + m.largest_gradient, "communication": self._bucket}

    def at_update(self) -> Parts:
        """The part's gradient in float32; the bucket is given back before."""
        return {"gradients": 4 * self._part}


class DeepSpeedZero3:
    """Stage 3: weights in parts too; what is gathered in forward stays while fewer than `LIVE` elements are whole."""

    def __init__(self, model: Model, live: int | None, bucket: int | None) -> None:
        self._m = model
        self._live = min(live or LIVE, sum(b.base + b.adapters for b in (*model.blocks, model.rest)))
        self._bucket = min(bucket or BUCKET, model.trained) * model.trained_element
        self._part = _share(model.trained, model.world)

    def kept(self) -> Parts:
        m = self._m
        return {
            "weights": _share(m.base, m.world),
            "adapters": _share(m.adapters, m.world),
            "optimizer_state": (1 + MOMENTS) * 4 * self._part,
            "gradients": 4 * self._part,
        }

    def setup(self) -> Parts:
        m = self._m
        return {"weights": m.base + _share(m.base, m.world), "adapters": m.adapters, "optimizer_state": 4 * self._part}

    def _whole(self) -> int:
        return self._live * self._m.element

    def in_loss(self) -> Parts:
        return {"gathered_weights": self._whole()}

    def in_backward(self, at: int) -> Parts:
        m = self._m
        unit: Sizes = m.blocks[at]
        return {"gathered_weights": self._whole(), "communication": self._bucket + m.gradient_of(unit)}

    def at_end(self) -> Parts:
        return {
            "gathered_weights": self._m.bytes_of(self._m.rest),
            "communication": self._bucket + self._m.largest_gradient,
        }

    def at_update(self) -> Parts:
        return {}
