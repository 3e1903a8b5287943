"""What `fit` says, as frozen records. Bytes everywhere."""

from __future__ import annotations

import msgspec

PARTS = {
    "weights": "weights of the model",
    "adapters": "weights of the adapters",
    "gradients": "gradients",
    "optimizer_state": "AdamW's two moments, and master weights where there are any",
    "optimizer_temporaries": "what the update itself needs for a while",
    "activations": "what forward keeps for backward, and backward's own tensors",
    "logits": "scores of the vocabulary, in float32",
    "gathered_weights": "weights of other ranks' parts, whole for a while",
    "communication": "buffers of collectives",
    "runtime": "the CUDA context and NCCL, or threads and libraries of the process",
    "slack": "what the allocator holds but nobody uses",
}


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds at a moment of training, by part."""

    name: str
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank may use. ``bytes`` None: not known, and then nothing is refused."""

    device: str
    bytes: int | None
    source: str


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the spec, and what a rank would need with it."""

    change: str
    settings: list[str]
    needed_bytes: int
    fits: bool
    cost: str


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank. ``moments`` in the order in which they come; ``peak`` is the largest of them.

    ``fits`` None: not known, and ``unknown`` says why; the numbers are then left out where the model is not known.
    """

    model: str
    model_source: str
    strategy: str
    world_size: int
    parameters: int
    parameters_trained: int
    moments: list[Moment]
    peak: str
    needed_bytes: int
    capacity: Capacity
    fits: bool | None
    fails_in: str | None = None
    unknown: str | None = None
    remedies: list[Remedy] = []
    notes: list[str] = []

    def at_peak(self) -> Moment:
        """The moment that needs most."""
        return next(m for m in self.moments if m.name == self.peak)
