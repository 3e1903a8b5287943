"""Runs that end early, keep their best checkpoint, reply to prompts, and are exported for transformers and PEFT."""

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from allranks.train.export import load, verify_logits
from tests.conftest import tiny_spec
from tests.dist.harness import ALLRANKS, allranks, equal, rows_spec, train, until, weights_of

PATIENCE = 2


def spec_of(folder: Path, steps: int = 200) -> dict[str, Any]:
    """A run whose held-out loss rises after a while: the learning rate is far too high."""
    rows = [{"instruction": f"Say the number {i}", "output": f"number {i} " + "yes " * (i % 5)} for i in range(60)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return tiny_spec(
        folder / "rows.json", folder, train={"max_steps": steps, "lr": 1.0, "schedule": "constant"},
        eval={"every": 2, "patience": PATIENCE, "baseline": True},
        checkpoint={"mode": "full", "every": 2, "keep": 1, "keep_best": True},
    )  # fmt: skip


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("early")
    done, run = train(folder, spec_of(folder), code=0)
    return folder, done, run


def losses_of(run: RunDir, rank: int = 0) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in read_events(run.events_of(rank)) if e["event"] == "eval" and e["step"]}


def test_it_ends_on_all_ranks_with_the_best_kept(early: Any) -> None:
    _, done, run = early
    losses = losses_of(run)
    best = min(losses, key=lambda step: losses[step])
    end = best + 2 * PATIENCE
    assert best >= 2 and list(losses) == list(range(2, end + 1, 2))
    for rank in (0, 1):
        assert [e["step"] for e in read_events(run.events_of(rank)) if e["event"] == "step"][-1] == end, rank
    metrics = read_json(run.metrics)
    assert metrics["status"] == "succeeded" and metrics["steps"] == end
    assert (metrics["best_step"], metrics["best_eval_loss"]) == (best, losses[best])
    assert metrics["stopped_early"]["step"] == end and f"(step {best})" in metrics["stopped_early"]["reason"]
    assert "ended early" in done.stdout and run.checkpoint_steps() == [best, end]
    assert run.best_checkpoint.read_text() == f"step-{best}\n"
    assert read_json(run.checkpoint(best) / "manifest.json")["eval_loss"] == losses[best]


def test_a_resume_continues_the_count_and_an_ended_run_is_not_resumed(early: Any, tmp_path: Path) -> None:
    """The first attempt ends within the patience: without its evaluations, the second would train longer."""
    folder, _, whole = early
    expected = losses_of(whole)
    _, run = train(tmp_path, spec_of(tmp_path, max(expected) - 2), code=0)
    allranks("resume", run.name, "--set", "train.max_steps=200", cwd=tmp_path, code=0)
    assert losses_of(run) == expected and run.checkpoint_steps() == whole.checkpoint_steps()
    assert run.best_checkpoint.read_text() == whole.best_checkpoint.read_text()
    assert read_json(run.metrics)["stopped_early"] == read_json(whole.metrics)["stopped_early"]
    done = allranks("resume", whole.name, cwd=folder, code=2)
    assert "ended early after step" in done.stderr and "eval.patience" in done.stderr


def exported(root: Path, *words: str, cwd: Path | None = None) -> dict[str, Any]:
    return json.loads(allranks("export", str(root), "--json", *words, cwd=cwd or root, code=0).stdout)


def test_the_best_is_exported(early: Any, tmp_path: Path) -> None:
    """From elsewhere to a relative folder; the process that verifies it starts in another one."""
    folder, _, run = early
    best = int(run.best_checkpoint.read_text().removeprefix("step-"))
    told = exported(run.root, "--best", "--out", "given", cwd=tmp_path)
    assert (told["step"], told["folder"]) == (best, str(tmp_path / "given"))
    config = json.loads((tmp_path / "given" / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]).is_absolute() and Path(config["base_model_name_or_path"]).is_dir()
    card = (tmp_path / "given" / "README.md").read_text()
    for words in (f"base_model: {run.model}", "library_name: peft", f"step {best}", "held-out loss", "max_steps: 200"):
        assert words in card, card
    assert not list(tmp_path.glob(".given*"))
    allranks("export", run.name, "--best", "--step", "2", cwd=folder, code=2)


def replies(run: RunDir, cwd: Path, *words: str, stdin: str = "") -> Any:
    return json.loads(allranks("generate", run.name, "--json", *words, cwd=cwd, stdin=stdin, code=0).stdout)


