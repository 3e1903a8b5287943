"""Define the ``mlp:`` models as a transformers model class, so that they are loaded, sharded and saved like all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from allranks.spec.models import MlpShape


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
        sizes = MlpShape(width=config.width, layers=config.layers, shape=config.shape, expansion=config.expansion)  # type: ignore[arg-type]
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
    """The model with its loss: forward(batch) returns the sum over rows of the row's mean squared error, a float32 scalar.

    Divided by the number of rows, it equals torch's ``MSELoss``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> torch.Tensor:
        return self.each(batch).sum()

    def each(self, batch: Any) -> torch.Tensor:
        """Return the mean squared error of each row, (B,) in float32."""
        found = self.model(batch.inputs)
        return (found.float() - batch.targets.float()).square().mean(dim=-1)
