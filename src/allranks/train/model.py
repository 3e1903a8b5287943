"""The model: from a hub name, a folder, or a config; as a language model or a sequence classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from allranks.errors import DataError, EnvironmentNotAble, SpecError
from allranks.spec.records import ModelSpec
from allranks.train.data.tokenizer import first_line
from allranks.train.moe import keep_routers_in_float32, routers_read_in_float32
from allranks.train.tiny import ENCODERS, check_folder, family, tiny_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def is_classifier(model: ModelSpec) -> bool:
    """True where the model is an encoder, which classifies; False where it is a language model.

    Raises:
        SpecError, EnvironmentNotAble: no such model, or it cannot be had.
    """
    if model.name.startswith("tiny:"):
        return family(model.name) in ENCODERS
    config = _hub_config(model)
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    wanted = (getattr(config, "architectures", None) or [""])[0]
    if "SequenceClassification" in wanted or "MaskedLM" in wanted or "ForPreTraining" in wanted:
        return True
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return False
    if config.model_type in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return True
    raise SpecError(
        f"model.name {model.name}: a {config.model_type} is neither a causal language model nor a sequence classifier"
    )


def _hub_config(model: ModelSpec) -> Any:
    from transformers import AutoConfig

    check_folder(model.name)
    try:
        return AutoConfig.from_pretrained(
            str(Path(model.name).expanduser()) if Path(model.name).expanduser().is_dir() else model.name,
            revision=model.revision,
        )
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentNotAble(
            f"model.name {model.name}: is no local folder, and the hub could not give it: {first_line(error)}; check the name, "
            "set HF_TOKEN for a gated model, or give a local folder"
        ) from None


def build_model(spec: ModelSpec, tokenizer: Any, *, dtype: str, labels: dict[str, int], seed: int) -> nn.Module:
    """The model with its weights, in `dtype`, on the CPU. Built from a config, every rank draws the same weights.

    Args:
        labels: class numbers by label value; empty for a language model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    if spec.name.startswith("tiny:"):
        config = tiny_config(
            spec.name, {k: v for k, v in spec.config.items() if k != "vocab_size"}, tokenizer, len(labels)
        )
        _name_labels(config, labels)
        torch.manual_seed(seed)
        model: Any = kind.from_config(config, dtype=DTYPES[dtype], attn_implementation=spec.attention)
    else:
        extra: dict[str, Any] = (
            {"num_labels": len(labels), "id2label": _id2label(labels), "label2id": dict(labels)} if labels else {}
        )
        try:
            torch.manual_seed(seed)  # a new classification head is drawn
            with routers_read_in_float32(kind._model_mapping.get(type(_hub_config(spec)), None)):
                model = kind.from_pretrained(
                    spec.name, revision=spec.revision, dtype=DTYPES[dtype], attn_implementation=spec.attention, **extra
                )
        except (OSError, ValueError, ImportError) as error:
            raise EnvironmentNotAble(f"model.name {spec.name}: cannot be loaded: {first_line(error)}") from None
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            raise DataError(
                f"model.name {spec.name}: the tokenizer has {len(tokenizer)} tokens, the model only {model.get_input_embeddings().weight.shape[0]}"
            )
    keep_routers_in_float32(model)
    model.config.use_cache = False
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    if spec.gradient_checkpointing:
        # Non-reentrant: the reentrant form fires DDP's hooks twice for LoRA weights ("marked ready twice").
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable()  # transformers 5.23 and later; non-reentrant by default
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _id2label(labels: dict[str, int]) -> dict[int, str]:
    return {number: value for value, number in labels.items()}


def _name_labels(config: Any, labels: dict[str, int]) -> None:
    if labels:
        config.id2label = _id2label(labels)
        config.label2id = dict(labels)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(all, trained) parameters."""
    everything = list(model.parameters())
    return sum(p.numel() for p in everything), sum(p.numel() for p in everything if p.requires_grad)
