"""Build a language model or classifier from a hub name, a folder or a config, and start to load its weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import DataError, EnvironmentNotAble, SpecError
from allranks.spec.models import (
    TINY_ENCODERS,
    TaskTypes,
    check_model_folder,
    model_task,
    require_architecture,
    tiny_defaults,
    tiny_family,
)
from allranks.spec.records import ModelSpec, RunSpec
from allranks.train.data.tokenization import first_line, load_config
from allranks.train.distributed import DistContext
from allranks.train.models.moe import keep_routers_in_float32
from allranks.train.models.precision import DTYPES
from allranks.train.models.weight_loader import READER, WeightLoader, from_meta, run_on_reader, unmaterialize
from allranks.train.models.weight_sources import (
    DirectReads,
    FileSource,
    ModelSource,
    WeightFiles,
    agree,
    describe,
    dtypes_of,
    remember_rules,
)
from allranks.train.patches import import_no_deepspeed_to_save
from allranks.utils.safetensors_files import PATTERNS, stored_tensors
from allranks.utils.text import did_you_mean

NEW_HEADS = {"classifier", "score", "pooler", "pre_classifier", "out_proj"}  # newly initialized modules of a classifier
Make = Callable[[], Any]


def open_config(world: DistContext, make: Make, built: Callable[[Any], None]) -> tuple[Any, WeightLoader]:
    """Build a model from a config. Only rank 0 initializes the weights, and frees each one after it is sent.

    Args:
        make: builds the model with its weights.
        built: called on rank 0 with the full model.
    """
    if world.rank == READER:
        model = make()
        import_no_deepspeed_to_save()
        built(model)
        source = ModelSource(model)
        unmaterialize(model, world.device)
    else:
        source, model = None, _on_meta(make)
        from_meta(model, [n for n, _ in model.named_parameters()], {}, world.device)
    _same_buffers(world, model)
    return model, WeightLoader(world, source)


def open_files(
    world: DistContext, spec: ModelSpec, make: Make, *, dtype: torch.dtype, classifier: bool, seed: int
) -> tuple[Any, WeightLoader]:
    """Open a model whose weights are in a folder or on the hub.

    Rank 0 checks the files. If the other ranks see the same files, each rank reads its own part; otherwise they need
    only the config.

    Raises:
        SpecError, EnvironmentNotAble: on every rank; names the file and the tensor.
    """
    opened: list[FileSource] = []  # only on the rank that reads

    def check() -> tuple[list[str], list[int], WeightFiles | None]:
        stored = stored_tensors(folder_of(spec), spec.name)
        opened.append(FileSource(_on_meta(make), stored, dtype, spec.name))
        require_complete(opened[0], spec.name, classifier=classifier)
        return opened[0].names, opened[0].rules_used, describe(opened[0]) if world.size > 1 else None

    given, rules, files = run_on_reader(world, check)
    source = opened[0] if opened else None
    model = source.model if source else _on_meta(make)
    remember_rules(model, rules)
    torch.manual_seed(seed)  # for a newly initialized head
    dtypes = dtypes_of(model, dtype)
    from_meta(model, given, dtypes, world.device)
    if source:
        for name, buffer in model.named_buffers():
            if name in given:
                buffer.copy_(source.take(name))
    _same_buffers(world, model)
    if model.can_generate():
        from transformers import GenerationConfig

        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(spec.name, revision=spec.revision or "main")
    # weights of a classifier's head that no file holds, so that they are drawn from the seed
    drawn = tuple(sorted(n for n in model.state_dict() if n not in given and NEW_HEADS & set(n.split("."))))
    drawn = drawn if classifier else ()
    if files is None:
        return model, WeightLoader(world, source, drawn=drawn)
    differ, first_node = agree(world, files)
    direct = None if differ else DirectReads(files, dtypes)
    return model, WeightLoader(world, source, drawn=drawn, direct=direct, why_not_direct=differ, first_node=first_node)


def _on_meta(make: Make) -> Any:
    with torch.device("meta"):
        return make()


def _same_buffers(world: DistContext, model: Any) -> None:
    if world.size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=READER, group=world.control)


def folder_of(spec: ModelSpec) -> Path:
    """Return the folder of a model's files. For a hub name, download config and safetensors files first.

    Raises:
        EnvironmentNotAble: the download failed.
    """
    local = Path(spec.name).expanduser()
    if local.is_dir():
        return local.absolute()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(spec.name, revision=spec.revision, allow_patterns=["config.json", *PATTERNS]))
    except (OSError, ValueError) as error:
        raise EnvironmentNotAble(
            f"model.name {spec.name}: its files could not be downloaded from the hub: {first_line(error)}"
        ) from None


def require_complete(source: FileSource, name: str, *, classifier: bool) -> None:
    """Check that the files hold every weight, except tied ones and the new head of a classifier.

    Raises:
        SpecError: names a missing weight, or two that are tied in the config but differ in the files.
    """
    model, given = source.model, set(source.names)
    places: dict[int, list[str]] = {}
    for place, tensor in model.state_dict(keep_vars=True).items():
        places.setdefault(id(tensor), []).append(place)
    drawn = "|".join(model._keys_to_ignore_on_load_missing or ())

    def may_be_drawn(place: str) -> bool:
        return bool(drawn and re.search(drawn, place)) or (classifier and bool(NEW_HEADS & set(place.split("."))))

    lost = sorted(n for group in places.values() if not given & set(group) for n in group if not may_be_drawn(n))
    if lost:
        more = f" and {len(lost) - 1} more of the model's weights" if len(lost) > 1 else ""
        raise SpecError(
            f"model.name {name}: no file in {source.folder} has {lost[0]}{more}: config.json does not match the weight "
            "files"
        )
    for group in places.values():
        tied = [n for n in group if n in given]
        first = source.take(tied[0]) if len(tied) > 1 else None
        for other in tied[1:]:
            if not torch.equal(first, source.take(other)):  # type: ignore[arg-type]
                raise SpecError(
                    f"model.name {name}: the config ties {tied[0]} and {other}, but the files in {source.folder} hold "
                    "different weights for them: set tie_word_embeddings: false in its config.json"
                )


def tiny_config(name: str, overrides: dict[str, Any], tokenizer: Any, labels: int) -> Any:
    """Return the config of a tiny model, with its tokenizer's vocabulary, or the larger one that the spec names.

    Raises:
        SpecError: the config of this model type has no such setting.
    """
    from transformers import AutoConfig

    model_type, values = tiny_family(name), tiny_defaults(name)
    plain = AutoConfig.for_model(model_type)
    for key in overrides:
        if key not in values and not hasattr(plain, key):  # some settings are not fields of the class, but are used
            known = [*values, *(k for k in vars(plain) if not k.startswith("_"))]
            raise SpecError(f"model.config.{key}: {model_type} has no such setting{did_you_mean(key, known)}")
    values = {**values, **overrides}
    # few texts may not give that many tokens
    values["vocab_size"] = max(len(tokenizer), overrides.get("vocab_size", 0))
    if labels:
        values["num_labels"] = labels
    try:
        return AutoConfig.for_model(
            model_type,
            **values,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    except (TypeError, ValueError) as error:
        raise SpecError(f"model.config: {model_type} rejects these values: {str(error).splitlines()[0]}") from None


def is_classifier(spec: RunSpec) -> bool:
    """Return True for an encoder, which is trained as a classifier, and False for a language model.

    Raises:
        SpecError, EnvironmentNotAble: the model does not exist, cannot be loaded, or does not suit the spec.
    """
    model = spec.model
    assert model is not None
    if model.name.startswith("tiny:"):
        return tiny_family(model.name) in TINY_ENCODERS
    check_model_folder(model.name)
    config = load_config(model.name, model.revision).to_dict()
    from transformers.models.auto import modeling_auto

    types = TaskTypes(
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )
    where = f"model {model.name}"
    classifier = model_task(config, types, where) == "classification"
    require_architecture(config, spec, where, classifier=classifier)  # the launcher may not have had the config
    return classifier


def load_model(
    world: DistContext,
    spec: ModelSpec,
    tokenizer: Any,
    *,
    dtype: str,
    labels: dict[str, int],
    seed: int,
    built: Callable[[Any], None] = lambda model: None,
) -> tuple[nn.Module, WeightLoader]:
    """Return the model without weights, and the loader of its weights. Collective.

    Args:
        built: called on rank 0 with the full model, if it is built from a config.

    Raises:
        SpecError: files and config do not match, or the weights are pickles; on every rank.
        DataError: the tokenizer has more tokens than the model.
        EnvironmentNotAble: files are missing, truncated or damaged.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    tiny = spec.name.startswith("tiny:")

    def make() -> Any:
        if tiny:
            config = tiny_config(spec.name, spec.config, tokenizer, len(labels))
        else:
            config = load_config(spec.name, spec.revision, **({"num_labels": len(labels)} if labels else {}))
        if labels:
            config.id2label, config.label2id = {n: value for value, n in labels.items()}, dict(labels)
        torch.manual_seed(seed)
        try:
            return _configured(
                kind.from_config(config, dtype=DTYPES[dtype], attn_implementation=spec.implementation), spec, tokenizer
            )
        except (OSError, ValueError, ImportError) as error:
            raise EnvironmentNotAble(f"model.name {spec.name}: cannot be built: {first_line(error)}") from None

    if tiny:
        return open_config(world, make, built)
    return open_files(world, spec, make, dtype=DTYPES[dtype], classifier=bool(labels), seed=seed)


def _configured(model: Any, spec: ModelSpec, tokenizer: Any) -> Any:
    words = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > words:
        raise DataError(
            f"model.name {spec.name}: the tokenizer has {len(tokenizer)} tokens, but the model only {words}"
        )
    keep_routers_in_float32(model)
    model.config.use_cache = False
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model
