"""Checksums of a tensor that add up: those of parts that together are the whole sum to those of the whole.

So ranks can show that what they hold together is what one of them read, without any rank holding all of it.
"""

from __future__ import annotations

import torch

CPU_PIECE, GPU_PIECE = 1 << 16, 1 << 22  # words that are widened at a time; on a CPU so few that they stay in its cache
MODULUS = 1 << 48  # sums of 2^15 ranks stay below 2^63
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Sums = tuple[int, int, int]


def checksums(tensor: torch.Tensor, start: int = 0) -> Sums:
    """Of one part of a flattened tensor.

    Args:
        tensor: the part, of any shape and dtype; its elements in order, as words of their own size.
        start: where the part begins in the flattened whole, elements.

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


def add(a: Sums, b: Sums) -> Sums:
    """Of two parts together."""
    return a[0] + b[0], (a[1] + b[1]) % MODULUS, (a[2] + b[2]) % MODULUS
