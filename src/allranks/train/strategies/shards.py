"""Read and write this rank's ranges of weights and optimizer state, in the safetensors format of
torch.distributed.checkpoint.

A part is a range of the flattened tensor. That fits every strategy: flat parts of hand-written ZeRO, which start and
end anywhere, FSDP2's rows, and full tensors. So a checkpoint of one strategy on W ranks can be read by another on V
ranks: each reads its own ranges, and nothing is gathered. Every rank writes one ``shard-<rank>-*.safetensors``, whose
header holds the positions of its ranges. (torch's default ``.distcp`` format keeps its index as a pickle, which is
unsafe to read from files of other users.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import CheckpointError
from allranks.train.models.safetensors_files import write_safetensors

if TYPE_CHECKING:  # it is only needed to read and write checkpoints, and slow to import
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

MASTER = "master"  # key of the optimizer state: float32 weights of a model in lower precision


@dataclass(frozen=True)
class TensorShard:
    """This rank's part of one tensor.

    `everywhere`: every rank holds the same. `copy`, `copies`: this is copy number `copy` of `copies` that as many ranks
    hold. Of both each rank writes a share, and reads all.
    """

    key: str  # name of the full tensor
    numel: int  # elements of the full tensor
    offset: int  # where the part begins in the flattened full tensor
    tensor: torch.Tensor  # the part, 1-D and contiguous, on any device; reading fills it in place
    everywhere: bool = False
    copy: int = 0
    copies: int = 1


@dataclass(frozen=True)
class StateRange:
    """Where a parameter's state is in this rank's optimizer. `everywhere`, `copy`, `copies` as in `TensorShard`."""

    optimizer: torch.optim.Optimizer
    parameter: nn.Parameter  # what it updates; a flat part may hold ranges of several parameters
    start: int  # where the range begins in the flattened `parameter`
    length: int  # elements of the range
    name: str  # the parameter's name in the model
    numel: int  # elements of the full parameter
    offset: int  # where the range begins in the flattened full parameter
    everywhere: bool = False
    copy: int = 0
    copies: int = 1
    copy_of: torch.dtype | None = None  # dtype of the model's weights, if `parameter` is a copy updated instead of them

    @property
    def is_master(self) -> bool:
        """Whether `parameter` is more precise than the model's weights, so that it is state, too."""
        return self.copy_of not in (None, self.parameter.dtype)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the range in a tensor with the layout of `parameter`, 1-D; a view if it is contiguous."""
        flat = tensor.detach().reshape(-1)
        return flat if self.length == flat.numel() else flat[self.start : self.start + self.length]


class _CheckpointableShard(torch.Tensor):
    """Adapter of a `TensorShard` for `torch.distributed.checkpoint` (its ``_Checkpointable`` protocol)."""

    _offset: int
    _whole: int

    @staticmethod
    def of(shard: TensorShard) -> _CheckpointableShard:
        part = shard.tensor.detach().as_subclass(_CheckpointableShard)
        part._offset, part._whole = shard.offset, shard.numel
        return part

    def size(self, dim: int | None = None) -> Any:  # type: ignore
        whole = torch.Size([self._whole])
        return whole if dim is None else whole[dim]

    def __create_write_items__(self, fqn: str, _: Any) -> Any:
        raise NotImplementedError("the protocol requires it; `write_parts` writes")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        size = self.as_subclass(torch.Tensor).numel()
        return [ChunkStorageMetadata(offsets=torch.Size([self._offset]), sizes=torch.Size([size]))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def whole_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[TensorShard]:
    """Return shards of tensors, all contiguous, that every rank holds in full."""
    return [TensorShard(f"model/{n}", t.numel(), 0, t.detach().view(-1), everywhere=True) for n, t in tensors]


def whole_states(
    named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, *, everywhere: bool
) -> list[StateRange]:
    """Return ranges of parameters whose full state this rank holds."""
    return [StateRange(optimizer, p, 0, p.numel(), n, p.numel(), 0, everywhere) for n, p in named]


def state_shards(ranges: Iterable[StateRange]) -> list[TensorShard]:
    """Return this rank's parts of the optimizer state.

    Keys are ``optimizer/<name>/<key>``; for one value per parameter (AdamW's step), ``scalar/<name>/<key>``.
    """
    out: list[TensorShard] = []
    for r in ranges:
        held = (r.everywhere, r.copy, r.copies)
        if r.is_master:
            out.append(TensorShard(f"optimizer/{r.name}/{MASTER}", r.numel, r.offset, r.of(r.parameter), *held))
        for key, value in r.optimizer.state.get(r.parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim:
                out.append(TensorShard(f"optimizer/{r.name}/{key}", r.numel, r.offset, r.of(value), *held))
            elif r.offset == 0:
                number = torch.as_tensor(value, dtype=torch.float32).detach().reshape(1)
                out.append(TensorShard(f"scalar/{r.name}/{key}", 1, 0, number, *held))
    return out


def allocate_state(ranges: Sequence[StateRange], stored: Iterable[str]) -> list[TensorShard]:
    """Create optimizer state of zeros for the keys in `stored`, and return the shards to read into.

    An optimizer would create its state only in its first update. Master weights are read if the files have them.
    """
    keys: dict[str, list[tuple[str, str]]] = {}
    for full in stored:
        kind, _, rest = full.partition("/")
        name, _, key = rest.rpartition("/")
        if kind in ("optimizer", "scalar"):
            keys.setdefault(name, []).append((kind, key))
    out: list[TensorShard] = []
    for r in ranges:
        state = r.optimizer.state[r.parameter] if r.name in keys else {}
        # the same order on all ranks, independent of the order of files
        for kind, key in sorted(keys.get(r.name, []), reverse=True):
            if kind == "scalar":
                # fused optimizers keep the step on the device of the parameter
                value = state.setdefault(key, torch.zeros((), dtype=torch.float32, device=r.parameter.device))
                out.append(TensorShard(f"scalar/{r.name}/{key}", 1, 0, value.reshape(1)))
            elif key != MASTER or r.is_master:
                value = r.parameter if key == MASTER else state.setdefault(key, torch.zeros_like(r.parameter))
                out.append(TensorShard(f"optimizer/{r.name}/{key}", r.numel, r.offset, r.of(value)))
    return out


def positions_of(parts: Iterable[TensorShard]) -> list[tuple[str, int, int, int]]:
    """Return of each part: key, offset, number of elements, and elements of the full tensor."""
    return [(p.key, p.offset, p.tensor.numel(), p.numel) for p in parts]


def shard_file(rank: int) -> str:
    """Return the name of a rank's file, which is that of ``HuggingFaceStorageWriter``."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write_parts(parts: Sequence[TensorShard], path: Path) -> bytes:
    """Write parts to one ``HuggingFaceStorageReader`` file, whose header has each part's offset; return its hash."""
    where = {part.key: {"saved_offsets": [part.offset]} for part in parts}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(where)}
    return write_safetensors(path, {part.key: part.tensor.detach().cpu() for part in parts}, metadata)


