"""How long a rank may be silent. Pure.

Steps of training have the limit that the spec asks for. What is long by nature (joining, data, the model, the first step,
evaluation, checkpoints) may take as long as the others can wait: nearly ``cluster.timeout_s``, after which the collective in
which they wait would end them and the evidence with them.
"""

from __future__ import annotations

import msgspec

from allranks.errors import SpecError
from allranks.hang.pulse import SCRIPT, TRAIN, Beat
from allranks.spec.records import RunSpec

AUTO_MOST_S = 300.0
AUTO_SHARE = 0.5  # of the collectives' limit
SHORTEST_TIMEOUT_S = 20  # below it there is no room for a silence and for looking at it
ROOM_SHARE, ROOM_S = 0.1, 8.0  # of the collectives' limit, and at least: what looking takes
SLOWEST = 3.0  # times the longest silence that this rank has shown before, while it trained


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """``step_s`` within steps of training, ``long_s`` in the other phases."""

    step_s: float
    long_s: float


def limits_of(spec: RunSpec) -> Limits | None:
    """The limits of a run; None where it is not watched.

    Raises:
        SpecError: collectives would time out before.
    """
    asked, timeout = spec.observe.hang_s, spec.cluster.timeout_s
    if asked == "auto":
        if timeout < SHORTEST_TIMEOUT_S or spec.script is not None:
            return None
        asked = min(AUTO_MOST_S, AUTO_SHARE * timeout)
    if asked is None:
        return None
    if asked >= timeout:
        raise SpecError(
            f"observe.hang_s is {asked:g}, but collectives time out after {timeout} s (cluster.timeout_s), which ends the ranks before "
            "anybody could look at them; make it smaller, or cluster.timeout_s larger"
        )
    return Limits(step_s=asked, long_s=max(asked, timeout - max(ROOM_SHARE * timeout, ROOM_S)))


def limit(limits: Limits, beat: Beat) -> float:
    """What this rank may take now, in seconds. One whose steps have long parts by nature gets more, up to ``long_s``."""
    if not strict(beat):
        return limits.long_s
    return min(max(limits.step_s, SLOWEST * beat.longest_s), limits.long_s)


def strict(beat: Beat) -> bool:
    """Whether only beats are progress; elsewhere a process that computes, reads or writes is not silent. A program of the
    user's own is held to it from its first collective on."""
    return beat.phase == TRAIN or (beat.phase == SCRIPT and any(beat.sequences.values()))
