"""From a spec's model to one whose weights are on their way."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.spec.records import ModelSpec
from allranks.train.data.tokenizer import first_line
from allranks.train.loading.files import PATTERNS, stored_tensors
from allranks.train.loading.filler import Filler
from allranks.train.loading.reader import READER, reader_does
from allranks.train.loading.recipes import dtypes_of, recipes_for, remember_rules
from allranks.train.loading.skeleton import from_meta, make_hollow
from allranks.train.loading.source import FileSource, ModelSource
from allranks.train.world import World

NEW_HEADS = {"classifier", "score", "pooler", "pre_classifier", "out_proj"}  # of a model that is to learn to classify
Make = Callable[[], Any]


def open_config(world: World, make: Make, built: Callable[[Any], None]) -> tuple[Any, Filler]:
    """A model built from a config. Rank 0 draws its weights and lets them go one by one, the others draw nothing.

    Args:
        make: builds it, with its weights.
        built: called on rank 0 with the whole model.
    """
    if world.rank == READER:
        model = make()
        built(model)
        source = ModelSource(model)
        make_hollow(model, world.device)
    else:
        source, model = None, _on_meta(make)
        from_meta(model, [n for n, _ in model.named_parameters()], {}, world.device)
    _same_buffers(world, model)
    return model, Filler(world, source)


def open_files(
    world: World, spec: ModelSpec, make: Make, *, dtype: torch.dtype, classifier: bool, seed: int
) -> tuple[Any, Filler]:
    """A model whose weights lie in a folder or on the hub. Rank 0 reads them; the others need no more than its config.

    Raises:
        SpecError, EnvironmentNotAble: on every rank; names the file and the tensor.
    """
    opened: list[FileSource] = []  # on the reader alone

    def check() -> tuple[list[str], list[int]]:
        opened.append(_opened(spec, make, dtype, classifier=classifier))
        return opened[0].names, opened[0].rules_used

    given, rules = reader_does(world, check)
    source = opened[0] if opened else None
    model = source.model if source else _on_meta(make)
    remember_rules(model, rules)
    torch.manual_seed(seed)  # a new head is drawn
    from_meta(model, given, dtypes_of(model, dtype), world.device)
    if source:
        for name, buffer in model.named_buffers():
            if name in given:
                buffer.copy_(source.take(name))
    _same_buffers(world, model)
    if model.can_generate():
        from transformers import GenerationConfig

        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(spec.name, revision=spec.revision or "main")
    return model, Filler(world, source)


def _on_meta(make: Make) -> Any:
    with torch.device("meta"):
        return make()


def _opened(spec: ModelSpec, make: Make, dtype: torch.dtype, *, classifier: bool) -> FileSource:
    stored = stored_tensors(folder_of(spec), spec.name)
    model = _on_meta(make)
    source = FileSource(stored, recipes_for(model, stored, dtype, spec.name), model)
    require_complete(source, spec.name, classifier=classifier)
    return source


def _same_buffers(world: World, model: Any) -> None:
    if world.size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=READER, group=world.control)


def folder_of(spec: ModelSpec) -> Path:
    """Where a model's files lie; fetched from the hub first, if it is not local: its safetensors, nothing else.

    Raises:
        EnvironmentNotAble: the hub does not give them.
    """
    local = Path(spec.name).expanduser()
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(spec.name, revision=spec.revision, allow_patterns=["config.json", *PATTERNS]))
    except (OSError, ValueError) as error:
        raise EnvironmentNotAble(
            f"model.name {spec.name}: the hub did not give its files: {first_line(error)}"
        ) from None


def require_complete(source: FileSource, name: str, *, classifier: bool) -> None:
    """Every weight must come from a file; but for tied ones, and the head of a model that is to learn to classify.

    Raises:
        SpecError: names the weight that none gives, or two that are tied in the config and differ in the files.
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
            f"model.name {name}: no file in {source.folder} gives {lost[0]}{more}: files and config.json are not of one model"
        )
    for group in places.values():
        _require_equal(source, [n for n in group if n in given], name)


def _require_equal(source: FileSource, tied: list[str], name: str) -> None:
    if len(tied) < 2:
        return
    first, *others = (source.take(n) for n in tied)
    for other, tensor in zip(tied[1:], others, strict=True):
        if not torch.equal(first, tensor):
            raise SpecError(
                f"model.name {name}: the config ties {tied[0]} and {other}, but the files in {source.folder} hold different weights "
                "for them: set tie_word_embeddings: false in its config.json"
            )
