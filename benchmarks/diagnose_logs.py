"""Makes the logs of the `diagnose` benchmark: ranks of one job, and one large file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

WATCHDOG = (
    "[rank{r}]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:629] [Rank {r}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=48211, OpType=ALLREDUCE, NumelIn=131072, NumelOut=131072, Timeout(ms)=600000) ran for "
    "600081 milliseconds before timing out."
)
MEMORY = (
    "[rank{r}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
    "GPU {d} has a total capacity of 79.10 GiB of which 310.00 MiB is free."
)


def rank_lines(rank: int, ranks: int, size_bytes: int, *, unique: bool) -> Iterator[str]:
    """NCCL's start, then training lines up to `size_bytes`; with `unique`, every line holds words that no other has."""
    host, rng, written = f"gpu{rank // 8:04d}", random.Random(rank), 0
    head = f"{host}:{1000 + rank}:{1000 + rank} [{rank % 8}] NCCL INFO"
    start = [
        f"{head} NCCL version 2.26.2+cuda12.2",
        f"{head} ncclCommInitRank comm 0x55{rank:08x} rank {rank} nranks {ranks} cudaDev {rank % 8} - Init START",
    ]
    start += [
        f"{head} Channel {c:02d}/0 : {rank}[{rank % 8}] -> {(rank + 1) % ranks}[0] [send] via NET/IB/{c % 8}/GDRDMA"
        for c in range(64)
    ]
    for line in start:
        written += len(line) + 1
        yield line
    step = 0
    while written < size_bytes:
        step += 1
        clock = f"{step // 3600 % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d},{rng.randrange(1000):03d}"
        line = (
            f"[2025-06-17 {clock}] [rank{rank}] step {step}/100000 | loss {rng.random() * 9:.4f} | grad norm "
            f"{rng.random():.3f} | lr {rng.random() * 1e-4:.3e} | tokens/s {rng.random() * 9e4:.1f}"
        )
        if unique:
            line = f"[rank{rank}]: sample " + " ".join(
                "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(12)
            )
        written += len(line) + 1
        yield line


def write_job(folder: Path, ranks: int, size_bytes: int) -> int:
    """One file a rank: rank `ranks // 2` runs out of memory, all others time out. Returns the bytes written."""
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for rank in range(ranks):
        last = (MEMORY if rank == ranks // 2 else WATCHDOG).format(r=rank, d=rank % 8)
        text = "\n".join([*rank_lines(rank, ranks, size_bytes, unique=False), last]) + "\n"
        (folder / f"rank{rank}.log").write_text(text)
        total += len(text)
    return total


def write_one(path: Path, size_bytes: int, *, unique: bool) -> int:
    """One file with the failure at its end. Returns the bytes written."""
    with path.open("w") as file:
        for line in rank_lines(3, 8, size_bytes, unique=unique):
            file.write(line + "\n")
        file.write(MEMORY.format(r=3, d=3) + "\n")
    return path.stat().st_size


def write_endless(path: Path, size_bytes: int) -> int:
    """One line without end, with the failure in its middle."""
    half, piece = size_bytes // 2, b"abcdefg " * (1 << 17)
    with path.open("wb") as file:
        for part in (0, 1):
            for _ in range(half // len(piece)):
                file.write(piece)
            if part == 0:
                file.write(MEMORY.format(r=3, d=3).encode())
    return path.stat().st_size
