"""From a spec's model to one whose weights are on their way."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from allranks.errors import AllranksError, EnvironmentNotAble, SpecError
from allranks.spec.records import ModelSpec
from allranks.train.data.tokenizer import first_line
from allranks.train.loading.files import PATTERNS, Stored, stored_tensors
from allranks.train.loading.filler import READER, Filler, reader_does
from allranks.train.loading.recipes import Recipes, dtypes_of, recipes_for
from allranks.train.loading.skeleton import from_meta, make_hollow
from allranks.train.loading.source import FileSource, ModelSource, fingerprint
from allranks.train.world import World

NEW_HEADS = {"classifier", "score", "pooler", "pre_classifier", "out_proj"}  # of a model that is to learn to classify
Make = Callable[[], Any]


@dataclass(frozen=True)
class Opened:
    """What a rank knows of a model's files before their weights are read."""

    skeleton: Any
    stored: dict[str, Stored]
    recipes: Recipes

    def source(self) -> FileSource:
        """To read them."""
        return FileSource(self.stored, self.recipes, self.skeleton)


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
    world: World, spec: ModelSpec, make: Make, *, dtype: torch.dtype, classifier: bool, replicated: bool, seed: int
) -> tuple[Any, Filler]:
    """A model whose weights lie in a folder or on the hub. Rank 0 reads them; the others need no more than its config.

    Where every rank is to hold all weights in a CPU's memory, and sees the same files, each maps them: what is not changed
    is there once a node.

    Raises:
        SpecError, EnvironmentNotAble: on every rank; names the file and the tensor.
    """
    mine: list[Opened] = []

    def check() -> tuple[list[str], bytes]:
        mine.append(_opened(spec, make, dtype, classifier=classifier))
        return sorted(mine[0].recipes.by_name), fingerprint(mine[0].stored)

    given, files = reader_does(world, check)
    mapped = replicated and world.device.type == "cpu" and _all_see(world, spec, files, check, mine)
    opened = mine[0] if mine and (mapped or world.rank == READER) else None
    skeleton = opened.skeleton if opened else _on_meta(make)
    torch.manual_seed(seed)  # a new head is drawn
    from_meta(skeleton, given, dtypes_of(skeleton, dtype), world.device)
    source = opened.source() if opened else None
    if source is not None and world.rank == READER:
        for name, buffer in skeleton.named_buffers():
            if name in opened.recipes.by_name:  # type: ignore[union-attr]
                buffer.copy_(source.take(name))
    _same_buffers(world, skeleton)
    if skeleton.can_generate():
        from transformers import GenerationConfig

        with suppress(OSError):
            skeleton.generation_config = GenerationConfig.from_pretrained(spec.name, revision=spec.revision)
    return skeleton, Filler(world, source, mapped=mapped)


def _on_meta(make: Make) -> Any:
    with torch.device("meta"):
        return make()


def _opened(spec: ModelSpec, make: Make, dtype: torch.dtype, *, classifier: bool) -> Opened:
    stored = stored_tensors(folder_of(spec), spec.name)
    skeleton = _on_meta(make)
    recipes = recipes_for(skeleton, stored, dtype, spec.name)
    require_complete(skeleton, recipes, stored, spec.name, classifier=classifier)
    return Opened(skeleton, stored, recipes)


def _all_see(
    world: World, spec: ModelSpec, files: bytes, check: Callable[[], tuple[list[str], bytes]], mine: list[Opened]
) -> bool:
    """Whether every rank sees files like rank 0's."""
    same = world.rank == READER
    if not same and Path(spec.name).expanduser().is_dir():
        with suppress(AllranksError):
            same = check()[1] == files
    word = torch.tensor(int(same))
    if world.size > 1:
        dist.all_reduce(word, op=dist.ReduceOp.MIN, group=world.control)
    return bool(word)


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


def require_complete(
    skeleton: Any, recipes: Recipes, stored: dict[str, Stored], name: str, *, classifier: bool
) -> None:
    """Every weight must come from a file; but for tied ones, and the head of a model that is to learn to classify.

    Raises:
        SpecError: names the weight that none gives, or two that are tied in the config and differ in the files.
    """
    places: dict[int, list[str]] = {}
    for place, tensor in skeleton.state_dict(keep_vars=True).items():
        places.setdefault(id(tensor), []).append(place)
    shared = {place: group for group in places.values() for place in group}
    drawn = "|".join(skeleton._keys_to_ignore_on_load_missing or ())
    lost = [
        n
        for n in sorted(recipes.missing)
        if not any(other in recipes.by_name for other in shared[n])
        and not (drawn and re.search(drawn, n))
        and not (classifier and NEW_HEADS & set(n.split(".")))
    ]
    if lost:
        folder = next(iter(stored.values())).file.parent if stored else name
        more = f" and {len(lost) - 1} more of the model's weights" if len(lost) > 1 else ""
        raise SpecError(
            f"model.name {name}: no file in {folder} gives {lost[0]}{more}: files and config.json are not of one model"
        )
    for group in places.values():
        both = [n for n in group if n in recipes.by_name]
        if len(both) > 1:
            _require_equal(both, recipes, stored, skeleton, name)


def _require_equal(names: list[str], recipes: Recipes, stored: dict[str, Stored], skeleton: Any, name: str) -> None:
    source = FileSource(stored, recipes, skeleton)
    first, *others = (source.take(n) for n in names)
    for other, tensor in zip(names[1:], others, strict=True):
        if not torch.equal(first, tensor):
            raise SpecError(
                f"model.name {name}: the config ties {names[0]} and {other}, but the files hold different weights for them: "
                "set tie_word_embeddings: false in its config.json"
            )
