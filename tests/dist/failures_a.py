"""Failures of the field notes, made to happen on two ranks: ``torchrun ... -m tests.dist.failures_a FOLDER``."""

import json
import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.spec.records import AdapterSpec, ModelSpec, TrainSpec
from allranks.train.data.tokenization import train_tokenizer
from allranks.train.loop import adamw
from allranks.train.models.adapters import add_adapter
from tests.dist.making import CONFIG, build_model, built, raised


def lora(*, reentrant: bool) -> Any:
    """A model that allranks builds with checkpointing; `reentrant`: as it was by hand in the field notes."""
    tokenizer = train_tokenizer(["hello"], 300, classifier=False)
    spec = ModelSpec(name="tiny:mistral", config=CONFIG, gradient_checkpointing=not reentrant)
    model = build_model(spec, tokenizer, dtype="float32", labels={}, seed=1)
    if reentrant:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
    adapter = AdapterSpec(type="lora", r=4, targets=["q_proj", "v_proj"])
    return add_adapter(model, adapter, classifier=False, base="b", seed=1)


def one_backward(model: Any, **how: Any) -> None:
    ids = torch.arange(10, 40).unsqueeze(0)
    wrapped = DistributedDataParallel(model.train(), **how)  # it must live until backward has ended
    wrapped(input_ids=ids, labels=ids).loss.backward()


def mixed_dtypes() -> None:
    """Adapters in float32 over a base in bfloat16, of which the first FSDP makes one flat parameter."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = built({"lora": True, "base_dtype": "bfloat16"})
    FullyShardedDataParallel(model, use_orig_params=False, device_id=torch.device("cpu"))


def out_of_memory_in_the_first_step() -> None:
    """Weights and gradients fit; there is room for one of the two moments of AdamW."""
    weight_bytes = 64 * 2**20
    model = nn.Linear(4096, weight_bytes // 4 // 4096, bias=False)
    optimizer = adamw(TrainSpec())(list(model.named_parameters()))
    model(torch.ones(1, 4096)).sum().backward()
    (line,) = (text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(line.split()[1]) * 1024 + weight_bytes * 3 // 2, before[1]))
    try:
        optimizer.step()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def warn() -> None:
    """What looks alarming and is not: a needless search for unused parameters, an old interface."""
    model = DistributedDataParallel(nn.Linear(4, 4), find_unused_parameters=True)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    warnings.warn("this interface is deprecated and will be removed", FutureWarning, stacklevel=1)


def main() -> None:
    dist.init_process_group("gloo")
    found = {
        "ready_twice": raised(lambda: one_backward(lora(reentrant=True), find_unused_parameters=True)),
        "ours": raised(lambda: one_backward(lora(reentrant=False), find_unused_parameters=True)),
        "mixed_dtypes": raised(mixed_dtypes),
        "optimizer_step": raised(out_of_memory_in_the_first_step),
    }
    warn()
    print("step 1/1 loss 2.0", flush=True)
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the reducers that failed above leave threads behind, with which torch's own end has aborted


if __name__ == "__main__":
    main()
