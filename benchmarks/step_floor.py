"""Measure the least time of a training step: that of its matrix products and of its attention alone, on this device.

    python -m benchmarks.step_floor --device cuda --dtype bfloat16 --tokens 8192 --length 2048 --hidden 4096 ...
    OMP_NUM_THREADS=1 python -m benchmarks.step_floor --tokens 512 --processes 2 --documents 190,170,150 --json FILE

A decoder's step needs, per linear layer of a block, a product in forward and one for the gradient of its input; with
``--full`` also one for the gradient of its weight. The head needs the same. With LoRA, the narrow products of the
adapters come on top, and the first block needs no gradient of its input. Everything else of a step (norms, activations,
loss, optimizer, copies) takes time on top of this floor. ``--documents`` also measures the attention of documents that
do not attend to one another. With ``--processes``, several measure at the same time, as ranks on one machine compute,
and each number is their mean. Prints one JSON object, and writes it with ``--json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F

from allranks.train.models import blockwise_attention
from benchmarks import machine
from benchmarks.programs import ROOT

REPEATS = 7


@dataclass(frozen=True)
class Shapes:
    """Of a decoder with grouped-query attention and a gated MLP, and of its batch."""

    tokens: int
    length: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rank: int
    full: bool

    def inputs(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the width of each tensor that linear layers of a block read, and the widths of what they return."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (self.hidden, (wide, narrow, narrow)),
            (wide, (self.hidden,)),
            (self.hidden, (self.intermediate, self.intermediate)),
            (self.intermediate, (self.hidden,)),
        ]


def seconds(action: Callable[[], Any], device: torch.device, least_s: float = 0.05) -> float:
    """Return the median duration of an action in seconds, by events on a GPU."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    action()
    wait()
    began = time.perf_counter()
    action()
    wait()
    calls = max(1, int(least_s / max(time.perf_counter() - began, 1e-6)))
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(calls):
            action()
        wait()
        found.append((time.perf_counter() - began) / calls)
    return median(found)


def wide_s(
    tokens: int, inputs: int, outputs: int, *, full: bool, device: torch.device, dtype: Any
) -> tuple[float, float, float]:
    """Return the seconds of a layer's products: forward, gradient of its input, and of its weight with ``full``.

    Each is added to a tensor, as where layers share their input, or have an adapter.
    """
    x, w, dy = draw(device, dtype, (tokens, inputs), (outputs, inputs), (tokens, outputs))
    y, dx, dw = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w)
    weight = seconds(lambda: dw.addmm_(dy.t(), x), device) if full else 0.0
    return seconds(lambda: y.addmm_(x, w.t()), device), seconds(lambda: dx.addmm_(dy, w), device), weight


def narrow_s(
    tokens: int, inputs: int, outputs: tuple[int, ...], rank: int, device: torch.device, dtype: Any
) -> dict[str, float]:
    """Return the seconds of each kind of product of adapters (`allranks.train.models.lora`) that read one tensor."""
    ranks = rank * len(outputs)
    x, a, m = draw(device, dtype, (tokens, inputs), (ranks, inputs), (ranks, tokens))
    back = torch.zeros_like(x)
    found = {
        "m^T = A x^T": seconds(lambda: a @ x.t(), device),
        "dA = dm^T x": seconds(lambda: m @ x, device),
        "dx = dm A": seconds(lambda: back.addmm_(m.t(), a, beta=0), device),
        "y = m B^T": 0.0,
        "dm^T = B^T dy^T": 0.0,
        "dB^T = m^T dy": 0.0,
    }
    for width in outputs:
        dy, b, own = draw(device, dtype, (tokens, width), (width, rank), (rank, tokens))
        into = torch.zeros_like(dy)
        for name, product in (
            ("y = m B^T", lambda into=into, own=own, b=b: into.addmm_(own.t(), b.t(), beta=0)),
            ("dm^T = B^T dy^T", lambda dy=dy, b=b: b.t() @ dy.t()),
            ("dB^T = m^T dy", lambda dy=dy, own=own: own @ dy),
        ):
            found[name] += seconds(product, device)
    return found


def draw(device: torch.device, dtype: Any, *sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return random tensors: on zeros, products can be faster."""
    return [torch.randn(*size, device=device, dtype=dtype) for size in sizes]


def attention_s(shapes: Shapes, length: int, batch: int, device: torch.device, dtype: Any) -> float:
    """Return the seconds of causal attention of a block, forward and backward: of the faster of two ways on a CPU."""
    sizes = ((batch, n, length, shapes.head_dim) for n in (shapes.heads, shapes.kv_heads, shapes.kv_heads))
    q, k, v = (torch.randn(*size, device=device, dtype=dtype, requires_grad=True) for size in sizes)
    slope = torch.randn_like(q)

    def both() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shapes.heads != shapes.kv_heads)
        torch.autograd.grad(out, (q, k, v), slope)

    by_kernel = seconds(both, device)
    given = [t.detach() for t in (q, k, v)]
    if not blockwise_attention.blocks_pay(*given):
        return by_kernel

    def in_blocks() -> None:
        for query, key, value, gradient in zip(*given, slope, strict=True):
            sums, scale = query.new_empty(query.shape[:2]), shapes.head_dim**-0.5
            blockwise_attention.forward(query, key, value, scale, torch.empty_like(query), sums)
            blockwise_attention.backward(gradient, query, key, value, sums, scale)

    return min(by_kernel, seconds(in_blocks, device))


def ceilings(device: torch.device, dtype: Any) -> dict[str, float]:
    """Return the rate of a large matrix product (FLOP/s) and of a large copy (bytes read and written per second)."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(2**29 if device.type == "cuda" else 2**26, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    return {
        "product_flops_per_s": 2.0 * n**3 / seconds(lambda: a @ b, device),
        "copy_bytes_per_s": 2.0 * source.nbytes / seconds(lambda: target.copy_(source), device),
    }


