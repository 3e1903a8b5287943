"""What is known of one of the forty failures."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

How = Literal["P", "R", "D"]
WORDS: dict[How, str] = {"P": "prevented", "R": "refused", "D": "named"}


class Failure(Struct, frozen=True, kw_only=True):
    """One failure, and how allranks deals with it.

    ``how`` is P (prevented by construction), R (refused before the ranks start) or D (named by `diagnose`).
    ``where`` says in words what keeps it away or finds it; ``page`` is a file of docs/failures.
    ``tests`` are pytest node ids, of a function or of one of its cases; ``evidence`` says whether they inject the real
    thing or, where that takes GPUs or a fabric, replay logs and facts of it.
    ``classes`` are those of the catalogue by which `diagnose` names it where it happened outside of allranks.
    """

    number: int
    title: str
    how: How
    where: str
    page: str
    tests: tuple[str, ...]
    evidence: Literal["injected", "replayed"] = "injected"
    classes: tuple[str, ...] = ()
