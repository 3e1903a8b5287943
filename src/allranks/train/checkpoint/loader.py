"""Read checkpoints: each rank reads the ranges that it holds, no matter which rank wrote them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from allranks.errors import CheckpointError
from allranks.rundir.files import read_json
from allranks.train import distributed
from allranks.train.checkpoint.writer import ADAPTER_FILE, INDEX_FILE, PublishedFiles, TrainingIdentity, weight_name
from allranks.train.distributed import DistContext
from allranks.train.models.weight_loader import raise_on_all_ranks
from allranks.train.strategies import shards
from allranks.train.strategies.base import Strategy
from allranks.train.strategies.shards import MASTER, TensorShard, allocate_state
from allranks.utils.inputs import read_text


def load_full(folder: Path, strategy: Strategy, published: PublishedFiles, rank: int) -> None:
    """Load weights, optimizer and this rank's random generators from a full checkpoint of any strategy and world size.
    Raise `CheckpointError` if it does not fit this model."""
    state = folder / "state"
    stored = shards.stored_sizes(state)
    weights = strategy.weight_shards()
    inside = [s for s in weights if s.key in stored]
    _load_published(folder, [s for s in weights if s.key not in stored], published)
    keys = [key for key in stored if strategy.keeps_master or not key.endswith(f"/{MASTER}")]
    shards.read_shards([*inside, *allocate_state(strategy.state_ranges(), keys)], state)
    strategy.finish_loading()
    own = state / f"rank{rank}.pt"
    if own.exists():
        distributed.set_rng_state(torch.load(own, weights_only=True))


def load_weights_only(folder: Path, strategy: Strategy, published: PublishedFiles, model: nn.Module) -> None:
    """Load trained weights only; optimizer and generators stay initial. Raise `CheckpointError` if they do not fit."""
    known = {name for part in published.files for name in part}
    wanted = [s for s in strategy.weight_shards() if weight_name(s.key) in known]
    if len(published.keys) < len(known):
        _load_converted(folder, wanted, model)
    else:
        _load_published(folder, wanted, published)
    strategy.finish_loading()


def require_same(world: DistContext, folder: Path, now: TrainingIdentity, *, allow_inexact: bool) -> None:
    """Compare what a checkpoint was trained on with what this attempt has. Every rank calls.

    Raises:
        CheckpointError: on every rank: the number of sequences differs, on which their order depends; or, unless
            `allow_inexact`, their content or the weights of the frozen base.
    """
    progress = read_json(folder / "state" / "progress.json")
    had = progress if isinstance(progress, dict) else {}
    raise_on_all_ranks(world, _difference(folder, had, now, allow_inexact=allow_inexact) if world.is_first else None)


def _difference(
    folder: Path, had: dict[str, Any], now: TrainingIdentity, *, allow_inexact: bool
) -> CheckpointError | None:
    if isinstance(had.get("sequences"), int) and had["sequences"] != now.sequences:
        return CheckpointError(
            f"{folder}: the checkpoint was written with {had['sequences']} training sequences, now there are "
            f"{now.sequences}, so the order of the data would change; use the same data, or start a new run from these "
            "weights"
        )
    data, base = "the training data (its rows, the template or the tokenizer)", "the weights of the base model"
    changed = []
    for key, what in (("data_hash", data), ("base_hash", base)):
        before, after = had.get(key), getattr(now, key)
        if before and after and before != after:
            changed.append(f"{what} changed ({before[:12]} then, {after[:12]} now)")
    if not changed or allow_inexact:
        return None
    return CheckpointError(
        f"{folder}: since it was written, {' and '.join(changed)}, so a resume would not be exact; "
        "give what it was written with, or use --allow-inexact"
    )


def _load_published(folder: Path, wanted: Sequence[TensorShard], published: PublishedFiles) -> None:
    """Load ranges of weights from the published files, one tensor in memory at a time."""
    places = _file_of_each_key(folder)
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        for shard in wanted:
            name = weight_name(shard.key)
            key = published.keys.get(name)
            if key is None or key not in places:
                raise CheckpointError(f"{folder}: does not fit this model: it has no {name}")
            file = places[key]
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(folder / file, framework="pt"))
            _fill(shard, opened[file].get_tensor(key), folder / file, key)


def _fill(shard: TensorShard, whole: torch.Tensor, file: Path, key: str) -> None:
    if whole.numel() != shard.numel:
        raise CheckpointError(
            f"{file}: does not fit this model: {key} has {whole.numel()} elements, expected {shard.numel}"
        )
    shard.tensor.copy_(whole.view(-1)[shard.offset : shard.offset + shard.tensor.numel()])


def _file_of_each_key(folder: Path) -> dict[str, str]:
    """Return the file that holds each key."""
    if (folder / INDEX_FILE).exists():
        return json.loads(read_text(folder / INDEX_FILE))["weight_map"]
    name = ADAPTER_FILE if (folder / ADAPTER_FILE).exists() else "model.safetensors"
    try:
        with safe_open(folder / name, framework="pt") as file:
            return dict.fromkeys(file.keys(), name)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder / name}: cannot be read: {error}") from None


def _load_converted(folder: Path, wanted: Sequence[TensorShard], model: Any) -> None:
    """Load weights that transformers stores in another layout: let it load the full model on the CPU."""
    twin = type(model).from_pretrained(str(folder))
    whole = twin.state_dict()
    for shard in wanted:
        name = weight_name(shard.key)
        if name not in whole:
            raise CheckpointError(f"{folder}: does not fit this model: it has no {name}")
        _fill(shard, whole[name], folder, name)
