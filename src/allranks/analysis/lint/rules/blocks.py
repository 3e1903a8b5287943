"""Where the loops and branches of a script begin and end, by the words of its text."""

from __future__ import annotations

import re

LOOPS = {"for", "while", "until", "select"}
ENDS = {"done": LOOPS, "fi": {"if"}, "esac": {"case"}}
WORD = re.compile(
    r"(?m)(?:^|(?<=[;&|({`])|(?<![\w$./=-])(?:do|then|else|!)(?=[ \t]))[ \t]*(for|while|until|select|if|case|done|fi|esac)(?![\w./=-])"
)


def open_blocks(code: str, offset: int) -> list[tuple[str, int]]:
    """Return the loops and branches that are open at a place, outermost first: the word and the place of each."""
    found: list[tuple[str, int]] = []
    for word in WORD.finditer(code, 0, offset):
        if word[1] not in ENDS:
            found.append((word[1], word.start(1)))
        elif found and found[-1][0] in ENDS[word[1]]:
            found.pop()
    return found


def outer_loop(code: str, offset: int) -> int | None:
    """Return where the outermost loop around a place begins."""
    return next((start for word, start in open_blocks(code, offset) if word in LOOPS), None)


def in_loops_only(code: str, offset: int) -> bool:
    """Return whether a place is in a loop and in no branch of an ``if`` or a ``case``."""
    around = [word for word, _ in open_blocks(code, offset)]
    return bool(around) and set(around) <= LOOPS
