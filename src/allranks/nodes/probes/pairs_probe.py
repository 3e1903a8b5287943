"""Measure copies and all-reduces between all pairs of ranks: time and bandwidth. Runs on the nodes, with torch.

    python -m allranks.nodes.probes.pairs_probe < request.json      {"hosts": ["n1", "n2"], "environment": {...}, "port": 21000, ...}

The request grows with the number of nodes, so it is passed on standard input: one argument has at most 128 KiB. Started once
per node, the program starts its ranks itself. Pairs run one after another, so that they do not disturb each other. Rank 0 prints.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import combinations
from typing import Any

from allranks.nodes.network_verification import connection_addresses
from allranks.nodes.srun import write_stdin

RANK = "ALLRANKS_PAIRS_RANK"
REPEATS = 5
PASSES = 2
"""Repetitions: a pair is slow only if it is slow each time, because on a busy machine any pair may be slow once."""
LIMIT_S = 30
SMALL_BYTES = 8


def main() -> None:
    """Run the node's part, or one rank's."""
    text = sys.stdin.read()
    wish = json.loads(text)
    if RANK in os.environ:
        measure(wish, int(os.environ[RANK]))
    else:
        sys.exit(start(wish, text))


def start(wish: dict[str, Any], text: str) -> int:
    """Start this node's ranks, each with its interface and the request as its standard input, and wait for them."""
    me = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    me = me if me in wish["hosts"] else wish["hosts"][0]
    base = {**os.environ, "OMP_NUM_THREADS": "1", **wish["environment"][me]}
    first = wish["hosts"].index(me) * wish["procs"]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "allranks.nodes.probes.pairs_probe"],
            env={**base, RANK: str(first + local), "LOCAL_RANK": str(local)},
            stdin=subprocess.PIPE,
            text=True,
        )
        for local in range(wish["procs"])
    ]
    for child in children:
        write_stdin(child.stdin, text)
    deadline = time.monotonic() + wish["limit_s"]
    try:
        return max(abs(child.wait(max(0.1, deadline - time.monotonic()))) for child in children)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        for child in children:
            child.kill()


def measure(wish: dict[str, Any], rank: int) -> None:
    """Measure all pairs in turn; the store collects the results."""
    import torch
    import torch.distributed as dist

    world, cuda = len(wish["hosts"]) * wish["procs"], wish["backend"] == "nccl"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore(wish["master"], wish["port"], world, rank == 0, limit)
    dist.init_process_group(wish["backend"], store=store, rank=rank, world_size=world, timeout=limit)
    pairs = list(combinations(range(world), 2))
    groups = [dist.new_group(list(pair), timeout=limit) for pair in pairs]
    best: dict[tuple[int, int], dict[str, float]] = {}
    for _ in range(PASSES):
        for pair, group in zip(pairs, groups, strict=True):
            if rank in pair:
                times = _pair(torch, dist, wish["bytes"], pair, rank, group, cuda)
                best[pair] = {key: min(value, best.get(pair, times)[key]) for key, value in times.items()}
            dist.barrier()
    store.set(f"connections/{rank}", json.dumps(connection_addresses([os.getpid()], without_ports=[wish["port"]])))
    for pair, times in best.items():
        if rank == pair[0]:
            store.set(f"pair/{pair[0]}/{pair[1]}", json.dumps(times))
    if rank == 0:
        rows = [{"a": a, "b": b, **json.loads(store.get(f"pair/{a}/{b}"))} for a, b in pairs]
        seen = [json.loads(store.get(f"connections/{other}")) for other in range(world)]
        sys.stdout.write(json.dumps({"host": wish["hosts"][0], "pairs": rows, "connections": seen}) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def _pair(
    torch: Any, dist: Any, size: int, pair: tuple[int, int], rank: int, group: Any, cuda: bool
) -> dict[str, float]:
    device = "cuda" if cuda else "cpu"
    large = torch.ones(size // 4, dtype=torch.float32, device=device)
    small = torch.ones(SMALL_BYTES // 4, dtype=torch.float32, device=device)
    other = pair[1] if rank == pair[0] else pair[0]

    def there_and_back(tensor: Any) -> None:
        for sender in pair:
            if sender == rank:
                dist.send(tensor, other, group=group)
            else:
                dist.recv(tensor, other, group=group)

    def timed(work: Callable[[], None]) -> float:
        times = []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times[1:])  # the first one includes connecting; other load only adds time

    return {
        "copy_s": timed(lambda: there_and_back(large)) / 2,
        "latency_s": timed(lambda: there_and_back(small)) / 2,
        "all_reduce_s": timed(lambda: dist.all_reduce(large, group=group)),
    }


if __name__ == "__main__":
    main()
