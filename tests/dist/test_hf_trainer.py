"""The engine `hf_trainer`: the losses, records and files of `pytorch_ddp`; what would make it train apart is
refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.conftest import tiny_spec, write_rows
from tests.dist.harness import allranks, memory_is_as_estimated, run_ranks, step_events, train, write_spec

pytestmark = pytest.mark.dist
HF = {"name": "hf_trainer"}
STEPS = {"max_steps": 4, "grad_accum": 2, "schedule": "cosine", "warmup_steps": 1}
FORMS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": {"type": "lora", "r": 4, "dropout": 0.1}},
    "padded": {"adapter": {"type": "none"}, "data": {"packing": "none"}, "train": {**STEPS, "max_grad_norm": None}},
    "checkpointing": {"adapter": {"type": "lora", "r": 4, "dropout": 0.1}, "model": {"gradient_checkpointing": True}},
}
SEARCHING = {"checkpointing"}  # with the search for unused parameters, which reentrant checkpointing does not survive


def spec(tmp_path: Path, name: str, strategy: dict[str, Any], **more: Any) -> dict[str, Any]:
    plain = {"checkpoint": {"mode": "full", "every": 2}, "train": STEPS, "eval": {"every": 2, "samples": 0}}
    return tiny_spec(tmp_path / "rows.json", tmp_path, name=name, strategy=strategy, **{**plain, **more})


def steps(run: RunDir, rank: int = 0) -> list[tuple[Any, ...]]:
    """What a step's record says but for times and memory."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_trained", "tokens_padded", "epoch")
    return [tuple(e[k] for k in keys) for e in step_events(run, rank)]


def events(run: RunDir) -> list[dict[str, Any]]:
    return list(read_events(run.events_of(0)))


def good(done: Any) -> None:
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "form", ["lora", *(pytest.param(f, marks=pytest.mark.full) for f in ("padded", "checkpointing"))]
)
def test_a_run_equals_pytorch_ddp_and_goes_on_bitwise(tmp_path: Path, form: str) -> None:
    write_rows(tmp_path / "rows.json", 80)
    more = FORMS[form]
    done, plain = train(tmp_path, spec(tmp_path, "plain", {"name": "pytorch_ddp"}, **more))
    good(done)
    own = spec(tmp_path, "ours", {**HF, "find_unused_parameters": form in SEARCHING}, **more)
    done, ours = train(tmp_path, own, anew=True)
    good(done)
    assert "Traceback" not in done.stderr
    for rank in (0, 1):  # two ranks: the same sums, dropout among them
        assert steps(ours, rank) == steps(plain, rank)
    file = "adapter_model.safetensors" if more["adapter"]["type"] == "lora" else "model.safetensors"
    a, b = (load_file(r.checkpoint(4) / file) for r in (ours, plain))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    found, wanted = read_json(ours.metrics), read_json(plain.metrics)
    assert isinstance(found, dict) and isinstance(wanted, dict)
    assert found.keys() == wanted.keys()
    for key in (
        "eval_loss",
        "perplexity",
        "sync_proof",
        "parameters_trained",
        "tokens_real",
        "tokens_trained",
        "steps",
    ):
        assert found[key] == wanted[key], key
    assert found["engine"]["name"] == "hf_trainer"
    assert wanted["engine"] is None
    assert ours.report.exists()
    memory_is_as_estimated(ours)  # the Trainer's own libraries among it
    uninterrupted = [steps(ours, rank) for rank in (0, 1)]
    shutil.rmtree(ours.checkpoint(4))
    good(allranks("resume", ours.name, cwd=tmp_path))
    assert [e["from_step"] for e in events(ours) if e["event"] == "resume"] == [2]
    assert [steps(ours, rank) for rank in (0, 1)] == uninterrupted
    again = load_file(ours.checkpoint(4) / file)
    assert all(torch.equal(a[k], again[k]) for k in a)


