"""QLoRA: a base in 4 bits equals a base with the same values, under all strategies that take it, and in runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from allranks.planning.memory.model_config import read_model_config
from allranks.planning.memory.weights import model_memory, shapes_of, trained_weights_of
from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.train.models.nf4 import dequantize, quantize
from tests import sampling
from tests.dist.harness import allranks, equal, rows_spec, run_ranks, step_events, train, weights_of
from tests.dist.making import save_family
from tests.dist.quantized import ADAPTER
from tests.unit.test_nf4 import nearest

CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
STRATEGIES = sampling.first_of(
    ["pytorch_ddp", "zero2", "pytorch_zero3:sharded", "pytorch_zero2", "pytorch_zero3", "hf_trainer"], 3
)


def both(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    """A model, and one with the values of its weights in 4 bits, found without the package."""
    own, rounded = (save_family(folder / name, "llama", CONFIG, dtype) for name in ("model", "rounded"))
    state = load_file(rounded / "model.safetensors")
    state = {n: nearest(w) if ".layers." in n and w.ndim == 2 else w for n, w in state.items()}
    save_file(state, rounded / "model.safetensors", {"format": "pt"})
    return str(own), str(rounded)


def test_training_is_that_next_to_the_same_values(tmp_path: Path) -> None:
    own, rounded = both(tmp_path)
    dense = run_ranks("trained", 2, tmp_path, 240, "quantized", names=STRATEGIES, mode="none", model=rounded)
    found = run_ranks("trained", 2, tmp_path, 240, "quantized", names=STRATEGIES, mode="nf4", model=own)
    for name in STRATEGIES:
        assert found[0][name]["steps"] == dense[0][name]["steps"], name
        assert found[0][name]["weights"] == dense[0][name]["weights"] and found[0][name]["weights"], name
    assert len({f[name]["base"] for f in found[:1] for name in STRATEGIES}) == 1
    # the memory estimate's bytes are those of the parameters
    shapes = shapes_of(read_model_config({"model_type": "llama", **CONFIG}, "here"))
    sizes: dict[str, Any] = {"element": 4, "trained_element": 4, "autocast": None, "node_ranks": 2, "copies": 2}
    trained = trained_weights_of(ADAPTER, shapes, "nf4")
    planned = model_memory(shapes, trained, **sizes, world=2, accumulates=False, device="cpu")
    assert found[0]["pytorch_ddp"]["bytes"] == planned.base + planned.adapters
    assert found[0]["pytorch_zero3:sharded"]["bytes"] == planned.share(planned.base) + planned.share(planned.adapters)


def test_a_wrongly_quantised_weight_is_refused(tmp_path: Path) -> None:
    own, _ = both(tmp_path)
    wrong = {"mode": "nf4", "model": own, "wrong": True}
    found = run_ranks("trained", 2, tmp_path, 240, "quantized", names=["pytorch_zero3"], **wrong)
    for rank in found:
        assert "q_proj.weight: " in rank["pytorch_zero3"]["error"] and "0.152" in rank["pytorch_zero3"]["error"]


IN_4_BITS, IN_FLOAT8 = {"quantize": "nf4_double"}, {"float8": True, "attention": "auto"}


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("pytorch_ddp", IN_4_BITS),
        pytest.param("pytorch_zero3", IN_4_BITS, marks=pytest.mark.full),
        pytest.param("pytorch_zero3", IN_FLOAT8, marks=pytest.mark.full),
        pytest.param("pytorch_ddp", IN_FLOAT8, marks=pytest.mark.full),
        pytest.param("zero3", IN_FLOAT8, marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_bitwise_is_exported_and_replies(tmp_path: Path, strategy: str, model: dict[str, Any]) -> None:
    """Also with products in 8-bit floats, whose base stays, and with the kernel of attention of the first attempt."""
    spec = rows_spec(
        tmp_path, name="q", strategy={"name": strategy}, checkpoint={"mode": "full", "every": 3}, eval={"samples": 1},
        model={"name": "tiny:mistral", **model, "config": CONFIG},
        train={"max_steps": 6, "lr": 1e-2, "schedule": "constant"},
    )  # fmt: skip
    _, run = train(tmp_path, spec, code=0)
    losses, weights = [e["loss"] for e in step_events(run)], weights_of(run, 6)
    shutil.rmtree(run.checkpoint(6))  # not another run: its trial might choose another kernel, which rounds otherwise
    allranks("resume", run.name, cwd=tmp_path, code=0)
    assert [e["loss"] for e in step_events(run)] == losses and equal(weights_of(run, 6), weights)
    events = list(read_events(run.events_of(0)))
    chosen = [(e["reused"], e["chosen"]) for e in events if e["event"] == "attention"]
    off = [e["difference"] for e in events if e["event"] == "float8"]
    if model is IN_FLOAT8:
        assert [reused for reused, _ in chosen] == [False, True] and len({name for _, name in chosen}) == 1
        assert len(off) == 1 and 0.03 < off[0] < 0.06
        assert read_json(run.metrics)["attention"]["chosen"] == chosen[0][1]
    words = ("export", run.name, "--step", "6", "--merge", "--json")
    merged = json.loads(allranks(*words, cwd=tmp_path, code=0).stdout)
    assert merged["difference"] < 1e-4
    base, made = (load_file(Path(folder) / "model.safetensors") for folder in (run.model, merged["folder"]))
    name = "model.layers.1.mlp.down_proj.weight"  # without adapter: what the ranks computed with
    stored = base[name] if model is IN_FLOAT8 else dequantize(*quantize(base[name], "nf4_double"), torch.float32)
    assert torch.equal(made[name], stored)
    said = allranks("generate", run.name, "--prompt", "Add 1 and 2", "--json", cwd=tmp_path, code=0).stdout
    assert json.loads(said)["replies"]
