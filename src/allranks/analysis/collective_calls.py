"""Find where ranks diverge, from the collectives that each of them called. Pure.

The hang watch of a run and `allranks diagnose` apply it to the records of torch's flight recorder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from allranks.utils.collectives import size_rule


class CollectiveCall(Struct, frozen=True, kw_only=True):
    """One collective that a rank has called.

    ``sizes`` are those of its inputs; ``done``: it has completed on this rank; ``where``: the program's line, ``file:line:function``.
    """

    group: str
    seq: int
    op: str
    sizes: str
    output_sizes: str = ""
    done: bool
    where: str = ""


C = TypeVar("C", bound=CollectiveCall)


class OpenCollective(Struct, Generic[C], frozen=True):
    """The first collective of a group that is unfinished on a rank.

    ``calls``: by rank, what was called as this number of the group. ``absent``: ranks whose last call in the group is an earlier one.
    """

    group: str
    seq: int
    calls: dict[int, C]
    absent: list[int]

    @property
    def waiting(self) -> list[int]:
        """Return the ranks on which it is unfinished."""
        return [rank for rank, call in sorted(self.calls.items()) if not call.done]

    @property
    def differs(self) -> bool:
        """Return whether the ranks called different operations, or one operation with sizes that must be equal and are not."""
        return len({c.op for c in self.calls.values() if c.op}) > 1 or any(len(s) > 1 for s in self._sizes())

    @property
    def rarest(self) -> list[int]:
        """Return the ranks whose call is the rarest."""
        kinds = {rank: _kind(call) for rank, call in sorted(self.calls.items())}
        counts = Counter(kinds.values())
        least = min(counts.values(), default=0)
        return [rank for rank, kind in kinds.items() if counts[kind] == least]

    def contrast(self, rank: int) -> C | None:
        """Return the most frequent call that differs from this rank's."""
        counts = Counter(_kind(c) for c in self.calls.values())
        others = [c for c in self.calls.values() if _kind(c) != _kind(self.calls[rank])]
        return max(others, key=lambda c: counts[_kind(c)], default=None)

    def describe(self, call: C | None) -> str:
        """Describe a call by operation and sizes; the sizes of its outputs are included if only they differ."""
        if call is None:
            return "another"
        inputs, outputs = self._sizes()
        to = f" to {call.output_sizes}" if len(inputs) < 2 and len(outputs) > 1 else ""
        return f"{describe_call(call)}{to}"

    def _sizes(self) -> tuple[set[str], set[str]]:
        """Return the different sizes of inputs and outputs that must be equal; unknown ones are ignored."""
        kinds = [_kind(c) for c in self.calls.values()]
        return {k[1] for k in kinds if k[1]}, {k[2] for k in kinds if k[2]}


def _kind(call: CollectiveCall) -> tuple[str, str, str]:
    """Return what must be equal on all ranks: the operation, and the sizes that its rule names."""
    rule = size_rule(call.op)
    return call.op, call.sizes if rule and rule.inputs else "", call.output_sizes if rule and rule.outputs else ""


def describe_call(call: CollectiveCall) -> str:
    """Describe a collective by operation and sizes."""
    return f"{call.op} {call.sizes}".strip()


def open_collectives(ranks: Mapping[int, Sequence[C]]) -> Iterator[OpenCollective[C]]:
    """Yield the first unfinished collective of each group that has one.

    Args:
        ranks: the calls that each rank has recorded.
    """
    for group in sorted({c.group for calls in ranks.values() for c in calls}):
        members = {rank: own for rank, calls in ranks.items() if (own := {c.seq: c for c in calls if c.group == group})}
        unfinished = [seq for own in members.values() for seq, c in own.items() if not c.done]
        if unfinished:
            seq = min(unfinished)
            yield OpenCollective(
                group=group,
                seq=seq,
                calls={rank: own[seq] for rank, own in members.items() if seq in own},
                absent=sorted(rank for rank, own in members.items() if max(own) < seq),
            )
