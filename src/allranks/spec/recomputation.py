"""Modes of recomputation of activations: what a block keeps from forward for backward. No torch."""

from __future__ import annotations

from typing import Final

NONE: Final = "none"
SELECTIVE: Final = "selective"
FULL: Final = "full"
AUTO: Final = "auto"
MODES = (NONE, SELECTIVE, FULL)
"""From the fastest to the one that keeps least."""

NARROW = 16


def keeps_product(inner: int, width: int) -> bool:
    """Return whether ``selective`` keeps the output of a matrix product: not if it is much wider than the sum is long, as in LoRA."""
    return inner * NARROW >= width


def mode_of(value: bool | str) -> str:
    """Return the mode for a value of ``model.gradient_checkpointing``: none | selective | full | auto."""
    return {True: FULL, False: NONE}[value] if isinstance(value, bool) else value
