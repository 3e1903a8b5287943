"""Build the model of the reference with transformers and PEFT alone, so that the package's own changes to a model are checked, too."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from allranks.spec.models import MlpShape, is_mlp, mlp_shape
from allranks.spec.records import RunSpec


class PlainModule(nn.Module):
    """A model under the name that it has in the module of a strategy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def plain_module(module: Any, spec: RunSpec, *, classifier: bool) -> PlainModule:
    """Return a model of the spec with the weights of `module`, without dropout, on the same device."""
    assert spec.model is not None
    given = module.model
    plain: Any
    if is_mlp(spec.model.name):
        plain = _Perceptron(mlp_shape(spec.model.name, spec.model.config))
    else:
        base = given.get_base_model() if hasattr(given, "get_base_model") else given
        plain = type(base)(copy.deepcopy(base.config))
        for layer in plain.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        if spec.adapter.type == "lora":
            plain = _with_lora(plain, spec, classifier=classifier)
    plain.load_state_dict(given.state_dict())
    return PlainModule(plain.to(next(given.parameters()).device))


def _with_lora(model: Any, spec: RunSpec, *, classifier: bool) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    wanted = spec.adapter
    targets = wanted.targets
    config = LoraConfig(
        r=wanted.r,
        lora_alpha=wanted.alpha,  # type: ignore[arg-type] - PEFT accepts fractions, too
        lora_dropout=0.0,
        target_modules="all-linear" if targets is None and not wanted.target_parameters else targets,
        target_parameters=wanted.target_parameters or None,
        modules_to_save=wanted.modules_to_save or None,
        task_type=TaskType.SEQ_CLS if classifier else TaskType.CAUSAL_LM,
    )
    return get_peft_model(model, config)


class _Perceptron(nn.Module):
    """Linear layers with a GELU between any two of a block (``blocks``), or of all (``wide``)."""

    def __init__(self, shape: MlpShape) -> None:
        super().__init__()
        wide = shape.width * shape.expansion
        self.layers = nn.ModuleList()
        for i in range(shape.layers):
            if shape.shape == "blocks":
                self.layers.append(nn.Sequential(nn.Linear(shape.width, wide), nn.GELU(), nn.Linear(wide, shape.width)))
            else:
                ends = shape.width if i == 0 else wide, shape.width if i == shape.layers - 1 else wide
                self.layers.append(nn.Sequential(*[nn.GELU()][: min(i, 1)], nn.Linear(*ends)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs
