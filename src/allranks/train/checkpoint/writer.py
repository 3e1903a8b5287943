"""Copy what each rank must write, and write the files that other programs read: PEFT's adapter file or a Hugging Face model folder.

Each published file is written by one rank, from its own weights and from parts on disk.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import nn

from allranks.train.models.adapters import is_adapted
from allranks.train.models.weight_sources import NAME_OF
from allranks.train.strategies import shards
from allranks.train.strategies.base import Strategy
from allranks.train.strategies.shards import TensorShard, share_to_write, state_shards

PREFIX = "model."  # of the model within the loss
ADAPTER_FILE = "adapter_model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SMALL_BYTES = 64 << 20
LARGE_BYTES = 4 << 30


class TrainingIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint was trained on, for an exact resume.

    Attributes:
        sequences: number of training sequences.
        data_hash: SHA-256 of the training sequences; "" if unknown.
        base_hash: SHA-256 over the weights of a frozen base model as they were loaded; "" without one, and on ranks that do not read.
    """

    sequences: int
    data_hash: str = ""
    base_hash: str = ""


@dataclass(frozen=True)
class PublishedFiles:
    """What a checkpoint's files hold for others, fixed before any strategy takes the model apart.

    Attributes:
        files: the weights' names in the model, by the file that holds them. File ``i`` is written by rank ``i % W``.
        keys: by a weight's name, its key in the file, where it stands there bit by bit. transformers stores some in another
            layout (fused experts apart): they have no key.
        whole: dtype and shape by name.
        adapted: the files are one adapter's.
    """

    files: tuple[tuple[str, ...], ...]
    keys: Mapping[str, str]
    whole: Mapping[str, tuple[torch.dtype, torch.Size]]
    adapted: bool

    @property
    def bytes(self) -> int:
        """Of all weights in the files."""
        return sum(bytes_of(*self.whole[name]) for part in self.files for name in part)

    def file_names(self) -> list[str]:
        """As PEFT and transformers name them."""
        if self.adapted:
            return [ADAPTER_FILE]
        n = len(self.files)
        return ["model.safetensors"] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]

    def owners(self, world_size: int) -> dict[str, int]:
        """Which rank writes a weight."""
        return {name: i % world_size for i, part in enumerate(self.files) for name in part}


def bytes_of(dtype: torch.dtype, shape: torch.Size) -> int:
    """Of a tensor."""
    return dtype.itemsize * shape.numel()


def plan_published_files(model: nn.Module, world_size: int) -> PublishedFiles:
    """Of a model that no strategy has taken yet (it may be on the meta device)."""
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
    """What PEFT would save and by which key, learnt by letting it choose from numbered tensors."""
    from peft import get_peft_model_state_dict

    numbered = {name: torch.tensor([i]) for i, name in enumerate(names)}
    chosen = get_peft_model_state_dict(model, state_dict=numbered, save_embedding_layers=False)  # type: ignore[arg-type]
    return {names[int(t)]: key for key, t in chosen.items()}


def _saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter once, also if it has several names, and the buffers that belong to the model's state."""
    parameters = dict(model.named_parameters())
    everything = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {n: t for n, t in model.state_dict().items() if n not in everything}
    return {**{n: p.detach() for n, p in parameters.items()}, **buffers}


def converted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights in the names and layout that transformers stores for this kind of model."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def _unchanged(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    meta = {n: torch.empty_like(t, device="meta") for n, t in tensors.items()}
    out = converted(model, dict(meta))
    return [n for n, t in meta.items() if out.get(n) is t]


def _shared_out(sizes: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """Weights into `count` files of about equal size, in order. A layer's stay together: its layout may be changed as one."""
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
    """This rank's. A weight's name is the one within the model.

    Attributes:
        owned: weights that all ranks hold whole and this one writes, 1-D.
        scattered: parts of published weights that this rank alone holds, keyed ``model/<name>``.
        state: what resuming needs beside the published weights; empty in mode weights_only.
        random: states of this rank's random generators; None in mode weights_only.
    """

    owned: Mapping[str, torch.Tensor]
    scattered: tuple[TensorShard, ...]
    state: tuple[TensorShard, ...]
    random: dict[str, Any] | None

    @property
    def bytes(self) -> int:
        """That are written. What is scattered is written twice, once on its way."""
        return (
            sum(_bytes(t) for t in self.owned.values())
            + 2 * sum(_bytes(s.tensor) for s in self.scattered)
            + sum(_bytes(s.tensor) for s in self.state)
        )


@dataclass(frozen=True)
class TensorDigest:
    """A fingerprint of a range of a tensor, as it was in memory.

    Attributes:
        key: in a published file, or in ``state/``.
        offset, numel: elements; where the range begins in the flattened whole, and how many it has.
        crc: CRC-32 of its bytes. It is to find mistakes and damage, not forgery.
        dtype: as safetensors names it.
    """

    key: str
    offset: int
    numel: int
    crc: int
    dtype: str


def collect_parts(
    strategy: Strategy, published: PublishedFiles, rank: int, world: int, random: dict[str, Any] | None
) -> RankParts:
    """Views of what this rank is to write; `random` is given in mode full. No collective."""
    owners = published.owners(world)
    owned, scattered, state = {}, [], []
    for shard in strategy.weight_shards():
        name = weight_name(shard.key)
        if name in owners:
            if not shard.everywhere:
                scattered.append(TensorShard(MODEL + name, shard.numel, shard.offset, shard.tensor))
            elif owners[name] == rank:
                owned[name] = shard.tensor
        if random is not None and name not in published.keys:
            state.append(shard)
    if random is not None:
        state += state_shards(strategy.state_ranges())
    mine = (share_to_write(shard, rank, world) for shard in state)
    return RankParts(owned, tuple(scattered), tuple(s for s in mine if s.tensor.numel()), random)


def weight_name(key: str) -> str:
    """Within the model, of a shard's key (`Strategy.weight_shards` names them within the loss)."""
    return key.removeprefix(MODEL).removeprefix(PREFIX)


@dataclass
class CpuCopies:
    """CPU memory for one checkpoint's parts, used again by the next: never more than one copy."""

    _kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, parts: RankParts) -> RankParts:
        """The parts, copied. On CUDA all copies travel together."""
        used: dict[str, torch.Tensor] = {}

        def copied(place: str, tensor: torch.Tensor) -> torch.Tensor:
            old = self._kept.get(place)
            if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
                old = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            used[place] = old.copy_(tensor.detach(), non_blocking=True)
            return old

        def shards(kind: str, given: Iterable[TensorShard]) -> tuple[TensorShard, ...]:
            return tuple(
                TensorShard(s.key, s.numel, s.offset, copied(f"{kind}{s.key}@{s.offset}", s.tensor)) for s in given
            )

        out = RankParts(
            {n: copied(f"owned {n}", t) for n, t in parts.owned.items()},
            shards("scattered ", parts.scattered),
            shards("state ", parts.state),
            parts.random,
        )
        self._kept = used
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return out


