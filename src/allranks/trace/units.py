"""Figures with their units, for tables and messages."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """A duration with a unit that suits it."""
    if value is None:
        return "-"
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if abs(value) < limit:
            return f"{value * factor:.4g} {unit}" if abs(value * factor) < 1000 else f"{value * factor:.0f} {unit}"
    return f"{value:.4g} s"


def size(value: float | None) -> str:
    """Bytes with a binary unit."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def rate(value: float | None) -> str:
    """Bytes per second in units of 10^9, as nccl-tests print them."""
    if value is None:
        return "-"
    return f"{value / 1e9:.3g}" if value >= 1e6 else "< 0.001"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else "-"
