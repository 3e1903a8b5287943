"""What traces and names claim about ranks, believed only where it can be."""

from __future__ import annotations

from typing import Any

MOST_RANKS = 1 << 20  # a number of ranks beyond that is a damaged one


def rank_number(value: Any) -> int | None:
    """A rank that a trace or a name tells; None if it cannot be one."""
    number = _whole(value)
    return number if number is not None and 0 <= number < MOST_RANKS else None


def rank_count(value: Any) -> int | None:
    """A world size that a trace tells; None if it cannot be one."""
    number = _whole(value)
    return number if number is not None and 0 < number <= MOST_RANKS else None


def _whole(value: Any) -> int | None:
    """Numbers may stand as text; of a text too long to be one nothing is tried."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) < 20 else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
