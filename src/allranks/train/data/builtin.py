"""The built-in data sets, for demos and tests that must work with no network: ``builtin:<name>``.

All texts are made up here from word lists. The same seed gives the same rows on every machine and every version of
Python, and a shorter call gives the beginning of a longer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from allranks.train.data import builtin_instructions, builtin_news, builtin_reviews
from allranks.train.data.builtin_draw import Draw


@dataclass(frozen=True)
class BuiltinSet:
    """One built-in set: how its rows become text, and the rows."""

    name: str
    template: Literal["alpaca", "classification"]
    columns: Mapping[str, str | list[str]]
    stream: Callable[[Draw], Iterator[dict[str, Any]]]
    default_rows: int = 4000

    def rows(self, n: int, seed: int) -> list[dict[str, Any]]:
        """The first n rows of a seed; no two ask or say the same."""
        return list(islice(self.stream(Draw(f"{self.name}:{seed}")), n))


BUILTIN: dict[str, BuiltinSet] = {
    one.name: one
    for one in (
        BuiltinSet(
            "instructions",
            "alpaca",
            {"instruction": "instruction", "input": "input", "output": "output"},
            builtin_instructions.rows,
        ),
        BuiltinSet("news", "classification", {"text": ["title", "description"], "label": "label"}, builtin_news.rows),
        BuiltinSet("reviews", "classification", {"text": "text", "label": "label"}, builtin_reviews.rows),
    )
}
