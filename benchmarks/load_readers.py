"""Seconds and bytes read by each rank while a model is loaded: each rank reads its part of the files, or rank 0 reads and sends all.

    python -m benchmarks.load_readers [--repeats 3] [--ranks 4] [--experts]

The model of `load_memory` (212 million parameters, 425 MB as bfloat16 files) is loaded for training in float32, or with --experts a GLM-4-MoE
of 221 million, of which 201 million are experts that the files hold separately. The ways alternate.
Before a cold load the files are removed from the page cache (`posix_fadvise`), before a warm one they are read once. Seconds are those of
the slowest rank, with the set-up of the strategy.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.load_memory import REPO, measure, spread, write_models
from benchmarks.machine import facts

WAYS = ("every rank", "rank 0")
STRATEGIES = ("pytorch_ddp", "zero3", "pytorch_zero3")


EXPERTS = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "n_routed_experts": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def write_experts(folder: Path) -> Path:
    """Write a mixture of experts as bfloat16 files of 100 MB."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("glm4_moe", **EXPERTS)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="100MB")
    return folder


def set_cache(folder: Path, *, cold: bool) -> None:
    """Remove the files of a folder from the page cache, or read them once."""
    for file in folder.glob("*.safetensors"):
        if not cold:
            file.read_bytes()
            continue
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)  # pages that are not yet written would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks" / "results" / "load_readers.json")
    args = parser.parse_args()
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as root:
        folder = write_experts(Path(root)) if args.experts else write_models(Path(root))[0]["bfloat16"]
        file_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for repeat in range(args.repeats):
            for key in [(s, cache, way) for s in STRATEGIES for cache in ("cold", "warm") for way in WAYS]:
                strategy, cache, way = key
                set_cache(folder, cold=cache == "cold")
                found.setdefault(key, []).append(measure(way, strategy, folder, args.ranks))
                print(f"{repeat + 1}/{args.repeats} {key} {found[key][-1]['seconds']} s", flush=True)
    rows = [
        {
            **{"strategy": strategy, "cache": cache, "readers": way},
            "seconds": spread([f["seconds"] for f in each]),
            "read_bytes": each[0]["read_bytes"],
        }
        for (strategy, cache, way), each in found.items()
    ]
    head = {"machine": facts(), "ranks": args.ranks, "repeats": args.repeats, "file_bytes": file_bytes}
    args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
