"""Copy each rank's state, and write the files that other programs read: PEFT's adapter file or a Hugging Face model folder.

Each published file is written by one rank, from its own weights and from parts on disk. For a save in the background, the state is
copied to host memory while training goes on until its next update.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from allranks.train.checkpoint.commit import ExpectedTensor, TensorDigest
from allranks.train.models.adapters import is_adapted
from allranks.train.models.safetensors_files import bytes_view, write_safetensors
from allranks.train.models.weight_sources import NAME_OF
from allranks.train.strategies import shards
from allranks.train.strategies.base import Strategy
from allranks.train.strategies.shards import TensorShard, share_to_write, state_shards

PREFIX = "model."  # prefix of the model inside `LossModel`
ADAPTER_FILE = "adapter_model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SMALL_BYTES = 64 << 20
LARGE_BYTES = 4 << 30


class TrainingIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint was trained on, for an exact resume.

    Attributes:
        sequences: number of training sequences.
        data_hash: SHA-256 of the training sequences; "" if unknown.
        base_hash: SHA-256 over the weights of a frozen base model as they were loaded; "" without one, and on ranks that do not read files.
    """

    sequences: int
    data_hash: str = ""
    base_hash: str = ""


@dataclass(frozen=True)
class PublishedFiles:
    """Layout of the weights in the published files, planned before a strategy shards the model.

    Attributes:
        files: names of the weights in each file. File ``i`` is written by rank ``i % W``.
        keys: key in the file by weight name, for weights stored bitwise. Weights that transformers stores in another layout
            (fused experts) have no key.
        whole: dtype and full shape by name.
        adapted: the files are those of an adapter.
    """

    files: tuple[tuple[str, ...], ...]
    keys: Mapping[str, str]
    whole: Mapping[str, tuple[torch.dtype, torch.Size]]
    adapted: bool

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
    chosen = get_peft_model_state_dict(model, state_dict=numbered, save_embedding_layers=False)  # type: ignore[arg-type]
    return {names[int(t)]: key for key, t in chosen.items()}


def _saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return each parameter once, even if it has several names, and the persistent buffers."""
    parameters = dict(model.named_parameters())
    everything = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {n: t for n, t in model.state_dict().items() if n not in everything}
    return {**{n: p.detach() for n, p in parameters.items()}, **buffers}


def converted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert weights to the names and layout in which transformers stores this kind of model."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def _unchanged(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    meta = {n: torch.empty_like(t, device="meta") for n, t in tensors.items()}
    out = converted(model, dict(meta))
    return [n for n, t in meta.items() if out.get(n) is t]


def _shared_out(sizes: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """Distribute weights to `count` files of about equal size, in order. Weights of one layer stay together, because their layout
    may be converted together."""
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
    """What this rank writes. A weight's name is the one within the model.

    Attributes:
        owned: weights that all ranks hold in full and this rank writes, 1-D.
        scattered: parts of published weights that only this rank holds, keyed ``model/<name>``.
        state: what a resume needs beside the published weights; empty in mode weights_only.
        random: states of this rank's random generators; None in mode weights_only.
    """

    owned: Mapping[str, torch.Tensor]
    scattered: tuple[TensorShard, ...]
    state: tuple[TensorShard, ...]
    random: dict[str, Any] | None

    @property
    def bytes(self) -> int:
        """Bytes to write. Scattered parts are written twice, once as intermediate files."""
        return (
            sum(_bytes(t) for t in self.owned.values())
            + 2 * sum(_bytes(s.tensor) for s in self.scattered)
            + sum(_bytes(s.tensor) for s in self.state)
        )


def collect_parts(
    strategy: Strategy, published: PublishedFiles, rank: int, world: int, random: dict[str, Any] | None
) -> RankParts:
    """Return views of what this rank must write; `random` is given in mode full. Not collective."""
    owners = published.owners(world)
    owned, scattered, state = {}, [], []
    for shard in strategy.weight_shards():
        name = weight_name(shard.key)
        if name in owners:
            if not shard.everywhere:
                own = share_to_write(shard, rank, world)
                scattered.append(TensorShard(MODEL + name, own.numel, own.offset, own.tensor))
            elif owners[name] == rank:
                owned[name] = shard.tensor
        if random is not None and name not in published.keys:
            state.append(shard)
    if random is not None:
        state += state_shards(strategy.state_ranges())
    ends = ends_of_shares(published, world, sum(_bytes(s.tensor) for s in state if s.everywhere))
    mine = (share_to_write(shard, rank, world, ends) for shard in state)
    return RankParts(owned, tuple(scattered), tuple(s for s in mine if s.tensor.numel()), random)


def ends_of_shares(published: PublishedFiles, world: int, state_bytes: int) -> list[int] | None:
    """Return for `share_to_write` how the state that every rank holds is divided so that all ranks write the same number of bytes.

    A rank that writes published files writes less of the state.

    Args:
        state_bytes: bytes of the state that every rank holds.
    """
    load = [0] * world
    for i, names in enumerate(published.files):
        load[i % world] += sum(bytes_of(*published.whole[name]) for name in names)
    target = -(-(sum(load) + state_bytes) // world)
    ends, end = [], 0
    for own in load:
        end += max(target - own, 0)
        ends.append(end)
    return ends if end else None


def weight_name(key: str) -> str:
    """Return the name within the model for a shard's key (`Strategy.weight_shards` uses names within the loss)."""
    return key.removeprefix(MODEL).removeprefix(PREFIX)


