"""Sample answers to held-out questions, before and after training. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from allranks.observe.samples import before_and_after
from allranks.report.gather import RunData

_HEADERS = ("### Instruction:", "### Input:", "### Response:")
_BLANK_LINES = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Answer:
    """An answer; ``right`` is to the letter, as ``exact_match`` counts."""

    label: str
    text: str | None
    right: bool = False


@dataclass(frozen=True)
class Sample:
    """A held-out question with its answers, each with its time; text None where it was not asked then."""

    question: str
    answers: list[Answer]


def samples(data: RunData) -> list[Sample]:
    """Held-out questions with their answers before and after training."""
    asked = [e["step"] for e in data.zero.of("eval") if e["samples"]]
    labels = [f"after step {step}" if step else "before training" for step in asked]
    first = labels[0] if len(asked) > 1 or 0 in asked else "before training"
    last = labels[-1] if any(asked) else "after training"
    return [
        Sample(
            _question(row["prompt"]),
            [
                Answer("the right answer", row["expected"].strip()),
                _answer(first, row["before"], row["expected"]),
                _answer(last, row["after"], row["expected"]),
            ],
        )
        for row in before_and_after(data.zero.of("eval"))
    ]


def _answer(label: str, reply: str | None, expected: str) -> Answer:
    if reply is None:
        return Answer(label, None)
    return Answer(label, reply.strip(), bool(expected.strip()) and reply.strip() == expected.strip())


def _question(prompt: str) -> str:
    for header in _HEADERS:
        prompt = prompt.replace(header, "")
    return _BLANK_LINES.sub("\n", prompt.strip())
