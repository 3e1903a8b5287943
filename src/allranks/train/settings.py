"""Whether another library's configuration says what the spec says. Pure, no torch."""

from __future__ import annotations

import math
from typing import Any


def same_setting(theirs: Any, ours: Any) -> bool:
    """Numbers are compared as numbers (1 and 1.0 are the same, 1 and true are not), all else as it stands."""
    if isinstance(theirs, bool) != isinstance(ours, bool):
        return False
    if isinstance(theirs, (int, float)) and isinstance(ours, (int, float)):
        return math.isclose(theirs, ours, rel_tol=1e-9)
    return theirs == ours