def on_cpu(parts: RankParts) -> RankParts:
    """Return the parts themselves if they are on the CPU, else copies."""
    return RankParts(
        {n: t.detach().cpu() for n, t in parts.owned.items()},
        tuple(TensorShard(s.key, s.numel, s.offset, s.tensor.detach().cpu()) for s in parts.scattered),
        tuple(TensorShard(s.key, s.numel, s.offset, s.tensor.detach().cpu()) for s in parts.state),
        parts.random,
    )


def digests_of(shards: Iterable[TensorShard]) -> list[TensorDigest]:
    """Return the digests of parts on the CPU."""
    return [digest_of(s.key, s.offset, s.tensor) for s in shards]


def digest_of(key: str, offset: int, tensor: torch.Tensor) -> TensorDigest:
    """Return the digest of a range on the CPU."""
    flat = tensor.detach().contiguous().view(-1)
    return TensorDigest(key, offset, flat.numel(), zlib.crc32(bytes_view(flat)), NAME_OF[flat.dtype])


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass
class CpuCopies:
    """CPU memory for one checkpoint's parts, reused by the next: there is never more than one copy."""

    _kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, parts: RankParts) -> RankParts:
        """Return copies of the parts. On CUDA all copies run asynchronously on the current stream, with one synchronisation."""
        used: dict[str, torch.Tensor] = {}
        sources: list[torch.Tensor] = []

        def place_for(place: str, tensor: torch.Tensor) -> torch.Tensor:
            old = self._kept.get(place)
            if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
                old = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            used[place] = old
            sources.append(tensor.detach())
            return old

        def shards(kind: str, given: Iterable[TensorShard]) -> tuple[TensorShard, ...]:
            return tuple(
                TensorShard(s.key, s.numel, s.offset, place_for(f"{kind}{s.key}@{s.offset}", s.tensor)) for s in given
            )

        out = RankParts(
            {n: place_for(f"owned {n}", t) for n, t in parts.owned.items()},
            shards("scattered ", parts.scattered),
            shards("state ", parts.state),
            parts.random,
        )
        _copy_all(list(used.values()), sources)
        self._kept = used
        return out


