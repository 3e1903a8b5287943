"""Host memory of a node's ranks while a model is loaded and sharded, against `from_pretrained` on every rank.

    python -m benchmarks.load_memory [--repeats 3] [--ranks 1,2,4]

A Llama-shaped model of 212 million parameters is written as float32 and as bfloat16 files, five tensors' worth a file;
both are loaded for training in float32 (850 MB) under three strategies that shard weights. Every rank samples its own
/proc/self/smaps_rollup every 5 ms. Samples are aligned by the monotonic clock, which processes of a machine share; of
the sum over the ranks, less what each had before loading, the peak is taken. ``pss`` counts what processes share
(mapped files) once between them, ``private`` is what belongs to one process alone (psutil's USS).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import facts

REPO = Path(__file__).resolve().parent.parent
CONFIG = {
    "vocab_size": 16_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": False,
}
HOW = ("from_pretrained", "allranks")
STRATEGIES = ("pytorch_zero3", "zero3", "deepspeed_zero3")
KINDS = {"pss": ("Pss",), "private": ("Private_Clean", "Private_Dirty")}


class Sampler(threading.Thread):
    """This process's memory by time, bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.now()
        self.samples: list[tuple[float, dict[str, int]]] = []
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.005):
            self.samples.append((time.monotonic(), self.now()))

    @staticmethod
    def now() -> dict[str, int]:
        found: dict[str, int] = {}
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
            key, _, value = line.partition(":")
            found[key] = int(value.split()[0]) * 1024
        return {kind: sum(found.get(k, 0) for k in keys) for kind, keys in KINDS.items()}

    def end(self) -> dict[str, Any]:
        self._ended.set()
        if self.ident is not None:
            self.join()
        return {"before": self.before, "after": self.now(), "samples": self.samples}


