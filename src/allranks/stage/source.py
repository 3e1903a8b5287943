"""One part before it is packed: its files, where nodes that see it find it, and which files prove that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SKIPPED = {
    *(".git", ".hg", ".venv", "venv", "__pycache__", "node_modules"),
    *(".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis"),
}


@dataclass(frozen=True)
class Source:
    """One part before it is packed. ``override`` is what a node with the staged copy changes in the spec."""

    name: str
    path: Path
    files: tuple[tuple[str, Path], ...]
    probe: tuple[str, ...]
    revision: str | None = None
    override: dict[str, str | None] | None = None


def walk(folder: Path, *, compiled: bool = False) -> Iterator[Path]:
    """Files below a folder, sorted; links are followed, but never in a circle."""
    visited: set[str] = set()
    for base, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(base)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(f for f in folders if f not in _SKIPPED or (compiled and f == "__pycache__"))
        for name in sorted(names):
            path = Path(base, name)
            if path.is_file() and (compiled or path.suffix != ".pyc"):
                yield path