def _copy_all(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    on_host = [(p, s) for p, s in zip(places, sources, strict=True) if not s.is_cuda]
    if on_host:  # one call, which leaves the interpreter's lock to training
        torch._foreach_copy_([p for p, _ in on_host], [s for _, s in on_host])
    on_device = [(p, s) for p, s in zip(places, sources, strict=True) if s.is_cuda]
    for place, source in on_device:
        place.copy_(source, non_blocking=True)
    if on_device:
        torch.cuda.current_stream(on_device[0][1].device).synchronize()


def with_buffers_copied(parts: RankParts, module: nn.Module) -> RankParts:
    """Return the parts with copies of the module's buffers, which a forward pass may change."""
    buffers = {buffer.untyped_storage().data_ptr() for buffer in module.buffers()}

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in buffers else tensor

    def shards(given: Iterable[TensorShard]) -> tuple[TensorShard, ...]:
        return tuple(replace(s, tensor=kept(s.tensor)) if s.key.startswith(MODEL) else s for s in given)

    owned = {name: kept(tensor) for name, tensor in parts.owned.items()}
    return RankParts(owned, shards(parts.scattered), shards(parts.state), parts.random)


class UpdateGuard:
    """Hold back the updates of optimizers while their state is copied in another thread.

    Attributes:
        waited_s: how long the updates were held back for the current copy.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._copied = threading.Event()
        self._copied.set()
        self._guarded: list[torch.optim.Optimizer] = []

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Hold back updates of these optimizers from now on."""
        self.waited_s = 0.0
        self._copied.clear()
        for optimizer in optimizers:
            if not any(optimizer is known for known in self._guarded):
                optimizer.register_step_pre_hook(self._before_update)
                self._guarded.append(optimizer)

    def end(self) -> None:
        """Allow updates again. Safe to call twice."""
        self._copied.set()

    def _before_update(self, *_: Any) -> None:
        if not self._copied.is_set():
            began = time.perf_counter()
            self._copied.wait()
            self.waited_s += time.perf_counter() - began


def on_own_stream(device: torch.device, copy: Callable[[], RankParts]) -> Callable[[], RankParts]:
    """Return `copy` for another thread: on CUDA it runs on a stream of its own, after the work that was submitted until now."""
    if device.type != "cuda":
        return copy
    submitted = torch.cuda.Event()
    submitted.record(torch.cuda.current_stream(device))

    def run() -> RankParts:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            stream.wait_event(submitted)
            return copy()

    return run


WrittenFile = Callable[[str, Mapping[str, ExpectedTensor]], Future[Any]]
"""Begin to check a complete file of tensors, given its name and what it must hold."""


def write_state(folder: Path, rank: int, state: Sequence[TensorShard], written: WrittenFile) -> None:
    """Write this rank's parts of the state into ``state/``, for `shards.read_shards`."""
    if state:
        name = f"state/{shards.shard_file(rank)}"
        shards.write_parts(state, folder / name)
        written(name, {s.key: ExpectedTensor(s.tensor, (s.tensor.numel(),), s.offset) for s in state})


def write_files(
    folder: Path,
    parts: RankParts,
    published: PublishedFiles,
    model: nn.Module,
    rank: int,
    world: int,
    written: WrittenFile,
    ranges: Mapping[str, Sequence[tuple[int, int]]],
) -> tuple[list[TensorDigest], dict[str, str]]:
    """Write this rank's published files, one after the other.

    Args:
        folder: its ``on-the-way`` has the scattered parts of weights.
        ranges: by ``model/<name>``, offset and number of elements of all scattered parts.

    Returns:
        Digests of the ranges in the weights that were put together from parts, and the file of each key.
    """
    prints, places, check = [], {}, None
    for i, (file, names) in enumerate(zip(published.file_names(), published.files, strict=True)):
        if i % world != rank:
            continue
        if check is not None and not parts.owned.keys() >= set(names):
            check.result()  # then its memory is free: never more than one file is put together from parts
        tensors = _whole(folder / "on-the-way", parts, published, names)
        for name in names:
            flat = tensors[name].view(-1)
            prints += [digest_of(MODEL + name, o, flat[o : o + n]) for o, n in ranges.get(MODEL + name, ())]
        out = (
            {published.keys[n]: t for n, t in tensors.items()} if published.adapted else dict(converted(model, tensors))
        )
        write_safetensors(folder / file, out, {"format": "pt"})
        # weights that are not converted are compared with the strategy's memory
        expected = {k: ExpectedTensor(t, tuple(t.shape)) for k, t in out.items()}
        expected |= {
            published.keys[n]: ExpectedTensor(t, tuple(published.whole[n][1]))
            for n, t in tensors.items()
            if n in published.keys
        }
        check = written(file, expected)
        places |= dict.fromkeys(out, file)
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
        write_configs(folder, published, model, tokenizer)
        if published.adapted:  # PEFT writes its weights, too: here one number for each
            numbers = {n: torch.zeros(1) for n in published.keys}
            model.save_pretrained(  # "auto" would ask the hub whether the vocabulary was resized
                str(folder), state_dict=numbers, safe_serialization=True, save_embedding_layers=False
            )
            (folder / ADAPTER_FILE).unlink()
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write_configs(folder: Path, published: PublishedFiles, model: Any, tokenizer: Any) -> None:
    """Write the model's configuration (not that of an adapter) and the tokenizer."""
    if not published.adapted:
        # as model.save_pretrained does, which imports DeepSpeed to look for its wrapper
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.save_pretrained(str(folder))
        if model.can_generate():
            model.generation_config.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def write_model(folder: Path, model: nn.Module, tokenizer: Any) -> None:
    """Write a whole model that this process holds, as ``save_pretrained`` does, to files of at most `LARGE_BYTES`.

    ``save_pretrained`` itself imports DeepSpeed where it is installed, which takes longer than writing a small model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    published = plan_published_files(model, 1)
    tensors, places = _saved_tensors(model), {}
    for file, names in zip(published.file_names(), published.files, strict=True):
        out = {k: t.contiguous() for k, t in converted(model, {n: tensors[n] for n in names}).items()}
        write_safetensors(folder / file, out, {"format": "pt"})
        places |= dict.fromkeys(out, file)
    write_index(folder, published, places)
    write_configs(folder, published, model, tokenizer)
