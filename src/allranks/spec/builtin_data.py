"""Generate the rows of the built-in data sets ``builtin:<name>``, for demos and tests that must work with no network.

The texts are in ``builtin/<name>.json``; all are fictitious. The same seed gives the same rows on every machine and
every version of Python, and a shorter call gives the beginning of a longer one. The order of the lists in these files
is part of the data: another order gives other rows.

``builtin:instructions``: short questions of many families, each with one answer that can be checked exactly.
``builtin:news``: a title and a description, in the four classes of AG News (labels 1 to 4).
``builtin:reviews``: reviews of two to six sentences with one to five stars.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

T = TypeVar("T")
Pairs = Sequence[Sequence[str]]


@cache
def texts_of(name: str) -> dict[str, Any]:
    """Return the texts of a set; its file is read once, on first use.

    ``phrases`` of ``builtin:instructions`` are the wordings of each family of questions. Blanks are in braces. The text
    after ``|`` becomes the row's ``input``. ``sizes`` are animals, each clearly larger than the one before. Companies,
    clubs and people of ``builtin:news`` are made up; its classes share names, places, numbers and many verbs, and some
    titles and leads fit several classes: a classifier learns the set well, but never perfectly.
    """
    return json.loads((Path(__file__).parent / "builtin" / f"{name}.json").read_bytes())


def _words() -> dict[str, Any]:
    return texts_of("instructions")["words"]


@cache
def _kind_of() -> dict[str, str]:
    return {thing: kind for kind, things in _words()["kinds"].items() for thing in things}


@cache
def _listed() -> list[str]:
    """Return words for lists and for questions about letters."""
    return [thing for things in _words()["kinds"].values() for thing in things[:3]]


class PortableRandom:
    """A stream of draws, named by a text such as ``"news:42"``.

    Python promises to keep only what ``random.Random.random()`` returns for a seed; ``choice``, ``sample`` and
    ``shuffle`` may change from one version to the next. So every draw is made of ``random()`` alone.
    """

    def __init__(self, name: str) -> None:
        self._random = random.Random(name).random

    def below(self, n: int) -> int:
        """Return an integer from 0 to n - 1."""
        return int(self._random() * n)

    def chance(self, probability: float) -> bool:
        """Return true with this probability."""
        return self._random() < probability

    def pick(self, items: Sequence[T]) -> T:
        """Return one of the items."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Return this number of different positions of the items, in random order."""
        pool = list(items)
        for i in range(count):
            j = i + self.below(len(pool) - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return all items in random order."""
        return self.sample(items, len(items))


Row = dict[str, str]
Question = tuple[str, str]
"""A question, its input behind ``|`` if it has one, and the answer."""


def _from_table(family: str, table: Callable[[dict[str, Any]], Pairs]) -> Callable[[PortableRandom], Question]:
    def question(draw: PortableRandom) -> Question:
        x, answer = draw.pick(table(_words()))
        return _phrase(draw, family).format(x=x), answer

    return question


def _phrase(draw: PortableRandom, family: str) -> str:
    return draw.pick(texts_of("instructions")["phrases"][family])


def _turned(pairs: Pairs) -> Pairs:
    return [(b, a) for a, b in pairs]


def _with_article(thing: str) -> str:
    if _kind_of()[thing] in ("drink", "metal"):
        return thing
    return f"an {thing}" if thing[0] in "aeiou" else f"a {thing}"


def _kind(draw: PortableRandom) -> Question:
    thing = draw.pick(list(_kind_of()))
    return _phrase(draw, "kind").format(x=thing, ax=_with_article(thing)), _kind_of()[thing]


def _is_kind(draw: PortableRandom) -> Question:
    thing = draw.pick(list(_kind_of()))
    right = _kind_of()[thing]
    yes = draw.chance(0.5)
    kind = right if yes else draw.pick([k for k in _words()["kinds"] if k != right])
    return _phrase(draw, "is_kind").format(x=thing, ax=_with_article(thing), k=kind), "yes" if yes else "no"


def _pick_kind(draw: PortableRandom) -> Question:
    known = _words()["kinds"]
    kinds = draw.sample(tuple(known), 3)
    things = [draw.pick(known[kind][:3]) for kind in kinds]
    return _phrase(draw, "pick_kind").format(k=kinds[0], list=", ".join(draw.shuffled(things))), things[0]


def _compare_numbers(draw: PortableRandom) -> Question:
    a, b = draw.sample(range(10), 2)
    larger = draw.chance(0.5)
    more = "larger" if larger else "smaller"
    return _phrase(draw, "compare_numbers").format(a=a, b=b, more=more), str(max(a, b) if larger else min(a, b))


def _compare_animals(draw: PortableRandom) -> Question:
    sizes = _words()["sizes"]
    a, b = draw.sample(range(len(sizes)), 2)
    larger = draw.chance(0.5)
    shown = [("an " if sizes[i][0] in "aeiou" else "a ") + sizes[i] for i in (a, b)]
    question = _phrase(draw, "compare_animals")
    question = question.format(a=shown[0], b=shown[1], more="larger" if larger else "smaller")
    return question, sizes[max(a, b) if larger else min(a, b)]


def _sum(draw: PortableRandom) -> Question:
    a, b = draw.below(10), draw.below(10)
    return _phrase(draw, "sum").format(a=a, b=b), str(a + b)


def _difference(draw: PortableRandom) -> Question:
    a = draw.below(10)
    b = draw.below(a + 1)
    return _phrase(draw, "difference").format(a=a, b=b), str(a - b)


def _list(draw: PortableRandom, shortest: int = 2) -> list[str]:
    return draw.sample(_listed(), shortest + draw.below(5 - shortest))


def _about_list(
    family: str, answer: Callable[[list[str]], str], shortest: int = 2
) -> Callable[[PortableRandom], Question]:
    def question(draw: PortableRandom) -> Question:
        items = _list(draw, shortest)
        return _phrase(draw, family).format(list=", ".join(items)), answer(items)

    return question


def _member(draw: PortableRandom) -> Question:
    items = _list(draw)
    yes = draw.chance(0.5)
    x = draw.pick(items) if yes else draw.pick([thing for thing in _listed() if thing not in items])
    return _phrase(draw, "member").format(x=x, list=", ".join(items)), "yes" if yes else "no"


def _letter(draw: PortableRandom) -> Question:
    word = draw.pick(_listed())
    first = draw.chance(0.5)
    place, verb = ("first", "begin") if first else ("last", "end")
    return _phrase(draw, "letter").format(x=word, place=place, verb=verb), word[0 if first else -1]


def _neighbour(draw: PortableRandom, wordings: Sequence[str], ring: Sequence[str]) -> Question:
    i = draw.below(len(ring))
    after = draw.chance(0.5)
    question = draw.pick(wordings).format(x=ring[i], side="after" if after else "before")
    return question, ring[(i + (1 if after else -1)) % len(ring)]


def _calendar(draw: PortableRandom) -> Question:
    phrases = texts_of("instructions")["phrases"]["next_day"]
    if draw.chance(0.4):
        return _neighbour(draw, phrases, _words()["days"])
    by_month = [words.replace("day of the week", "month").replace("day", "month") for words in phrases]
    return _neighbour(draw, by_month, _words()["months"])


def _next_number(draw: PortableRandom) -> Question:
    number = 1 + draw.below(24)
    after = draw.chance(0.5)
    question = _phrase(draw, "next_number").format(x=number, side="after" if after else "before")
    return question, str(number + 1 if after else number - 1)


FAMILIES: dict[str, Callable[[PortableRandom], Question]] = {
    "opposite": _from_table("opposite", lambda words: [*words["opposites"], *_turned(words["opposites"])]),
    "capital": _from_table("capital", lambda words: words["capitals"]),
    "country": _from_table("country", lambda words: _turned(words["capitals"])),
    "colour": _from_table("colour", lambda words: words["colours"]),
    "plural": _from_table("plural", lambda words: words["plurals"]),
    "past": _from_table("past", lambda words: words["pasts"]),
    "kind": _kind,
    "is_kind": _is_kind,
    "pick_kind": _pick_kind,
    "compare_numbers": _compare_numbers,
    "compare_animals": _compare_animals,
    "sum": _sum,
    "difference": _difference,
    "count": _about_list("count", lambda items: str(len(items)), shortest=1),
    "first": _about_list("first", lambda items: items[0]),
    "last": _about_list("last", lambda items: items[-1]),
    "member": _member,
    "letter": _letter,
    "calendar": _calendar,
    "next_number": _next_number,
}


def instruction_rows(draw: PortableRandom) -> Iterator[Row]:
    """Yield rows endlessly; families alternate, and an exhausted family is skipped.

    No question comes twice, not even with another ending, so that a held-out row is a new one.
    """
    questions: set[str] = set()
    while True:
        for name in draw.shuffled(tuple(FAMILIES)):
            for _ in range(50):
                question, answer = FAMILIES[name](draw)
                if question not in questions:
                    questions.add(question)
                    instruction, _, given = question.partition("|")
                    if instruction[-1] in ".?" and "yes or no" not in instruction.lower() and draw.chance(0.5):
                        instruction += draw.pick(texts_of("instructions")["endings"])
                    yield {"instruction": instruction, "input": given, "output": answer}
                    break


CLASSES = (1, 2, 3, 4)
BETWEEN_CLASSES = 0.12
ANY_TITLE, ANY_TITLE_BETWEEN = 0.15, 0.5
FOLLOW_UP = 0.7
"""Shares of rows: the lead fits two classes; the title fits any class, in others and in these; a second sentence."""


def _fill(draw: PortableRandom, texts: Sequence[str], chosen: dict[str, str]) -> str:
    """Return one of the texts with its blanks filled; a blank that occurs again in the row gets the same value."""
    text, blanks = draw.pick(texts), texts_of("news")["blanks"]
    for _, blank, _, _ in string.Formatter().parse(text):
        if blank and blank not in chosen:
            chosen[blank] = draw.pick(blanks[blank])
    return text.format(**chosen)


def capital(text: str) -> str:
    """Return the text with a capital first letter."""
    at = next(i for i, char in enumerate(text) if char.isalnum())
    return text[:at] + text[at].upper() + text[at + 1 :]


def _news_row(draw: PortableRandom, label: int) -> dict[str, Any]:
    texts, chosen = texts_of("news"), dict[str, str]()
    between = draw.chance(BETWEEN_CLASSES)
    any_title = draw.chance(ANY_TITLE_BETWEEN if between else ANY_TITLE)
    shared = [text for pair in texts["between"] if label in pair["classes"] for text in pair["leads"]]
    leads = shared if between else texts["leads"][str(label)]
    title = _fill(draw, texts["any_titles"] if any_title else texts["titles"][str(label)], chosen)
    sentences = [_fill(draw, leads, chosen)]
    if draw.chance(FOLLOW_UP):
        sentences.append(_fill(draw, texts["follow_ups"], chosen))
    return {"label": label, "title": capital(title), "description": " ".join(map(capital, sentences))}


def _labelled_rows(
    draw: PortableRandom, labels: Sequence[int], row_of: Callable[[PortableRandom, int], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield rows endlessly without repeated texts, the labels in shuffled order."""
    seen: set[tuple[str, ...]] = set()
    while True:
        for label in draw.shuffled(labels):
            row = row_of(draw, label)
            while (texts := tuple(row.values())[1:]) in seen:  # all but the label
                row = row_of(draw, label)
            seen.add(texts)
            yield row


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


def _review_row(draw: PortableRandom, label: int) -> dict[str, Any]:
    texts = texts_of("reviews")
    item = draw.pick(list(texts["items"]))
    tones = draw.shuffled(draw.pick(MIXES[label]).split())
    blanks = {blank: draw.pick(fillings) for blank, fillings in texts["blanks"].items()}
    sentences = [draw.pick(texts["openings"]).format(item=item, **blanks)] if draw.chance(OPENING) else []
    pools = {tone: draw.shuffled(pool) for tone, pool in texts["sentences"].items()}
    for tone, trait in zip(tones, draw.sample(texts["items"][item], len(tones)), strict=True):
        sentences.append(pools[tone].pop().format(item=item, trait=trait, **blanks))
    if draw.chance(ASIDE) and len(tones) < 4:
        sentences.append(draw.pick(texts["asides"]).format(item=item, **blanks))
    if draw.chance(VERDICT):
        sentences.append(draw.pick(texts["verdicts"][str(label)]).format(item=item, **blanks))
    return {"label": label, "text": " ".join(sentences)}


class BuiltinSet(msgspec.Struct, frozen=True):
    """One built-in set: how its rows become text, and the rows."""

    name: str
    template: Literal["alpaca", "classification"]
    columns: Mapping[str, str | list[str]]
    stream: Callable[[PortableRandom], Iterator[dict[str, Any]]]
    default_rows: int = 4000

    def rows(self, n: int, seed: int) -> list[dict[str, Any]]:
        """Return the first n rows of a seed, without duplicates."""
        return list(islice(self.stream(PortableRandom(f"{self.name}:{seed}")), n))


BUILTIN: dict[str, BuiltinSet] = {
    one.name: one
    for one in (
        BuiltinSet(
            "instructions",
            "alpaca",
            {"instruction": "instruction", "input": "input", "output": "output"},
            instruction_rows,
        ),
        BuiltinSet(
            "news",
            "classification",
            {"text": ["title", "description"], "label": "label"},
            lambda draw: _labelled_rows(draw, CLASSES, _news_row),
        ),
        BuiltinSet(
            "reviews",
            "classification",
            {"text": "text", "label": "label"},
            lambda draw: _labelled_rows(draw, STARS, _review_row),
        ),
    )
}
