"""Rules for the branches of ``case``: patterns that an earlier branch has taken already."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation
from allranks.utils.text import lazy_regex

TAKEN_WHY = "case runs the first branch whose pattern fits, and no other: this one is never reached."
START = lazy_regex(
    r"(?m)(?:^|[;&|(){]|\b(?:do|then|else))[ \t]*case[ \t]+(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s;]+)[ \t]+in\b[ \t]*(?:;|\n)?"
)
PATTERNS = lazy_regex(r"[\s;]*\(?[ \t]*([^()\n;&]+?)[ \t]*\)")
STEP = lazy_regex(r"(?m)\"(?:[^\"\\]|\\.)*\"|'[^']*'|\\.|;;&|;;|;&|(?:^|[;&|({ \t])case(?=[ \t])|\besac\b")
LITERAL = lazy_regex(r"[\w./:=@%+,-]+")


def taken_twice(job: JobDescription) -> Iterator[Violation]:
    """Report a pattern that stands in two branches of one ``case``, and branches behind ``*)``."""
    for found in START.finditer(job.code) if job.kind == "script" else ():
        if job.in_quotes(found.start() + found[0].index("case")) or job.in_comment(found.start()):
            continue
        seen: dict[str, tuple[int, str]] = {}
        for place, patterns, body in _branches(job.code, found.end()):
            hit = _taken(job, seen, place, patterns, body)
            if hit is not None:
                yield hit
                break
            seen.update((p, (place, body)) for p in patterns if p not in seen)


def _taken(
    job: JobDescription, seen: dict[str, tuple[int, str]], place: int, patterns: list[str], body: str
) -> Violation | None:
    """Return what is wrong with a branch, given the patterns above it and what their branches do."""
    if "*" in seen:
        line = job.lines.place(seen["*"][0])[0]
        text = f"the branch {patterns[0]}) stands below *) of line {line}, which takes everything"
        return Violation(place, text, why=TAKEN_WHY, cure="move *) to the end")
    twice = next((p for p in patterns if p in seen and (LITERAL.fullmatch(p) or p == "*")), None)
    if twice is None or seen[twice][1] == body:
        return None
    line = job.lines.place(seen[twice][0])[0]
    text = f"{twice} is a pattern of line {line}, too, whose branch is taken"
    return Violation(place, text, why=TAKEN_WHY, cure="another letter, or remove one of the two")


def _branches(code: str, start: int) -> Iterator[tuple[int, list[str], str]]:
    """Yield where each branch of a ``case`` begins, its patterns and its text, as long as every branch ends with ``;;``."""
    place = start
    while found := PATTERNS.match(code, place):
        words = [re.sub(r"[\"']", "", word).strip() for word in found[1].split("|")]
        if any(re.search(r"\besac\b", word) for word in words) or "$" in found[1]:
            return
        end = _end_of_branch(code, found.end())
        yield found.start(1), words, " ".join(code[found.end() : end].split()) if end else ""
        if end is None:
            return
        place = end


def _end_of_branch(code: str, start: int) -> int | None:
    """Return where the next branch begins; None behind the last one, or if the end is not certain."""
    depth = 0
    for step in STEP.finditer(code, start):
        word = step[0].strip(" \t;&|({")
        if step[0] in (";;", ";&", ";;&"):
            if depth == 0:
                return step.end() if step[0] == ";;" else None
        elif word == "case":
            depth += 1
        elif word == "esac":
            if depth == 0:
                return None
            depth -= 1
    return None
