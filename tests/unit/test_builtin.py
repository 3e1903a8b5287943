"""The built-in sets: the same on every machine, without repeats, and right."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest

from allranks.spec.builtin_data import BUILTIN

# The first 300 rows of seed 42. They change when a text does, and must not with the version of Python.
DIGESTS = {"instructions": "401889035073903e", "news": "35bf101fb871cd13", "reviews": "3a3af822b4396a65"}

NAMES = pytest.mark.parametrize("name", ["instructions", "news", "reviews"])


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
def test_a_shorter_call_is_the_beginning_of_a_longer_one(name: str) -> None:
    assert BUILTIN[name].rows(50, 3) == BUILTIN[name].rows(500, 3)[:50]


@pytest.mark.parametrize(("name", "n"), [("instructions", 5000), ("news", 30000), ("reviews", 30000)])
@pytest.mark.parametrize("seed", [0, 42])
def test_no_row_comes_twice(name: str, n: int, seed: int) -> None:
    rows = [tuple(v for k, v in row.items() if k not in ("output", "label")) for row in BUILTIN[name].rows(n, seed)]
    assert len(set(rows)) == len(rows) == n > BUILTIN[name].default_rows
