"""Find in the logs of ranks why a process aborted, and where in the program it was: a SIGABRT has no Python exception. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from allranks.analysis.stacks import blocking_location, main_thread_frames, traceback_frames

_WHAT = re.compile(r"^\s*what\(\):\s+(?P<text>\S.{0,400})", re.MULTILINE)
_FATAL = "Fatal Python error: "
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (?P<received>\d+) vs (?P<expected>\d+)")
_TRACEBACK = "Traceback (most recent call last):"


def describe_crash(rank: int, logs: Mapping[int, str]) -> str:
    """Return what the log of an aborted rank says of the reason and the place in the program; empty if it says nothing.

    Args:
        logs: the ends of the logs of all ranks.
    """
    text = logs.get(rank, "")
    found = _WHAT.findall(text)
    said = found[-1].strip() if found else ""
    if sizes := _SIZES.search(said):
        places = "; ".join(f"rank {r} in {place}" for r in sorted(logs) if (place := place_in_log(logs[r])))
        received = f"it received data of {sizes['received']} bytes where it expected {sizes['expected']}"
        return f"the ranks are in different collectives ({received})" + (f": {places}" if places else "")
    place = place_in_log(text) if _FATAL in text else ""
    return ", ".join(part for part in (said, f"in {place}" if place else "") if part)


def place_in_log(text: str) -> str:
    """Return the program's line of the dump or traceback with which a log ends; empty if there is none."""
    if _FATAL in text:
        return blocking_location(main_thread_frames(text[text.rindex(_FATAL) :])).partition(" (within")[0]
    if _TRACEBACK not in text:
        return ""
    return blocking_location(traceback_frames(text[text.rindex(_TRACEBACK) :])).partition(" (within")[0]
