"""LoRA by PEFT: dense layers, fused expert weights (``target_parameters``), modules trained whole."""

from __future__ import annotations

from typing import Any

from torch import nn

from allranks.errors import SpecError
from allranks.spec.records import AdapterSpec
from allranks.train.data.tokenizer import first_line
from allranks.train.kernels import cheapen_dropout
from allranks.train.lora_forward import fuse_lora


def add_adapter(model: nn.Module, spec: AdapterSpec, *, classifier: bool, base: str, seed: int) -> nn.Module:
    """The model with a fresh LoRA adapter (its base frozen), or the model itself for ``type: none``.

    Args:
        base: what the saved adapter names as its base: a hub name, or the run's own model folder.

    Raises:
        SpecError: targets that the model does not have.
    """
    if spec.type == "none":
        return model
    import torch
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        r=spec.r,
        lora_alpha=_whole(spec.alpha),  # type: ignore[arg-type] - PEFT takes fractions too
        lora_dropout=spec.dropout,
        target_modules=spec.targets if spec.targets is not None else (None if spec.target_parameters else "all-linear"),
        target_parameters=spec.target_parameters or None,
        modules_to_save=spec.modules_to_save or None,
        task_type=TaskType.SEQ_CLS if classifier else TaskType.CAUSAL_LM,
    )
    torch.manual_seed(seed + 1)  # the adapter's first weights, equal on every rank
    try:
        adapted: Any = get_peft_model(model, config)  # type: ignore[arg-type]
    except ValueError as error:
        linear = sorted(
            {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        )
        raise SpecError(
            f"adapter: {first_line(error)[:300]}; the model's linear layers are named: {', '.join(linear)}"
        ) from None
    cheapen_dropout(adapted)
    fuse_lora(adapted)
    adapted.peft_config["default"].base_model_name_or_path = base
    if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        adapted.enable_input_require_grads()  # else a frozen embedding gives checkpointed blocks nothing to differentiate
    return adapted


def _whole(alpha: float) -> int | float:
    return int(alpha) if float(alpha).is_integer() else alpha


def is_adapted(model: nn.Module) -> bool:
    """True for a PEFT model."""
    return hasattr(model, "peft_config")
