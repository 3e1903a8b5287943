"""The model: from a hub name, a folder, or a config; as a language model or a sequence classifier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allranks.errors import DataError, EnvironmentNotAble, SpecError
from allranks.spec.records import ModelSpec
from allranks.train.data.tokenizer import first_line
from allranks.train.loading.filler import Filler
from allranks.train.loading.opening import open_config, open_files
from allranks.train.moe import keep_routers_in_float32
from allranks.train.tiny import ENCODERS, check_folder, family, tiny_config
from allranks.train.world import ALONE, World

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
            local_name(model),
            revision=model.revision,
        )
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentNotAble(
            f"model.name {model.name}: is no local folder, and the hub could not give it: {first_line(error)}; check the name, "
            "set HF_TOKEN for a gated model, or give a local folder"
        ) from None


def build_model(spec: ModelSpec, tokenizer: Any, *, dtype: str, labels: dict[str, int], seed: int) -> nn.Module:
    """The model with its weights, in `dtype`, on the CPU, for this process alone. Built from a config, every process draws
    the same weights.

    Args:
        labels: class numbers by label value; empty for a language model.

    Raises:
        SpecError, DataError, EnvironmentNotAble: as `load_model`.
    """
    model, filler = load_model(ALONE, spec, tokenizer, dtype=dtype, labels=labels, seed=seed)
    filler.begin(model, model, in_parts=False)
    filler.whole(model.named_parameters())
    filler.finish()
    return model


def load_model(
    world: World,
    spec: ModelSpec,
    tokenizer: Any,
    *,
    dtype: str,
    labels: dict[str, int],
    seed: int,
    built: Callable[[Any], None] = lambda model: None,
) -> tuple[nn.Module, Filler]:
    """The model in its shapes, and what will give it its weights, equal to those of `build_model`. Every rank calls.

    Args:
        built: called on rank 0 with the whole model, if it is built from a config.

    Raises:
        SpecError: files and config do not fit each other, or the weights are pickles; on every rank.
        DataError: the tokenizer has more tokens than the model.
        EnvironmentNotAble: files are missing, cut off or damaged.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    tiny = spec.name.startswith("tiny:")
    settings = {k: v for k, v in spec.config.items() if k != "vocab_size"}

    def make() -> Any:
        if tiny:
            config = tiny_config(spec.name, settings, tokenizer, len(labels))
            _name_labels(config, labels)
        else:
            heads = {"num_labels": len(labels), "id2label": _id2label(labels), "label2id": dict(labels)}
            config = AutoConfig.from_pretrained(local_name(spec), revision=spec.revision, **(heads if labels else {}))
        torch.manual_seed(seed)
        try:
            return _prepared(
                kind.from_config(config, dtype=DTYPES[dtype], attn_implementation=spec.attention), spec, tokenizer
            )
        except (OSError, ValueError, ImportError) as error:
            raise EnvironmentNotAble(f"model.name {spec.name}: cannot be built: {first_line(error)}") from None

    if tiny:
        return open_config(world, make, built)
    return open_files(world, spec, make, dtype=DTYPES[dtype], classifier=bool(labels), seed=seed)


def _prepared(model: Any, spec: ModelSpec, tokenizer: Any) -> Any:
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


def local_name(spec: ModelSpec) -> str:
    """A folder's path without ``~``; a hub name as it is."""
    folder = Path(spec.name).expanduser()
    return str(folder) if folder.is_dir() else spec.name


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
