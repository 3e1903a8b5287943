"""Time limits as sbatch reads them. Pure."""

from __future__ import annotations

import re

SIGNAL_EARLY_S = 60
"""By how much ``--signal`` may come early (man sbatch)."""
_FORM = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


def seconds_of(text: str) -> int | None:
    """``90`` (minutes), ``90:00``, ``1:30:00``, ``2-0``, ``2-1:30`` or ``2-1:30:00`` in seconds; None for other words."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        return None
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"] is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:  # minutes[:seconds], or hours:minutes:seconds
        hours, minutes, seconds = parts if len(parts) == 3 else [0, *parts, 0][:3]
    return ((int(found["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
