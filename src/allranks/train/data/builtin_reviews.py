"""``builtin:reviews``: made-up reviews of two to six sentences with one to five stars.

Every star count has its own mixes of sentences, from awful to great, so that neighbours share many sentences and the
whole text must be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from allranks.train.data.builtin_draw import Draw
from allranks.train.data.builtin_reviews_texts import ASIDES, BLANKS, ITEMS, OPENINGS, SENTENCES, VERDICTS

STARS = (1, 2, 3, 4, 5)
MIXES: dict[int, tuple[str, ...]] = {
    1: ("awful awful", "awful bad", "awful awful bad", "awful bad bad"),
    2: ("bad bad", "bad bad good", "bad awful good", "bad bad bad"),
    3: ("good bad", "good good bad bad", "good bad bad", "good good bad"),
    4: ("good good", "good good bad", "good great bad", "good good good"),
    5: ("great great", "great good", "great great good", "great good good"),
}
"""What a review with this many stars says, in any order."""
OPENING, ASIDE, VERDICT = 0.7, 0.2, 0.5
"""Shares of the reviews that begin with how the thing was bought, say something neutral, and end with a verdict."""


def _row(draw: Draw, label: int) -> dict[str, Any]:
    item = draw.pick(tuple(ITEMS))
    tones = draw.shuffled(draw.pick(MIXES[label]).split())
    blanks = {blank: draw.pick(fillings) for blank, fillings in BLANKS.items()}
    sentences = [draw.pick(OPENINGS).format(item=item, **blanks)] if draw.chance(OPENING) else []
    pools = {tone: draw.shuffled(texts) for tone, texts in SENTENCES.items()}
    for tone, trait in zip(tones, draw.sample(ITEMS[item], len(tones)), strict=True):
        sentences.append(pools[tone].pop().format(item=item, trait=trait, **blanks))
    if draw.chance(ASIDE) and len(tones) < 4:
        sentences.append(draw.pick(ASIDES).format(item=item, **blanks))
    if draw.chance(VERDICT):
        sentences.append(draw.pick(VERDICTS[label]).format(item=item, **blanks))
    return {"label": label, "text": " ".join(sentences)}


def rows(draw: Draw) -> Iterator[dict[str, Any]]:
    """Rows without end, no text twice, the stars in shuffled turns."""
    told: set[str] = set()
    while True:
        for label in draw.shuffled(STARS):
            row = _row(draw, label)
            while row["text"] in told:
                row = _row(draw, label)
            told.add(row["text"])
            yield row
