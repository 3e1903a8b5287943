"""Host memory of a node's ranks while a model is loaded, against `from_pretrained` on every rank.

    python -m benchmarks.load_memory [--repeats 3] [--ranks 1,2,4]

A Llama-shaped model of 542 MB in float32 is written once as float32 and once as bfloat16 files; both are trained in float32.
Every rank samples its own /proc/self/smaps_rollup every 5 ms; samples are put side by side by the monotonic clock, which
processes of a machine share, and the sum over the ranks, less what each had before loading, has its peak taken. ``pss`` counts
what processes share (mapped files) once between them, ``private`` is what belongs to one process alone, ``anonymous`` what no file backs.
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
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": False,
}
VOCAB = 16_000
WAYS = [
    ("from_pretrained", "pytorch_ddp"),
    ("allranks", "pytorch_ddp"),
    ("from_pretrained", "pytorch_zero3"),
    ("allranks", "pytorch_zero3"),
    ("from_pretrained", "zero3"),
    ("allranks", "zero3"),
]
KINDS = {"pss": ("Pss",), "private": ("Private_Clean", "Private_Dirty"), "anonymous": ("Anonymous",)}


class Sampler(threading.Thread):
    """This process's memory by time, MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._stop = threading.Event()

    def run(self) -> None:
        while not self._stop.wait(0.005):
            self.samples.append((time.monotonic(), self.now()))

    @staticmethod
    def now() -> dict[str, float]:
        found: dict[str, int] = {}
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
            key, _, value = line.partition(":")
            found[key] = int(value.split()[0])
        return {kind: sum(found.get(k, 0) for k in keys) * 1024 / 1e6 for kind, keys in KINDS.items()}

    def end(self) -> None:
        self._stop.set()
        self.join()


def rank_main(how: str, strategy_name: str, folder: str, out: str) -> None:
    """One rank: load, and write what memory it took."""
    import torch
    import torch.distributed as dist

    from allranks.spec.records import ModelSpec, TrainSpec
    from allranks.train import strategies
    from allranks.train.data.tokenizer import train_tokenizer
    from allranks.train.loading.setup import set_up
    from allranks.train.losses import LossModel
    from allranks.train.model import load_model
    from allranks.train.optim import adamw
    from allranks.train.world import World

    dist.init_process_group("gloo")
    group, control = dist.group.WORLD, dist.new_group(backend="gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    world = World(rank, rank, size, "", torch.device("cpu"), group, control)  # type: ignore[arg-type]
    tokenizer = train_tokenizer(["hello"], 300, classifier=False)
    strategy = strategies.create(strategy_name, {})
    from transformers import AutoModelForCausalLM

    warm_up(AutoModelForCausalLM)
    dist.barrier()
    before = Sampler.now()
    sampler = Sampler()
    sampler.start()
    started = time.perf_counter()
    if how == "allranks":
        spec = ModelSpec(name=folder)
        model, filler = load_model(
            world, spec, tokenizer, dtype="float32", labels={}, seed=1, replicated=strategy.replicated
        )
        module = LossModel(model, classifier=False)
        _, done = set_up(strategy, filler, module, model, adamw(TrainSpec()), group, 1.0)  # type: ignore[arg-type]
        read = done.read_bytes
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        module = LossModel(model, classifier=False)
        strategy.setup(module, adamw(TrainSpec()), group, 1.0)  # type: ignore[arg-type]
        read = 0
    dist.barrier()
    seconds = time.perf_counter() - started
    sampler.end()
    after = Sampler.now()
    result = {"before": before, "after": after, "samples": sampler.samples, "seconds": seconds, "read_bytes": read}
    Path(f"{out}.{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def warm_up(auto: Any) -> None:
    """Import what loading imports, so that code does not count as weights."""
    import torch
    from transformers import LlamaConfig

    with tempfile.TemporaryDirectory() as small:
        config = LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=300
        )
        auto.from_config(config).save_pretrained(small)
        auto.from_pretrained(small)
    import torch.distributed._composable.fsdp
    import torch.distributed.tensor  # noqa: F401


def peak(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """The highest sum over the ranks of what each has more than before, MB, by kind."""
    found = {}
    for kind in KINDS:
        changes = sorted(
            (at, r, sample[kind] - rank["before"][kind])
            for r, rank in enumerate(ranks)
            for at, sample in rank["samples"]
        )
        last, best = [0.0] * len(ranks), 0.0
        for _, r, value in changes:
            last[r] = value
            best = max(best, sum(last))
        found[kind] = round(best, 1)
    return found


def measure(how: str, strategy: str, folder: Path, ranks: int) -> dict[str, Any]:
    """One loading by so many ranks of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as out:
        processes = []
        for rank in range(ranks):
            env = {
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"},
                **{"MASTER_PORT": port, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"},
                "PYTHONPATH": f"{REPO}:{REPO / 'src'}",
            }
            command = [sys.executable, "-m", "benchmarks.load_memory", "--rank", how, strategy, str(folder), f"{out}/r"]
            processes.append(
                subprocess.Popen(command, env=env, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            )
        errors = [p.communicate(timeout=600)[1].decode()[-2000:] for p in processes]
        if any(p.returncode for p in processes):
            raise RuntimeError("\n".join(errors))
        found = [json.loads(Path(f"{out}/r.{rank}.json").read_text()) for rank in range(ranks)]
    after = sum(r["after"]["pss"] - r["before"]["pss"] for r in found)
    return {
        "peak_mb": peak(found),
        "after_mb": {k: round(sum(r["after"][k] - r["before"][k] for r in found), 1) for k in KINDS},
        "seconds": round(max(r["seconds"] for r in found), 2),
        "read_mb": [round(r["read_bytes"] / 1e6, 1) for r in found],
        "after_pss_mb": round(after, 1),
    }


def write_models(root: Path) -> tuple[dict[str, Path], int]:
    """The same weights as float32 and bfloat16 files; and the model's bytes in float32."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCAB, **CONFIG), dtype=torch.float32)
    folders = {"float32 files": root / "float32", "bfloat16 files": root / "bfloat16"}
    model.save_pretrained(folders["float32 files"], max_shard_size="100MB")
    model.to(torch.bfloat16).save_pretrained(folders["bfloat16 files"], max_shard_size="100MB")
    return folders, sum(p.numel() for p in model.parameters()) * 4


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
        folders, bytes_ = write_models(Path(root))
        for repeat in range(args.repeats):
            for ranks in sizes:
                for files, folder in folders.items():
                    for how, strategy in WAYS:
                        found = measure(how, strategy, folder, ranks)
                        rows.setdefault((strategy, ranks, files, how), []).append(found)
                        print(f"{repeat + 1}/{args.repeats} {strategy} {ranks} {files} {how} {found}", flush=True)
    result = {
        "machine": facts(),
        "model_mb": round(bytes_ / 1e6, 1),
        "repeats": args.repeats,
        "rows": [summary(*key, found) for key, found in sorted(rows.items())],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def summary(strategy: str, ranks: int, files: str, how: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and ranges over the repeats."""
    return {
        "strategy": strategy,
        "ranks": ranks,
        "files": files,
        "how": how,
        **{f"peak_{k}_mb": spread([f["peak_mb"][k] for f in found]) for k in KINDS},
        **{f"after_{k}_mb": spread([f["after_mb"][k] for f in found]) for k in KINDS},
        "seconds": spread([f["seconds"] for f in found]),
        "read_mb": found[0]["read_mb"],
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 2), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main()
