"""This rank's part of a weight that FSDP2 has cut."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from allranks.train.shards import Shard


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank holds of a `DTensor`."""
    return cast(DTensor, tensor).to_local()


def shard_of(key: str, parameter: nn.Parameter, local: torch.Tensor) -> Shard:
    """Rows of a matrix are a range of the flattened whole."""
    like = cast(DTensor, parameter.data)
    _, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    rest = like.numel() // max(like.shape[0], 1) if like.ndim else 1
    offset = offsets[0] * rest if like.ndim else 0
    return Shard(key, like.numel(), offset, local.detach().view(-1))


def part_of(whole: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """This rank's rows: FSDP2 cuts the first dimension into equal chunks, the last of which may be short or empty."""
    mesh = cast(DTensor, parameter.data).device_mesh
    chunks = whole.chunk(mesh.size(), dim=0)
    rank = mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else whole[:0]


def padded_bytes(parameter: nn.Parameter, world: int) -> int:
    """Bytes of a parameter's rows on all ranks, where each holds as many as the one with most."""
    rows = parameter.shape[0] if parameter.ndim else 1
    rest = parameter.numel() // max(rows, 1)
    return -(-rows // world) * world * rest * parameter.element_size()
