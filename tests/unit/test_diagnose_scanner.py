"""The scanner: how a file is cut into blocks and in which order lines are searched does not change what is found."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from allranks.analysis.diagnose.records import FileScan
from allranks.analysis.diagnose.scanner import Scanner

TELLING = (
    "[rank1]: KeyError: 'labels'",
    "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB",
    "node-a:7:9 [0] misc/socket.cc:57 NCCL WARN something new went wrong",
    "Training completed in 5 s",
)


def _lines(seed: int, *, unlike: bool) -> list[str]:
    """Return lines of text with failures and progress in between; `unlike` ones have words that no other line has."""
    rng = random.Random(seed)
    lines = []
    for n in range(3000):
        words = (
            " ".join("".join(rng.choices("abcdefghij", k=6)) for _ in range(6)) if unlike else "reading the next part"
        )
        lines.append(f"[rank{n % 4}]: {words} {n}")
        if n % 7 == 0:
            lines.append(f"2026-01-02 10:{n // 60 % 60:02d}:{n % 60:02d} step {n}/9000 loss {rng.random():.3f}")
        if rng.random() < 0.01:
            lines.append(rng.choice(TELLING))
    return lines


def _blocks(lines: list[str], size: int) -> Iterator[tuple[bytes, bool]]:
    for start in range(0, len(lines), size):
        yield ("\n".join(lines[start : start + size]) + "\n").encode(), True


def _scan(lines: list[str], size: int) -> FileScan:
    return Scanner().scan(0, _blocks(lines, size))


def _told(scan: FileScan) -> tuple[object, ...]:
    signals = [(s.kind, s.owner, s.line, s.rank, s.text) for s in scan.signals]
    progress = (scan.first_progress, scan.last_progress, scan.late_progress, scan.last_progress_text)
    return signals, progress, scan.marks, scan.last_done, scan.lines


@pytest.mark.parametrize("unlike", [True, False])
def test_the_size_of_blocks_does_not_change_what_is_found(unlike: bool) -> None:
    lines = _lines(3, unlike=unlike)
    whole, one = _scan(lines, len(lines)), _scan(lines, 1)
    assert len(whole.signals) > 4
    assert whole.marks.keys() >= {0, 7, 21, 49}
    assert _told(whole) == _told(one)
    assert _told(_scan(lines, 150)) == _told(one)  # many blocks, of which later ones are searched before they are split
