"""Checksums of weights on their way from the files to the ranks: of what was read, and of what the ranks keep."""

from __future__ import annotations

import torch
import torch.distributed as dist

from allranks.errors import ProofFailed
from allranks.train.distributed import DistContext
from allranks.train.sync_proof import MODULUS, TensorSums, add_checksums, checksums

NO_SUMS: TensorSums = (0, 0, 0)


class TransferChecksums:
    """Checksums by parameter: of what was read (the reader sent it, or this rank read it), and of what this rank keeps.

    Args:
        elements: number of elements of each full parameter.
    """

    def __init__(self, elements: dict[str, int]) -> None:
        self._elements = elements
        self._sent: dict[str, TensorSums] = {}
        self._kept: dict[str, TensorSums] = {}
        self._copies: dict[str, int] = {}

    def send(self, name: str, part: torch.Tensor, start: int = 0) -> None:
        """Add data that was read: elements of the flattened parameter from index `start`. All ranks together read it once."""
        self._sent[name] = add_checksums(self._sent.get(name, NO_SUMS), checksums(part, start))

    def keep(self, name: str, part: torch.Tensor, start: int = 0, copies: int = 1) -> None:
        """Add what this rank keeps; all ranks together keep the parameter `copies` times."""
        self._copies[name] = copies
        self._kept[name] = add_checksums(self._kept.get(name, NO_SUMS), checksums(part, start))

    def compare(self, world: DistContext, reader: str) -> dict[str, TensorSums]:
        """Compare the sums, and return those of each full parameter on every rank. Collective.

        Args:
            reader: who has read, for the message.

        Raises:
            ProofFailed: names a parameter that is not held as it was read, or of which a part was not read.
        """
        names = sorted(self._copies)
        kept = torch.tensor([self._kept[n] for n in names], dtype=torch.int64).view(-1, 3)
        sent = torch.tensor([self._sent.get(n, NO_SUMS) for n in names], dtype=torch.int64).view(-1, 3)
        if world.size > 1:
            dist.all_reduce(kept, group=world.control)
            dist.all_reduce(sent, group=world.control)
        sent[:, 1:] %= MODULUS
        due = sent * torch.tensor([self._copies[n] for n in names]).view(-1, 1)
        kept[:, 1:] %= MODULUS
        due[:, 1:] %= MODULUS
        whole = [self._elements[n] for n in names]
        wrong = [
            n
            for n, k, d, s, count in zip(names, kept.tolist(), due.tolist(), sent[:, 0].tolist(), whole, strict=True)
            if k != d or s != count
        ]
        if wrong:
            more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
            raise ProofFailed(
                f"loading: {wrong[0]}{more}: the weights held by the ranks differ from those that {reader} read"
            )
        return {n: (s[0], s[1], s[2]) for n, s in zip(names, sent.tolist(), strict=True)}
