"""Variables of torch's flight recorder: on, and where NCCL's own watchdog puts its dump if it is the first to notice."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RECORDS = "2000"  # what torch 2.13 keeps by itself
OWN_NAMES = (2, 13)  # from here on it is on by itself, and the older names bring a warning
WATCHDOG = "watchdog.rank"


def environment(device: str, folder: Path) -> dict[str, str]:
    """What a rank should have, unless the user has set it.

    Args:
        device: ``cuda`` or ``cpu``.
        folder: where dumps go.
    """
    new = _torch_version() >= OWN_NAMES
    found = {} if new else {"TORCH_FR_BUFFER_SIZE": RECORDS, "TORCH_NCCL_TRACE_BUFFER_SIZE": RECORDS}
    if device == "cuda":
        name = "TORCH_FR_DUMP_TEMP_FILE" if new else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
        found[name] = str(folder / WATCHDOG)
    return found


def _torch_version() -> tuple[int, ...]:
    try:
        parts = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return (0, 0)
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)
