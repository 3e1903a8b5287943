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
    "imports": "the interpreter with its libraries and engines, on a CPU",
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


FITS, CLOSE, TOO_LARGE, NOT_KNOWN = "fits", "close", "too large", "not known"
ERROR = 0.10  # what the estimate may be wrong by: only what is larger still is refused


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank. ``moments`` in the order in which they come; ``peak`` is the largest of them.

    ``verdict``: fits | close (within the estimate's error of the limit) | too large | not known. What is not known of the model
    stands in ``unknown``, and the numbers are left out then; what is not known of the device, in ``capacity.source``.
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
    verdict: str
    fails_in: str | None = None
    unknown: str | None = None
    remedies: list[Remedy] = []
    notes: list[str] = []

    @property
    def refused(self) -> bool:
        """True where no run should be started."""
        return self.verdict == TOO_LARGE

    def at_peak(self) -> Moment:
        """The moment that needs most."""
        return next(m for m in self.moments if m.name == self.peak)


def verdict(needed_bytes: int, limit_bytes: int | None) -> str:
    """What is to be said of a rank that needs so much where there is so much."""
    if limit_bytes is None:
        return NOT_KNOWN
    if needed_bytes <= limit_bytes:
        return FITS
    return CLOSE if needed_bytes * (1 - ERROR) <= limit_bytes else TOO_LARGE