def on_cpu(parts: RankParts) -> RankParts:
    """The parts themselves where they are on the CPU, else copies."""
    return RankParts(
        {n: t.detach().cpu() for n, t in parts.owned.items()},
        tuple(TensorShard(s.key, s.numel, s.offset, s.tensor.detach().cpu()) for s in parts.scattered),
        tuple(TensorShard(s.key, s.numel, s.offset, s.tensor.detach().cpu()) for s in parts.state),
        parts.random,
    )


def digests_of(parts: RankParts, published: PublishedFiles) -> list[TensorDigest]:
    """Of all that stands in a file bit by bit as it is in memory."""
    keys = published.keys
    return [
        *(digest_of(keys[n], 0, t) for n, t in parts.owned.items() if n in keys),
        *(digest_of(keys[n], s.offset, s.tensor) for s in parts.scattered if (n := s.key.removeprefix(MODEL)) in keys),
        *(digest_of(s.key, s.offset, s.tensor) for s in parts.state),
    ]


def digest_of(key: str, offset: int, tensor: torch.Tensor) -> TensorDigest:
    """Of a range on the CPU."""
    flat = tensor.detach().contiguous().view(-1)
    crc = zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
    return TensorDigest(key, offset, flat.numel(), crc, NAME_OF[flat.dtype])


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def write_files(
    folder: Path, on_the_way: Path, parts: RankParts, published: PublishedFiles, model: nn.Module, rank: int, world: int
) -> tuple[list[TensorDigest], dict[str, str]]:
    """Write the files that are this rank's.

    Args:
        on_the_way: where the ranks put parts of weights that none of them holds whole.

    Returns:
        Fingerprints of what is in another layout than in memory, and the file of each key.
    """
    prints, places = [], {}
    for i, (file, names) in enumerate(zip(published.file_names(), published.files, strict=True)):
        if i % world != rank:
            continue
        tensors = _whole(on_the_way, parts, published, names)
        if published.adapted:
            model.save_pretrained(  # type: ignore[operator] - "auto" would ask the hub whether the vocabulary was resized
                str(folder), state_dict=tensors, safe_serialization=True, save_embedding_layers=False
            )
            assert (folder / ADAPTER_FILE).exists()
            continue
        out = {k: t.contiguous() for k, t in converted(model, tensors).items()}
        save_file(out, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(out, file)
        prints += [digest_of(k, 0, t) for k, t in out.items() if k not in published.keys]
    return prints, places


def _whole(
    on_the_way: Path, parts: RankParts, published: PublishedFiles, names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    tensors = {}
    away = []
    for name in names:
        dtype, shape = published.whole[name]
        if name in parts.owned:
            tensors[name] = parts.owned[name].view(shape)
            continue
        tensors[name] = torch.empty(shape, dtype=dtype)
        away.append(TensorShard(MODEL + name, shape.numel(), 0, tensors[name].view(-1)))
    if away:
        shards.read_shards(away, on_the_way)
    return tensors


def write_index(folder: Path, published: PublishedFiles, places: dict[str, str]) -> None:
    """What transformers needs to find weights in several files."""
    if published.adapted or len(published.files) == 1:
        return
    total = sum(bytes_of(*w) for w in published.whole.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def write_configs(folder: Path, published: PublishedFiles, model: Any, tokenizer: Any) -> None:
    """The model's configuration (PEFT writes the adapter's beside its weights), and the tokenizer."""
    if not published.adapted:
        # a folder of its own: beside a config transformers removes numbered weight files that it has not written itself
        own = folder / ".configs"
        model.save_pretrained(str(own), state_dict={})
        for path in own.iterdir():
            path.rename(folder / path.name)
        own.rmdir()
    tokenizer.save_pretrained(str(folder))
