"""Exports of real runs, loaded by plain transformers and PEFT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from allranks.launch.export import export_checkpoint
from allranks.rundir.paths import RunDir
from allranks.train.export import load, verify_logits
from tests.dist.harness import allranks, equal, rows_spec, train, weights_of

pytestmark = pytest.mark.dist
SMALL = {"train": {"max_steps": 2}, "cluster": {"procs_per_node": 1}}


def trained(folder: Path, **more: Any) -> RunDir:
    return train(folder, rows_spec(folder, 40, **{**SMALL, **more}), code=0)[1]


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("lora")
    return trained(folder, adapter={"type": "lora", "r": 4}, train={"max_steps": 2, "lr": 0.05})


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.inference_mode():
        return model(input_ids=torch.arange(24).view(2, 12)).logits


def test_an_adapter_and_its_merged_model_say_the_same(lora: RunDir) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter = export_checkpoint(lora, step=None, merge=False, out=None, force=False)
    merged = export_checkpoint(lora, step=2, merge=True, out=None, force=False)
    assert adapter.difference == 0.0 and 0.0 <= merged.difference < 1e-4
    base = AutoModelForCausalLM.from_pretrained(str(adapter.base))
    plain = logits(base)
    with_adapter = logits(PeftModel.from_pretrained(base, adapter.folder))
    alone = logits(AutoModelForCausalLM.from_pretrained(merged.folder))
    assert float((with_adapter - plain).abs().max()) > 1e-3
    assert torch.allclose(alone, with_adapter, atol=1e-4)
    assert len(AutoTokenizer.from_pretrained(merged.folder)) <= plain.shape[-1] == 320
    assert not list(Path(merged.folder).glob("*.bin")) and not (Path(adapter.folder) / "manifest.json").exists()


def test_a_model_trained_whole_is_exported_without_our_state(tmp_path: Path) -> None:
    run = trained(tmp_path, adapter={"type": "none"}, checkpoint={"mode": "full"})
    done = allranks("export", run.name, "--json", cwd=tmp_path, code=0)
    told = json.loads(done.stdout)
    assert told["kind"] == "model" and told["difference"] == 0.0
    assert not (Path(told["folder"]) / "state").exists()
    assert equal(weights_of(run, 2), load_file(Path(told["folder"]) / "model.safetensors"))
    assert "not an adapter" in allranks("export", run.name, "--merge", cwd=tmp_path, code=2).stderr


def test_other_weights_are_not_published(lora: RunDir, tmp_path: Path) -> None:
    """One weight of an adapter twice as large, and a merge with the wrong scaling."""
    base = str(lora.model)
    source = lora.checkpoint(2)
    spoilt = tmp_path / "spoilt"
    shutil.copytree(source, spoilt)
    weights = load_file(spoilt / "adapter_model.safetensors")
    name = next(n for n in weights if "lora_B" in n)
    save_file({**weights, name: weights[name] * 2}, spoilt / "adapter_model.safetensors")
    with pytest.raises(Exception, match="nothing was published"):
        verify_logits(source, spoilt, base)
    model = load(source, base)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] *= 1.5
    model.merge_and_unload().save_pretrained(str(tmp_path / "merged"))
    with pytest.raises(Exception, match="nothing was published"):
        verify_logits(source, tmp_path / "merged", base)


def test_what_is_there_stays_and_what_is_damaged_is_named(lora: RunDir, tmp_path: Path) -> None:
    def refused(run: Path, *args: str, code: int = 2) -> str:
        return allranks("export", str(run), *args, cwd=tmp_path, code=code).stderr

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    assert "not an earlier export" in refused(lora.root, "--out", "mine", "--force")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    refused(lora.root, "--step", "7")
    refused(lora.root, "--out", "new", code=0)
    assert "--force" in refused(lora.root, "--out", "new")
    broken = tmp_path / "broken"
    shutil.copytree(lora.root, broken)
    file = broken / "checkpoints" / "step-2" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    text = refused(broken, "--step", "2", code=1)
    assert "adapter_model.safetensors has the wrong size" in text and "Traceback" not in text
    shutil.rmtree(broken / "model")
    shutil.rmtree(broken / "checkpoints")
    shutil.copytree(lora.checkpoints, broken / "checkpoints")
    assert "base model" in refused(broken, "--out", str(tmp_path / "x"), code=3) and not (tmp_path / "x").exists()
