"""``builtin:news``: made-up news, a title and a description, in the four classes of AG News (labels 1 to 4).

Classes share names, places, numbers and many verbs; some titles fit any class, some leads sit between two classes and
carry either label. A classifier learns the set well, but never perfectly.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from typing import Any

from allranks.train.data.builtin_draw import Draw
from allranks.train.data.builtin_news_texts import (
    ANY_TITLES,
    BETWEEN,
    BLANKS,
    CLASSES,
    FOLLOW_UPS,
    LEADS,
    TITLES,
)

BETWEEN_CLASSES = 0.12
ANY_TITLE, ANY_TITLE_BETWEEN = 0.15, 0.5
FOLLOW_UP = 0.7
"""Shares of the rows whose lead fits two classes; whose title fits any class, elsewhere and there; and that have a
second sentence."""


def _fill(draw: Draw, texts: Sequence[str], chosen: dict[str, str]) -> str:
    """One of the texts with its blanks filled; a blank filled before in this row keeps its filling."""
    text = draw.pick(texts)
    for _, blank, _, _ in string.Formatter().parse(text):
        if blank and blank not in chosen:
            chosen[blank] = draw.pick(BLANKS[blank])
    return text.format(**chosen)


def capital(text: str) -> str:
    """The text with its first letter made a capital."""
    at = next(i for i, char in enumerate(text) if char.isalnum())
    return text[:at] + text[at].upper() + text[at + 1 :]


def _row(draw: Draw, label: int) -> dict[str, Any]:
    chosen: dict[str, str] = {}
    between = draw.chance(BETWEEN_CLASSES)
    any_title = draw.chance(ANY_TITLE_BETWEEN if between else ANY_TITLE)
    leads = (
        [text for labels, texts in BETWEEN.items() if label in labels for text in texts] if between else LEADS[label]
    )
    title = _fill(draw, ANY_TITLES if any_title else TITLES[label], chosen)
    sentences = [_fill(draw, leads, chosen)]
    if draw.chance(FOLLOW_UP):
        sentences.append(_fill(draw, FOLLOW_UPS, chosen))
    return {"label": label, "title": capital(title), "description": " ".join(map(capital, sentences))}


def rows(draw: Draw) -> Iterator[dict[str, Any]]:
    """Rows without end, no text twice, the classes in shuffled turns."""
    told: set[tuple[str, str]] = set()
    while True:
        for label in draw.shuffled(CLASSES):
            row = _row(draw, label)
            while (row["title"], row["description"]) in told:
                row = _row(draw, label)
            told.add((row["title"], row["description"]))
            yield row
