"""Check a spec against its model's files before anything is started: task, positions, tokenizer, attention, adapter
targets.

Only files on this machine are read, without torch. What they do not show is checked on the ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from allranks.errors import AllranksError, SpecError
from allranks.planning.memory.model_config import ModelFiles, find_config, find_files
from allranks.planning.memory.weights import quantize_problem, shapes_of
from allranks.rundir.files import read_record
from allranks.spec.data_columns import TEMPLATE_KINDS
from allranks.spec.data_templates import require_task_template
from allranks.spec.models import (
    TINY_ENCODERS,
    TYPES,
    architecture_warning,
    fused_parameter,
    is_mlp,
    require_architecture,
    require_parameters,
    require_trainable,
    tested,
    tested_settings,
    tiny_family,
)
from allranks.spec.records import QUANTIZE_NONE, AdapterSpec, RunSpec
from allranks.utils.inputs import FileTooLarge, read_text
from allranks.utils.safetensors_files import INDEX, SINGLE, read_header, stored_tensors
from allranks.utils.text import did_you_mean

MAX_TOKENIZER_BYTES = 64 << 20
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "merges.txt", "tekken.json")

POSITION_KEYS = ("max_position_embeddings", "n_positions")
OLD_NAMES = ("gate_proj", "up_proj", "down_proj")
"""Targets that PEFT may apply to fused experts itself."""


def check_model(spec: RunSpec) -> bool | None:
    """Check a spec against the files of its model, if they are on this machine.

    Returns:
        Whether the model is trained as a classifier; None if that is unknown.

    Raises:
        SpecError, DataError: the first contradiction, with the key and the limit.
    """
    if spec.model is None or spec.data is None or is_mlp(spec.model.name):
        return None
    files = find_files(spec)
    if files is None:
        return None
    stored = stored_weights(spec.model.name, files.folder) if files.folder is not None else None
    classifier = is_classifier(files)
    if classifier is not None and spec.data.template in TEMPLATE_KINDS:
        require_task_template(spec.data.template, spec.model.name, classifier=classifier)
    limit = max_positions(files.config)
    if limit is not None and spec.data.max_length > limit and has_absolute_positions(files.config):
        raise SpecError(
            f"data.max_length is {spec.data.max_length}, but {files.where} has {limit} positions: a longer sequence "
            f"cannot be computed; set data.max_length: {limit} or less"
        )
    require_attention(files.config.get("model_type"), spec.model.implementation, files.where)
    require_architecture(files.config, spec, files.where, classifier=classifier is True)
    known = find_config(spec).config
    require_vocabulary(files)
    if known is not None and spec.model.quantize != QUANTIZE_NONE and (why := quantize_problem(known)):
        raise SpecError(f"model.quantize {spec.model.quantize} does not suit {files.where}: {why}; set it to none")
    if known is not None and spec.model.float8 and (why := quantize_problem(known)):
        raise SpecError(f"model.float8 does not suit {files.where}: {why}; set it to false")
    if spec.adapter.type == "lora":
        shapes = {w.name: len(w.shape) for w in shapes_of(known).weights()} if known is not None else {}
        if known is not None:
            require_parameters(spec.adapter, shapes, files.where)
        modules = module_names(shapes if stored is None else stored)
        require_targets(spec.adapter, modules, files.where, shapes, classifier=classifier)
    return classifier


def trains_classifier(spec: RunSpec) -> bool | None:
    """Check the model, and return whether it is trained as a classifier; None if its config is not on this machine.

    Raises:
        SpecError: the model does not suit the spec.
    """
    classifier = check_model(spec)
    if spec.model is not None and spec.model.name.startswith("tiny:"):
        return tiny_family(spec.model.name) in TINY_ENCODERS
    return classifier


def model_warnings(spec: RunSpec) -> list[str]:
    """Return warnings on a model with a local config: untested architecture, sequences longer than it was made for."""
    files = find_files(spec) if spec.data is not None else None
    if spec.data is None or files is None:
        return []
    untested = architecture_warning(files.config.get("model_type"), files.where)
    warnings = [untested] if untested else []
    limit = max_positions(files.config)
    if limit is not None and spec.data.max_length > limit and not has_absolute_positions(files.config):
        warnings.append(
            f"data.max_length is {spec.data.max_length}, but {files.where} was made for {limit} positions; is its "
            "rotary embedding scaled for more?"
        )
    return warnings


def is_classifier(files: ModelFiles) -> bool | None:
    """Return whether the model is trained as a classifier; None for a model type that is not tested, which the ranks
    look up in transformers.

    Raises:
        SpecError: it is an encoder-decoder, or a model of images or audio.
    """
    require_trainable(files.config, files.where)
    wanted = str((files.config.get("architectures") or [""])[0])
    entry = tested(files.config.get("model_type"))
    if entry is None or files.config.get("is_decoder"):
        return None
    return entry.task == "classification" or "SequenceClassification" in wanted


def has_absolute_positions(config: Mapping[str, Any]) -> bool:
    """Return whether the model looks positions up in a table of fixed length."""
    relative = config.get("position_embedding_type", "absolute") != "absolute"
    return config.get("model_type") in TYPES.absolute_positions and not relative


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens for which the model has positions; None if its config does not say."""
    value = next((config[key] for key in POSITION_KEYS if config.get(key) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return None
    if config.get("model_type") in TYPES.offset_positions:
        pad = config.get("pad_token_id")
        return max(1, value - 1 - (pad if isinstance(pad, int) else 1))
    return value


def require_vocabulary(files: ModelFiles) -> None:
    """Refuse a tokenizer in the model's folder with an id beyond the vocabulary; `SpecError` names the token."""
    size = files.config.get("vocab_size")
    if files.folder is None or not isinstance(size, int):
        return
    token, number = highest_token(files.folder)
    if number is not None and number >= size:
        raise SpecError(
            f"{files.where}: its tokenizer has the token {token!r} with the id {number}, but the model's vocabulary "
            f"ends at {size - 1} (vocab_size in config.json): the tokenizer is another model's, or tokens were added "
            "without resizing the embedding"
        )


def highest_token(folder: Path) -> tuple[str, int | None]:
    """Return the token with the highest id and this id; None where the tokenizer's files do not show it."""
    try:
        file = folder / "tokenizer.json"
        if not file.is_file():
            return "", None
        content = json.loads(read_text(file, MAX_TOKENIZER_BYTES))
        vocab = content["model"].get("vocab", {})
        tokens = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
        tokens.update((entry["content"], entry["id"]) for entry in content.get("added_tokens", []))
        return max(tokens.items(), key=lambda item: item[1], default=("", None))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, FileTooLarge):
        return "", None  # transformers reports what is wrong with it


def stored_weights(name: str, folder: Path) -> Collection[str]:
    """Return the names of the weights in a model's folder; none for a folder with only a config, which can be planned.

    Raises:
        SpecError, EnvironmentNotAble: a folder that ``model.name`` names has damaged weights or no tokenizer. What is
            wrong in the cache is reported by the ranks.
    """
    if not Path(name).expanduser().is_dir():
        with suppress(AllranksError, KeyError, AttributeError):
            index = folder / INDEX
            return read_record(index)["weight_map"].keys() if index.is_file() else read_header(folder / SINGLE)
        return ()
    if not any(folder.glob("*.safetensors*")):
        return ()
    stored = stored_tensors(folder, name)
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise SpecError(
            f"model.name {name}: this folder has weights but no tokenizer (tokenizer.json, tokenizer.model or "
            "vocab.*); copy the tokenizer's files of the same model into it"
        )
    return stored


def require_attention(model_type: Any, wanted: str, where: str) -> None:
    """Refuse ``sdpa`` for a tested model type without it in transformers; `SpecError` names what it has."""
    entry = tested(model_type)
    if wanted == "sdpa" and entry is not None and entry.attention == "eager":
        raise SpecError(
            f"model.attention sdpa: {where} ({model_type}) does not have it in transformers; set model.attention: "
            f"eager{tested_settings(model_type)}"
        )


def module_names(weights: Iterable[str]) -> frozenset[str]:
    """Return the full names of the modules that hold these weights."""
    names: set[str] = set()
    for weight in weights:
        parts = weight.split(".")[:-1]
        names.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    return frozenset(names)


def require_targets(
    adapter: AdapterSpec,
    modules: Collection[str],
    where: str,
    dimensions: Mapping[str, int] = MappingProxyType({}),
    *,
    classifier: bool | None,
) -> None:
    """Check that each target of the adapter is a module of the model. PEFT ignores one that is not, if another one is.

    transformers may rename modules of the files and fuse experts; so only a name that resembles nothing in a mixture of
    experts passes here, and is checked on the ranks.

    Args:
        dimensions: how many dimensions the model's parameters have, if known.

    Raises:
        SpecError: names the target, and the nearest name.
    """
    if not modules:
        return
    fused = any(re.search(r"\.experts?\.", name) for name in modules)
    inner = {name.rpartition(".")[0] for name in modules}
    last = sorted({name.rsplit(".", 1)[-1] for name in modules if name not in inner and "norm" not in name})
    heads = {"lm_head"} if classifier is False else {"lm_head", "classifier", "score", "pre_classifier"}
    wanted = [("adapter.targets", target) for target in adapter.targets or ()]
    wanted += [("adapter.modules_to_save", name) for name in adapter.modules_to_save if name not in heads]
    for key, target in wanted:
        if any(name == target or name.endswith(f".{target}") for name in modules):
            continue
        hint = fused_parameter(target, dimensions) if target not in OLD_NAMES else ""
        hint = hint or did_you_mean(target.rsplit(".", 1)[-1], last)
        if fused and not hint:
            continue
        hint = "; null adapts every linear layer" if target == "all-linear" else hint
        raise SpecError(f"{key}: {where} has no module {target!r}{hint} (its modules are named {', '.join(last)})")
