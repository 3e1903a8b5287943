"""Shorten names of kernels and modules so that they remain distinguishable."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from os.path import commonprefix

from allranks.analysis.trace.records import ModuleRow

_LIBRARY_NAMESPACES = re.compile(
    r"\b(?:at::native|at::cuda|at::detail|c10|cutlass|cub|cudnn::ops|cudnn|thrust)::|\(anonymous namespace\)::"
)


def short_name(name: str, width: int) -> str:
    """Shorten a kernel's or operator's name to `width` columns: first remove common parts, then its middle."""
    name = _strip_signature(name, width)
    if len(name) <= width:
        return name
    end = (width - 1) // 3
    return f"{name[: width - 1 - end]}…{name[len(name) - end :]}"


def short_names(names: Sequence[str], width: int) -> list[str]:
    """Apply `short_name` to each name. Of names that would be equal, the different part is shown."""
    shown = [short_name(name, width) for name in names]
    for text, count in Counter(shown).items():
        if count > 1:
            alike = [i for i, other in enumerate(shown) if other == text]
            for i, own in zip(
                alike, _distinguish([_strip_signature(names[i], width) for i in alike], width), strict=True
            ):
                shown[i] = own
    return shown


def _strip_signature(name: str, width: int) -> str:
    """Remove `void`, the list of parameters and library namespaces from a name, as far as needed."""
    for drop in (lambda n: n.removeprefix("void "), _without_parameters, lambda n: _LIBRARY_NAMESPACES.sub("", n)):
        if len(name) <= width:
            break
        name = drop(name)
    return name


def _distinguish(names: list[str], width: int) -> list[str]:
    """Return the start and the part after the first difference; repeated for names that differ later."""
    same = len(commonprefix(names))  # noqa: RUF071 - characters are what is meant
    head = width // 3
    start = max(min(same - 2, min(map(len, names)) - 1), head)
    room = width - head - 1
    made = [f"{n[:head]}…{n[start:] if len(n) - start <= room else n[start : start + room - 1] + '…'}" for n in names]
    for text, count in Counter(made).items():
        alike = [i for i, other in enumerate(made) if other == text]
        if 1 < count < len(names):
            for i, own in zip(alike, _distinguish([names[i] for i in alike], width), strict=True):
                made[i] = own
    return made


def short_path(path: str, width: int) -> str:
    """Shorten a dotted path to `width` columns: keep the end, starting at a dot if possible."""
    if len(path) <= width:
        return path
    end = path[len(path) - (width - 1) :]
    dot = end.find(".")
    return "…" + (end[dot:] if 0 <= dot < width // 3 else end)


def _without_parameters(name: str) -> str:
    """Return a C++ signature without its last parameter list."""
    if not name.endswith(")"):
        return name
    depth = 0
    for at in range(len(name) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(name[at], 0)
        if depth == 0:
            return name[:at] or name
    return name


def top_modules_by_self_time(modules: Sequence[ModuleRow], limit: int) -> list[ModuleRow]:
    """Return the modules with the largest self time in their order, each with its parents.

    Without its parents, an indented module would seem to belong to the row above it.
    """
    ranked = sorted(range(len(modules)), key=lambda i: -modules[i].self_s)[:limit]
    shown = set(ranked)
    for i in ranked:
        depth, at = (
            (0 if modules[i].source == "module" else modules[i].depth),
            i,
        )  # the path of a module includes its parents
        while depth > 0 and at > 0:
            at -= 1
            if modules[at].depth < depth:
                depth = modules[at].depth
                shown.add(at)
    return [modules[i] for i in sorted(shown)]
