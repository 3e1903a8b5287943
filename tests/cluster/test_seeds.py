"""The tiny twins of the field notes' jobs on several nodes, and the lab: what readers shall look at is there."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.lab.cluster import Box
from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.cluster.helpers import submit
from tests.cluster.runs import allranks, log_of
from tests.conftest import REPO
from tests.dist.test_seeds import check_smoke

SEEDS = REPO / "examples" / "seeds"
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LAB = REPO / "examples" / "lab-bert-agnews-slurm.yaml"
GLM = REPO / "examples" / "glm-tiny-fsdp-lora.yaml"


def run_example(shared: Path, example: Path, *sets: str) -> RunDir:
    """`allranks run` of an example, with its run folder and cache where the nodes see them."""
    return example_and_output(shared, example, *sets)[0]


def example_and_output(shared: Path, example: Path, *sets: str) -> tuple[RunDir, str]:
    """The same, with what was shown to the user."""
    all_sets = (f"run_root={shared}/runs", f"cluster.cache={shared}/cache", "cluster.env.OMP_NUM_THREADS='1'", *sets)
    done = allranks(shared, "run", str(example), *(word for item in all_sets for word in ("--set", item)))
    run_dir = RunDir(next((shared / "runs").iterdir()))
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    return run_dir, done.stdout


def check_lab(run_dir: RunDir, nodes: int) -> None:
    """Every check-off of the hand-out."""
    world = 2 * nodes
    lines = run_dir.preflight_text.read_text().splitlines()
    begins = [[f"n{i}", "proj=ok", "pkgs=ok"] for i in range(1, nodes + 1)]
    assert [line.split()[:3] for line in lines[:nodes]] == begins
    assert all(line.endswith(" OK") for line in lines[:nodes])
    logs = run_dir.rank_logs(1)
    assert sorted(logs) == list(range(world))
    for rank, path in logs.items():
        assert f"[RANK {rank}] WORLD_SIZE={world} n{rank // 2 + 1} " in path.read_text()
    (checkpoint,) = run_dir.checkpoints.glob("step-*")
    names = {path.name for path in checkpoint.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    metrics = read_json(run_dir.metrics)
    assert (metrics["world_size"], metrics["nodes"]) == (world, nodes)
    assert metrics["sync_proof"] == {"world_size": world, "weights_equal": True, "data_disjoint": True}
    assert metrics["accuracy"] is not None
    steps_of_an_epoch = 380 / (8 * world)
    assert 0 < metrics["epoch_s"] < metrics["wall_time_s"]
    assert metrics["epoch_s"] == pytest.approx(steps_of_an_epoch * metrics["step_time_s"]["median"], rel=0.9)


def test_the_lab_on_five_nodes(shared: Path, use_box: Callable[..., Box]) -> None:
    use_box("five", nodes=5)
    check_lab(run_example(shared, LAB, "data.subset=400", "train.epochs=2", "cluster.nodes=5"), 5)


@pytest.mark.parametrize("adapters", ["auto", "sharded"])
def test_the_twin_of_the_large_mixture_of_experts(box: Box, shared: Path, adapters: str) -> None:
    """FSDP2 over two nodes: adapters on attention and experts, which auto keeps whole; plain PEFT reads them."""
    run_dir = run_example(shared, GLM, f"strategy.adapters={adapters}")
    metrics = read_json(run_dir.metrics)
    assert (metrics["world_size"], metrics["nodes"], metrics["strategy"]) == (4, 2, "pytorch_zero3")
    assert metrics["sync_proof"]["weights_equal"] and metrics["sync_proof"]["data_disjoint"]
    assert metrics["steps"] > 12 and metrics["train_loss_last"] < metrics["train_loss_first"]
    events = list(read_events(run_dir.events_of(0)))
    evals = [e for e in events if e["event"] == "eval"]
    assert [e["step"] for e in evals] == [6, 12, 18, metrics["steps"]]
    assert {(e["rows"], e["targets"]) for e in evals} == {(200, evals[0]["targets"])}
    assert evals[-1]["loss"] < evals[0]["loss"]
    remarks = {e["message"].partition(":")[0] for e in events if e["event"] == "remark"}
    assert remarks == {"packed rows", "routers", *(["adapters"] if adapters == "auto" else [])}
    load = metrics["expert_load"]
    assert load["experts"] == 8 and [layer["layer"] for layer in load["layers"]] == ["1", "2"]
    counted = [sum(e["layers"]["1"]) for e in events if e["event"] == "experts"]
    assert sum(counted) == 2 * metrics["tokens_real"]  # two experts a token
    assert run_dir.checkpoint_steps() == [6, 12, 18, metrics["steps"]]
    last = run_dir.checkpoint(metrics["steps"])
    config = json.loads((last / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    check_reload(last)


def check_reload(checkpoint: Path) -> None:
    """Plain transformers and PEFT read it, and every adapter has learned: B is zero before the first update."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = json.loads((checkpoint / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    model = PeftModel.from_pretrained(base, str(checkpoint))
    learned = {n: float(p.detach().abs().max()) for n, p in model.named_parameters() if "lora_B" in n}
    assert len(learned) == 3 * 4 + 2 * 2 and all(v > 0 for v in learned.values()), learned


def test_trainer_with_lora_on_two_nodes(box: Box, shared: Path) -> None:
    """000: Slurm, torchrun and HF Trainer on nodes with different interfaces; the job first waits for another."""
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
    evals = [e for e in read_events(run_dir.events_of(0)) if e["event"] == "eval"]
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


def test_zero1_over_four_nodes(shared: Path, use_box: Callable[..., Box]) -> None:
    """004, test 04, as its twin says it: four nodes, two ranks each."""
    pytest.importorskip("deepspeed")
    use_box("four", nodes=4)
    check_smoke(run_example(shared, SEEDS / "004" / "04-deepspeed-4-nodes-tiny.yaml"), "deepspeed_zero1", 8, 32)
