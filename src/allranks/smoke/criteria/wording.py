"""Numbers as criteria name them."""

from __future__ import annotations

import math
from typing import Any


def n_of(found: int, all_: int, what: str) -> str:
    return f"{found} of {all_} {what}"


def n_ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
