"""Values as text for people, and text from files made fit to be shown. Pure."""

from __future__ import annotations

import math
import re
import time
from typing import Any

from allranks.redact import redact

NONE = "-"
LONGEST = 4000
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def number(value: Any) -> float | None:
    """A finite number, or None for anything else: files of a run that broke off may hold anything."""
    if type(value) is float:  # the usual case of hundreds of thousands
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def whole(value: Any) -> int | None:
    """An integer that can be shown and counted with, or None."""
    found = number(value)
    return int(found) if found is not None and abs(found) < 2**63 else None


def plain(value: Any, longest: int = LONGEST) -> str:
    """Text without secrets, colour codes and control characters, cut where it is too long for a page."""
    text = redact(_CONTROL.sub("", _ESCAPES.sub("", str(value))))
    text = text.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair cannot be written
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text) - longest:,} more characters)"


def clean(value: Any) -> Any:
    """The same tree with every text made `plain`."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(key): clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item) for item in value]
    return value


def records(value: Any) -> list[dict[str, Any]]:
    """The dictionaries in a list; nothing where it is none."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def items(value: Any) -> list[Any]:
    """A list, or an empty one."""
    return value if isinstance(value, list) else []


def record(value: Any) -> dict[str, Any]:
    """A dictionary, or an empty one."""
    return value if isinstance(value, dict) else {}


def text_or_none(value: Any) -> str:
    """A value as text, a dash where there is none."""
    if value is None or value == "":
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return plain(value)


def count_text(value: Any) -> str:
    """40572 as 40,572."""
    found = whole(value)
    return NONE if found is None else f"{found:,}"


def short_count(value: Any) -> str:
    """5198080 as 5.20 M."""
    found = number(value)
    if found is None:
        return NONE
    for unit in ("", " k", " M", " B"):
        if abs(found) < 1000:
            return f"{found:.0f}" if not unit else f"{found:.3g}{unit}"
        found /= 1000
    return f"{found:,.3g} T"


def bytes_text(value: Any) -> str:
    """711147520 as 678 MiB."""
    found = number(value)
    if found is None:
        return NONE
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(found) < 1024:
            return f"{found:.0f} {unit}" if unit == "B" or found >= 100 else f"{found:.1f} {unit}"
        found /= 1024
    return f"{found:,.1f} TiB"


def seconds_text(value: Any) -> str:
    """0.0313 as 31.3 ms, 3720 as 1 h 02 min."""
    found = number(value)
    if found is None:
        return NONE
    if found < 0.9995:
        return f"{found * 1000:.3g} ms" if found else "0 s"
    if found < 59.95:
        return f"{found:.2f} s" if found < 9.995 else f"{found:.1f} s"
    minutes, seconds = divmod(round(found), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s" if seconds else f"{minutes} min"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def loss_text(value: Any) -> str:
    """Four figures, whatever the size."""
    found = number(value)
    if found is None:
        return NONE
    if found != 0 and abs(found) < 0.001:
        return f"{found:.1e}"
    if abs(found) >= 1e6:
        return f"{found:.2e}"
    return f"{found:.3f}" if abs(found) < 10 else f"{found:,.1f}"


def share_text(value: Any, digits: int = 1) -> str:
    """0.123 as 12.3 %."""
    found = number(value)
    return NONE if found is None else f"{found * 100:.{digits}f} %"


def rate_text(value: Any) -> str:
    """A rate with as many figures as it deserves."""
    found = number(value)
    if found is None:
        return NONE
    return f"{found:,.0f}" if abs(found) >= 100 else f"{found:.3g}"


def perplexity_text(value: Any) -> str:
    """Two decimals as long as they tell something: 2.80, 84.1, 1,445."""
    found = number(value)
    return f"{found:.2f}" if found is not None and abs(found) < 10 else rate_text(value)


def clock_text(value: Any) -> str:
    """Seconds since the epoch as local date and time."""
    found = number(value)
    if found is None:
        return NONE
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found))
    except (ValueError, OverflowError, OSError):
        return NONE


def ranks_text(ranks: list[int]) -> str:
    """[0, 1, 2, 5] as 0-2, 5."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or NONE
