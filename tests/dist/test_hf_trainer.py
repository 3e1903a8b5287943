"""The engine `hf_trainer`: the records and files of `pytorch_ddp`; what would make it train apart is refused."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.dist import harness
from tests.dist.harness import allranks, equal, rows_spec, run_ranks, step_events, train, weights_of

HF = {"name": "hf_trainer"}
full = partial(pytest.param, marks=pytest.mark.full)
STEPS = {"max_steps": 4, "grad_accum": 2, "schedule": "cosine", "warmup_steps": 1}
FORMS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": {"type": "lora", "r": 4, "dropout": 0.1}},
    "padded": {"adapter": {"type": "none"}, "data": {"packing": "none"}, "train": {**STEPS, "max_grad_norm": None}},
    "checkpointing": {"adapter": {"type": "lora", "r": 4, "dropout": 0.1}, "model": {"gradient_checkpointing": True}},
}
SEARCHING = {"checkpointing"}  # with the search for unused parameters, which reentrant checkpointing does not survive


def spec(tmp_path: Path, name: str, strategy: dict[str, Any], rows: int = 80, **more: Any) -> dict[str, Any]:
    plain = {"checkpoint": {"mode": "full", "every": 2}, "train": STEPS, "eval": {"every": 2, "samples": 0}}
    return rows_spec(tmp_path, rows, name=name, strategy=strategy, **{**plain, **more})


def steps(run: RunDir, ranks: int = 2) -> list[tuple[Any, ...]]:
    """What the records of the ranks' steps say but for times and memory."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_trained", "tokens_padded", "epoch")
    return [tuple(e[k] for k in keys) for rank in range(ranks) for e in step_events(run, rank)]


def goes_on_bitwise(run: RunDir, cwd: Path, ranks: int = 2) -> None:
    """From the checkpoint of step 2, as if there had been no stop."""
    whole, uninterrupted = weights_of(run, 4), steps(run, ranks)
    shutil.rmtree(run.checkpoint(4))
    allranks("resume", run.name, cwd=cwd, code=0)
    assert [e["from_step"] for e in read_events(run.events_of(0)) if e["event"] == "resume"] == [2]
    assert steps(run, ranks) == uninterrupted and equal(whole, weights_of(run, 4))


@pytest.mark.parametrize("form", ["lora", full("padded"), full("checkpointing")])
def test_a_run_equals_pytorch_ddp_and_goes_on_bitwise(tmp_path: Path, form: str) -> None:
    more = FORMS[form]
    _, plain = train(tmp_path, spec(tmp_path, "plain", {"name": "pytorch_ddp"}, **more), code=0)
    own = spec(tmp_path, "ours", {**HF, "find_unused_parameters": form in SEARCHING}, **more)
    done, ours = train(tmp_path, own, anew=True, code=0)
    assert "Traceback" not in done.stderr
    assert steps(ours) == steps(plain)  # two ranks: the same sums, dropout among them
    assert equal(weights_of(ours, 4), weights_of(plain, 4))
    found, wanted = read_json(ours.metrics), read_json(plain.metrics)
    same = ("eval_loss", "perplexity", "sync_proof", "parameters_trained", "tokens_real", "tokens_trained", "steps")
    assert found.keys() == wanted.keys()
    assert {key: found[key] for key in same} == {key: wanted[key] for key in same}
    assert (found["engine"]["name"], wanted["engine"]) == ("hf_trainer", None) and ours.report.exists()
    harness.memory_is_as_estimated(ours)  # the Trainer's own libraries among it
    goes_on_bitwise(ours, tmp_path)


def test_adapters_reload_in_plain_peft_with_the_same_logits(tmp_path: Path) -> None:
    (one,) = run_ranks("reloaded_adapter", 2, tmp_path, names=["hf_trainer"])[0]
    assert one["learned"] > 1e-3 and one["apart"] < 1e-5 * max(one["learned"], 1.0)


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
def test_a_trainer_that_would_train_apart_is_refused(tmp_path: Path, plant: str, kind: str, words: str) -> None:
    found = run_ranks("trainer_bug", 2, tmp_path, plant=plant)
    told = [f for f in found if f["said"]]
    assert bool(told) == bool(words)
    assert all(words in f["said"] and f["kind"] == kind for f in told), found


@pytest.mark.full
def test_three_ranks_go_on_bitwise_from_a_step_in_the_middle(tmp_path: Path) -> None:
    """The order of sums depends on how buckets are laid out, which DDP settles after its first backward."""
    strategy, cluster = {**HF, "args": {"ddp_bucket_cap_mb": 1}}, {"procs_per_node": 3}
    own = spec(tmp_path, "three", strategy, 120, adapter={"type": "none"}, cluster=cluster)
    goes_on_bitwise(train(tmp_path, own, code=0)[1], tmp_path, 3)


def test_arguments_that_are_free_reach_the_trainer_and_others_are_refused_by_plan(tmp_path: Path) -> None:
    free, bad = {"ddp_bucket_cap_mb": 1, "learning_rate": 1e-2}, {"learning_rate": 3e-4, "fsdp": "full_shard"}
    _, run = train(tmp_path, spec(tmp_path, "free", {**HF, "args": free}, 40), code=0)
    config = json.loads(run.engine_config.read_text())
    assert (config["ddp_bucket_cap_mb"], config["logging_nan_inf_filter"]) == (1, False)
    path = harness.write_spec(tmp_path, spec(tmp_path, "bad", {**HF, "args": bad}, 40))
    done = allranks("plan", str(path), cwd=tmp_path, code=2)
    for words in ("learning_rate is 0.0003, but train.lr is 0.01", "fsdp cannot be set here", "pytorch_zero3"):
        assert words in done.stderr
