"""Noise by a perceptron: regression with the mean squared error, as the field's smoke tests train."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import nn

from allranks.mlp import mlp_shape
from allranks.spec.records import RunSpec
from allranks.train.data import cache
from allranks.train.data.noise import NoiseBatch, noise_batch, prepared_noise
from allranks.train.data.order import Rows
from allranks.train.data.prepared import Prepared, TokenSet
from allranks.train.evaluate import EvalResult, Evaluator
from allranks.train.loading.filler import Filler
from allranks.train.loading.opening import open_config
from allranks.train.mlp import Mlp, MlpConfig, MlpLoss
from allranks.train.model import DTYPES
from allranks.train.world import World


class NoiseTask:
    """See `Task`."""

    classifier = False

    def __init__(self, spec: RunSpec) -> None:
        assert spec.model is not None and spec.data is not None
        self._spec, self._data = spec, spec.data
        self._shape = mlp_shape(spec.model.name, spec.model.config)

    def prepare(self, cache_root: Path, log: cache.Log) -> Prepared:
        return prepared_noise(self._data, self._spec.eval)

    def load(self, world: World, data: Prepared, dtype: str, built: Callable[[Any], None]) -> tuple[nn.Module, Filler]:
        def make() -> Mlp:
            torch.manual_seed(self._spec.train.seed)
            return Mlp(MlpConfig(**msgspec.to_builtins(self._shape))).to(DTYPES[dtype])  # type: ignore[arg-type]

        return open_config(world, make, built)

    def loss_model(self, model: nn.Module) -> MlpLoss:
        return MlpLoss(model)

    def batches(self, data: Prepared, dtype: str, device: torch.device) -> Callable[[Rows], NoiseBatch]:
        make = partial(noise_batch, self._data, data.train, width=self._shape.width, dtype=DTYPES[dtype])
        return lambda rows: make(rows).to(device)

    def evaluator(self, world: World, loss_model: MlpLoss, data: Prepared, dtype: str) -> Evaluator | None:
        if data.held_out is None:
            return None
        make = partial(noise_batch, self._data, data.held_out, width=self._shape.width, dtype=DTYPES[dtype])
        size = self._spec.eval.batch_size
        return NoiseEvaluator(
            world, loss_model, data.held_out, lambda rows: make(rows).to(world.device), batch_size=size
        )


class NoiseEvaluator(Evaluator):
    """The mean squared error over rows. Neither perplexity nor accuracy mean anything here."""

    def __init__(
        self,
        world: World,
        model: MlpLoss,
        tokens: TokenSet,
        make: Callable[[Rows], NoiseBatch],
        *,
        batch_size: int | None,
    ) -> None:
        super().__init__(world, cast(Any, model), tokens, pad_id=0, batch_size=batch_size, classifier=False)
        self._loss, self._make = model, make

    def run(self) -> EvalResult:
        return msgspec.structs.replace(super().run(), perplexity=None, accuracy=None)

    def _score(self, rows: Rows) -> torch.Tensor:
        loss = self._loss.each(self._make(rows)).double().sum()
        return torch.stack([loss, loss.new_tensor(len(rows)), torch.zeros_like(loss), loss.new_tensor(len(rows))])
