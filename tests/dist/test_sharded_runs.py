"""Whole runs under strategies of which no rank holds the weights: evaluation, answers, both checkpoints, going on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from allranks.rundir.files import read_json
from tests.conftest import tiny_spec, write_rows
from tests.dist.harness import allranks, step_events, train

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("zero3", False),
        pytest.param("pytorch_zero2", False, marks=pytest.mark.full),
        pytest.param("zero3", True, marks=pytest.mark.full),
        pytest.param("pytorch_zero3", True, marks=pytest.mark.full),
        pytest.param("pytorch_zero3", False, marks=pytest.mark.full),
    ],
)
def test_a_sharded_run_saves_what_a_plain_one_would_and_goes_on(tmp_path: Path, name: str, lora: bool) -> None:
    write_rows(tmp_path / "rows.json", 80)
    adapter: dict[str, Any] = {"adapter": {"type": "lora", "r": 4} if lora else {"type": "none"}}

    def spec(strategy: str) -> dict[str, Any]:
        return tiny_spec(
            tmp_path / "rows.json", tmp_path, name=strategy, strategy={"name": strategy}, checkpoint={"mode": "full"}, train={"max_steps": 4}, **adapter
        )  # fmt: skip

    done, plain = train(tmp_path, spec("pytorch_ddp"))
    assert done.returncode == 0, done.stderr
    done, sharded = train(tmp_path, spec(name))
    assert done.returncode == 0, done.stderr
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    ours, theirs = (load_file(r.checkpoint(4) / file) for r in (sharded, plain))
    assert ours.keys() == theirs.keys()
    assert max(float((ours[k] - theirs[k]).abs().max()) for k in ours) < 1e-4
    a, b = read_json(sharded.metrics), read_json(plain.metrics)
    assert isinstance(a, dict) and isinstance(b, dict)
    assert a["eval_loss"] == pytest.approx(b["eval_loss"], rel=1e-4)
    done = allranks("resume", sharded.name, "--set", "train.max_steps=6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert step_events(sharded)[-1]["step"] == 6
