"""Compute the reference of a trial on rank 0, and judge what strategies trained by it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from allranks.train.benchmark.differences import relative_error, update_error
from allranks.train.benchmark.reference import PlainTrainer, PlainTraining, Variant
from allranks.train.benchmark.reference_model import plain_module
from allranks.train.benchmark.reference_rows import PlainSequence, PlannedRows, plain_sequences
from allranks.train.benchmark.trials import TrialRunner, TrialWork
from allranks.train.models.losses import LossModel
from allranks.train.models.precision import DTYPES
from allranks.train.strategies.base import Strategy

Json = dict[str, Any]


class Baseline:
    """What one kind of trial must give. All ranks call the same methods; the results are those of rank 0.

    ``facts`` has ``spread``, the distances of two honest trainings in one process; ``planned``, the work of each rank and step;
    ``problem``, how the prepared data differ from the documented rules; and ``norms``, the gradient norm of each step.
    """

    def __init__(self, bench: TrialRunner, name: str, steps: int) -> None:
        self._bench, self._world, self._steps = bench, bench.world, steps
        self._start_file = bench.folder / f"{name}-start.safetensors"
        self._trained_file = bench.folder / f"{name}-reference.safetensors"
        self.facts: Json = {}
        self.seconds = 0.0

    def compute(self, module: LossModel) -> None:
        """Train a copy of `module` twice on rank 0; the others wait on the control group.

        In float32 the copy is a model of transformers and PEFT alone; in other precisions it is `module` itself, which is left with its
        first weights.
        """
        began, bench = time.perf_counter(), self._bench
        if self._world.is_first:
            bench.folder.mkdir(parents=True, exist_ok=True)
            start = _trained_weights(module)
            save_file(start, self._start_file)
            trainer = self._trainer()
            trained: nn.Module = module
            if (bench.plan.dtype, bench.plan.param_dtype) == ("float32", "float32"):
                trained = plain_module(module, bench.spec, classifier=bench.task.classifier)
            plain = trainer.run(trained, self._steps, Variant.PLAIN)
            _restore(trained, start)
            other = trainer.run(trained, self._steps, Variant.SHIFTED)
            _restore(trained, start)
            save_file(plain.weights, self._trained_file)
            self.facts |= {"spread": _distances(other, plain, start), "norms": plain.norms}
            self._plain = PlainTraining({}, plain.losses, plain.norms)  # its weights are read from the file
        dist.barrier(group=self._world.control)
        self.seconds = time.perf_counter() - began

    def _trainer(self) -> PlainTrainer:
        bench = self._bench
        spec, batch = bench.spec, bench.batch
        assert spec.data is not None
        sequences, problem = plain_sequences(spec, bench.data, classifier=bench.task.classifier)
        order = PlannedRows(len(sequences), spec.data.seed, batch, self._world.size)
        self.facts |= {"problem": problem, "planned": self._planned(sequences, order)}
        pad = bench.data.tokenizer.pad_token_id
        dtype = DTYPES[bench.plan.dtype]
        return PlainTrainer(spec, batch, self._world.size, sequences, order, pad, self._world.device, dtype)

    def _planned(self, sequences: list[PlainSequence], order: PlannedRows) -> list[list[Json]]:
        found = []
        for rank in range(self._world.size):
            steps = [order.of_rank(step, rank) for step in range(self._steps)]
            rows = [[row for part in parts for i in part for row in sequences[i]] for parts in steps]
            found.append(
                [
                    {
                        "rows": rows_digest(parts),
                        "tokens": sum(row.tokens for row in own),
                        "tokens_trained": sum(row.targets for row in own),
                    }
                    for parts, own in zip(steps, rows, strict=True)
                ]
            )
        return found

    def judge(self, strategy: Strategy, model: LossModel, steps: list[Json], work: TrialWork) -> Json:
        """Return this rank's work, and on rank 0 the distances from the reference. Collective."""
        accum, micro = self._bench.batch.grad_accum, work.micro_batches
        found: Json = {
            "updates": work.updates,
            "micro_batches": len(micro),
            "work": [
                {
                    "rows": rows_digest(micro[i * accum : (i + 1) * accum]),
                    "tokens": event["tokens"],
                    "tokens_trained": event["tokens_trained"],
                }
                for i, event in enumerate(steps)
            ],
        }
        whole = strategy.weights(trained_only=True)
        if self._world.is_first:
            ours = PlainTraining(whole, [e["loss"] for e in steps], [e["grad_norm"] for e in steps])
            plain = replace(self._plain, weights=load_file(self._trained_file))
            found |= _distances(ours, plain, load_file(self._start_file))
        if strategy.replicated:
            mine = torch.tensor([float(p.double().sum()) for p in model.parameters()], dtype=torch.float64)
            every = [torch.zeros_like(mine) for _ in range(self._world.size)]
            dist.all_gather(every, mine, group=self._world.control)
            found["ranks_differ"] = max(float((t - mine).abs().max()) for t in every)
        return found


def rows_digest(micro_batches: list[list[int]]) -> str:
    """Return a short digest of the rows of a step's micro-batches, in order."""
    return hashlib.sha256(msgspec.json.encode(micro_batches)).hexdigest()[:16]


def _distances(ours: PlainTraining, reference: PlainTraining, start: dict[str, torch.Tensor]) -> Json:
    return {
        "error": update_error(ours.weights, reference.weights, start),
        "norm_error": relative_error(ours.norms, reference.norms),
        "loss_error": relative_error(ours.losses, reference.losses),
    }


def _trained_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().to("cpu", copy=True).contiguous() for n, p in module.named_parameters() if p.requires_grad}


def _restore(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
