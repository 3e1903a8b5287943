"""Frozen records of a memory estimate. All sizes are in bytes."""

from __future__ import annotations

import msgspec


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank in one phase of training, by part."""

    name: str
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Return the sum of all parts."""
        return sum(self.parts.values())


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one rank may use. ``bytes`` None: unknown, and nothing is refused."""

    device: str
    bytes: int | None
    source: str


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the spec, and the memory that a rank would need with it."""

    change: str
    settings: list[str]
    needed_bytes: int
    fits: bool
    cost: str


FITS, CLOSE, TOO_LARGE, NOT_KNOWN = "fits", "close", "too large", "not known"
ESTIMATE_ERROR = (
    0.10  # relative error of the estimate: a run is only refused if it is too large even after subtracting it
)


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank. ``moments`` are phases in order; ``peak`` is the largest of them.

    ``verdict``: fits | close (within the estimate's error of the limit) | too large | not known. ``unknown`` says what
    is missing about the model (there are no numbers then), ``capacity.source`` what is missing about the device.
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
        """Return whether the run must not be started."""
        return self.verdict == TOO_LARGE


def verdict(needed_bytes: int, limit_bytes: int | None) -> str:
    """Return the verdict for a rank that needs this much on a device of this capacity."""
    if limit_bytes is None:
        return NOT_KNOWN
    if needed_bytes <= limit_bytes:
        return FITS
    return CLOSE if needed_bytes * (1 - ESTIMATE_ERROR) <= limit_bytes else TOO_LARGE
