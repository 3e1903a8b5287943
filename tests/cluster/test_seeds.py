"""The tiny twins of the field notes' jobs on several nodes, as their files say them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.lab.cluster import Box
from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from tests.cluster.helpers import submit
from tests.cluster.runs import log_of
from tests.cluster.test_lab import check_lab, example_and_output, run_example
from tests.conftest import REPO
from tests.dist.test_seeds import check_smoke

SEEDS = REPO / "examples" / "seeds"
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_trainer_with_lora_on_two_nodes(box: Box, shared: Path) -> None:
    """000: Slurm, torchrun and HF Trainer over two nodes whose interfaces have different names; first the job waits for
    another."""
    submit(box, shared, "sleep 5\n", "--nodes=3", "--exclusive")
    run_dir, shown = example_and_output(shared, SEEDS / "000" / "two-nodes-tiny.yaml")
    assert re.search(r"job \d+ is pending: (Resources|Priority)", shown), shown
    metrics = read_json(run_dir.metrics)
    found = (metrics["world_size"], metrics["nodes"], metrics["steps"], metrics["strategy"], metrics["dtype"])
    assert found == (2, 2, 10, "hf_trainer", "bfloat16")
    assert metrics["use_lora"] and not metrics["gradient_checkpointing"]
    assert metrics["sync_proof"] == {"world_size": 2, "weights_equal": True, "data_disjoint": True}
    said = log_of(run_dir)
    assert "node 0 = n1 eth0" in said and "node 1 = n2 eno1" in said and "ranks 1-1" in said
    (checkpoint,) = run_dir.checkpoints.glob("step-*")
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (8, 16, 0.05)
    assert set(config["target_modules"]) == {*ATTENTION, "gate_proj", "up_proj", "down_proj"}
    assert (checkpoint / "adapter_model.safetensors").stat().st_size > 0


def test_fsdp_lora_of_a_mixture_of_experts_on_two_nodes(box: Box, shared: Path) -> None:
    """001: evaluations of the same rows, adapters alone saved as often, the oldest removed."""
    run_dir = run_example(shared, SEEDS / "001" / "two-nodes-slurm-tiny.yaml")
    metrics = read_json(run_dir.metrics)
    assert (metrics["world_size"], metrics["nodes"], metrics["strategy"]) == (2, 2, "pytorch_zero3")
    assert metrics["sync_proof"]["weights_equal"] and metrics["sync_proof"]["data_disjoint"]
    events = list(read_events(run_dir.events_of(0)))
    evals = [e for e in events if e["event"] == "eval"]
    assert [e["step"] for e in evals] == [4, 8, metrics["steps"]]
    assert {(e["rows"], e["targets"]) for e in evals} == {(40, evals[0]["targets"])}
    assert evals[-1]["loss"] < evals[0]["loss"] and metrics["train_loss_last"] < metrics["train_loss_first"]
    assert run_dir.checkpoint_steps() == [8, metrics["steps"]]
    last = run_dir.checkpoint(metrics["steps"])
    config = json.loads((last / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], set(config["target_modules"])) == (64, 128, ATTENTION)
    assert not list(last.glob("model*.safetensors")) and not (last / "state").exists(), "adapters alone"


def test_the_lab_with_the_trainer(box: Box, shared: Path) -> None:
    """003: every check-off of the hand-out, with HF Trainer as there."""
    run_dir = run_example(shared, SEEDS / "003" / "lab-tiny.yaml")
    check_lab(run_dir, 3)
    assert read_json(run_dir.metrics)["strategy"] == "hf_trainer"


def test_zero1_over_several_nodes(box: Box, shared: Path) -> None:
    """004, test 04, on as many nodes as the box of all tests can give it at little cost."""
    pytest.importorskip("deepspeed")
    sets = ("cluster.nodes=2", "cluster.procs_per_node=1", "train.max_steps=20")
    check_smoke(
        run_example(shared, SEEDS / "004" / "04-deepspeed-4-nodes-tiny.yaml", *sets), "deepspeed_zero1", 2, 32, 20
    )


@pytest.mark.full
def test_zero1_over_four_nodes(shared: Path, make_box: Callable[..., Box], monkeypatch: pytest.MonkeyPatch) -> None:
    """004, test 04, as its twin says it: four nodes, two ranks each."""
    pytest.importorskip("deepspeed")
    box = make_box(f"four-{os.getpid()}", nodes=4)
    monkeypatch.setenv("ALLRANKS_BOX", box.name)
    check_smoke(run_example(shared, SEEDS / "004" / "04-deepspeed-4-nodes-tiny.yaml"), "deepspeed_zero1", 8, 32)
