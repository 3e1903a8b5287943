"""Compare causal attention in blocks with torch's kernel for CPUs, forward and backward, side by side.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu_attention --json benchmarks/results/cpu_attention.json   # 1 min

Both compute the same tensors in turns; a ratio below 1 means that blocks are faster. Memory comes from the allocator as
`plan` sets it for ranks on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from allranks.planning.rank_environment import TUNABLES, as_variables, with_allocator
from allranks.train.models import blockwise_attention
from benchmarks import machine

SHAPES = ((8, 4, 32), (12, 12, 64), (14, 2, 64), (32, 8, 64), (16, 8, 128))
"""Query heads, key heads, and the width of a head."""
LENGTHS = (128, 192, 224, 256, 320, 384, 512, 768, 1024, 2048, 3072)
MOST_SCORES = 32 * 1024**2
"""Longer sequences of many heads are left out."""


def drawn(heads: int, kv_heads: int, width: int, length: int) -> list[torch.Tensor]:
    """Return query, key, value and the gradient of the output, (1, H, L, D), laid out as by layers of transformers."""
    torch.manual_seed(length)
    return [torch.randn(1, length, n, width).transpose(1, 2) for n in (heads, kv_heads, kv_heads, heads)]


def by_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slope: torch.Tensor) -> list[torch.Tensor]:
    """Return output and gradients by torch's kernel."""
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    q, k, v = leaves
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
    return [out.detach(), *torch.autograd.grad(out, leaves, slope)]


def in_blocks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slope: torch.Tensor) -> list[torch.Tensor]:
    """Return output and gradients in blocks."""
    scale, out = query.shape[-1] ** -0.5, torch.empty_like(query)
    sums = query.new_empty(query.shape[1:3])
    blockwise_attention.forward(query[0], key[0], value[0], scale, out[0], sums)
    found = blockwise_attention.backward(slope[0], query[0], key[0], value[0], sums, scale)
    return [out, *(t[None] for t in found)]


def seconds(function: Callable[[], Any], times: int) -> float:
    """Return the mean seconds of several calls."""
    started = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - started) / times


def compare(shape: tuple[int, int, int], length: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of both in each of several rounds, their ratio, and the largest difference of results."""
    given = drawn(*shape, length)
    off = max(
        float((a - b).abs().max() / a.abs().max()) for a, b in zip(by_torch(*given), in_blocks(*given), strict=True)
    )
    times = max(1, int(0.05 / seconds(lambda: by_torch(*given), 1)))
    kernel, blocks = [], []
    for _ in range(rounds):
        kernel.append(seconds(lambda: by_torch(*given), times))
        blocks.append(seconds(lambda: in_blocks(*given), times))
    ratios = sorted(b / k for b, k in zip(blocks, kernel, strict=True))
    return {
        "heads": shape[0],
        "kv_heads": shape[1],
        "head_dim": shape[2],
        "tokens": length,
        "torch_ms": round(median(kernel) * 1e3, 2),
        "blocks_ms": round(median(blocks) * 1e3, 2),
        "ratio": {"median": round(median(ratios), 3), "min": round(ratios[0], 3), "max": round(ratios[-1], 3)},
        "largest_relative_difference": float(f"{off:.1e}"),
    }


def main() -> int:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if TUNABLES not in os.environ:  # read when a process starts
        settings = as_variables(with_allocator([], device="cpu", recomputes=False))
        command = [sys.executable, "-m", "benchmarks.cpu_attention", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, **settings}, check=False).returncode
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        for length in LENGTHS:
            if shape[0] * length**2 > MOST_SCORES:
                continue
            rows.append(compare(shape, length, args.rounds))
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        used = [blockwise_attention.LENGTHS.start, blockwise_attention.LENGTHS.stop - 1]
        document = {"machine": machine.facts(), "threads": 1, "rounds": args.rounds}
        document |= {"used_for_tokens": used, "rows": rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
