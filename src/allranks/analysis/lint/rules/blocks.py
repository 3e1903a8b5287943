"""Where the loops and branches of a script begin and end, by the words of its text."""

from __future__ import annotations

from functools import lru_cache

from allranks.utils.text import lazy_regex

LOOPS = {"for", "while", "until", "select"}
ENDS = {"done": LOOPS, "fi": {"if"}, "esac": {"case"}}
WORD = lazy_regex(
    r"(?m)(?:^|(?<=[;&|({`])|(?<![\w$./=-])(?:do|then|else|!)(?=[ \t]))[ \t]*(for|while|until|select|if|case|done|fi|esac)(?![\w./=-])"
)


@lru_cache(maxsize=4)
def _blocks(code: str) -> tuple[tuple[str, int, int], ...]:
    """Return the word, the start and the end of each loop and branch, by their starts."""
    found: list[tuple[str, int, int]] = []
    inside: list[tuple[str, int]] = []
    for word in WORD.finditer(code):
        if word[1] not in ENDS:
            inside.append((word[1], word.start(1)))
        elif inside and inside[-1][0] in ENDS[word[1]]:
            found.append((*inside.pop(), word.start(1)))
    found += [(word, start, len(code) + 1) for word, start in inside]
    return tuple(sorted(found, key=lambda block: block[1]))


def open_blocks(code: str, offset: int) -> list[tuple[str, int]]:
    """Return the loops and branches that are open at a place, outermost first: the word and the place of each."""
    return [(word, start) for word, start, end in _blocks(code) if start < offset <= end]


def outer_loop(code: str, offset: int) -> int | None:
    """Return where the outermost loop around a place begins."""
    return next((start for word, start in open_blocks(code, offset) if word in LOOPS), None)


def in_loops_only(code: str, offset: int) -> bool:
    """Return whether a place is in a loop and in no branch of an ``if`` or a ``case``."""
    around = [word for word, _ in open_blocks(code, offset)]
    return bool(around) and set(around) <= LOOPS
