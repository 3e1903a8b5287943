"""Write the files that other programs read (PEFT's adapter file or a Hugging Face model folder), and this rank's parts
of the state.

Each published file is written by one rank, from its own weights and from parts on disk.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from allranks.errors import CheckpointError
from allranks.train.models.adapters import is_adapted
from allranks.train.models.safetensors_files import content_hash, write_safetensors
from allranks.train.strategies import shards
from allranks.train.strategies.shards import TensorShard

PREFIX = "model."  # prefix of the model inside `LossModel`
ADAPTER_FILE = "adapter_model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SMALL_BYTES = 64 << 20
LARGE_BYTES = 4 << 30


class TrainingIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint was trained on, for an exact resume: the number of training sequences, and SHA-256 of them and
    of a frozen base model as it was loaded ("" if unknown)."""

    sequences: int
    data_hash: str = ""
    base_hash: str = ""


@dataclass(frozen=True)
class PublishedFiles:
    """Layout of the weights in the published files, planned before a strategy shards the model.

    ``files`` are the names of the weights in each file; file ``i`` is written by rank ``i % W``. ``keys`` is the key in
    the file by weight name: weights that transformers stores in another layout (fused experts) have none.
    """

    files: tuple[tuple[str, ...], ...]
    keys: Mapping[str, str]
    whole: Mapping[str, tuple[torch.dtype, torch.Size]]  # dtype and full shape by name
    adapted: bool  # the files are those of an adapter

    @property
    def bytes(self) -> int:
        """Bytes of all weights in the files."""
        return sum(bytes_of(*self.whole[name]) for part in self.files for name in part)

    def file_names(self) -> list[str]:
        """File names, as PEFT and transformers choose them."""
        if self.adapted:
            return [ADAPTER_FILE]
        n = len(self.files)
        return ["model.safetensors"] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]

    def owners(self, world_size: int) -> dict[str, int]:
        """Return the rank that writes each weight."""
        return {name: i % world_size for i, part in enumerate(self.files) for name in part}


def bytes_of(dtype: torch.dtype, shape: torch.Size) -> int:
    """Return the bytes of a tensor."""
    return dtype.itemsize * shape.numel()


