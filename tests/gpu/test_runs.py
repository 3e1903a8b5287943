"""Whole runs on one GPU: infinite gradients, host syncs, resume, memory, a rank that spins in a kernel."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.conftest import tiny_spec, write_rows
from tests.dist.harness import allranks, step_events, train, write_spec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
PLANTS = Path(__file__).parent / "plants"


def spec(tmp_path: Path, device: str, name: str, **sections: Any) -> dict[str, Any]:
    write_rows(tmp_path / "rows.json", 120)
    usual = {"train": {"max_steps": 8, "schedule": "constant"}, "eval": {"samples": 0}}
    usual["cluster"] = {"device": device, "procs_per_node": 1}
    merged = {section: {**values, **sections.pop(section, {})} for section, values in usual.items()}
    return {**tiny_spec(tmp_path / "rows.json", tmp_path, **merged, **sections), "name": name}


def plant(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLANTS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("GPU_PLANT", what)


def succeeded(tmp_path: Path, wanted: dict[str, Any]) -> RunDir:
    done, run = train(tmp_path, wanted)
    assert done.returncode == 0, done.stderr[-3000:]
    return run


def weights(run: RunDir, step: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    (file,) = run.checkpoint(step).glob("*model.safetensors")
    return load_file(file)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("strategy", ["single", "pytorch_ddp", "zero1", "zero3", "pytorch_zero3"])
def test_a_nan_in_step_5_leaves_the_weights_of_step_4(
    strategy: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"strategy": {"name": strategy}, "checkpoint": {"mode": "full"}, "train": {"deterministic": True}}
    wanted = spec(tmp_path, device, "good", **how)
    wanted["train"]["max_steps"] = 4
    good = succeeded(tmp_path, wanted)
    plant(monkeypatch, "nan_loss:0:5")
    done, bad = train(tmp_path, spec(tmp_path, device, "bad", **how))
    assert done.returncode == 1, done.stderr[-3000:]
    assert "is not finite" in done.stderr and "in step 5" in done.stderr, done.stderr[-3000:]
    assert bad.checkpoint_steps() == [4]
    assert equal(weights(good, 4), weights(bad, 4)), "the update of a gradient that is not finite was not skipped"


@pytest.mark.parametrize(
    "strategy", ["single", "pytorch_ddp", "bucket_ddp_async", "zero1", "zero2", "zero3", "pytorch_zero3"]
)
@pytest.mark.parametrize("packing", ["isolated", "wrapped"])
def test_nothing_in_a_step_waits_for_the_gpu(
    strategy: str, packing: str, cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packing == "wrapped" and strategy != "single":
        pytest.skip("the way of the batches does not depend on the strategy")
    plant(monkeypatch, "no_host_syncs:0:4")  # the first steps may: lazily created handles, autotuning
    sections = {"strategy": {"name": strategy}, "data": {"packing": packing}, "eval": {"at_end": False}}
    succeeded(tmp_path, spec(tmp_path, cuda, "sync", **sections))


def test_a_host_sync_that_is_planted_is_found(cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "no_host_syncs:0:4;read_a_value:0:6")
    done, _ = train(tmp_path, spec(tmp_path, cuda, "sync"))
    assert done.returncode == 1
    assert "synchroniz" in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize("exact", [True, False], ids=["deterministic", "usual"])
def test_20_steps_resumed_to_30_equal_30_unbroken(exact: bool, device: str, tmp_path: Path) -> None:
    """Asynchronous full checkpoints; bitwise if deterministic, else atomic additions may round differently."""
    checkpoint = {"mode": "full", "every": 10, "async": True}
    sections: dict[str, Any] = {"checkpoint": checkpoint, "model": {"dtype": "bfloat16"}}
    trains = {steps: {"deterministic": exact, "max_steps": steps} for steps in (30, 20)}
    specs = [spec(tmp_path, device, f"to-{n}", train=t, **sections) for n, t in trains.items()]
    whole, parts = (succeeded(tmp_path, one) for one in specs)
    assert parts.checkpoint_steps() == [10, 20]
    done = allranks("resume", parts.name, "--set", "train.max_steps=30", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = ([e["loss"] for e in step_events(run)] for run in (whole, parts))
    assert len(one) == len(other) == 30
    if exact or device == "cpu":
        assert one == other
        assert equal(weights(whole, 30), weights(parts, 30))
    else:
        assert all(abs(a - b) <= 0.02 * a for a, b in zip(one, other, strict=True)), list(zip(one, other, strict=True))


SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "full": {"adapter": {"type": "none"}},
    "lora": {},
    "recomputed": {"model": {"gradient_checkpointing": "full"}},
    "recomputed_in_part": {"model": {"gradient_checkpointing": "selective"}},
    "recomputed_in_part_full": {"adapter": {"type": "none"}, "model": {"gradient_checkpointing": "selective"}},
    "float32": {"model": {"dtype": "float32"}},
    "zero3": {"adapter": {"type": "none"}, "strategy": {"name": "zero3"}},
    "pytorch_zero3": {"adapter": {"type": "none"}, "strategy": {"name": "pytorch_zero3"}},
}


@pytest.mark.parametrize("form", FORMS)
def test_peak_memory_is_what_plan_says(form: str, cuda: str, tmp_path: Path) -> None:
    """The allocator's peak against the estimate without the CUDA context, which the allocator does not see."""
    from allranks.planning.memory.estimate import ESTIMATE_ERROR

    wanted = spec(tmp_path, cuda, "memory", data={"max_length": 1024, "packing": "wrapped", "template": "text"})
    wanted["data"] |= {"source": "builtin:reviews", "eval_fraction": 0, "mask_prompt": False}
    wanted["model"] = {"name": "tiny:mistral", "dtype": "bfloat16", "config": SIZES}
    wanted["train"]["micro_batch_size"] = 4
    for section, values in FORMS[form].items():
        wanted[section] = {**wanted.get(section, {}), **values} if section != "adapter" else values
    fit = json.loads(allranks("plan", str(write_spec(tmp_path, wanted)), "--json", cwd=tmp_path).stdout)["fit"]
    (peak,) = [m for m in fit["moments"] if m["name"] == fit["peak"]]
    estimated = sum(peak["parts"].values()) - peak["parts"]["runtime"]
    measured = read_json(succeeded(tmp_path, wanted).metrics)["peak_memory_bytes"]
    said = f"estimated {estimated >> 20} MiB in phase {fit['peak']!r}, measured {measured >> 20} MiB"
    assert abs(estimated / measured - 1) <= ESTIMATE_ERROR, said


def test_a_rank_that_spins_in_a_kernel_is_named(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host thread waits in a synchronisation at 100 % of a core; the other rank waits for it in a collective."""
    plant(monkeypatch, "spin_on_the_device:1:5")
    wanted = spec(tmp_path, device, "spin", observe={"hang_s": 8}, strategy={"name": "pytorch_ddp"})
    wanted["cluster"] |= {"procs_per_node": 2, "backend": "gloo"}
    wanted["train"]["max_steps"] = 40
    done, run = train(tmp_path, wanted)
    assert done.returncode == 1, done.stdout + done.stderr
    report = read_json(run.hang_report(1))
    assert report is not None, done.stderr[-3000:]
    assert [stalled["rank"] for stalled in report["stalled"]] == [1], report["sentence"]
    assert "spin_on_the_device" in report["stalled"][0]["where"], report["stalled"][0]
    assert "hang: rank 1 on" in done.stderr
