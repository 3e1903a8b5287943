"""Add LoRA adapters with PEFT.

PEFT supports linear layers, fused expert weights (``target_parameters``) and fully trained modules. `lora` and
`lora_experts` compute the forward and backward passes of the first two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from allranks.errors import SpecError
from allranks.spec.models import fused_parameter, require_parameters
from allranks.spec.records import AdapterSpec
from allranks.train.data.tokenization import first_line
from allranks.train.models.adapter_dropout import replace_dropout
from allranks.train.models.lora import fuse_lora, left_to_peft
from allranks.train.models.lora_experts import fuse_expert_lora
from allranks.utils.text import did_you_mean


def add_adapter(
    model: nn.Module, spec: AdapterSpec, *, classifier: bool, base: str, seed: int, revision: str | None = None
) -> nn.Module:
    """Return the model with a new LoRA adapter and a frozen base, or the model itself for ``type: none``.

    Args:
        base: what the saved adapter names as its base: a hub name, or a folder.
        revision: the hub revision of the base, which the saved adapter names, too.

    Raises:
        SpecError: the model lacks the targets.
    """
    if spec.type == "none":
        return model
    from peft import LoraConfig, TaskType, get_peft_model

    dimensions = {name: p.ndim for name, p in model.named_parameters()}
    require_parameters(spec, dimensions, "the model")
    # PEFT would adapt and train them in full: it also saves what ends like a classifier (DistilBERT)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    second_heads = [name for name in linear if name.endswith("pre_classifier")] or None
    config = LoraConfig(
        r=spec.r,
        # PEFT accepts fractions, too
        lora_alpha=int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha,  # type: ignore[arg-type]
        lora_dropout=spec.dropout,
        target_modules=spec.targets if spec.targets is not None else (None if spec.target_parameters else "all-linear"),
        target_parameters=spec.target_parameters or None,
        modules_to_save=spec.modules_to_save or None,
        exclude_modules=second_heads if classifier and spec.targets is None else None,
        task_type=TaskType.SEQ_CLS if classifier else TaskType.CAUSAL_LM,
    )
    torch.manual_seed(seed + 1)  # equal initial weights of the adapter on every rank
    try:
        adapted: Any = get_peft_model(model, config)  # type: ignore[arg-type]
    except ValueError as error:
        raise SpecError(f"adapter: {_why(error, model, spec, dimensions)}") from None
    _require_targets(adapted, spec, dimensions)
    replace_dropout(adapted)
    fuse_lora(adapted)
    fuse_expert_lora(adapted)
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.peft_config["default"].revision = revision
    return adapted


def _require_targets(adapted: Any, spec: AdapterSpec, dimensions: Mapping[str, int]) -> None:
    """Refuse a target, or a module to save, that the model does not have. PEFT ignores it if it finds another one.

    It also maps the experts' names of older files to fused parameters; such a target need not be a module.
    """
    names = [name.removeprefix("base_model.model.") for name, _ in adapted.named_modules()]
    config = adapted.peft_config["default"]
    targets = [t for t in spec.targets or () if not config.target_parameters or t in config.target_modules]
    for key, wanted in (("targets", targets), ("modules_to_save", spec.modules_to_save)):
        for target in wanted:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                linear = _linear_layers(adapted.get_base_model())
                hint = fused_parameter(target, dimensions) or did_you_mean(target.rsplit(".", 1)[-1], linear)
                raise SpecError(f"adapter.{key}: the model has no module {target!r}{hint}; {_named(linear)}")


def _linear_layers(model: nn.Module) -> list[str]:
    return sorted(
        {
            name.removesuffix(".base_layer").rsplit(".", 1)[-1]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and ".lora_" not in name
        }
    )


def _named(linear: list[str]) -> str:
    return f"the model's linear layers are named: {', '.join(linear)}"


def _why(error: ValueError, model: nn.Module, spec: AdapterSpec, dimensions: Mapping[str, int]) -> str:
    if "ParamWrapper" in str(error) and spec.dropout:
        return (
            f"dropout is {spec.dropout:g}, but PEFT adapts the fused experts of this model as parameters, which do not "
            "support dropout; set adapter.dropout: 0, or limit adapter.targets to attention layers"
        )
    for target in spec.targets or ():
        if advice := fused_parameter(target, dimensions):
            return f"the model has no module {target!r}{advice}; {_named(_linear_layers(model))}"
    return f"{first_line(error)[:300]}; {_named(_linear_layers(model))}"


def adapter_remarks(model: nn.Module, spec: AdapterSpec) -> tuple[str, ...]:
    """Return remarks on targets that PEFT interpreted differently, and on layers that its own forward computes.

    For mixtures of experts whose projections transformers has fused, PEFT maps the old names (gate_proj, w1, ...) to
    the experts' parameters, and "all linear layers" also includes the router. Layers outside of the experts with such a
    name get no adapter. And a remark on adapters of parameters that need a full copy of them in each forward pass. A
    model without adapters has no remarks.
    """
    if not is_adapted(model):
        return ()
    peft: Any = model
    places = sorted(peft.peft_config["default"].target_parameters or [])
    copied = [
        f"adapters: {len(names)} layers use PEFT's forward, first {names[0].removeprefix('base_model.model.')}: {why}"
        for why, names in left_to_peft(model).items()
    ]
    wrappers: list[Any] = [m for m in model.modules() if type(m).__name__ == "ParamWrapper"]
    if plain := [m for m in wrappers if m.num_experts > 1 and "forward" not in vars(m)]:
        copied.append(
            f"adapters: PEFT adds the adapters of {len(plain)} parameters to a full copy of their weights in each "
            f"forward pass, first of {plain[0].parameter_name} in {type(plain[0].get_base_layer()).__name__}, which is "
            "not one of transformers' usual classes of experts"
        )
    if not places:
        return tuple(copied)
    wanted = spec.targets if spec.targets is not None else ([] if spec.target_parameters else None)
    head = peft.get_output_embeddings()  # PEFT excludes it from "all linear layers"
    left = [
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and not any(part in name for part in (".lora_", ".base_layer", ".modules_to_save", ".original_module"))
        and (wanted is None or any(name == t or name.endswith(f".{t}") for t in wanted))
    ]
    if not left:
        return tuple(copied)
    targets = "every linear layer" if wanted is None else ", ".join(wanted)
    return (
        f"adapters: for {targets}, PEFT adapts the fused experts instead ({', '.join(places)}) and skips {len(left)} "
        f"linear layers, first {left[0]}; name the layers in adapter.targets and the parameters in "
        "adapter.target_parameters",
        *copied,
    )


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model is a PEFT model."""
    return hasattr(model, "peft_config")