def require_whole_tensors(parts: Iterable[tuple[str, int, int, int]]) -> None:
    """Raise `CheckpointError` unless parts (key, offset, elements, tensor elements) cover each tensor exactly once."""
    by_key: dict[str, list[tuple[int, int, int]]] = {}
    for key, *part in parts:
        by_key.setdefault(key, []).append((part[0], part[1], part[2]))
    for key, held in by_key.items():
        end, size = 0, held[0][2]
        for offset, numel, whole in sorted(held):
            if (offset, whole) != (end, size):
                break
            end += numel
        else:
            if end == size:
                continue
        total = sum(numel for _, numel, _ in held)
        raise CheckpointError(
            f"{key}: the ranks together hold {total} of its {size} elements, with a gap or an overlap at element {end}"
        )


def share_to_write(shard: TensorShard, rank: int, world: int, ends: Sequence[int] | None = None) -> TensorShard:
    """Return what this rank writes: a share if several ranks hold the same, an even one unless `ends` says by rank
    where its share ends, as multiples of ``1 / ends[-1]``."""
    at, of = (rank, world) if shard.everywhere else (shard.copy, shard.copies)
    if of == 1:
        return shard
    begin, end, of = (ends[at - 1] if at else 0, ends[at], ends[-1]) if shard.everywhere and ends else (at, at + 1, of)
    held = shard.tensor.numel()
    low, high = held * begin // of, held * end // of
    return TensorShard(shard.key, shard.numel, shard.offset + low, shard.tensor[low:high])


def read_shards(shards: Sequence[TensorShard], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fill the parts from files written by any number of ranks. Collective over the group; without one, each rank reads
    alone. Raise `CheckpointError` if a tensor is missing, has another number of elements, or lacks a range."""
    stored = stored_sizes(folder)
    for shard in shards:
        if shard.key not in stored:
            raise CheckpointError(f"{folder}: has no {shard.key}")
        whole, covered = stored[shard.key]
        if whole != shard.numel or covered != whole:
            raise CheckpointError(f"{folder}: {shard.key} has {covered} of {whole} elements, expected {shard.numel}")
    from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as dcp_load
    from torch.distributed.checkpoint.api import CheckpointException

    parts = {shard.key: _CheckpointableShard.of(shard) for shard in shards if shard.tensor.numel()}
    try:
        dcp_load(
            cast("dict[str, Any]", parts),
            storage_reader=HuggingFaceStorageReader(str(folder)),
            planner=DefaultLoadPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:  # a rank's failure, on all ranks; a `BaseException`
        rank, (problem, _) = min(error.failures.items())
        raise CheckpointError(f"rank {rank}: {str(problem).splitlines()[0] if str(problem) else problem!r}") from None


def stored_sizes(folder: Path) -> Mapping[str, tuple[int, int]]:
    """Return by key: elements of the full tensor (the end of its last range), and elements that the files hold."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    sizes = {}
    for key, tensor in metadata.state_dict_metadata.items():
        chunks = getattr(tensor, "chunks", ())
        end = max((c.offsets[0] + c.sizes[0] for c in chunks), default=0)
        sizes[key] = (end, sum(c.sizes[0] for c in chunks))
    return sizes
