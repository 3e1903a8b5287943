"""Time of one comparison of the weights (`observe.verify_every`) as a share of an optimizer step, side by side.

    OMP_NUM_THREADS=1 python -m benchmarks.verify_weights [--device cuda] [--repeats 5] [--json FILE]

A Llama-shaped model takes optimizer steps (forward, backward, fused AdamW); after each its weights are hashed as a rank
hashes them, without and with the optimizer state, as before a full checkpoint. The exchange of 16 bytes per rank is
left out: a small all-gather, whatever the model. Every N steps the training is slowed by the ratio divided by N.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from allranks.train.replica_check import ReplicaCheck
from allranks.train.strategies.shards import whole_states
from benchmarks.machine import facts

# hidden size, intermediate size, layers, vocabulary, tokens of a step
SHAPES = {"cpu": (512, 1408, 8, 16_000, 512), "cuda": (2048, 5632, 22, 32_000, 16_384)}
SEQUENCE = 512


def measure(device: str, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Return seconds of a step and of both hashes, and their ratios, formed within each repeat."""
    hidden, inner, layers, vocabulary, tokens = SHAPES[device]
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    config = AutoConfig.for_model("llama", **shape, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows = torch.randint(0, vocabulary, (tokens // SEQUENCE, SEQUENCE), device=device)

    def step() -> None:
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    named = list(model.named_parameters())
    strategy: Any = SimpleNamespace(
        replicated=True, state_ranges=lambda: whole_states(named, optimizer, everywhere=True)
    )
    attempt: Any = SimpleNamespace(
        world=SimpleNamespace(size=3),
        plan=SimpleNamespace(shard_ranks=3),
        spec=SimpleNamespace(observe=SimpleNamespace(verify_every=1)),
    )
    check = ReplicaCheck(attempt, strategy, model)
    actions = {
        "step_s": step,
        "weights_s": lambda: check.digest(with_state=False),
        "weights_and_state_s": lambda: check.digest(with_state=True),
    }
    for action in actions.values():
        seconds(action, device)
    found = [{name: seconds(action, device) for name, action in actions.items()} for _ in range(repeats)]
    ratios = {name: [one[name] / one["step_s"] for one in found] for name in ("weights_s", "weights_and_state_s")}
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_step": tokens,
        **{name: median(one[name] for one in found) for name in actions},
        "weights_bytes_per_s": size / median(one["weights_s"] for one in found),
        "ratio_weights": [min(ratios["weights_s"]), median(ratios["weights_s"]), max(ratios["weights_s"])],
        "ratio_weights_and_state": [pick(ratios["weights_and_state_s"]) for pick in (min, median, max)],
    }


def seconds(action: Callable[[], object], device: str) -> float:
    """Return how long an action takes until the device has ended it."""
    started = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=list(SHAPES), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dtypes = (torch.float32,) if args.device == "cpu" else (torch.float32, torch.bfloat16)
    found = [measure(args.device, dtype, args.repeats) for dtype in dtypes]
    for one in found:
        print(
            f"{one['device']} {one['dtype']} {one['parameters'] / 1e6:.0f} M: step {one['step_s']:.3f} s, hash of the "
            f"weights {one['ratio_weights'][1]:.3f} steps ({one['weights_bytes_per_s'] / 1e9:.1f} GB/s), with state "
            f"{one['ratio_weights_and_state'][1]:.3f} steps"
        )
    if args.json:
        args.json.write_text(json.dumps({"machine": facts(), "repeats": args.repeats, "found": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
