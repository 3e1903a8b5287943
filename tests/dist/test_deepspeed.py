"""Whole runs under DeepSpeed's engine: the losses of `pytorch_ddp`, files that others can load, and clear refusals."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.dist import harness
from tests.dist.harness import allranks, equal, rows_spec, run_ranks, step_events, train, weights_of
from tests.dist.plants import needs_deepspeed

pytestmark = needs_deepspeed
full = partial(pytest.param, marks=pytest.mark.full)
STAGES = ["deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"]


def spec(tmp_path: Path, name: str, strategy: dict[str, Any], **more: Any) -> dict[str, Any]:
    plain = {
        "adapter": {"type": "none"}, "checkpoint": {"mode": "full"},
        "train": {"max_steps": 4, "grad_accum": 2, "schedule": "constant"},
        "eval": {"baseline": True},  # before the engine has gathered anything
    }  # fmt: skip
    return rows_spec(tmp_path, 80, name=name, strategy=strategy, **{**plain, **more})


def losses(run: RunDir) -> list[float]:
    return [e["loss"] for e in step_events(run)]


@pytest.mark.parametrize(("name", "lora"), [("deepspeed_zero3", True), *(full(n, False) for n in STAGES)])
def test_a_run_equals_pytorch_ddp_and_goes_on_bitwise(tmp_path: Path, name: str, lora: bool) -> None:
    more: dict[str, Any] = {"adapter": {"type": "lora", "r": 4, "dropout": 0.1}} if lora else {}
    _, plain = train(tmp_path, spec(tmp_path, "plain", {"name": "pytorch_ddp"}, **more), anew=True, code=0)
    _, ours = train(tmp_path, spec(tmp_path, "whole", {"name": name}, **more), anew=True, code=0)
    a, b = weights_of(ours, 4), weights_of(plain, 4)
    assert a.keys() == b.keys() and max(float((a[k] - b[k]).abs().max()) for k in a) < 1e-4
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)
    found, wanted = read_json(ours.metrics), read_json(plain.metrics)
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-4)
    same = ("parameters", "parameters_trained", "sync_proof")
    assert {key: found[key] for key in same} == {key: wanted[key] for key in same}
    assert (found["engine"]["name"], wanted["engine"]) == ("deepspeed", None)
    assert found["engine"]["initialize_s"] > 0
    config = json.loads(ours.engine_config.read_text())
    assert (config["train_batch_size"], config["zero_optimization"]["stage"]) == (2 * 2 * 2, int(name[-1]))
    assert ours.report.exists()
    harness.memory_is_as_estimated(plain)
    harness.memory_is_as_estimated(ours)  # DeepSpeed's own libraries among it
    short = {**more, "train": {"max_steps": 2, "grad_accum": 2, "schedule": "constant"}}
    _, part = train(tmp_path, spec(tmp_path, "part", {"name": name}, **short))
    allranks("resume", part.name, "--set", "train.max_steps=4", cwd=tmp_path, code=0)
    assert equal(a, weights_of(part, 4)) and losses(part) == losses(ours)


def reloaded(tmp_path: Path, names: list[str], plant: str = "") -> list[dict[str, Any]]:
    return run_ranks("reloaded_adapter", 2, tmp_path, names=names, plant=plant)[0]


def test_adapters_reload_in_plain_peft_with_the_same_logits(tmp_path: Path) -> None:
    for one in reloaded(tmp_path, STAGES):
        assert one["learned"] > 1e-3 and one["apart"] < 1e-5 * max(one["learned"], 1.0), one


def test_an_adapter_of_which_one_ranks_part_was_saved_would_be_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"size mismatch|could not be saved"):
        reloaded(tmp_path, ["deepspeed_zero3"], "own_shards_alone")
    (one,) = reloaded(tmp_path, ["deepspeed_zero3"], "own_part_and_zeros")
    assert one["apart"] > 1e-4, one


def parity(tmp_path: Path, variants: list[str], **more: Any) -> list[dict[str, Any]]:
    return run_ranks("parities", 2, tmp_path, 240, pairs=[("deepspeed_zero3", v) for v in variants], **more)[0]


def test_lora_in_blocks_that_are_gathered_as_a_whole_equals_one_process(tmp_path: Path) -> None:
    found = parity(tmp_path, ["lora", "moe_lora", "lora_recomputed", "lora_unused"])
    assert len(found) == 4
    for one in found:
        assert one["error"] < 2e-3 and one["norm_error"] < 1e-3 and one["moved"] > 1e-3, one


def test_a_first_block_whose_input_gets_no_gradient_would_be_seen(tmp_path: Path) -> None:
    """DeepSpeed reduces gradients before they are there: they are wrong, or weights are no longer gathered."""
    try:
        (one,) = parity(tmp_path, ["lora"], plant="input_without_gradient")
    except AssertionError as error:
        assert "must match the size of tensor" in str(error), error
        return
    assert one["error"] > 0.01, one


def test_blocks_with_lora_are_gathered_and_freed_one_after_the_other(tmp_path: Path) -> None:
    """Each block is gathered as a whole, so that its layers can be computed together."""
    for found in run_ranks("gathered_by_deepspeed", 2, tmp_path, blocks=8, how={}):
        assert found["looks"] > 100
        assert 0.05 < found["share"] < 0.4, found  # a block, the head, and what is fetched before its use
        assert found["left"] == [0, 0, 0], found


def test_an_optimizer_in_the_json_is_used_and_equals_ours(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": optimizer, "train_batch_size": "auto"}))
    strategy = {"name": "deepspeed_zero2"}
    _, own = train(tmp_path, spec(tmp_path, "own", strategy), code=0)
    _, other = train(tmp_path, spec(tmp_path, "json", {**strategy, "config": str(tmp_path / "ds.json")}), code=0)
    assert losses(other) == pytest.approx(losses(own), rel=1e-5)
    assert json.loads(other.engine_config.read_text())["optimizer"]["params"]["lr"] == 1e-2


@pytest.mark.parametrize(
    ("raises", "words"),
    [
        ("ModuleNotFoundError(\"No module named 'deepspeed'\", name='deepspeed')", "pip install 'allranks[deepspeed]'"),
        ("ImportError('libcudart.so.11.0: cannot open shared object file')", "libcudart.so.11.0"),
        ("RuntimeError('operator torchvision::nms does not exist')", "torchvision::nms"),
    ],
)
def test_a_deepspeed_that_cannot_be_imported_ends_with_3_and_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: str, words: str
) -> None:
    broken = tmp_path / "broken" / "deepspeed"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(f"raise {raises}\n")
    monkeypatch.setenv("PYTHONPATH", f"{broken.parent}:{os.environ.get('PYTHONPATH', '')}")
    # anew: a warm process may have imported the real one
    wanted = harness.write_spec(tmp_path, spec(tmp_path, "broken", {"name": "deepspeed_zero1"}))
    done = allranks("run", str(wanted), cwd=tmp_path, anew=True, code=3)
    assert words in done.stderr and "pip install" in done.stderr
    assert "Traceback" not in done.stderr
