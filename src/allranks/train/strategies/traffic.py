"""What a strategy is expected to send: the formulas that a comparison holds against what its process group really did.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
Phase = Literal["forward", "backward", "after_backward", "step"]


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one phase of an optimizer step, on one rank.

    ``bytes`` is the size of what is reduced or gathered as a whole: for a gather the gathered tensor, for a
    reduce-scatter the tensor before it is scattered. ``count`` is None where a library decides it.
    """

    kind: Kind
    phase: Phase
    count: int | None
    bytes: int


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model as a strategy sees it: one entry a trained parameter, in registration order."""

    trained: tuple[int, ...]

    @property
    def trained_bytes(self) -> int:
        return sum(self.trained)


def ring_bytes(kind: Kind, bytes_: int, world: int) -> float:
    """Bytes that each rank sends for a collective on a ring (Patarasuk and Yuan 2009): 2(W-1)/W for an all-reduce,
    (W-1)/W for its two halves, and a whole message for a broadcast."""
    share = (world - 1) / world
    return {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share, "broadcast": 1.0}[kind] * bytes_
