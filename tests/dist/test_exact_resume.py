"""A resume is exact, or is refused and names what differs: what was changed behind the back of a stopped run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM

from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from allranks.train.data.tokenization import train_tokenizer
from tests.dist.harness import allranks, rows_spec, train
from tests.dist.making import CONFIG

pytestmark = pytest.mark.dist


def save_base(folder: Path) -> None:
    """Write a random model of 320 tokens and its tokenizer, as a user has one in a folder."""
    tokenizer = train_tokenizer(["say word 0 1 2 3 4 5 6 7 8 9"], 320, classifier=False)
    torch.manual_seed(1)
    MistralForCausalLM(MistralConfig(vocab_size=len(tokenizer), **CONFIG)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A LoRA run on a base in a folder, two steps of four, with a full checkpoint."""
    folder = tmp_path_factory.mktemp("exact")
    save_base(folder / "base")
    short = {"max_steps": 2, "schedule": "constant"}
    spec = rows_spec(folder, 40, checkpoint={"mode": "full"}, train=short, data={"packing": "none"})
    _, run = train(folder, {**spec, "model": {"name": str(folder / "base")}}, code=0)
    return folder, run.name


def resumed(stopped: tuple[Path, str], tmp_path: Path, *more: str) -> tuple[int, str, RunDir]:
    """Resume a copy of the run, to four steps."""
    folder, name = stopped
    shutil.copytree(folder / "runs" / name, tmp_path / name)
    done = allranks("resume", name, "--run-root", str(tmp_path), "--set", "train.max_steps=4", *more, cwd=folder)
    return done.returncode, done.stderr + done.stdout, RunDir(tmp_path / name)


def test_nothing_changed(stopped: tuple[Path, str], tmp_path: Path) -> None:
    code, said, run = resumed(stopped, tmp_path)
    assert code == 0, said
    progress = read_json(run.checkpoint(4) / "state" / "progress.json")
    assert len(progress["data_hash"]) == len(progress["base_hash"]) == 64


@pytest.mark.parametrize("inexact", [False, True], ids=["exact", "inexact"])
def test_rewritten_answers_and_another_base_are_refused(
    stopped: tuple[Path, str], tmp_path: Path, inexact: bool
) -> None:
    source, file = stopped[0] / "rows.json", stopped[0] / "base" / "model.safetensors"
    text, weights = source.read_text(), file.read_bytes()
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("down_proj.weight"))
    try:
        source.write_text(json.dumps([{**row, "output": str(row["output"])[::-1]} for row in json.loads(text)]))
        save_file({**tensors, name: torch.flip(tensors[name], [0])}, file, metadata={"format": "pt"})
        code, said, _ = resumed(stopped, tmp_path)
        assert code == 1 and "Traceback" not in said
        assert said.count("the training data (its rows, the template or the tokenizer) changed") == 1, said
        assert said.count("the weights of the base model changed") == 1, said
        if inexact:
            code, said, _ = resumed(stopped, tmp_path / "again", "--allow-inexact")
            assert code == 0, said
    finally:
        source.write_text(text)
        file.write_bytes(weights)
