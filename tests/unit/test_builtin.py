"""The built-in sets: the same on every machine, without repeats, and right."""

from __future__ import annotations

import hashlib
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from allranks.spec.builtin_data import BUILTIN, FAMILIES, PortableRandom, texts_of

# The first 300 rows of seed 42. They change when a text does, and must not with the version of Python.
DIGESTS = {"instructions": "401889035073903e", "news": "35bf101fb871cd13", "reviews": "3a3af822b4396a65"}

ENDINGS = texts_of("instructions")["endings"]
NAMES = pytest.mark.parametrize("name", ["instructions", "news", "reviews"])


def questions(family: str, count: int = 400) -> list[tuple[str, str]]:
    draw = PortableRandom(f"test of {family}")
    return [FAMILIES[family](draw) for _ in range(count)]


@NAMES
def test_rows_are_the_same_everywhere(name: str) -> None:
    text = json.dumps(BUILTIN[name].rows(300, 42), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[name]


def test_rows_do_not_depend_on_the_hash_seed() -> None:
    code = "from allranks.spec.builtin_data import BUILTIN; print([s.rows(200, 7) for s in BUILTIN.values()])"
    outs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": h, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for h in ("1", "2")
    }
    assert len(outs) == 1


@NAMES
@pytest.mark.parametrize("n", [0, 1, 57, 4000])
def test_number_of_rows(name: str, n: int) -> None:
    assert len(BUILTIN[name].rows(n, 1)) == n


@NAMES
def test_a_shorter_call_is_the_beginning_of_a_longer_one(name: str) -> None:
    assert BUILTIN[name].rows(50, 3) == BUILTIN[name].rows(500, 3)[:50]


@pytest.mark.parametrize(("name", "n"), [("instructions", 5000), ("news", 30000), ("reviews", 30000)])
@pytest.mark.parametrize("seed", [0, 42])
def test_no_row_comes_twice(name: str, n: int, seed: int) -> None:
    rows = [tuple(v for k, v in row.items() if k not in ("output", "label")) for row in BUILTIN[name].rows(n, seed)]
    assert len(set(rows)) == len(rows) == n > BUILTIN[name].default_rows


@NAMES
def test_columns_are_in_the_rows(name: str) -> None:
    one = BUILTIN[name]
    wanted = {c for given in one.columns.values() for c in ([given] if isinstance(given, str) else given)}
    for row in one.rows(200, 0):
        assert set(row) == wanted
        assert all(isinstance(v, str) == (k != "label") for k, v in row.items())
        assert not any("{" in str(v) or "  " in str(v) or "|" in str(v) for v in row.values())


# --- instructions


def test_a_question_does_not_come_again_with_another_ending() -> None:
    rows = BUILTIN["instructions"].rows(4000, 42)
    bare = []
    for row in rows:
        text = row["instruction"]
        for ending in ENDINGS:
            text = text.removesuffix(ending)
        bare.append((text, row["input"]))
    assert len(set(bare)) == len(bare)
    assert 500 < sum(row["instruction"].endswith(ENDINGS) for row in rows) < 2500


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def listed(question: str) -> list[str]:
    text = question.rpartition("|")[2] if "|" in question else question.rpartition(": ")[2]
    return [word.strip(" .?") for word in text.split(",")]


def in_list(question: str) -> str:
    before, _, behind = question.rpartition("|" if "|" in question else ": ")
    items = set(re.findall(r"[a-z]+", behind))
    asked = re.findall(r"\b(?:Is|contain|word|find) ([a-z]+)\b", before)
    return "yes" if asked[0] in items else "no"


def sum_of_two(question: str) -> str:
    return str(sum(numbers(question)))


def difference(question: str) -> str:
    a, b = numbers(question)
    return str(b - a if re.match(r"Take|Subtract \d", question) else a - b)


RECOMPUTED: dict[str, Callable[[str], str]] = {
    "sum": sum_of_two,
    "difference": difference,
    "compare_numbers": lambda q: str((max if "larger" in q else min)(numbers(q))),
    "count": lambda q: str(len(listed(q))),
    "first": lambda q: listed(q)[0],
    "last": lambda q: listed(q)[-1],
    "member": in_list,
    "next_number": lambda q: str(numbers(q)[0] + (1 if "after" in q else -1)),
}


@pytest.mark.parametrize("family", RECOMPUTED)
def test_computed_answers_are_right(family: str) -> None:
    for question, answer in questions(family):
        assert RECOMPUTED[family](question) == answer, question


# Written down anew, not taken from the package.


# --- news and reviews


@pytest.mark.parametrize(("name", "labels"), [("news", {1, 2, 3, 4}), ("reviews", {1, 2, 3, 4, 5})])
def test_labels_are_in_range_and_balanced(name: str, labels: set[int]) -> None:
    for n in (4000, 399):
        counts = Counter(row["label"] for row in BUILTIN[name].rows(n, 5))
        assert set(counts) == labels
        assert max(counts.values()) - min(counts.values()) <= 1


def naive_bayes(rows: list[dict], held_out: list[dict]) -> float:
    """Share of the held-out labels that the words alone give away."""

    def words(row: dict) -> set[str]:
        return set(re.findall(r"\w+", " ".join(str(v) for k, v in row.items() if k != "label").lower()))

    totals = Counter(row["label"] for row in rows)
    counts: dict[int, Counter[str]] = {label: Counter() for label in totals}
    for row in rows:
        counts[row["label"]].update(words(row))

    def score(label: int, row: dict) -> float:
        return sum(math.log((counts[label][w] + 0.1) / (totals[label] + 0.2)) for w in words(row))

    return sum(max(totals, key=lambda c: score(c, row)) == row["label"] for row in held_out) / len(held_out)


@pytest.mark.parametrize(("name", "least", "most"), [("news", 0.93, 0.99), ("reviews", 0.7, 0.95)])
def test_labels_can_be_learned_but_not_perfectly(name: str, least: float, most: float) -> None:
    rows = BUILTIN[name].rows(4000, 42)
    assert least < naive_bayes(rows[:3200], rows[3200:]) < most
