"""The tiny twins of the field notes' jobs that need one machine, as their files say them."""

import json
import re
from pathlib import Path

import pytest

from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.conftest import REPO
from tests.dist.harness import allranks, folders

SEEDS = REPO / "examples" / "seeds"


def run_twin(tmp_path: Path, twin: str) -> RunDir:
    allranks("run", str(SEEDS / f"{twin}.yaml"), "--set", f"cluster.cache={tmp_path}/cache", cwd=tmp_path, code=0)
    return RunDir(folders(tmp_path)[-1])


def strategies_of(spec: str) -> list[str]:
    """Those that the command at the top of a spec names."""
    (found,) = re.findall(r"--strategies (\S+)", (SEEDS / f"{spec}.yaml").read_text())
    return found.split(",")


def test_trainer_with_lora_on_one_node(tmp_path: Path) -> None:
    """000: ten steps of padded rows, and the figures that the notes wrote down."""
    run = run_twin(tmp_path, "000/one-node-tiny")
    metrics = read_json(run.metrics)
    wanted = {"world_size": 2, "nodes": 1, "steps": 10, "strategy": "hf_trainer", "dtype": "bfloat16", "use_lora": True}
    assert {name: metrics[name] for name in wanted} == wanted and not metrics["gradient_checkpointing"]
    assert metrics["sync_proof"] == {"world_size": 2, "weights_equal": True, "data_disjoint": True}
    assert metrics["tokens_real"] + metrics["tokens_padded"] == 10 * 2 * 64, "steps x ranks x length"
    assert 0 < metrics["warmup_s"] < metrics["wall_time_s"]
    (checkpoint,) = run.checkpoints.glob("step-*")
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    wanted = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05}
    assert {name: config[name] for name in wanted} == wanted and len(config["target_modules"]) == 7


@pytest.mark.parametrize(
    ("twin", "strategies"),
    [("002/ddp", ["simple_ddp_ga", "bucket_ddp_async"]), pytest.param("002/sharding", None, marks=pytest.mark.full)],
)
def test_the_strategies_of_a_shell_script_are_compared(tmp_path: Path, twin: str, strategies: list[str] | None) -> None:
    """002: all that a script went through, in turns on equal work, each proved."""
    named = strategies_of(twin)
    asked = strategies or named
    assert set(asked) <= set(named)
    words = ["--strategies", ",".join(asked), "--repeats", "1", "--json", "--set", f"cluster.cache={tmp_path}/cache"]
    done = allranks("compare", str(SEEDS / f"{twin}-tiny.yaml"), *words, cwd=tmp_path, code=0)
    rows = json.loads(done.stdout)["rows"]
    assert [row["strategy"] for row in rows] == asked
    for row in rows:
        assert row["gates"] == {"parity": True, "mechanism": True, "equal_work": True}, row
        assert row["tokens_per_s"]["median"] > 0
    (folder,) = folders(tmp_path)
    assert {"comparison.html", "comparison.csv", "comparison.json"} <= {p.name for p in folder.iterdir()}
    allranks("trace", "latest", "--select", "latest", "--out", "reports", cwd=tmp_path, code=0)
    for name in asked:
        assert {p.name for p in (tmp_path / "reports" / name).iterdir()} >= {"summary.html", "summary.csv"}, name


@pytest.mark.parametrize(
    ("twin", "strategy", "rows"),
    [
        ("004/01-single-gpu", "single", 32),
        pytest.param("004/02-ddp-2-gpus", "pytorch_ddp", 64, marks=pytest.mark.full),
        pytest.param("004/03-deepspeed-zero1", "deepspeed_zero1", 32, marks=pytest.mark.full),
    ],
)
def test_a_smoke_test_of_the_notes_on_one_machine(tmp_path: Path, twin: str, strategy: str, rows: int) -> None:
    """004: 100 steps of noise, a checkpoint that was read again, and rows a second over all ranks."""
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    check_smoke(run_twin(tmp_path, f"{twin}-tiny"), strategy, 1 if strategy == "single" else 2, rows)


def check_smoke(run: RunDir, strategy: str, world: int, rows: int, steps: int = 100) -> None:
    """What tests 01 to 04 tick off, without their transport."""
    metrics = read_json(run.metrics)
    assert (metrics["strategy"], metrics["world_size"], metrics["steps"]) == (strategy, world, steps)
    assert metrics["sync_proof"]["world_size"] == world and metrics["sync_proof"]["weights_equal"]
    assert metrics["tokens_real"] == steps * world * rows, "a row counts once"
    assert metrics["train_loss_last"] == pytest.approx(1.0, abs=0.3), "noise has a variance of 1"
    assert run.checkpoint_steps() == [steps]
    state = list((run.checkpoint(steps) / "state").iterdir())
    assert len([p for p in state if p.suffix == ".safetensors"]) >= world, "every rank writes its own part"
