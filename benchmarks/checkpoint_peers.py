"""A rank of a peer in `benchmarks.checkpoint_stall`: `torch.save` by rank 0 while the others wait, or HF Trainer's own save.

``torchrun -m benchmarks.checkpoint_peers FOLDER ARGS``; rank 0 writes FOLDER/result.json. ``torch_save`` is what most scripts do:
model and optimizer in one file, which nobody reads again, and which may still be in the page cache. ``torch_save_synced`` also
waits until it is on the disk, as ours does. With adapters the frozen weights are in the file: a script's ``state_dict()`` has them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.spec.records import AdapterSpec
from allranks.train.models.adapters import add_adapter

KEEP = 2
LORA = {"type": "lora", "r": 8, "dropout": 0.0}


def built(args: dict[str, Any]) -> nn.Module:
    """The model that our runs train, from the same folder, with the same adapters."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args["model"], dtype=torch.float32)
    model.config.use_cache = False
    if not args["lora"]:
        return model
    return add_adapter(model, AdapterSpec(**LORA), classifier=False, base=args["model"], seed=1)


def shapes(model: nn.Module, *, lora: bool) -> dict[str, list[int]]:
    """Of what is trained, by the names that published files have."""
    if lora:
        from peft import get_peft_model_state_dict

        return {n: list(t.shape) for n, t in get_peft_model_state_dict(model, save_embedding_layers=False).items()}  # type: ignore[arg-type]
    return {n: list(p.shape) for n, p in model.named_parameters()}


def files_of(folder: Path) -> dict[str, int]:
    """Bytes of each file below a folder."""
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def timed_by_all(action: Any) -> float:
    """Seconds in which no rank could train: from when all have come to when all may go on."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def torch_save(model: nn.Module, folder: Path, args: dict[str, Any]) -> list[float]:
    """A bare DDP loop that saves every few steps."""
    ddp = DistributedDataParallel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    seconds = []

    def save(step: int) -> None:
        if dist.get_rank():
            return
        aside = folder / f"step-{step}"
        aside.mkdir()
        with (aside / "checkpoint.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
            if args["kind"] == "torch_save_synced":
                file.flush()
                os.fsync(file.fileno())
        shutil.rmtree(folder / f"step-{step - KEEP * args['every']}", ignore_errors=True)

    for step in range(1, args["every"] * args["saves"] + 1):
        ids = torch.randint(4, 255, (args["rows"], args["length"]))
        ddp(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % args["every"] == 0:
            seconds.append(timed_by_all(lambda step=step: save(step)))
    return seconds


def hf_trainer(model: nn.Module, folder: Path, args: dict[str, Any]) -> list[float]:
    """HF Trainer with its own checkpoints: model or adapter, optimizer, schedule, random states."""
    from transformers import Trainer, TrainingArguments

    seconds = []

    class Timed(Trainer):
        def _save_checkpoint(self, *given: Any, **named: Any) -> None:
            seconds.append(timed_by_all(lambda: super(Timed, self)._save_checkpoint(*given, **named)))

    rows = [{"input_ids": (ids := torch.randint(4, 255, (args["length"],))), "labels": ids} for _ in range(256)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=args["every"] * args["saves"],
        per_device_train_batch_size=args["rows"],
        save_strategy="steps",
        save_steps=args["every"],
        save_total_limit=KEEP,
        optim="adamw_torch_fused",
        bf16=False,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Timed(model=model, args=arguments, train_dataset=rows)  # type: ignore[arg-type] - a list of rows will do
    trainer.train()
    if not isinstance(trainer.model_wrapped, DistributedDataParallel):
        raise TypeError(f"the Trainer wrapped the model in {type(trainer.model_wrapped).__name__}, not in DDP")
    return seconds


def main() -> None:
    folder, args = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.manual_seed(int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    model = built(args)
    found = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "shapes": shapes(model, lora=args["lora"]),
    }
    run = hf_trainer if args["kind"] == "hf_trainer" else torch_save
    (folder / "saves").mkdir(exist_ok=True)
    seconds = run(model, folder / "saves", args)
    if dist.get_rank() == 0:
        last = max((folder / "saves").iterdir(), key=lambda p: int(p.name.rsplit("-", 1)[1]))
        (folder / "result.json").write_text(json.dumps({"seconds": seconds, "files_bytes": files_of(last), **found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
