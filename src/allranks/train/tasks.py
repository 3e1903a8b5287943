"""Define the training tasks: text with a language model, labels with a classifier, noise with a perceptron.

The perceptron (``mlp:``) is a transformers model class, so that it is loaded, sharded and saved like all others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from allranks.rundir import shared_cache
from allranks.spec.models import MlpShape, is_mlp, mlp_shape
from allranks.spec.records import RunSpec
from allranks.train.data.batches import NoiseBatch, Rows, collate, collate_labelled, noise_batch, prepared_noise
from allranks.train.data.prepared import PreparedData, TokenSet, prepare
from allranks.train.distributed import DistContext
from allranks.train.evaluation import EvalResult, Evaluator
from allranks.train.models.build import load_model, open_config
from allranks.train.models.losses import LossModel
from allranks.train.models.moe import RouterLoss, router_coefficient
from allranks.train.models.packed_attention import use_packed_attention
from allranks.train.models.precision import DTYPES, compute_dtype
from allranks.train.models.weight_loader import WeightLoader
from allranks.train.patches import repeat_keys_in_float32


class TokenTask:
    """Train a language model or a classifier on text. Other kinds of training have the same methods."""

    def __init__(self, spec: RunSpec, *, classifier: bool) -> None:
        self._spec, self.classifier = spec, classifier

    def prepare(self, cache_root: Path, log: shared_cache.Log) -> PreparedData:
        """Find, wait for, or build the data. Safe to call on any number of ranks at once."""
        return prepare(self._spec, cache_root, classifier=self.classifier, log=log)

    def load(
        self, world: DistContext, data: PreparedData, dtype: str, built: Callable[[Any], None]
    ) -> tuple[nn.Module, WeightLoader]:
        """Load the model; see `train.models.build.load_model`."""
        assert self._spec.model is not None
        labels, seed = data.facts.labels, self._spec.train.seed
        return load_model(world, self._spec.model, data.tokenizer, dtype=dtype, labels=labels, seed=seed, built=built)

    def loss_model(self, model: nn.Module) -> Any:
        """Return the model, on its device, with its loss: forward(batch) sums over trained tokens (float32 scalar)."""
        assert self._spec.model is not None
        loss_model = LossModel(model, classifier=self.classifier)
        coefficient, loss_model.routers = router_coefficient(model, self._spec.model.router_aux_loss)
        if coefficient:
            loss_model.router_loss = RouterLoss(model, coefficient)
        repeat_keys_in_float32()
        assert self._spec.data is not None
        first = next(model.parameters())
        isolated = self._spec.data.packing == "isolated"
        if not self.classifier and (isolated or first.device.type == "cpu"):  # where whole sequences gain by it, too
            packed = use_packed_attention(model, first.device, compute_dtype(model) or first.dtype)
            loss_model.packed = packed if isolated else None
        return loss_model

    def batches(
        self, data: PreparedData, dtype: str, device: torch.device, *, compiled: bool = False
    ) -> Callable[[Rows], Any]:
        """Return a function that makes micro-batches for the device in host memory. They have ``inputs``, ``to``, and
        token counts; with `compiled` blocks one shape."""
        assert self._spec.data is not None
        pad_id = data.tokenizer.pad_token_id
        if self.classifier:
            return lambda rows: collate_labelled(data.train, rows, pad_id)
        fixed = self._spec.data.packing == "none" or device.type == "cuda" or compiled
        pad_to = self._spec.data.max_length if fixed else None
        return lambda rows: collate(data.train, rows, pad_id, pad_to)

    def evaluator(self, world: DistContext, loss_model: Any, data: PreparedData, dtype: str) -> Evaluator | None:
        """Return the evaluator of the held-out rows, or None if there are none."""
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


class NoiseTask(TokenTask):
    """Train a perceptron on noise."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec, classifier=False)
        assert spec.model is not None and spec.data is not None
        self._data = spec.data
        self._shape = mlp_shape(spec.model.name, spec.model.config)

    def prepare(self, cache_root: Path, log: shared_cache.Log) -> PreparedData:
        return prepared_noise(self._data, self._spec.eval)

    def load(
        self, world: DistContext, data: PreparedData, dtype: str, built: Callable[[Any], None]
    ) -> tuple[nn.Module, WeightLoader]:
        def make() -> Mlp:
            torch.manual_seed(self._spec.train.seed)
            return Mlp(MlpConfig(**msgspec.to_builtins(self._shape))).to(DTYPES[dtype])  # type: ignore[arg-type]

        return open_config(world, make, built)

    def loss_model(self, model: nn.Module) -> MlpLoss:
        return MlpLoss(model)

    def batches(
        self, data: PreparedData, dtype: str, device: torch.device, *, compiled: bool = False
    ) -> Callable[[Rows], NoiseBatch]:
        return partial(noise_batch, self._data, data.train, width=self._shape.width, dtype=DTYPES[dtype])

    def evaluator(self, world: DistContext, loss_model: Any, data: PreparedData, dtype: str) -> Evaluator | None:
        if data.held_out is None:
            return None
        make = partial(noise_batch, self._data, data.held_out, width=self._shape.width, dtype=DTYPES[dtype])
        return NoiseEvaluator(world, loss_model, data.held_out, make, batch_size=self._spec.eval.batch_size)


