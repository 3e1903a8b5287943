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
from tests.conftest import tiny_spec, write_rows
from tests.dist.harness import allranks, train

pytestmark = pytest.mark.dist


SMALL = {"train": {"max_steps": 2}, "cluster": {"procs_per_node": 1}}


def trained(folder: Path, **more: Any) -> RunDir:
    write_rows(folder / "rows.json", 40)
    done, run = train(folder, tiny_spec(folder / "rows.json", folder, **{**SMALL, **more}))
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained(
        tmp_path_factory.mktemp("lora"), adapter={"type": "lora", "r": 4}, train={"max_steps": 2, "lr": 0.05}
    )


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
    done = allranks("export", run.name, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["kind"] == "model" and told["difference"] == 0.0
    assert not (Path(told["folder"]) / "state").exists()
    saved = load_file(run.checkpoint(2) / "model.safetensors")
    assert all(torch.equal(t, saved[n]) for n, t in load_file(Path(told["folder"]) / "model.safetensors").items())
    done = allranks("export", run.name, "--merge", cwd=tmp_path)
    assert done.returncode == 2 and "not an adapter" in done.stderr


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
    def refused(*args: str) -> tuple[int, str]:
        done = allranks("export", str(lora.root), *args, cwd=tmp_path)
        return done.returncode, done.stderr

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    code, text = refused("--out", "mine", "--force")
    assert code == 2 and "not an earlier export" in text and (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    assert refused("--step", "7")[0] == 2
    assert refused("--out", "new")[0] == 0
    code, text = refused("--out", "new")
    assert code == 2 and "--force" in text
    broken = tmp_path / "broken"
    shutil.copytree(lora.root, broken)
    file = broken / "checkpoints" / "step-2" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    done = allranks("export", str(broken), "--step", "2", cwd=tmp_path)
    assert done.returncode == 1 and "adapter_model.safetensors has the wrong size" in done.stderr
    assert "Traceback" not in done.stderr
    shutil.rmtree(broken / "model")
    shutil.rmtree(broken / "checkpoints")
    shutil.copytree(lora.checkpoints, broken / "checkpoints")
    done = allranks("export", str(broken), "--out", str(tmp_path / "x"), cwd=tmp_path)
    assert done.returncode == 3 and "base model" in done.stderr and not (tmp_path / "x").exists()