def floor(shapes: Shapes, documents: list[int], device: torch.device, dtype: Any) -> dict[str, Any]:
    """Return the seconds of a step's matrix products and attention."""
    tokens, layers, full = shapes.tokens, shapes.layers, shapes.full
    known: dict[tuple[int, int], tuple[float, float, float]] = {}
    wide, weights, adapters = 0.0, shapes.hidden * shapes.vocabulary, 0
    narrow: dict[str, float] = {}
    for first, (inputs, outputs) in zip((True, False, False, False), shapes.inputs(), strict=True):
        spared = 1 if first and not full else 0  # the first block's q, k and v
        for width in outputs:
            if (inputs, width) not in known:
                known[inputs, width] = wide_s(tokens, inputs, width, full=full, device=device, dtype=dtype)
            forward, back, weight = known[inputs, width]
            wide += layers * (forward + weight) + (layers - spared) * back
            weights += layers * inputs * width
        if not full and shapes.rank:
            adapters += layers * shapes.rank * (len(outputs) * inputs + sum(outputs))
            for name, taken in narrow_s(tokens, inputs, outputs, shapes.rank, device, dtype).items():
                times = layers - spared if name == "dx = dm A" else layers
                narrow[name] = narrow.get(name, 0.0) + times * taken
    parts = {
        "wide_s": wide,
        "narrow_s": sum(narrow.values()),
        "head_s": sum(wide_s(tokens, shapes.hidden, shapes.vocabulary, full=full, device=device, dtype=dtype)),
        "attention_s": layers * attention_s(shapes, shapes.length, max(1, tokens // shapes.length), device, dtype),
    }
    unneeded = 0 if full else shapes.hidden * sum(shapes.inputs()[0][1])
    products, total = parts["wide_s"] + parts["narrow_s"] + parts["head_s"], sum(parts.values())
    isolated = {}
    if documents:
        alone = {length: attention_s(shapes, length, 1, device, dtype) for length in set(documents)}
        parts["attention_of_documents_s"] = layers * sum(alone[length] for length in documents)
        isolated["documents_tokens_per_s"] = sum(documents) / (products + parts["attention_of_documents_s"])
    return {
        "shapes": asdict(shapes),
        "documents": documents,
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "parts": parts,
        "narrow_parts_s": narrow,
        "products_s": products,
        "floor_s": total,
        "tokens_per_s": tokens / total,
        **isolated,
        "product_flops": 2.0 * tokens * ((3 if full else 2) * weights - unneeded + 3 * adapters),
    }


def together(words: list[str], processes: int) -> dict[str, Any]:
    """Return what several processes find that measure at the same time: the mean of each number."""
    command = [sys.executable, "-m", "benchmarks.step_floor", *words, "--processes", "1"]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    found = [(one.communicate()[0], one.returncode) for one in running]
    if any(code for _, code in found):
        raise SystemExit("step_floor: a process failed")
    return {**meant([json.loads(out) for out, _ in found]), "processes": processes}


def meant(values: list[Any]) -> Any:
    """Return the mean of floats, at any depth; whatever else is the same in all."""
    if isinstance(values[0], dict):
        return {key: meant([value[key] for value in values]) for key in values[0]}
    return mean(values) if isinstance(values[0], float) else values[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--full", action="store_true", help="all weights are trained, not adapters")
    parser.add_argument("--documents", default="", help="lengths of the documents of a packed row, with commas between")
    parser.add_argument("--processes", type=int, default=1, help="that measure at the same time")
    parser.add_argument("--json", type=Path, help="also write the object here, with the facts of the machine")
    for name, default in (
        ("tokens", 2048), ("length", 512), ("hidden", 256), ("intermediate", 704), ("layers", 4), ("heads", 8),
        ("kv-heads", 4), ("head-dim", 32), ("vocabulary", 4096), ("rank", 8),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    path, processes = given.pop("json"), given.pop("processes")
    if processes > 1:
        flags = ["--full"] if given.pop("full") else []
        found = together([*flags, *(f"--{key.replace('_', '-')}={value}" for key, value in given.items())], processes)
    else:
        device, dtype = torch.device(given.pop("device")), getattr(torch, given.pop("dtype"))
        documents = [int(length) for length in given.pop("documents").split(",") if length]
        found = {**floor(Shapes(**given), documents, device, dtype), **ceilings(device, dtype)}
    print(json.dumps(found))
    if path:
        path.write_text(json.dumps({"benchmark": "step_floor", "machine": machine.facts(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
