"""Public training programs with their specs, and two as a user of DeepSpeed and TRL writes them."""

import importlib.util
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import shared

NANOGPT = "nanogpt/train.py"
NEEDS = {
    "accel": ("accelerate", "datasets"), "alpaca": ("transformers", "accelerate"), "ddp": (),
    "deepspeed": ("deepspeed",), "fsdp2": (), "lightning": ("lightning",), "mingpt": ("hydra", "boto3"),
    "nanogpt": ("numpy",), "trl": ("trl", "datasets"),
}  # fmt: skip
WITHOUT_DATA = {"ddp", "fsdp2", "lightning", "mingpt", "nanogpt", "deepspeed"}
DEEPSPEED = """
import argparse, deepspeed, torch
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
generator = torch.Generator().manual_seed(engine.global_rank)
for step in range(1, 21):
    x = torch.randn(8, 16, generator=generator)
    loss = torch.nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
"""
DEEPSPEED_CONFIG = """{"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2},
 "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": true}}}"""
TRL = """
import sys
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
model, data, out = sys.argv[1:4]
args = SFTConfig(output_dir=out, max_steps=20, per_device_train_batch_size=4, logging_steps=5, max_length=64,
                 save_strategy="no",
                 report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False)
rows = load_dataset("json", data_files=data, split="train")
SFTTrainer(AutoModelForCausalLM.from_pretrained(model), args, train_dataset=rows,
           processing_class=AutoTokenizer.from_pretrained(model)).train()
"""


def lay_out(name: str, folder: Path) -> dict[str, Any]:
    """Copy one program with its data to a folder; return its spec. Skip where it or a package it needs is missing."""
    source = shared("programs")
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{name} needs the package {package}")
    shutil.copytree(source, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    for path in [*folder.glob("specs/*.yaml"), *folder.glob("accel/*.py")]:
        path.write_text(path.read_text().replace("@HERE@", str(folder)))
    if name not in WITHOUT_DATA:
        prepare(folder / "make_data.py")
    (folder / "ds.json").write_text(DEEPSPEED_CONFIG)
    deepspeed = ["--deepspeed", "--deepspeed_config", str(folder / "ds.json")]
    trl = [str(folder / part) for part in ("models/tinyllama", "data/sft.jsonl", "out")]
    if name in ("deepspeed", "trl"):
        text, arguments = (DEEPSPEED, deepspeed) if name == "deepspeed" else (TRL, trl)
        (folder / f"{name}_train.py").write_text(text)
        return {"name": name, "script": {"path": str(folder / f"{name}_train.py"), "args": arguments}}
    spec = yaml.safe_load((folder / "specs" / f"{name}.yaml").read_text())
    if name == "nanogpt":
        write_characters((folder / "tinyshakespeare.txt").read_text(), folder / "nanogpt/data/shakespeare_char")
    (folder / "at").mkdir(exist_ok=True)
    spec["script"]["workdir"] = str(folder / ("nanogpt" if name == "nanogpt" else "at"))
    return spec


def write_characters(text: str, folder: Path) -> None:
    """Write nanoGPT's data as its prepare.py does, which imports a package to download the text."""
    import numpy as np

    letters = sorted(set(text))
    numbers = {letter: i for i, letter in enumerate(letters)}
    tokens, cut = np.array([numbers[letter] for letter in text], dtype=np.uint16), int(0.9 * len(text))
    tokens[:cut].tofile(folder / "train.bin")
    tokens[cut:].tofile(folder / "val.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": numbers}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def prepare(program: Path) -> None:
    command = [sys.executable, program]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def plant(folder: Path, fault: str) -> None:
    """Insert statements that rank 1 of nanoGPT executes in iteration 7."""
    program = folder / NANOGPT
    text = program.read_text()
    mark = "    # forward backward update, with"
    assert text.count(mark) == 1
    program.write_text(text.replace(mark, f"    if ddp and ddp_rank == 1 and iter_num == 7:\n        {fault}\n{mark}"))
