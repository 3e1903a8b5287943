"""Verify with checksums at step 0 that all ranks hold equal weights and disjoint rows.

Checksums are additive: those of the parts sum to that of the full tensor, so no rank needs all of it. Three things are
verified over the same group that training uses, because environment variables are no evidence (with some launch
settings every rank trains alone and still reports the right RANK and WORLD_SIZE):

1. the planned number of ranks answers, each once;
2. trained and frozen weights have the same hash on all ranks;
3. the sequences hold each row once, and the ranks' micro-batches of the first epoch hold each sequence once.

Training goes on with the third: each step's reduction carries a checksum of the sequences in the ranks' micro-batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import ProofFailed
from allranks.train.data.batches import SampleOrder
from allranks.train.distributed import DistContext
from allranks.utils.text import format_list

if TYPE_CHECKING:
    from allranks.train.data.prepared import TokenSet

CPU_PIECE, GPU_PIECE = 1 << 16, 1 << 22  # words converted at a time; on a CPU few enough for its cache
MODULUS = 1 << 48  # sums of 2^15 ranks stay below 2^63
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TensorSums = tuple[int, int, int]


def checksums(tensor: torch.Tensor, start: int = 0) -> TensorSums:
    """Return the checksums of one part of a flattened tensor.

    Args:
        tensor: the part, of any shape and dtype; each element is one word.
        start: index of the part's first element in the flattened tensor.

    Returns:
        The number of words, their sum, and their sum weighted by position (from 1), the last two modulo 2^48.
    """
    words = tensor.detach().contiguous().flatten()
    words = words.view(_WORDS[words.element_size()])
    piece = GPU_PIECE if words.is_cuda else CPU_PIECE
    plain = torch.zeros((), dtype=torch.int64, device=words.device)
    weighted = torch.zeros_like(plain)
    steps = torch.arange(1, min(piece, max(words.numel(), 1)) + 1, device=words.device)
    for at in range(0, words.numel(), piece):
        part = words[at : at + piece].long()
        total = part.sum()
        plain += total
        weighted += (part * steps[: part.numel()]).sum() + total * ((at + start) % MODULUS)
    return words.numel(), int(plain) % MODULUS, int(weighted) % MODULUS


def add_checksums(a: TensorSums, b: TensorSums) -> TensorSums:
    """Return the checksums of two parts together."""
    return a[0] + b[0], (a[1] + b[1]) % MODULUS, (a[2] + b[2]) % MODULUS


MAX_STEPS_CHECKED = 20_000


class SyncProof(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the proof; ``sync_proof`` in metrics.json."""

    world_size: int
    weights_equal: bool
    data_disjoint: bool
    weights_hash: str
    rows_checked: int


def prove_ranks(
    world: DistContext,
    planned_size: int,
    model: nn.Module,
    order: SampleOrder,
    before_sharding: bytes | None = None,
    tokens: TokenSet | None = None,
) -> SyncProof:
    """Verify ranks, weights and rows.

    Args:
        before_sharding: if the weights are already sharded, this rank's digest of the full weights, taken when the
            model was built or the checkpoint was read.
        tokens: the sequences of `order`; each of their rows must be in exactly one sequence.

    Raises:
        ProofFailed: the message names the rank that differs, and in what.
    """
    _check_ranks(world, planned_size)
    same_model = "Ranks must build the same model from the same seed and files"
    weights = prove_weights(world, model, "step-0 proof", same_model, before_sharding)
    if tokens is not None:
        counts = np.bincount(tokens.pack_rows, minlength=len(tokens.labels))
        if (counts != 1).any():
            raise ProofFailed(
                f"step-0 proof: the sequences do not hold each row once: of {len(counts)} rows "
                f"{int((counts > 1).sum())} are in several sequences and {int((counts == 0).sum())} in none. Remove "
                "the cache entry of the data"
            )
    rows = _check_rows(world, order)
    return SyncProof(
        world_size=world.size, weights_equal=True, data_disjoint=True, weights_hash=weights, rows_checked=rows
    )


def _check_ranks(world: DistContext, planned_size: int) -> None:
    one_each = torch.zeros(planned_size, dtype=torch.int64, device=world.device)
    if world.rank < planned_size:
        one_each[world.rank] = 1
    dist.all_reduce(one_each, group=world.group)
    counts = one_each.cpu().tolist()
    if world.size != planned_size or sum(counts) != planned_size or set(counts) != {1}:
        absent = [r for r, n in enumerate(counts) if n == 0]
        double = [r for r, n in enumerate(counts) if n > 1]
        raise ProofFailed(
            f"step-0 proof: {planned_size} ranks were planned, but {sum(counts)} of a group of {world.size} answered; "
            f"absent: rank {format_list(absent, 8) or 'none'}; answered more than once: rank "
            f"{format_list(double, 8) or 'none'}. The ranks are not one job: check how they were launched"
        )


