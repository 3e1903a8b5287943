"""What is to be compared; the ranks read it from the run folder."""

from __future__ import annotations

from typing import Any

import msgspec


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy with its options."""

    name: str
    options: dict[str, Any] = {}


class CompareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Timed steps, those before them that are not counted, and how often."""

    strategies: list[Candidate]
    repeats: int = 3
    steps: int = 10
    warmup_steps: int = 2
