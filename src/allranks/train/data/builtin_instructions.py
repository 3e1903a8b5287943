"""``builtin:instructions``: short questions of many families, each with one answer that can be checked exactly.

A family draws what a question is about and its answer; :func:`rows` then takes the families in turns and leaves out
every question it has asked before, so that held-out rows are new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from allranks.train.data import builtin_phrases as phrases
from allranks.train.data import builtin_words as facts
from allranks.train.data.builtin_draw import Draw

Row = dict[str, str]
Question = tuple[str, str]
"""A question, its input behind ``|`` if it has one, and the answer."""


def _from_table(wordings: Sequence[str], table: Sequence[tuple[str, str]]) -> Callable[[Draw], Question]:
    def family(draw: Draw) -> Question:
        x, answer = draw.pick(table)
        return draw.pick(wordings).format(x=x), answer

    return family


def _with_article(thing: str) -> str:
    if facts.KIND_OF[thing] in ("drink", "metal"):
        return thing
    return f"an {thing}" if thing[0] in "aeiou" else f"a {thing}"


def _kind(draw: Draw) -> Question:
    thing = draw.pick(facts.THINGS)
    return draw.pick(phrases.KIND).format(x=thing, ax=_with_article(thing)), facts.KIND_OF[thing]


def _is_kind(draw: Draw) -> Question:
    kinds = tuple(facts.KINDS)
    thing = draw.pick(facts.THINGS)
    yes = draw.chance(0.5)
    kind = facts.KIND_OF[thing] if yes else draw.pick([k for k in kinds if k != facts.KIND_OF[thing]])
    return draw.pick(phrases.IS_KIND).format(x=thing, ax=_with_article(thing), k=kind), "yes" if yes else "no"


def _pick_kind(draw: Draw) -> Question:
    kinds = draw.sample(tuple(facts.KINDS), 3)
    things = [draw.pick(facts.KINDS[kind][:3]) for kind in kinds]
    return draw.pick(phrases.PICK_KIND).format(k=kinds[0], list=", ".join(draw.shuffled(things))), things[0]


def _compare_numbers(draw: Draw) -> Question:
    a, b = draw.sample(range(10), 2)
    larger = draw.chance(0.5)
    more = "larger" if larger else "smaller"
    return draw.pick(phrases.COMPARE_NUMBERS).format(a=a, b=b, more=more), str(max(a, b) if larger else min(a, b))


def _compare_animals(draw: Draw) -> Question:
    a, b = draw.sample(range(len(facts.SIZES)), 2)
    larger = draw.chance(0.5)
    shown = [("an " if facts.SIZES[i][0] in "aeiou" else "a ") + facts.SIZES[i] for i in (a, b)]
    question = draw.pick(phrases.COMPARE_ANIMALS)
    question = question.format(a=shown[0], b=shown[1], more="larger" if larger else "smaller")
    return question, facts.SIZES[max(a, b) if larger else min(a, b)]


def _sum(draw: Draw) -> Question:
    a, b = draw.below(10), draw.below(10)
    return draw.pick(phrases.SUM).format(a=a, b=b), str(a + b)


def _difference(draw: Draw) -> Question:
    a = draw.below(10)
    b = draw.below(a + 1)
    return draw.pick(phrases.DIFFERENCE).format(a=a, b=b), str(a - b)


def _list(draw: Draw, shortest: int = 2, longest: int = 4) -> list[str]:
    return draw.sample(facts.LISTED, shortest + draw.below(longest - shortest + 1))


def _count(draw: Draw) -> Question:
    items = _list(draw, shortest=1)
    return draw.pick(phrases.COUNT).format(list=", ".join(items)), str(len(items))


def _first(draw: Draw) -> Question:
    items = _list(draw)
    return draw.pick(phrases.FIRST).format(list=", ".join(items)), items[0]


def _last(draw: Draw) -> Question:
    items = _list(draw)
    return draw.pick(phrases.LAST).format(list=", ".join(items)), items[-1]


def _member(draw: Draw) -> Question:
    items = _list(draw)
    yes = draw.chance(0.5)
    x = draw.pick(items) if yes else draw.pick([thing for thing in facts.LISTED if thing not in items])
    return draw.pick(phrases.MEMBER).format(x=x, list=", ".join(items)), "yes" if yes else "no"


def _letter(draw: Draw) -> Question:
    word = draw.pick(facts.LISTED)
    first = draw.chance(0.5)
    place, verb = ("first", "begin") if first else ("last", "end")
    return draw.pick(phrases.LETTER).format(x=word, place=place, verb=verb), word[0 if first else -1]


def _neighbour(draw: Draw, wordings: Sequence[str], ring: Sequence[str]) -> Question:
    i = draw.below(len(ring))
    after = draw.chance(0.5)
    question = draw.pick(wordings).format(x=ring[i], side="after" if after else "before")
    return question, ring[(i + (1 if after else -1)) % len(ring)]


def _calendar(draw: Draw) -> Question:
    if draw.chance(0.4):
        return _neighbour(draw, phrases.NEXT_DAY, facts.DAYS)
    return _neighbour(draw, phrases.NEXT_MONTH, facts.MONTHS)


def _next_number(draw: Draw) -> Question:
    number = 1 + draw.below(24)
    after = draw.chance(0.5)
    question = draw.pick(phrases.NEXT_NUMBER).format(x=number, side="after" if after else "before")
    return question, str(number + 1 if after else number - 1)


FAMILIES: dict[str, Callable[[Draw], Question]] = {
    "opposite": _from_table(phrases.OPPOSITE, facts.OPPOSITES + tuple((b, a) for a, b in facts.OPPOSITES)),
    "capital": _from_table(phrases.CAPITAL, facts.CAPITALS),
    "country": _from_table(phrases.COUNTRY, tuple((city, country) for country, city in facts.CAPITALS)),
    "colour": _from_table(phrases.COLOUR, facts.COLOURS),
    "plural": _from_table(phrases.PLURAL, facts.PLURALS),
    "past": _from_table(phrases.PAST, facts.PASTS),
    "kind": _kind,
    "is_kind": _is_kind,
    "pick_kind": _pick_kind,
    "compare_numbers": _compare_numbers,
    "compare_animals": _compare_animals,
    "sum": _sum,
    "difference": _difference,
    "count": _count,
    "first": _first,
    "last": _last,
    "member": _member,
    "letter": _letter,
    "calendar": _calendar,
    "next_number": _next_number,
}


def _dressed(draw: Draw, question: str, answer: str) -> Row:
    instruction, _, given = question.partition("|")
    if instruction[-1] in ".?" and "yes or no" not in instruction.lower() and draw.chance(0.5):
        instruction += draw.pick(phrases.ENDINGS)
    return {"instruction": instruction, "input": given, "output": answer}


def rows(draw: Draw) -> Iterator[Row]:
    """Rows without end; families come in turns, and one that is used up gives its turn to the next.

    No question comes twice, not even with another ending, so that a held-out row is a new one.
    """
    asked: set[str] = set()
    while True:
        for name in draw.shuffled(tuple(FAMILIES)):
            for _ in range(50):
                question, answer = FAMILIES[name](draw)
                if question not in asked:
                    asked.add(question)
                    yield _dressed(draw, question, answer)
                    break