def weights_digest(model: nn.Module) -> bytes:
    """Return a digest over names, shapes, dtypes and checksums of all parameters and persistent buffers of this rank.

    For sharded weights `WeightLoader.finish` computes the same digest from the sums of the ranks' shards.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {checksums(tensor)}".encode())
    return digest.digest()


def prove_weights(
    world: DistContext,
    model: nn.Module,
    proof: str = "proof",
    cure: str = "Their gradients were not averaged over the ranks",
    before_sharding: bytes | None = None,
) -> str:
    """Check that the weights are equal on all ranks, and return their hash. Collective.

    Args:
        proof, cure: for the message, such as ``proof after step 10``.
        before_sharding: as in `prove_ranks`.

    Raises:
        ProofFailed: the weights of a rank differ.
    """
    mine = before_sharding or weights_digest(model)
    own = torch.tensor(list(mine), dtype=torch.uint8, device=world.device)
    every = [torch.zeros_like(own) for _ in range(world.size)]
    dist.all_gather(every, own, group=world.group)
    digests = [bytes(t.tolist()) for t in every]
    if len(set(digests)) == 1:
        return mine.hex()
    usual = max(set(digests), key=digests.count)
    odd = [r for r, d in enumerate(digests) if d != usual]
    raise ProofFailed(
        f"{proof}: the weights are not equal on all ranks: rank {format_list(odd, 8)} differs from the others"
        f"{'' if before_sharding else _where_they_differ(world, model, odd[0])}. {cure}"
    )


def _where_they_differ(world: DistContext, model: nn.Module, odd: int) -> str:
    """Describe the tensors in which a rank differs, found by comparing short hashes of each."""
    mine = {name: f"{tuple(tensor.shape)} {checksums(tensor)}" for name, tensor in model.state_dict().items()}
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, mine, group=world.control)
    other = next(r for r in range(world.size) if everyone[r] != everyone[odd])
    keys = sorted(everyone[odd].keys() | everyone[other].keys())
    different = [k for k in keys if everyone[odd].get(k) != everyone[other].get(k)]
    return f", in {len(different)} of {len(keys)} tensors, first {different[0]}"


def _check_rows(world: DistContext, order: SampleOrder) -> int:
    """Check that the micro-batches take each row of the epoch exactly once, by a sum over the training group.

    Of a longer epoch the first steps are checked: no row twice, and as many rows as planned.
    """
    planned = order.positions_in(MAX_STEPS_CHECKED)
    counts = torch.zeros(order.n, dtype=torch.int32)
    np.add.at(counts.numpy(), order.first_epoch(MAX_STEPS_CHECKED), 1)
    total = counts.to(world.device, copy=True)
    dist.all_reduce(total, group=world.group)
    twice, never = int((total > 1).sum()), int((total == 0).sum())
    if twice == 0 and int(total.sum()) == planned:
        return planned
    raise ProofFailed(
        f"step-0 proof: the ranks' rows are not disjoint and complete: of {order.n} rows {twice} are taken more than "
        f"once and {never} are not taken{_who_overlaps(world, counts)}. Each rank must read its own part of the data"
    )


def require_own_random_numbers(world: DistContext) -> None:
    """Raise `ProofFailed` on every rank unless the random generators of all ranks have different seeds. Collective."""
    seeds: list[Any] = [None] * world.size
    cuda = world.device.type == "cuda"
    dist.all_gather_object(seeds, torch.cuda.initial_seed() if cuda else torch.initial_seed(), group=world.control)
    for rank, seed in enumerate(seeds):
        if (first := seeds.index(seed)) < rank:
            raise ProofFailed(
                f"rank {first} and rank {rank} draw the same random numbers (seed {seed}), so that their dropout is "
                "equal; each rank must keep the seed that it was given"
            )


def refuse_rows(world: DistContext, step: int, mine: Sequence[int], order: SampleOrder) -> None:
    """Raise `ProofFailed` on every rank for a step (from 0) in which the ranks together trained other sequences than
    planned; it names ranks that trained the same one. Collective."""
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, [int(r) for r in mine], group=world.control)
    planned = sorted(order.global_batch(step).tolist())
    pairs = ((a, b, set(every[a]) & set(every[b])) for a in range(world.size) for b in range(a))
    shared = next((pair for pair in pairs if pair[2] and len(set(planned)) == len(planned)), None)
    who = f"; rank {shared[0]} and rank {shared[1]} both trained {sorted(shared[2])[:8]}" if shared else ""
    trained = {row for rows in every for row in rows}
    raise ProofFailed(
        f"step {step + 1}: the ranks did not train the planned sequences: of {len(set(planned))} planned "
        f"{len(set(planned) - trained)} were not trained, and {len(trained - set(planned))} others were{who}. Each "
        "rank must read its own part of the data"
    )


def _who_overlaps(world: DistContext, mine: torch.Tensor) -> str:
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, np.packbits(mine.numpy() > 0).tobytes(), group=world.control)
    sets = [np.unpackbits(np.frombuffer(e, np.uint8)) for e in everyone]
    for a in range(world.size):
        for b in range(a + 1, world.size):
            shared = int((sets[a] & sets[b]).sum())
            if shared:
                return f"; rank {b} shares {shared} rows with rank {a}"
    return ""
