"""Kernels, operators and modules, summed over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from allranks.trace.modules import Source
from allranks.trace.rank import RankResult
from allranks.trace.records import ModuleRow, TopRow
from allranks.trace.steps import US
from allranks.trace.work import KINDS, Tops

SHOWN_TOPS = 50


def top_rows(parts: Iterable[Tops]) -> tuple[TopRow, ...]:
    """The `SHOWN_TOPS` names with the most time."""
    rows: dict[str, list[float]] = {}
    for part in parts:
        for name, (count, time, longest, kind) in part.items():
            row = rows.setdefault(name, [0, 0.0, 0.0, kind])
            row[0] += count
            row[1] += time
            row[2] = max(row[2], longest)
    whole = sum(row[1] for row in rows.values()) or 1.0
    ranked = sorted(rows.items(), key=lambda item: -item[1][1])[:SHOWN_TOPS]
    return tuple(
        TopRow(
            name=name,
            kind=KINDS[int(kind)],  # type: ignore[arg-type]
            count=int(count),
            total_s=time * US,
            mean_s=time / count * US,
            max_s=longest * US,
            share=time / whole,
        )
        for name, (count, time, longest, kind) in ranked
    )


def module_rows(ranks: Mapping[int, RankResult]) -> tuple[ModuleRow, ...]:
    """All modules, in the order in which the first rank has them."""
    rows: dict[str, list[float]] = {}
    depths: dict[str, int] = {}
    sources: list[Source] = [r.module_source for r in ranks.values() if r.modules]
    for result in ranks.values():
        for m in result.modules:
            row = rows.setdefault(m.name, [0, 0.0, 0.0, 0.0, 0.0])
            depths.setdefault(m.name, m.depth)
            for i, value in enumerate((m.count, m.host, m.forward, m.backward, m.own)):
                row[i] += value
    return tuple(
        ModuleRow(
            name=name,
            depth=depths[name],
            count=int(count),
            host_s=host * US,
            forward_s=forward * US,
            backward_s=backward * US,
            self_s=own * US,
            source=sources[0] if sources else "module",
        )
        for name, (count, host, forward, backward, own) in rows.items()
    )
