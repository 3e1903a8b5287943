"""Describe a mixture of several sources (``data.sources``): its parts, their shares of an epoch, and their names. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from allranks.spec.records import DataSpec


def parts_of(data: DataSpec) -> list[DataSpec]:
    """Return a `DataSpec` with one source for each source; the data itself if it has only ``data.source``.

    The parts of a mixture have no ``subset``: it is the number of rows that all of them give to an epoch.
    """
    if data.sources is None:
        return [data]
    parts = []
    for one in data.sources:
        own = {
            name: value
            for name in ("template", "columns", "split", "config", "revision")
            if (value := getattr(one, name)) is not None
        }
        parts.append(msgspec.structs.replace(data, source=one.source, sources=None, subset=None, **own))
    return parts


def source_of(data: DataSpec) -> str:
    """Return ``data.source`` of a part, or the names of all sources."""
    if data.sources is not None:
        return " + ".join(one.source for one in data.sources)
    return data.source or ""


def key_of(data: DataSpec, number: int) -> str:
    """Return the key of the spec that names this source."""
    return "data.source" if data.sources is None else f"data.sources[{number}].source"


def mixture_problems(data: DataSpec) -> list[str]:
    """Return a sentence for each contradiction between ``data.source`` and ``data.sources``."""
    if data.sources is None:
        missing = (
            "data.source is missing; set a hub name, a file, or for example builtin:instructions (or data.sources)"
        )
        return [] if data.source is not None else [missing]
    if data.source is not None:
        return ["data.source and data.sources are both set; set only one"]
    names = [one.source for one in data.sources]
    problems = [] if names else ["data.sources is empty; list at least one {source, weight}"]
    rows = [(one.source, one.split, one.config) for one in data.sources]
    twice = dict.fromkeys(row[0] for row in rows if rows.count(row) > 1)
    problems += [f"data.sources names {name} more than once; name it once, with a larger weight" for name in twice]
    if "builtin:noise" in names:
        problems.append("data.sources: builtin:noise is for mlp: models and cannot be mixed; use data.source")
    return problems


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `total`, proportional to the weights (largest remainder; the first of equal ones)."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    by_rest = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_rest[: total - sum(shares)]:
        shares[i] += 1
    return shares
