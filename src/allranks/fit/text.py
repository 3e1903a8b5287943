"""The estimate in words."""

from __future__ import annotations

import shlex

from allranks.fit.records import CLOSE, FITS, NOT_KNOWN, Fit, Remedy
from allranks.report.text import bytes_text


def verdict_line(found: Fit) -> str:
    """One sentence: what a rank needs, what it has, and whether that is enough."""
    if found.unknown:
        return f"not known: {found.unknown}; nothing is refused"
    there = found.capacity
    need = f"a rank needs about {bytes_text(found.needed_bytes)}, most of it at: {found.peak}"
    if found.verdict == NOT_KNOWN or there.bytes is None:
        return f"{need}; what it has is not known here, and nothing is refused ({there.source})"
    has = f"it has {bytes_text(there.bytes)} ({there.device}, {there.source})"
    if found.verdict == FITS:
        return f"{need}; {has}: it fits"
    if found.verdict == CLOSE:
        return f"{need}; {has}: too close to tell, it is not refused"
    return f"{need}; {has}: it cannot fit, and would fail in: {found.fails_in}"


def remedy_line(remedy: Remedy) -> str:
    """A change, and what a rank needs with it."""
    enough = "" if remedy.fits else ", which is still too much"
    return f"{remedy.change}: {bytes_text(remedy.needed_bytes)}{enough} ({remedy.cost})"


def remedy_settings(remedy: Remedy) -> str:
    """What to add to the command for it."""
    return " ".join(f"--set {shlex.quote(s)}" for s in remedy.settings)


def refusal(found: Fit) -> str:
    """The whole of it for an error."""
    cures = [f"  {i}. {remedy_line(r)}\n     {remedy_settings(r)}" for i, r in enumerate(found.remedies, 1)]
    fits = any(r.fits for r in found.remedies)
    head = (
        "what makes it fit, the cheapest first:"
        if fits
        else "no change of the spec that is known here makes it fit; nearest is:"
    )
    lines = [f"memory: {verdict_line(found)}", *([head, *cures] if cures else [])]
    return "\n".join([*lines, "to try it all the same: --force"])
