"""One rank of one case of `benchmarks.fit`: trains a few real steps and says how much memory that took.

``python -m benchmarks.fit_rank CASE RESULT`` with the environment that torchrun gives; rank 0 writes RESULT.

Two measures, never in one process: ``process`` is the growth of the resident memory (Linux counts the peak itself);
``storages`` adds up every allocation of torch's CPU allocator with the profiler, which costs memory of its own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from bisect import bisect_left, insort
from pathlib import Path
from typing import Any

import numpy as np
import peft  # noqa: F401 - imports are not what is measured
import torch
import torch.distributed as dist
import transformers.models.auto.modeling_auto as _auto  # noqa: F401
from torch.profiler import ProfilerActivity, profile

from allranks.planning.memory import make_plan
from allranks.planning.records import LaunchPlan
from allranks.rundir.events import EventLog
from allranks.spec import parse_spec
from allranks.spec.records import RunSpec
from allranks.train import distributed, strategies
from allranks.train.data.batches import Batch, Rows, SampleOrder, collate, collate_labelled
from allranks.train.data.prepared import TokenSet, _map, _save
from allranks.train.data.tokenization import EncodedRow
from allranks.train.distributed import DistContext, join_process_group, leave_process_group
from allranks.train.engines import engine_of
from allranks.train.loop import adamw
from allranks.train.models.adapters import add_adapter
from allranks.train.models.build import load_model
from allranks.train.setup import set_forward, set_up_strategy, stored_dtype
from allranks.train.step_metrics import LoopPlan, TrainingRows
from allranks.train.strategies.base import Strategy
from allranks.train.tasks import TokenTask
from allranks.utils.machine import machine_facts
from benchmarks.processes import count_peak_anew, resident_bytes

ROWS = 64


class FakeTokenizer:
    """What `build_model` asks of a tokenizer: how many tokens there are. The batches are random numbers."""

    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def token_set(folder: Path, spec: RunSpec, vocab: int, *, labelled: bool) -> TokenSet:
    """Random tokens that fill every sequence; packed ones are made of two rows."""
    assert spec.data is not None
    length, random = spec.data.max_length, np.random.default_rng(3)
    folder.mkdir(parents=True)
    parts = 1 if labelled or spec.data.packing == "none" else 2
    n = length // parts
    rows = [
        EncodedRow(
            ids=random.integers(4, vocab, n).astype(np.int32),
            mask=np.ones(n, np.uint8),
            **({"label": i % 2} if labelled else {}),
        )
        for i in range(ROWS * parts)
    ]
    _save(folder, "train", rows, [list(range(i * parts, (i + 1) * parts)) for i in range(ROWS)])
    return _map(folder, "train")


def vocab_of(folder: Path) -> int:
    """The number of tokens of a saved model."""
    return json.loads((folder / "config.json").read_text())["vocab_size"]


class Rank:
    """Builds and trains as `allranks.train.worker` does, with nothing else around it."""

    def __init__(self, spec: RunSpec, plan: LaunchPlan, world: DistContext, folder: Path) -> None:
        assert spec.model is not None and spec.data is not None and plan.batch is not None
        self._spec, self._plan, self._world, self._folder = spec, plan, world, folder
        self._labelled = spec.model.name == "tiny:bert"
        vocab = int(spec.model.config.get("vocab_size") or vocab_of(Path(spec.model.name)))
        self._tokens = token_set(folder / f"rows{world.rank}", spec, vocab, labelled=self._labelled)
        self._tokenizer = FakeTokenizer(vocab)
        self._order = SampleOrder(len(self._tokens), 5, plan.batch, world.rank, world.size)

    def _batch(self, rows: Rows) -> Batch:
        assert self._spec.data is not None
        if self._labelled:
            return collate_labelled(self._tokens, rows, 0)
        return collate(self._tokens, rows, 0, self._spec.data.max_length if self._spec.data.packing == "none" else None)

    def build(self) -> Strategy:
        """The model in its strategy, rehearsed where that is due."""
        spec, plan = self._spec, self._plan
        assert spec.model is not None
        strategy = strategies.create(plan.strategy, dict(plan.strategy_options))
        model, filler = load_model(
            self._world,
            spec.model,
            self._tokenizer,
            dtype=stored_dtype(plan, spec),
            labels={"a": 0, "b": 1} if self._labelled else {},
            seed=1,
        )
        model = add_adapter(model, spec.adapter, classifier=self._labelled, base="base", seed=1)
        set_forward(model, plan, self._world.device)
        loss_model = TokenTask(spec, classifier=self._labelled).loss_model(model)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        distributed.seed_rank(1, self._world.rank)
        set_up_strategy(
            strategy, filler, loss_model, model, adamw(spec.train), self._world.group, spec.train.max_grad_norm
        )
        strategy.warm_up(self._batch(self._order.micro_batches(0)[0]), resumed=False)
        return strategy

    def train(self, strategy: Strategy, steps: int) -> None:
        """Real steps of the real loop."""
        plan = LoopPlan(train=self._spec.train, total_steps=steps)
        events = EventLog(self._folder / f"events{self._world.rank}.jsonl", self._world.rank)
        engine = engine_of(self._plan.strategy)
        engine(self._world, strategy, TrainingRows(self._order, self._tokens, self._batch), plan, events).run()
        events.close()


def by_process(rank: Rank, steps: int) -> dict[str, Any]:
    """Growth of the resident memory: over all, and after set-up."""
    gc.collect()
    count_peak_anew()
    before, _ = resident_bytes("self")
    strategy = rank.build()
    built, setup_peak = resident_bytes("self")
    rank.train(strategy, steps)
    _, peak = resident_bytes("self")
    return {"setup_bytes": setup_peak - before, "built_bytes": built - before, "bytes": peak - before}


class Live:
    """Blocks of memory that are in use, by address.

    The profiler does not see what gloo's threads give back. A block that begins where another is still thought to be
    shows that the other is gone.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self.total = 0

    def take(self, at: int, n: int) -> None:
        while (i := bisect_left(self._starts, at + n)) and self._starts[i - 1] + self._sizes[self._starts[i - 1]] > at:
            self.give_back(self._starts[i - 1])
        insort(self._starts, at)
        self._sizes[at] = n
        self.total += n

    def give_back(self, at: int) -> None:
        if at in self._sizes:
            self.total -= self._sizes.pop(at)
            del self._starts[bisect_left(self._starts, at)]


