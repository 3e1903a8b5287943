"""Compare during training the weights of ranks that must hold the same, to find silent corruption of one of them.

Each rank hashes its weights, trained and frozen: a wrong frozen weight makes wrong gradients, which are then averaged
into the trained weights of all ranks alike. One all-gather of 16 bytes per rank follows. Before a full checkpoint the
optimizer state that several ranks hold is hashed, too, so that a checkpoint is only written of what agreed.

What all replicas receive alike is not seen: a wrong gradient, and under ``zero1`` and ``zero2`` a wrong update, which
its only owner sends to the others.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import ProofFailed
from allranks.planning.replicas import replica_sets
from allranks.train.attempt import Attempt
from allranks.train.models.safetensors_files import content_hash
from allranks.train.strategies.base import Strategy
from allranks.train.strategies.shards import state_shards
from allranks.train.sync_proof import checksums
from allranks.utils.machine import host_name

DIGEST_BYTES = 16


class ReplicaCheck:
    """Compare after every `observe.verify_every` steps, and when asked. Every rank calls every method.

    It does nothing if the spec does not ask for it, or no rank has a replica. Make it while no weights are gathered.
    """

    def __init__(self, attempt: Attempt, strategy: Strategy, model: nn.Module) -> None:
        self._attempt, self._strategy, self._every = attempt, strategy, attempt.spec.observe.verify_every
        world = attempt.world.size
        replicated = strategy.replicated
        sets = replica_sets(world, attempt.plan.shard_ranks, replicated=replicated) if self._every else []
        self._sets = sets
        # sharded parameters are replaced by gathered ones in a forward pass; their local tensors stay
        self._weights = [_local(p) for p in model.parameters()] if sets else []
        self._agreed: tuple[int, bool] = (0, False)

    def is_due(self, done: int) -> bool:
        """Return whether `compare` is to be called after `done` steps."""
        return bool(self._sets and self._every and done % self._every == 0)

    def compare(self, done: int, *, with_state: bool = False) -> None:
        """Compare the weights after `done` steps, if that was not done yet. Collective.

        Raises:
            ProofFailed: on every rank; the message names the ranks that differ, with their hosts.
        """
        if not self._sets or self._agreed >= (done, with_state):
            return
        started, world = time.perf_counter(), self._attempt.world
        own = torch.tensor(list(self.digest(with_state=with_state)), dtype=torch.uint8)
        every = [torch.zeros_like(own) for _ in range(world.size)]
        dist.all_gather(every, own, group=world.control)
        odd, unsure = odd_ranks(self._sets, [bytes(one.tolist()) for one in every])
        if odd or unsure:
            self._fail(done, odd, unsure)
        self._agreed = (done, with_state)
        if world.is_first:
            self._attempt.events.write("verify", step=done, seconds=round(time.perf_counter() - started, 6))

    def digest(self, *, with_state: bool) -> bytes:
        """Return a hash of this rank's weights; `with_state`: and of the optimizer state that other ranks hold, too."""
        tensors = list(self._weights)
        if with_state:
            held = state_shards(self._strategy.state_ranges())
            tensors += [shard.tensor for shard in held if shard.everywhere or shard.copies > 1]
        digest = hashlib.sha256()
        for tensor in tensors:
            # both see any single changed bit; on a CPU the hash is the faster one
            on_cpu = tensor.device.type == "cpu"
            digest.update(content_hash(tensor) if on_cpu else repr(checksums(tensor)).encode())
        return digest.digest()[:DIGEST_BYTES]

    def _fail(self, done: int, odd: list[int], unsure: list[list[int]]) -> None:
        hosts: list[Any] = [None] * self._attempt.world.size
        dist.all_gather_object(hosts, host_name(), group=self._attempt.world.control)
        named = [f"rank {rank} on {hosts[rank]}" for rank in odd]
        named += [f"ranks {' and '.join(f'{r} ({hosts[r]})' for r in ranks)}" for ranks in unsure]
        which = "" if odd else " from each other, unknown which is wrong"
        agreed = f"they last agreed {f'after step {self._agreed[0]}' if self._agreed[0] else 'at the start'}"
        raise ProofFailed(
            f"after step {done} the weights of {', '.join(named)} differ{which or ' from those of their replicas'} "
            f"(observe.verify_every); {agreed}, and no checkpoint was saved of weights that differ"
        )


def odd_ranks(sets: Sequence[Sequence[int]], digests: Sequence[bytes]) -> tuple[list[int], list[list[int]]]:
    """Return the ranks that differ from the majority of their replicas, and the sets that have no majority."""
    odd, unsure = [], []
    for ranks in sets:
        usual, count = Counter(digests[rank] for rank in ranks).most_common(1)[0]
        if 2 * count > len(ranks):
            odd += [rank for rank in ranks if digests[rank] != usual]
        else:
            unsure.append(list(ranks))
    return sorted(odd), unsure


def _local(parameter: torch.Tensor) -> torch.Tensor:
    local: Any = parameter
    return local.to_local().detach() if hasattr(local, "to_local") else parameter
