"""Shows that what the ranks hold together is what was read, though none of them holds all of it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from allranks.errors import ProofFailed
from allranks.train.checksums import MODULUS, Sums, add, checksums
from allranks.train.loading.reader import READER
from allranks.train.world import World

NOTHING: Sums = (0, 0, 0)


class Tally:
    """Checksums by parameter: of what the reader sent (counted there), and of what this rank keeps."""

    def __init__(self) -> None:
        self._sent: dict[str, Sums] = {}
        self._kept: dict[str, Sums] = {}
        self._copies: dict[str, int] = {}

    def send(self, name: str, part: torch.Tensor, start: int = 0) -> None:
        """The reader sends elements from `start` on of the flattened parameter."""
        self._sent[name] = add(self._sent.get(name, NOTHING), checksums(part, start))

    def keep(self, name: str, part: torch.Tensor, start: int = 0, copies: int = 1) -> None:
        """This rank keeps those; all ranks together keep the parameter `copies` times."""
        self._copies[name] = copies
        self._kept[name] = add(self._kept.get(name, NOTHING), checksums(part, start))

    def compare(self, world: World) -> dict[str, Sums]:
        """The sums of each whole parameter, on every rank. Every rank calls.

        Raises:
            ProofFailed: names a parameter that did not arrive as it was sent.
        """
        names = sorted(self._copies)
        kept = torch.tensor([self._kept[n] for n in names], dtype=torch.int64).view(-1, 3)
        sent = torch.tensor([self._sent.get(n, NOTHING) for n in names], dtype=torch.int64).view(-1, 3)
        if world.size > 1:
            dist.all_reduce(kept, group=world.control)
            dist.broadcast(sent, src=READER, group=world.control)
        due = sent * torch.tensor([self._copies[n] for n in names]).view(-1, 1)
        kept[:, 1:] %= MODULUS
        due[:, 1:] %= MODULUS
        wrong = [n for n, a, b in zip(names, kept.tolist(), due.tolist(), strict=True) if a != b]
        if wrong:
            more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
            raise ProofFailed(f"loading: {wrong[0]}{more}: what the ranks hold together is not what rank {READER} read")
        return {n: (s[0], s[1], s[2]) for n, s in zip(names, sent.tolist(), strict=True)}