def by_storages(rank: Rank, steps: int, trace: Path) -> dict[str, Any]:
    """The most bytes of torch's CPU allocator that were in use: in set-up, and in the training steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        strategy = rank.build()
        with torch.profiler.record_function("fit: training"):
            pass
        rank.train(strategy, steps)
    found.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    start = next(e["ts"] for e in events if e.get("name") == "fit: training")
    live, setup, built, peak = Live(), 0, 0, 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        n, at = event["args"]["Bytes"], event["args"]["Addr"]
        if n > 0:
            live.take(at, n)
        else:
            live.give_back(at)
        if event["ts"] < start:
            setup, built = max(setup, live.total), live.total
        else:
            peak = max(peak, live.total)
    return {"setup_bytes": setup, "built_bytes": built, "bytes": peak, "kept_bytes": live.total}


def main() -> None:
    """Measure one case."""
    case = json.loads(Path(sys.argv[1]).read_text())
    spec = parse_spec(case["spec"])
    facts = machine_facts()
    plan = make_plan(spec, facts)
    if plan.strategy.startswith("deepspeed"):
        from allranks.train.engines.deepspeed_engine import load_deepspeed

        load_deepspeed()
    with tempfile.TemporaryDirectory() as folder:
        world = join_process_group(plan)
        rank = Rank(spec, plan, world, Path(folder))
        how = by_process if case["measure"] == "process" else None
        found = (
            how(rank, case["steps"]) if how else by_storages(rank, case["steps"], Path(folder) / f"t{world.rank}.json")
        )
        found |= {"parameters": rank.parameters, "parameters_trained": rank.trained}
        every: list[Any] = [None] * world.size
        dist.all_gather_object(every, found, group=world.control)
        if world.is_first:
            Path(sys.argv[2]).write_text(json.dumps({"ranks": every}))
        leave_process_group()
    sys.stdout.flush()
    os._exit(0)  # the profiler's threads have been seen not to end


if __name__ == "__main__":
    main()