def rank_main(how: str, name: str, folder: str, out: str) -> None:
    """Load as one rank, and write the memory it took. `how`: one of `HOW`, or of `load_readers`' ways (no memory)."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from allranks.spec.records import ModelSpec, TrainSpec
    from allranks.train import strategies
    from allranks.train.data.tokenization import train_tokenizer
    from allranks.train.distributed import DistContext
    from allranks.train.loop import adamw
    from allranks.train.models import weight_sources
    from allranks.train.models.build import load_model
    from allranks.train.models.losses import LossModel
    from allranks.train.setup import set_up_strategy

    warm_up()  # before there is a group, in which only rank 0 would write a model
    dist.init_process_group("gloo")
    group, control = dist.group.WORLD, dist.new_group(backend="gloo")
    assert group is not None and isinstance(control, dist.ProcessGroup)
    rank = dist.get_rank()
    world = DistContext(rank, rank, dist.get_world_size(), "", torch.device("cpu"), group, control)
    tokenizer = train_tokenizer(["hello"], 300, classifier=False)
    strategy = strategies.create(name, {})
    dist.barrier()
    sampler = Sampler()
    if how in HOW:
        sampler.start()
    if how == "rank 0" and rank:
        weight_sources.difference = lambda known: "is told not to see the files"
    started = time.perf_counter()
    if how != "from_pretrained":
        spec = ModelSpec(name=folder)
        model, filler = load_model(world, spec, tokenizer, dtype="float32", labels={}, seed=1)
        module = LossModel(model, classifier=False)
        _, done = set_up_strategy(strategy, filler, module, model, adamw(TrainSpec()), group, 1.0)
        read = done.read_bytes
        assert how in ("allranks", done.readers), done
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        strategy.setup(LossModel(model, classifier=False), adamw(TrainSpec()), group, 1.0)
        read = None
    seconds = time.perf_counter() - started
    dist.barrier()
    Path(f"{out}.{rank}.json").write_text(json.dumps({**sampler.end(), "seconds": seconds, "read_bytes": read}))
    dist.barrier()
    dist.destroy_process_group()


def warm_up() -> None:
    """Import what loading imports, so that code does not count as weights."""
    import torch.distributed.tensor  # noqa: F401
    from torch.distributed.fsdp import fully_shard  # noqa: F401
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = {**CONFIG, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 300}
    with tempfile.TemporaryDirectory() as small:
        AutoModelForCausalLM.from_config(LlamaConfig(**config)).save_pretrained(small)
        AutoModelForCausalLM.from_pretrained(small)


def peak(ranks: list[dict[str, Any]], kind: str) -> int:
    """The highest sum over the ranks of what each has more than before, bytes."""
    changes = sorted(
        (at, r, sample[kind] - rank["before"][kind]) for r, rank in enumerate(ranks) for at, sample in rank["samples"]
    )
    last, best = [0] * len(ranks), 0
    for _, r, value in changes:
        last[r] = value
        best = max(best, sum(last))
    return best


def measure(how: str, strategy: str, folder: Path, ranks: int) -> dict[str, Any]:
    """One loading by so many ranks of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        **os.environ,
        **{"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"},
        **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{REPO}:{REPO / 'src'}"},
    }
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "benchmarks.load_memory", "--rank", how, strategy, str(folder), f"{out}/r"]
        processes = [
            subprocess.Popen(
                command,
                env={**common, "RANK": str(r), "LOCAL_RANK": str(r)},
                cwd=REPO,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for r in range(ranks)
        ]
        try:
            errors = [p.communicate(timeout=600)[1].decode()[-2000:] for p in processes]
        finally:
            for p in processes:
                p.kill()
        if any(p.returncode for p in processes):
            raise RuntimeError("\n".join(errors))
        found = [json.loads(Path(f"{out}/r.{r}.json").read_text()) for r in range(ranks)]
    return {
        **{f"peak_{kind}_bytes": peak(found, kind) for kind in KINDS},
        **{f"after_{kind}_bytes": sum(r["after"][kind] - r["before"][kind] for r in found) for kind in KINDS},
        "seconds": round(max(r["seconds"] for r in found), 2),
        "read_bytes": [r["read_bytes"] for r in found],
    }


def write_models(root: Path) -> tuple[dict[str, Path], int, int]:
    """The same weights as float32 and bfloat16 files; the model's bytes in float32, and its largest tensor's."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=torch.float32)
    sizes = [p.numel() * 4 for p in model.parameters()]
    folders = {"float32": root / "float32", "bfloat16": root / "bfloat16"}
    model.save_pretrained(folders["float32"], max_shard_size="100MB")
    model.to(torch.bfloat16).save_pretrained(folders["bfloat16"], max_shard_size="100MB")
    return folders, sum(sizes), max(sizes)


def allowed(held: float, largest: int, strategy: str, ranks: int) -> float:
    """What `docs/loading.md` promises: what is held, the tensor that is read and its converted copy, 64 MiB of pages of
    files, and for each rank 32 MiB (buffers of collectives); under ``zero3``, for each rank, a piece that is whole."""
    whole = largest * ranks if strategy == "zero3" else 0
    return held + 2 * largest + whole + (64 << 20) + ranks * (32 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks" / "results" / "load_memory.json")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(*args.rank)
        return
    sizes = [int(r) for r in args.ranks.split(",")]
    rows: dict[tuple[str, int, str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as root:
        folders, copy, largest = write_models(Path(root))
        for repeat in range(args.repeats):
            for key in [(s, n, f, h) for n in sizes for f in folders for s in STRATEGIES for h in HOW]:
                strategy, ranks, files, how = key
                found = measure(how, strategy, folders[files], ranks)
                rows.setdefault(key, []).append(found)
                print(f"{repeat + 1}/{args.repeats} {key} {found}", flush=True)
    result = {
        "machine": facts(),
        "copy_bytes": copy,
        "largest_tensor_bytes": largest,
        "repeats": args.repeats,
        "rows": [row(*key, found, copy, largest) for key, found in sorted(rows.items())],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for r in result["rows"]:
        copies, seconds = r["peak_copies"]["median"], r["seconds"]["median"]
        what = f"{r['strategy']:14} {r['ranks']} ranks {r['files']:9} {r['how']:15}"
        print(f"{what} peak {copies:.2f} copies (allowed {r['allowed_copies']:.2f}), {seconds} s")


def row(
    strategy: str, ranks: int, files: str, how: str, found: list[dict[str, Any]], copy: int, largest: int
) -> dict[str, Any]:
    """Medians and ranges over the repeats. DeepSpeed makes gradients and optimizer state at once, and so holds more."""
    held = median(f["after_pss_bytes"] for f in found) if strategy.startswith("deepspeed") else copy
    keys = [f"{when}_{kind}_bytes" for when in ("peak", "after") for kind in KINDS]
    return {
        **{"strategy": strategy, "ranks": ranks, "files": files, "how": how},
        "peak_copies": spread([f["peak_pss_bytes"] / copy for f in found]),
        "allowed_copies": round(allowed(held, largest, strategy, ranks) / copy, 2) if how == "allranks" else ranks,
        **{k: spread([f[k] for f in found]) for k in keys},
        "seconds": spread([f["seconds"] for f in found]),
        "read_bytes": found[0]["read_bytes"],
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)}


if __name__ == "__main__":
    main()
