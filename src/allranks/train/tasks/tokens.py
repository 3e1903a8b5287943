"""Text by a language model, or labels by a classifier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allranks.spec.records import RunSpec
from allranks.train.data import cache
from allranks.train.data.collate import Batch, collate, collate_labelled
from allranks.train.data.order import Rows
from allranks.train.data.prepared import Prepared, prepare
from allranks.train.evaluate import Evaluator
from allranks.train.loading.filler import Filler
from allranks.train.losses import LossModel
from allranks.train.model import load_model
from allranks.train.world import World


class TokenTask:
    """See `Task`."""

    def __init__(self, spec: RunSpec, *, classifier: bool) -> None:
        self._spec, self.classifier = spec, classifier

    def prepare(self, cache_root: Path, log: cache.Log) -> Prepared:
        return prepare(self._spec, cache_root, classifier=self.classifier, log=log)

    def load(self, world: World, data: Prepared, dtype: str, built: Callable[[Any], None]) -> tuple[nn.Module, Filler]:
        assert self._spec.model is not None
        labels, seed = data.facts.labels, self._spec.train.seed
        return load_model(world, self._spec.model, data.tokenizer, dtype=dtype, labels=labels, seed=seed, built=built)

    def loss_model(self, model: nn.Module) -> LossModel:
        return LossModel(model, classifier=self.classifier)

    def batches(self, data: Prepared, dtype: str, device: torch.device) -> Callable[[Rows], Batch]:
        assert self._spec.data is not None
        pad_id = data.tokenizer.pad_token_id
        if self.classifier:
            return lambda rows: collate_labelled(data.train, rows, pad_id).to(device)
        fixed = self._spec.data.packing == "none" or device.type == "cuda"
        pad_to = self._spec.data.max_length if fixed else None
        return lambda rows: collate(data.train, rows, pad_id, pad_to).to(device)

    def evaluator(self, world: World, loss_model: Any, data: Prepared, dtype: str) -> Evaluator | None:
        if data.held_out is None:
            return None
        return Evaluator(
            world,
            loss_model,
            data.held_out,
            pad_id=data.tokenizer.pad_token_id,
            batch_size=self._spec.eval.batch_size,
            classifier=self.classifier,
        )
