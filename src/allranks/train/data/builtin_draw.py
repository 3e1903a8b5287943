"""Draws that give the same rows on every Python version.

Python promises to keep only what ``random.Random.random()`` returns for a seed; ``choice``, ``sample`` and
``shuffle`` may change from one version to the next. So everything here is made of ``random()`` alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """A stream of draws, named by a text such as ``"news:42"``."""

    def __init__(self, name: str) -> None:
        self._random = random.Random(name).random

    def below(self, n: int) -> int:
        """A whole number from 0 to n - 1."""
        return int(self._random() * n)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """This many different positions of the items, in random order."""
        pool = list(items)
        for i in range(count):
            j = i + self.below(len(pool) - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """All the items, in random order."""
        return self.sample(items, len(items))
