"""Traces to analyse: real ones, our own of two gloo ranks, and generated ones of many ranks."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.tracegen import Scenario, Truth, generate

from allranks import api

OPERATORS = 4750  # a step and rank: with five steps about 25,000 events a rank


@dataclass(frozen=True)
class TraceSet:
    """A folder with one trace a rank; ``truth`` where it was generated."""

    name: str
    folder: Path
    truth: Truth | None = None

    @property
    def bytes(self) -> int:
        return sum(p.stat().st_size for p in self.folder.glob("*.json.gz"))

    @property
    def unpacked_bytes(self) -> int:
        return sum(len(gzip.decompress(p.read_bytes())) for p in self.folder.glob("*.json.gz"))

    @property
    def ranks(self) -> int:
        return len(list(self.folder.glob("*.json.gz")))


def real_sets(source: Path, work: Path) -> list[TraceSet]:
    """Each file beside a folder of its own, for analysers that read folders; folders stay sets of ranks."""
    sets = []
    for path in sorted(source.glob("*.json.gz")) if source.is_dir() else []:
        folder = work / path.name.removesuffix(".json.gz")
        folder.mkdir()
        shutil.copyfile(path, folder / path.name)
        sets.append(TraceSet(folder.name, folder))
    for path in sorted(p for p in source.iterdir() if p.is_dir()) if source.is_dir() else []:
        if list(path.glob("*.json.gz")):
            copied = shutil.copytree(path, work / path.name, copy_function=shutil.copyfile)
            copied.chmod(0o755)
            sets.append(TraceSet(path.name, copied))
    return sets


def own_gloo_set(work: Path) -> TraceSet:
    """Two gloo ranks that train a tiny model under `observe.profile`."""
    config = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
    result = api.run(
        {
            "name": "gloo",
            "model": {"name": "tiny:mistral", "config": config},
            "data": {"source": "builtin:instructions", "subset": 400, "max_length": 128, "eval_fraction": 0.0},
            "train": {"max_steps": 12, "micro_batch_size": 2},
            "checkpoint": {"mode": "none"},
            "observe": {"profile": {"wait": 4, "warmup": 2, "active": 5}},
            "cluster": {"cache": str(work / "cache"), "procs_per_node": 2, "env": {"OMP_NUM_THREADS": "1"}},
            "run_root": str(work / "runs"),
        }
    )
    if result.exit_code:
        raise SystemExit(f"the two gloo ranks failed: {result.message}")
    return TraceSet("own_gloo_2_ranks", Path(result.folder) / "traces")


def generated_set(work: Path, ranks: int, name: str | None = None) -> TraceSet:
    """About 25,000 events a rank: 8 ranks have 200,000."""
    scenario = Scenario(
        world=ranks,
        steps=5,
        layers=24,
        collectives=("all_reduce",) * 12,
        slow={(min(3, ranks - 1), 1): 900, (min(6, ranks - 1), 2): 450},
        memcpy=True,
        filler_ops=OPERATORS,
    )
    folder = work / (name or f"generated_{ranks}_ranks")
    return TraceSet(folder.name, folder, generate(scenario, folder))


def wrong_sets(work: Path) -> list[TraceSet]:
    """Where HolisticTraceAnalysis is known to be wrong, small."""
    slow = {(3, 1): 900, (6, 2): 450}
    scenarios = {
        "stragglers_of_new_names": Scenario(slow=slow),
        "stragglers_of_old_names": Scenario(slow=slow, names="old"),
        "stragglers_with_clocks_apart": Scenario(slow=slow, names="old", offset_us={5: 5000}),
        "rccl_kernels": Scenario(slow=slow, names="rccl"),
        "waits_of_streams": Scenario(slow=slow, syncs=True),
        "no_step_marks": Scenario(slow=slow, step_marks=False),
        "one_rank_of_eight": Scenario(slow=slow, absent=frozenset(range(1, 8))),
        "gloo": Scenario(slow=slow, backend="gloo"),
    }
    return [TraceSet(name, work / name, generate(s, work / name)) for name, s in scenarios.items()]
