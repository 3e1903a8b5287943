"""Real comparisons on two gloo ranks: honest strategies pass, each defect shuts its gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dist.harness import allranks

pytestmark = pytest.mark.dist
PLANTED = Path(__file__).parent / "planted"


def compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategies: str, **train: Any
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The exit code, the rows by strategy, and the setting of a comparison."""
    spec = {
        "name": "c",
        "model": {
            "name": "tiny:llama",
            "config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
        },
        "data": {"source": "builtin:reviews", "subset": 200, "max_length": 64, "template": "text"},
        "strategy": {"name": "pytorch_ddp", "bucket_mb": 0.2},
        "train": {"max_steps": 3, "micro_batch_size": 2, "lr": 1e-3, **train},
        "cluster": {"procs_per_node": 2, "cache": str(tmp_path / "cache")},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(spec))
    monkeypatch.setenv("PYTHONPATH", str(PLANTED), prepend=":")
    words = ("c.yaml", "--strategies", strategies, "--repeats", "1", "--json")
    done = allranks("compare", *words, cwd=tmp_path, limit_s=200)
    assert done.returncode in (0, 1), done.stderr
    document = json.loads(done.stdout)
    return done.returncode, {row["strategy"]: row for row in document["rows"]}, document["setting"]


DEFECTIVE = {"tiring": "in repeat 1 ", "localnorm": "in the uneven trial "}


def test_honest_strategies_pass_and_hold_what_theory_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares of the others are those of test_strategy_state.py."""
    honest, defective = ("simple_ddp", "bucket_ddp_async", "zero3"), ("tiring", "localnorm")
    clip = 100.0  # above every norm
    code, found, setting = compare(
        tmp_path, monkeypatch, ",".join(honest + defective), grad_accum=2, max_steps=6, max_grad_norm=clip
    )
    assert code == 1
    for name in honest:
        assert all(found[name]["gates"].values()), found[name]["reasons"]
        assert all(error < 1e-5 for error in found[name]["parity_errors"].values()), found[name]["parity_errors"]
    # a defect that begins after the verification is in the timed steps; clipping that the spec leaves inactive, in the
    # uneven trial
    for name in defective:
        assert found[name]["parity_error"] < 1e-5 and found[name]["reasons"][0].startswith(f"parity: {DEFECTIVE[name]}")
        assert found[name]["tokens_per_s"] is None
    found = {name: found[name] for name in honest}
    whole = 4 * setting["trained_bytes"]  # weights, gradients and two moments in float32
    ratios = {name: row["memory"]["state_bytes"] / whole for name, row in found.items()}
    wanted = {"simple_ddp": 1.0, "bucket_ddp_async": 1.0, "zero3": 1 / 2}
    for name in wanted.keys() & ratios.keys():
        assert ratios[name] == pytest.approx(wanted[name], rel=0.02), name
    calls = {name: {(c["kind"], c["phase"]): c["count"] for c in row["collectives"]} for name, row in found.items()}
    n = calls["simple_ddp"]["all_reduce", "after_backward"]
    assert n % 2 == 0, "each parameter on each of two micro-steps"
    assert 1 < calls["bucket_ddp_async"]["all_reduce", "backward"] < n / 2
    folder = next((tmp_path / "runs").iterdir())
    assert all((folder / f"comparison.{kind}").stat().st_size > 500 for kind in ("json", "csv", "html"))


def test_each_defect_shuts_its_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defective = "silent,late,twice,lazy,broken,undivided,halfway"
    code, found, _ = compare(tmp_path, monkeypatch, f"simple_ddp_ga,{defective}")
    assert code == 1
    assert found["simple_ddp_ga"]["gates"] == {"parity": True, "mechanism": True, "equal_work": True}
    assert not found["silent"]["gates"]["parity"] and not found["silent"]["gates"]["mechanism"]
    assert not found["twice"]["gates"]["mechanism"] and found["twice"]["gates"]["parity"]
    assert not found["lazy"]["gates"]["equal_work"]
    assert not found["undivided"]["gates"]["parity"] and found["undivided"]["gates"]["mechanism"]
    assert found["undivided"]["parity_error"] < 1e-4, "its weights alone would have passed"
    assert "not today" in found["broken"]["reasons"][0]
    assert any("launches no collective during backward" in mark for mark in found["late"]["marks"])
    assert not found["halfway"]["gates"]["parity"] and found["halfway"]["gates"]["mechanism"]
    for name in ("silent", "twice", "lazy", "broken", "undivided", "halfway"):
        assert found[name]["tokens_per_s"] is None, name
