"""The forty failures that the field notes behind this project tell of, and where each is prevented, refused or named."""

from __future__ import annotations

from allranks.diagnose.failures.first import FIRST
from allranks.diagnose.failures.record import WORDS, Failure, How
from allranks.diagnose.failures.second import SECOND

FAILURES: tuple[Failure, ...] = FIRST + SECOND

__all__ = ["FAILURES", "WORDS", "Failure", "How"]