def plan_published_files(model: nn.Module, world_size: int) -> PublishedFiles:
    """Plan the files of a model before the strategy's set-up (it may be on the meta device)."""
    if is_adapted(model):
        tensors = model.state_dict()
        keys = _adapter_keys(model, list(tensors))
        whole = {n: (tensors[n].dtype, tensors[n].shape) for n in keys}
        return PublishedFiles((tuple(keys),), keys, whole, adapted=True)
    tensors = _saved_tensors(model)
    whole = {n: (t.dtype, t.shape) for n, t in tensors.items()}
    keys = _unchanged(model, tensors)
    sizes = {n: bytes_of(*w) for n, w in whole.items()}
    count = max(-(-sum(sizes.values()) // LARGE_BYTES), min(world_size, -(-sum(sizes.values()) // SMALL_BYTES)), 1)
    return PublishedFiles(_shared_out(sizes, count), {n: n for n in keys}, whole, adapted=False)


def _adapter_keys(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Return the weights that PEFT saves and their keys, found by letting it choose from numbered tensors."""
    from peft import get_peft_model_state_dict

    numbered = {name: torch.tensor([i]) for i, name in enumerate(names)}
    chosen = get_peft_model_state_dict(model, state_dict=numbered, save_embedding_layers=False)  # type: ignore
    return {names[int(t)]: key for key, t in chosen.items()}


def _saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return each parameter once, even if it has several names, and the persistent buffers."""
    parameters = dict(model.named_parameters())
    everything = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {n: t for n, t in model.state_dict().items() if n not in everything}
    return {**{n: p.detach() for n, p in parameters.items()}, **buffers}


def _unchanged(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the weights that transformers stores under their names and in their layout."""
    from transformers.core_model_loading import revert_weight_conversion

    meta = {n: torch.empty_like(t, device="meta") for n, t in tensors.items()}
    out = revert_weight_conversion(model, dict(meta))
    return [n for n, t in meta.items() if out.get(n) is t]


def _shared_out(sizes: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """Distribute weights in order to `count` files of about equal size; a layer's stay together for conversion."""
    total, done = max(sum(sizes.values()), 1), 0
    files: list[list[str]] = [[] for _ in range(count)]
    home: dict[str, int] = {}
    for name, size in sizes.items():
        layer = re.match(r".*?\.\d+\.", name)
        place = min(done * count // total, count - 1)
        files[home.setdefault(layer.group() if layer else name, place)].append(name)
        done += size
    return tuple(tuple(part) for part in files if part)


MODEL = "model/"


@dataclass(frozen=True)
class RankParts:
    """What this rank writes. A weight's name is the one within the model."""

    owned: Mapping[str, torch.Tensor]  # weights that all ranks hold in full and this rank writes, 1-D
    scattered: tuple[TensorShard, ...]  # parts of published weights that only this rank holds, keyed ``model/<name>``
    state: tuple[TensorShard, ...]  # what a resume needs beside the published weights; empty in mode weights_only
    random: dict[str, Any] | None  # states of this rank's random generators; None in mode weights_only

    @property
    def bytes(self) -> int:
        """Bytes to write. Scattered parts are written twice, once as intermediate files."""
        once = [*self.owned.values(), *(s.tensor for s in self.state)]
        return sum(map(bytes_in, once)) + 2 * sum(bytes_in(s.tensor) for s in self.scattered)


def weight_name(key: str) -> str:
    """Return the name within the model for a shard's key (`Strategy.weight_shards` uses names within the loss)."""
    return key.removeprefix(MODEL).removeprefix(PREFIX)


def bytes_in(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class PartHash(msgspec.Struct, frozen=True):
    """Hash of a range of a flattened weight, in the memory of the rank that holds it. ``key``: ``model/<name>``."""

    key: str
    offset: int
    numel: int
    hash: bytes


def write_files(
    folder: Path,
    parts: RankParts,
    published: PublishedFiles,
    model: Any,
    rank: int,
    world: int,
    held: Sequence[PartHash],
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Write this rank's published files, one after the other: never more than one is put together from parts.

    The folder's ``on-the-way`` has the scattered parts of weights, `held` what the ranks that hold them say of them.
    Raise `CheckpointError` if a weight that was put together from parts differs from these.

    Returns:
        The hash of each file, and the file of each key.
    """
    from transformers.core_model_loading import revert_weight_conversion

    by_key: dict[str, list[PartHash]] = {}
    for part in held:
        by_key.setdefault(part.key, []).append(part)
    hashes: dict[str, bytes] = {}
    places: dict[str, str] = {}
    for i, (file, names) in enumerate(zip(published.file_names(), published.files, strict=True)):
        if i % world != rank:
            continue
        tensors, away = {}, []
        for name in names:
            dtype, shape = published.whole[name]
            if name in parts.owned:
                tensors[name] = parts.owned[name].view(shape)
            else:
                tensors[name] = torch.empty(shape, dtype=dtype)
                away.append(TensorShard(MODEL + name, shape.numel(), 0, tensors[name].view(-1)))
        if away:
            shards.read_shards(away, folder / "on-the-way")
        for whole in away:
            for part in by_key.get(whole.key, ()):
                if content_hash(whole.tensor[part.offset : part.offset + part.numel]) != part.hash:
                    raise CheckpointError(
                        f"{part.key} (elements {part.offset} to {part.offset + part.numel}) differs from the memory of "
                        "the rank that holds it"
                    )
        by_name = {published.keys[n]: t for n, t in tensors.items()} if published.adapted else {}
        out = by_name or dict(revert_weight_conversion(model, tensors))
        hashes[file] = write_safetensors(folder / file, out, {"format": "pt"})
        places |= dict.fromkeys(out, file)
    return hashes, places


def write_index(folder: Path, published: PublishedFiles, places: dict[str, str]) -> None:
    """Write the index that transformers needs to find weights in several files."""
    if published.adapted or len(published.files) == 1:
        return
    total = sum(bytes_of(*w) for w in published.whole.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def read_configs(published: PublishedFiles, model: Any, tokenizer: Any) -> dict[str, bytes]:
    """Return the small files beside the weights by name: the same in each checkpoint of a run, and slow to make."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if published.adapted:  # PEFT writes its weights, too: here one number for each
            numbers = {n: torch.zeros(1) for n in published.keys}
            model.save_pretrained(  # "auto" would ask the hub whether the vocabulary was resized
                str(folder), state_dict=numbers, safe_serialization=True, save_embedding_layers=False
            )
            (folder / ADAPTER_FILE).unlink()
        else:  # as model.save_pretrained does, which imports DeepSpeed to look for its wrapper
            model.config.dtype = str(model.dtype).removeprefix("torch.")
            model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
            model.config.save_pretrained(str(folder))
            if model.can_generate():
                model.generation_config.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
