"""Traces damaged at random, in their values or their bytes: figures or a plain refusal, never another error."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.output import write_all
from allranks.analysis.trace.tables import report_blocks, text_lines
from allranks.errors import AllranksError
from tests.sampling import seeds
from tests.tracegen import Scenario, generate

ODD: list[Any] = [
    None,
    -1,
    0,
    1e300,
    float("nan"),
    "x",
    "",
    [],
    {},
    [[]],
    {"a": 1},
    True,
    2**70,
    -(2**63),
    "1",
    [1, "a"],
]
SEEDS = seeds(4)
ROUNDS = 25


def damaged(rng: random.Random, document: dict[str, Any]) -> bytes:
    """Some values replaced or left out; sometimes the text cut or some of its bytes changed."""
    made = json.loads(json.dumps(document))
    for _ in range(rng.choice([1, 3, 20])):
        event = rng.choice(made["traceEvents"])
        what = rng.random()
        if what < 0.5 and event:
            event[rng.choice(list(event))] = rng.choice(ODD)
        elif what < 0.85 and isinstance(event.get("args"), dict) and event["args"]:
            event["args"][rng.choice(list(event["args"]))] = rng.choice(ODD)
        elif what < 0.95 and event:
            event.pop(rng.choice(list(event)))
        else:
            made[rng.choice([key for key in made if key != "traceEvents"])] = rng.choice(ODD)
    text = bytearray(json.dumps(made).encode())
    what = rng.random()
    if what < 0.2:
        return bytes(text[: rng.randrange(len(text))])
    if what < 0.4:
        for _ in range(rng.choice([1, 10, 100])):
            text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text)


@pytest.mark.parametrize("seed", SEEDS)
def test_damage_gives_figures_or_a_refusal(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    generate(Scenario(world=2, steps=2, backend=rng.choice(["nccl", "gloo"])), tmp_path / "good")
    good = {path.stem: json.loads(gzip.decompress(path.read_bytes())) for path in (tmp_path / "good").iterdir()}
    told = read = 0
    for _ in range(ROUNDS):
        for name, document in good.items():
            (tmp_path / "bad").mkdir(exist_ok=True)
            (tmp_path / "bad" / name).write_bytes(damaged(rng, document))
        try:
            reports = analyse([tmp_path / "bad"], workers=1)
            assert list(text_lines(report_blocks(reports[0], 80), 80))
            write_all(reports, tmp_path / "out")
            read += 1
        except AllranksError as error:
            assert str(error)
            told += 1
    assert read > ROUNDS // 2 and told + read == ROUNDS
