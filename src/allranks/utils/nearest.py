"""Suggest the name that a misspelt one may mean."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar of the known names, or None if none is similar.

    Args:
        cutoff: least similarity, between 0 and 1 (``difflib.SequenceMatcher.ratio``).
    """
    import difflib  # only after a mistake: every verb imports this module

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6, form: str = "{!r}") -> str:
    """Return ``; did you mean 'a'?``, or an empty text if no known name is similar.

    Args:
        form: how the suggestion is shown, such as ``tiny:{}``.
    """
    near = nearest_name(name, known, cutoff)
    return "" if near is None else suggest(form.format(near))


def suggest(*names: str) -> str:
    """Return ``; did you mean a or b?``; empty without names."""
    return f"; did you mean {' or '.join(names)}?" if names else ""


def nearest_file_hint(path: Path) -> str:
    """Return ``; did you mean job.sh?`` if the folder of a missing file has one of a similar name; else an empty text."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    near = nearest_name(path.name, names)
    return "" if near is None else suggest(str(path.with_name(near)))
