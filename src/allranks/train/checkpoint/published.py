"""How weights stand in the files that others read: PEFT's adapter file, or those of a Hugging Face model folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allranks.train.adapters import is_adapted

PREFIX = "model."  # of the model within the loss
ADAPTER_FILE = "adapter_model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SMALL_BYTES = 64 << 20
LARGE_BYTES = 4 << 30


@dataclass(frozen=True)
class Published:
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


def published_of(model: nn.Module, world_size: int) -> Published:
    """Of a model that no strategy has taken yet (it may be on the meta device)."""
    if is_adapted(model):
        tensors = model.state_dict()
        keys = _adapter_keys(model, list(tensors))
        whole = {n: (tensors[n].dtype, tensors[n].shape) for n in keys}
        return Published((tuple(keys),), keys, whole, adapted=True)
    tensors = _saved_tensors(model)
    whole = {n: (t.dtype, t.shape) for n, t in tensors.items()}
    keys = _unchanged(model, tensors)
    sizes = {n: bytes_of(*w) for n, w in whole.items()}
    count = max(-(-sum(sizes.values()) // LARGE_BYTES), min(world_size, -(-sum(sizes.values()) // SMALL_BYTES)), 1)
    return Published(_shared_out(sizes, count), {n: n for n in keys}, whole, adapted=False)


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
