"""DeepSpeed's three stages: flat weights, a bucket as large as all gradients, and master weights of its own."""

from __future__ import annotations

from allranks.fit.sharded import setup_in_parts
from allranks.fit.sharing import MOMENTS, Model, Parts, _share

BUCKET = 500_000_000  # elements, unless the configuration says less; never more than is trained (deepspeed_engine.py)
PREFETCH = 50_000_000  # stage 3: so many elements are fetched ahead
LIVE = 1_000_000_000  # stage 3: so many elements may be whole before any is freed


class DeepSpeedReplicated:
    """Stages 1 and 2: weights on every rank; master weights and moments, in float32, in parts."""

    def __init__(self, model: Model, stage: int, *, bucket: int | None, foreach: bool) -> None:
        self._m, self._stage, self._foreach = model, stage, foreach
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

    def _own(self) -> int:
        """This rank's part of the gradients."""
        return _share(self._m.gradients, self._m.world)

    def in_loss(self) -> Parts:
        if not self._m.accumulates:
            return {}
        return {
            "gradients": self._m.gradients + self._own() if self._stage == 1 else self._own(),
            "communication": self._bucket,
        }

    def at_head(self) -> Parts:
        before = self.in_loss().get("gradients", 0)
        return {"gradients": before + self._m.head_gradient, "communication": self._bucket}

    def in_backward(self, at: int) -> Parts:
        m = self._m
        before = self.in_loss().get("gradients", 0)
        come = m.come_before(at) if self._stage == 1 else _share(m.come_before(at), m.world)
        return {"gradients": (before or come) + m.first_of(at), "communication": self._bucket}

    def at_end(self) -> Parts:
        m = self._m
        kept = m.gradients if self._stage == 1 else self._own()
        return {"gradients": kept + m.largest_gradient, "communication": self._bucket}

    def at_update(self) -> Parts:
        """The part's gradient in float32, the bucket still there."""
        temporary = 4 * self._part if self._foreach else 0  # the square roots of all second moments at once
        return {"gradients": 4 * self._part, "communication": self._bucket, "optimizer_temporaries": temporary}


class DeepSpeedZero3:
    """Stage 3: weights in parts too; what is gathered in forward stays while fewer than `LIVE` elements are whole.

    Weights that are fetched ahead come in one tensor, and are copied out of it; it stays until the last of them is used.
    """

    def __init__(self, model: Model, *, live: int | None, bucket: int | None, prefetch: int | None) -> None:
        m = self._m = model
        every = sum(b.base + b.adapters for b in (*m.blocks, m.rest))
        self._live = min(live or LIVE, every) * m.element
        self._fetched = min(prefetch or PREFETCH, every) * m.element
        self._bucket = min(bucket or BUCKET, m.trained) * m.trained_element
        self._part = _share(m.trained, m.world)
        self._largest = max(w.numel for w in m.shapes.weights()) * m.element

    def kept(self) -> Parts:
        m = self._m
        return {
            "weights": _share(m.base, m.world),
            "adapters": _share(m.adapters, m.world),
            "optimizer_state": (1 + MOMENTS) * 4 * self._part,
            "gradients": _share(m.gradients, m.world),
            "communication": self._bucket,
        }

    def setup(self) -> Parts:
        """Each weight is cut as it comes; adapters are whole until then."""
        own = {"adapters": self._m.adapters, "optimizer_state": 4 * self._part}
        return {**setup_in_parts(self._m, self._largest), **own}

    def in_loss(self) -> Parts:
        return {"gathered_weights": self._live}

    def at_head(self) -> Parts:
        """Just before the last weights are used: what was fetched is still there twice."""
        return {"gathered_weights": self._live + self._fetched}

    def in_backward(self, at: int) -> Parts:
        return {"gathered_weights": self._live, "gradients": self._m.first_of(at)}

    def at_end(self) -> Parts:
        return {"gathered_weights": self._live, "gradients": self._m.largest_gradient}

    def at_update(self) -> Parts:
        """The part's gradients once more, in float32."""
        return {"gradients": 4 * self._part}