@pytest.mark.full
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.json", 60)
    wild = {"max_steps": 20, "lr": 1e30, "schedule": "constant", "max_grad_norm": None}
    done, run = train(tmp_path, spec(tmp_path, "wild", HF, train=wild, adapter={"type": "none"}, eval={"samples": 0}))
    assert done.returncode == 1
    for words in ("not finite", "rank 0", "step 2"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert run.checkpoint_steps() == [1]
    weights = load_file(run.checkpoint(1) / "model.safetensors")
    assert all(bool(torch.isfinite(v).all()) for v in weights.values())


def test_adapters_reload_in_plain_peft_with_the_same_logits(tmp_path: Path) -> None:
    (one,) = run_ranks("reloaded_adapter", 2, tmp_path, folder=tmp_path, names=["hf_trainer"])[0]
    assert one["learned"] > 1e-3
    assert one["apart"] < 1e-5 * max(one["learned"], 1.0)


@pytest.mark.parametrize(
    ("plant", "kind", "words"),
    [
        ("trainer_without_wrapper", "ProofFailed", "instead of wrapping it"),
        ("trainer_without_wrapper_unchecked", "ProofFailed", "gradients are not averaged"),
        ("trainer_without_wrapper_to_the_end", "ProofFailed", "after step 3: the weights are not equal"),
        ("trainer_alone", "ProofFailed", "would train alone"),
        ("trainer_same_rows", "ProofFailed", "rank 1 and rank 0 both trained"),
        ("trainer_other_rows", "ProofFailed", "did not train the planned sequences"),
        ("trainer_skips_rows", "ProofFailed", "did not train the planned sequences"),
        ("trainer_averages", "EnvironmentNotAble", "averages over micro-steps on its own"),
        ("none", None, None),
    ],
)
def test_a_trainer_that_would_train_apart_is_refused(
    tmp_path: Path, plant: str, kind: str | None, words: str | None
) -> None:
    found = run_ranks("trainer_bug", 2, tmp_path, folder=tmp_path, plant=plant)
    told = [f for f in found if f["said"]]
    assert bool(told) == bool(words)
    assert all(words in f["said"] and f["kind"] == kind for f in told), found


@pytest.mark.full
def test_three_ranks_go_on_bitwise_from_a_step_in_the_middle(tmp_path: Path) -> None:
    """From three ranks on the order of sums depends on how buckets are laid out, which DDP settles after its first
    backward."""
    write_rows(tmp_path / "rows.json", 120)
    more = {
        "cluster": {"procs_per_node": 3, "cache": str(tmp_path / "cache")},
        "strategy": {**HF, "args": {"ddp_bucket_cap_mb": 1}},
    }
    done, run = train(tmp_path, {**spec(tmp_path, "three", HF, adapter={"type": "none"}), **more})
    good(done)
    whole, uninterrupted = load_file(run.checkpoint(4) / "model.safetensors"), steps(run)
    shutil.rmtree(run.checkpoint(4))
    good(allranks("resume", run.name, cwd=tmp_path))
    assert steps(run) == uninterrupted
    again = load_file(run.checkpoint(4) / "model.safetensors")
    assert all(torch.equal(whole[k], again[k]) for k in whole)


def test_arguments_that_are_free_reach_the_trainer_and_others_are_refused_by_plan(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.json", 40)
    done, run = train(tmp_path, spec(tmp_path, "free", {**HF, "args": {"ddp_bucket_cap_mb": 1, "learning_rate": 1e-2}}))
    good(done)
    config = json.loads(run.engine_config.read_text())
    assert config["ddp_bucket_cap_mb"] == 1
    assert config["logging_nan_inf_filter"] is False
    path = write_spec(tmp_path, spec(tmp_path, "bad", {**HF, "args": {"learning_rate": 3e-4, "fsdp": "full_shard"}}))
    done = allranks("plan", str(path), cwd=tmp_path)
    assert done.returncode == 2
    for words in ("learning_rate is 0.0003, but train.lr is 0.01", "fsdp cannot be set here", "pytorch_zero3"):
        assert words in done.stderr