class NoiseEvaluator(Evaluator):
    """Compute the mean squared error over rows. Perplexity and accuracy are not defined here."""

    def __init__(
        self,
        world: DistContext,
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
        loss = self._loss.each(self._make(rows).to(self._world.device)).double().sum()
        return torch.stack([loss, *loss.new_tensor([len(rows), 0, len(rows)])])


def task_of(spec: RunSpec) -> TokenTask:
    """Return the training task of a spec.

    Raises:
        SpecError, EnvironmentNotAble: the model does not exist or cannot be loaded.
    """
    assert spec.model is not None
    if is_mlp(spec.model.name):
        return NoiseTask(spec)
    from allranks.train.models.build import is_classifier

    return TokenTask(spec, classifier=is_classifier(spec))


def whole_model(task: TokenTask, data: PreparedData, dtype: str) -> nn.Module:
    """Return the model with its weights on the CPU, without communication."""
    from allranks.train.distributed import SINGLE_PROCESS

    model, loader = task.load(SINGLE_PROCESS, data, dtype, lambda model: None)
    return loader.load_all(model)


class MlpConfig(PretrainedConfig):
    """Config with the sizes of `MlpShape`."""

    model_type = "allranks_mlp"

    def __init__(
        self, width: int = 64, layers: int = 2, shape: str = "blocks", expansion: int = 4, **more: Any
    ) -> None:
        self.width, self.layers, self.shape, self.expansion = width, layers, shape, expansion
        super().__init__(**more)


class Mlp(PreTrainedModel):
    """Perceptron: forward(inputs (B, width)) -> (B, width), in the dtype of the weights."""

    config_class = MlpConfig  # type: ignore[assignment]
    base_model_prefix = "model"

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config)
        shape: Any = config.shape
        sizes = MlpShape(width=config.width, layers=config.layers, shape=shape, expansion=config.expansion)
        self.layers = nn.ModuleList(
            _block(pairs, after_another=bool(i) and sizes.shape == "wide") for i, pairs in enumerate(sizes.blocks())
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()  # torch's default initialization

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            inputs = block(inputs)
        return inputs


def _block(pairs: list[tuple[int, int]], *, after_another: bool) -> nn.Sequential:
    parts: list[nn.Module] = []
    for i, (into, out) in enumerate(pairs):
        parts += [*([nn.GELU()] if i or after_another else []), nn.Linear(into, out)]
    return nn.Sequential(*parts)


class MlpLoss(nn.Module):
    """The model with its loss: forward(batch) returns the sum over rows of the row's mean squared error, a float32
    scalar.

    Divided by the number of rows, it equals torch's ``MSELoss``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> torch.Tensor:
        return self.each(batch).sum()

    def each(self, batch: Any) -> torch.Tensor:
        """Return the mean squared error of each row, (B,) in float32."""
        outputs = self.model(batch.inputs)
        return (outputs.float() - batch.targets.float()).square().mean(dim=-1)
