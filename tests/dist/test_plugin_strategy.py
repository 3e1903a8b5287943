"""A strategy of an installed package trains, and a comparison proves it, as those of allranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.conftest import tiny_spec
from tests.dist.harness import ALLRANKS

pytestmark = pytest.mark.dist

RECORD = """
from allranks.spec.strategies.base import Replicated, StrategyInfo

RIGHT = StrategyInfo("toy_ranks:Right", "mean of the gradients", {}, memory=lambda m, o: Replicated(m))
WRONG = StrategyInfo("toy_ranks:Wrong", "gradients of each rank", {}, memory=lambda m, o: Replicated(m))
"""
RANKS = """
from allranks.train.strategies.simple_ddp import SimpleDDP


class Right(SimpleDDP):
    pass


class Wrong(SimpleDDP):
    def backward(self, loss):
        loss.backward()
"""
ENTRIES = "[allranks.strategies]\ntoy_right = toy_record:RIGHT\ntoy_wrong = toy_record:WRONG\n"


def test_it_is_planned_trained_and_compared(tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    info = site / "toy-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "toy_record.py").write_text(RECORD)
    (site / "toy_ranks.py").write_text(RANKS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(tiny_spec(rows_file, tmp_path, strategy={"name": "toy_right"})))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*ALLRANKS, *words], cwd=tmp_path, capture_output=True, text=True, timeout=200)

    planned = run("plan", "s.yaml", "--json")
    assert planned.returncode == 0, planned.stderr
    done = run("run", "s.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["strategy"] == "toy_right"
    compared = run("compare", "s.yaml", "--strategies", "toy_right,toy_wrong", "--repeats", "1", "--json")
    assert compared.returncode == 1, compared.stderr  # that one of them is wrong
    rows = {row["strategy"]: row for row in json.loads(compared.stdout)["rows"]}
    assert rows["toy_right"]["gates"]["parity"] and rows["toy_right"]["tokens_per_s"]
    assert not rows["toy_wrong"]["gates"]["parity"]