def test_replies_are_those_of_the_evaluation(early: Any) -> None:
    """Greedy, in the template of the data: the sample answers that the ranks gave at that step."""
    folder, _, run = early
    samples = {e["step"]: e["samples"] for e in read_events(run.events_of(0)) if e["event"] == "eval"}
    best, end = run.checkpoint_steps()

    def as_sampled(found: Any, step: int) -> None:
        assert found["step"] == step
        for reply, sample in zip(found["replies"], samples[step], strict=True):
            assert reply["reply"].startswith(sample["reply"].rstrip("\ufffd"))  # that one has fewer tokens

    prompts = [sample["prompt"] for sample in samples[end]]
    instructions = [p.split("### Instruction:\n")[1].split("\n\n### Response")[0] for p in prompts]
    last = replies(run, folder, *(word for text in instructions for word in ("--prompt", text)))
    assert last["template"] == "alpaca"
    as_sampled(last, end)
    raw = [word for prompt in prompts for word in ("--prompt", prompt)]
    before = replies(run, folder, "--raw", "--checkpoint", "best", *raw)
    as_sampled(before, best)
    assert [r["reply"] for r in last["replies"]] != [r["reply"] for r in before["replies"]]
    assert any(sample["reply"].strip() for step in (best, end) for sample in samples[step])


def test_an_interrupt_ends_the_process_with_the_model(early: Any) -> None:
    folder, _, run = early
    command = [*ALLRANKS, "generate", run.name, "--prompt", "x", "--max-new-tokens", "100000"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(psutil.Process(process.pid).children)
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and err.strip() == "allranks: interrupted", (out, err)
    assert not psutil.wait_procs(children, timeout=20)[1], "the process with the model is left"


def test_a_classifier_says_labels_and_a_run_without_a_checkpoint_refuses(tmp_path: Path) -> None:
    kinds = [("bad", "bad awful poor"), ("good", "good great fine")] * 30
    rows = [{"text": f"{words} {i}", "label": label} for i, (label, words) in enumerate(kinds)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    spec = tiny_spec(tmp_path / "rows.json", tmp_path, train={"max_steps": 40, "lr": 5e-3})
    spec["model"], spec["adapter"] = {"name": "tiny:bert"}, {"type": "lora", "r": 4}
    _, run = train(tmp_path, spec, code=0)
    found = replies(run, tmp_path, "--prompt", "good great", "--prompt", "awful bad")["replies"]
    assert [next(iter(reply["labels"])) for reply in found] == ["good", "bad"]
    assert all(abs(sum(reply["labels"].values()) - 1) < 1e-5 and reply["reply"] is None for reply in found)
    for step in run.checkpoint_steps():
        run.checkpoint(step).rename(tmp_path / "elsewhere")
    done = allranks("generate", run.name, "--prompt", "x", cwd=tmp_path, code=2)
    assert "has no checkpoint to try: none has been saved yet" in done.stderr


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

    adapter, merged = (exported(lora.root, *words) for words in ((), ("--step", "2", "--merge")))
    assert adapter["difference"] == 0.0 and 0.0 <= merged["difference"] < 1e-4
    base = AutoModelForCausalLM.from_pretrained(adapter["base"])
    plain = logits(base)
    with_adapter = logits(PeftModel.from_pretrained(base, adapter["folder"]))
    alone = logits(AutoModelForCausalLM.from_pretrained(merged["folder"]))
    assert float((with_adapter - plain).abs().max()) > 1e-3
    assert torch.allclose(alone, with_adapter, atol=1e-4)
    assert len(AutoTokenizer.from_pretrained(merged["folder"])) <= plain.shape[-1] == 320
    assert not list(Path(merged["folder"]).glob("*.bin")) and not Path(adapter["folder"], "manifest.json").exists()


def test_a_model_trained_whole_is_exported_without_our_state(tmp_path: Path) -> None:
    run = trained(tmp_path, adapter={"type": "none"}, checkpoint={"mode": "full"})
    told = exported(run.root)
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
        verify_logits(source, spoilt, base, "none")
    model = load(source, base)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] *= 1.5
    model.merge_and_unload().save_pretrained(str(tmp_path / "merged"))
    with pytest.raises(Exception, match="nothing was published"):
        verify_logits(source, tmp_path / "merged", base, "none")


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
