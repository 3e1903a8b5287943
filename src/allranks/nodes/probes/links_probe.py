"""Test copies between the GPUs of a node, and measure collectives and pairs of ranks. Runs on the nodes, with torch.

    python -m allranks.nodes.probes.links_probe copies --json-args '{"devices": null, "limit_s": 20}'
    python -m allranks.nodes.probes.links_probe pairs < request.json    {"hosts": ["n1", "n2"], "environment": {...},
    "port": 21000, ...}

``copies`` tests copies between all pairs of GPUs of one node and compares every value. A pair with broken peer-to-peer
does not fail: it hangs, or copies wrong values. So the copies run in a separate process, which reports each copy before
it starts; if it hangs, it is killed, the pair has failed, and another process continues.

``pairs`` measures all-reduces of all ranks by size, then copies and all-reduces between pairs of ranks. Its request
grows with the number of nodes, so it is passed on standard input: one argument has at most 128 KiB. Started once per
node, the program starts its ranks itself. Pairs are measured in rounds of a round-robin tournament: no rank is in two
pairs of a round, and between nodes no node is, so that pairs of a round share no link. All rounds of n ranks take n - 1
times as long as one pair; after log2(n) rounds each node has been measured with as many others. Rank 0 prints, also if
the time ends before the last round.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import permutations
from typing import Any

from allranks.nodes.slurm.srun import write_stdin
from allranks.utils.kernel_counters import connection_addresses

COPIES_CHILD = "ALLRANKS_COPIES_CHILD"
COPY_WORDS = 4 * 2**20
COPIES_START_S = 60.0


def check_copies() -> None:
    """Run the node's part, which prints one JSON line, or the copying process."""
    request = json.loads(sys.argv[sys.argv.index("--json-args") + 1])
    if COPIES_CHILD in os.environ:
        copy_all(request["devices"], request["skip"])
        return
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    command = [sys.executable, "-m", "allranks.nodes.probes.links_probe", "copies"]
    report = supervise(command, request.get("devices"), request.get("limit_s", 20.0))
    sys.stdout.write(json.dumps({"host": host, **report}) + "\n")
    sys.stdout.flush()


def supervise(command: Sequence[str], devices: list[str] | None, limit_s: float) -> dict[str, Any]:
    """Return the number of tested pairs and the failed pairs; a process that hangs on a pair is replaced.

    Args:
        command: command of the copying process; ``--json-args`` is added.
        devices: torch's device names; None: all GPUs.
        limit_s: time limit for one pair.
    """
    done: list[str] = []
    failed: list[str] = []
    error = ""
    while True:
        under_way, ended, message = _watch(command, {"devices": devices, "skip": done}, limit_s, done, failed)
        if under_way is None:
            error = "" if ended == 0 else message or f"the copying process ended with {ended}"
            break
        done.append(under_way)
        failed.append(under_way)
    return {"tested": len(done), "failed": sorted({_plain(pair) for pair in failed}), "error": error}


def _plain(pair: str) -> str:
    """Return one name for both directions of a pair."""
    return "-".join(sorted(pair.split("-"), key=lambda name: (len(name), name)))


def _watch(
    command: Sequence[str], request: dict[str, Any], limit_s: float, done: list[str], failed: list[str]
) -> tuple[str | None, int | None, str]:
    """Follow one process to its end or first hang; return the pair where it hung or died, exit code and last output."""
    process = subprocess.Popen(
        [*command, "--json-args", json.dumps(request)],
        env={**os.environ, COPIES_CHILD: "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    pair: str | None = None
    last = ""
    try:
        while (line := lines.get(timeout=limit_s if pair else COPIES_START_S)) is not None:
            word, _, name = line.partition(" ")
            if word == "begin":
                pair = name
            elif word in ("ok", "wrong") and name == pair:
                done.append(name)
                failed += [name] if word == "wrong" else []
                pair = None
            else:
                last = line or last
        return pair, process.wait(limit_s), last
    except (queue.Empty, subprocess.TimeoutExpired):
        return pair, None, last or "no answer"
    finally:
        process.kill()


def copy_all(devices: list[str] | None, skip: Sequence[str]) -> None:
    """Test each ordered pair in turn: begin, copy, compare, ok or wrong."""
    import torch

    names = devices or [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    shown = [_shown(name, place) for place, name in enumerate(names)]
    for a, b in permutations(range(len(names)), 2):
        pair = f"{shown[a]}-{shown[b]}"
        if pair in skip:
            continue
        _say(f"begin {pair}")
        source = torch.arange(COPY_WORDS, dtype=torch.int32, device=names[a]) * (a + 3)
        copy = source.to(names[b], copy=True)
        if names[b].startswith("cuda"):
            torch.cuda.synchronize(names[b])
        _say(f"{'ok' if torch.equal(copy.cpu(), source.cpu()) else 'wrong'} {pair}")


def _shown(name: str, place: int) -> str:
    """Return nvidia-smi's name of the GPU, which CUDA_VISIBLE_DEVICES may have changed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = visible[place] if place < len(visible) and visible[place].isdigit() else str(place)
    return f"GPU{index}" if name.startswith("cuda") else f"{name.upper()}{place}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


PAIRS_RANK = "ALLRANKS_PAIRS_RANK"
REPEATS = 5
PASSES = 2
"""Repetitions: a pair is slow only if it is slow each time, because on a busy machine any pair may be slow once."""
LIMIT_S = 60
SMALL_BYTES = 8
SIZES = [4**k for k in range(5, 15)]
"""Bytes of the all-reduces of all ranks: 1 KiB to 256 MiB."""
SWEEP_SHARE = 0.4
"""Share of the time for the all-reduces of all ranks; the rest is for pairs."""
TIMED_S = 0.2
"""A collective or a copy is repeated for about so long."""
MOST_REPEATS = 20
Pair = tuple[int, int]


def measure_pairs() -> None:
    """Run the node's part, or one rank's."""
    text = sys.stdin.read()
    request = json.loads(text)
    if PAIRS_RANK in os.environ:
        measure(request, int(os.environ[PAIRS_RANK]))
    else:
        sys.exit(start_ranks(request, text))


def start_ranks(request: dict[str, Any], text: str) -> int:
    """Start this node's ranks, each with its interface and the request as its standard input, and wait for them."""
    me = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    me = me if me in request["hosts"] else request["hosts"][0]
    base = {**os.environ, "OMP_NUM_THREADS": "1", **request["environment"][me]}
    first = request["hosts"].index(me) * request["procs"]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "allranks.nodes.probes.links_probe", "pairs"],
            env={**base, PAIRS_RANK: str(first + local), "LOCAL_RANK": str(local)},
            stdin=subprocess.PIPE,
            text=True,
        )
        for local in range(request["procs"])
    ]
    for child in children:
        write_stdin(child.stdin, text)
    deadline = time.monotonic() + request["limit_s"]
    try:
        return max(abs(child.wait(max(0.1, deadline - time.monotonic()))) for child in children)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        for child in children:
            child.kill()


def measure(request: dict[str, Any], rank: int) -> None:
    """Measure collectives and pairs; the store collects the results."""
    import torch
    import torch.distributed as dist

    world, cuda = len(request["hosts"]) * request["procs"], request["backend"] == "nccl"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore(request["master"], request["port"], world, rank == 0, limit)
    dist.init_process_group(request["backend"], store=store, rank=rank, world_size=world, timeout=limit)
    ranks = Ranks(torch, dist, rank, world, cuda, time.monotonic() + request["budget_s"])
    sweep = list(ranks.sweep(request["budget_s"] * SWEEP_SHARE)) if world > 1 else []
    best, done, planned = ranks.pairs(request["procs"], request["bytes"])
    store.set(f"connections/{rank}", json.dumps(connection_addresses([os.getpid()], without_ports=[request["port"]])))
    store.set(f"pairs/{rank}", json.dumps([{"a": a, "b": b, **times} for (a, b), times in best.items() if rank == a]))
    if rank == 0:
        rows = [row for other in range(world) for row in json.loads(store.get(f"pairs/{other}"))]
        rows.sort(key=lambda row: (row["a"], row["b"]))
        seen = [json.loads(store.get(f"connections/{other}")) for other in range(world)]
        report = {"pairs": rows, "sweep": sweep, "connections": seen, "rounds": [done, planned]}
        sys.stdout.write(json.dumps({"host": request["hosts"][0], **report}) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def tournament(players: int) -> list[list[Pair]]:
    """Return rounds of disjoint pairs where each two players meet once (circle method); if odd, one rests in each."""
    seats = [*range(players), *([-1] if players % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]))  # noqa: B905 - equally long
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in met if min(a, b) >= 0))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds if players > 1 else []


def rounds_of(nodes: int, procs: int) -> list[list[Pair]]:
    """Return the rounds: pairs within all nodes at a time, then between nodes: first ranks, then second ranks, ..."""
    within = [[(n * procs + a, n * procs + b) for n in range(nodes) for a, b in pairs] for pairs in tournament(procs)]
    between = tournament(nodes)
    return [*within, *([(a * procs + i, b * procs + i) for a, b in pairs] for i in range(procs) for pairs in between)]


class Ranks:
    """One rank's part in the measurement. All ranks call the same methods and take the same decisions."""

    def __init__(self, torch: Any, dist: Any, rank: int, world: int, cuda: bool, deadline: float) -> None:
        self._torch, self._dist, self._rank, self._world = torch, dist, rank, world
        self._cuda, self._deadline = cuda, deadline
        self._control = dist.new_group(backend="gloo") if cuda else dist.group.WORLD

    def sweep(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """Time all-reduces of all ranks by size, until the next size would take longer than there is time."""
        end = min(time.monotonic() + limit_s, self._deadline)
        last = 0.0
        for size in SIZES:
            if not self._all_agree(time.monotonic() + 3 * 4 * last < end):
                return
            data = self._ones(size)
            last = self._timed(lambda data=data: self._dist.all_reduce(data), self._control)
            yield {"kind": "all_reduce", "bytes": size, "seconds": last}

    def _ones(self, size: int) -> Any:
        device = "cuda" if self._cuda else "cpu"
        return self._torch.ones(max(1, size // 4), dtype=self._torch.float32, device=device)

    def pairs(self, procs: int, size: int) -> tuple[dict[Pair, dict[str, float]], int, int]:
        """Measure pairs, as far as there is time.

        Returns:
            This rank's pairs with their best times; the number of rounds done at least once, and of all.
        """
        rounds = rounds_of(self._world // procs, procs)
        best: dict[Pair, dict[str, float]] = {}
        groups: dict[Pair | None, Any] = {}
        done, took = 0, 0.0
        for number in range(PASSES * len(rounds)):
            began = time.monotonic()
            if not self._all_agree(began + took < self._deadline):
                break
            pair = next((p for p in rounds[number % len(rounds)] if self._rank in p), None)
            if number < len(rounds):
                groups[pair] = self._group([self._rank] if pair is None else list(pair))
            if pair is not None:
                times = self._pair(pair, groups[pair], size)
                best[pair] = {key: min(value, best.get(pair, times)[key]) for key, value in times.items()}
            took = max(took, time.monotonic() - began)
            done = max(done, min(number + 1, len(rounds)))
        self._dist.barrier(group=self._control)
        return best, done, len(rounds)

    def _group(self, members: list[int]) -> Any:
        """Create a group without other ranks; each rank, even at rest, creates one per round: names have the count."""
        return self._dist.new_group(members, timeout=timedelta(seconds=LIMIT_S), use_local_synchronization=True)

    def _pair(self, pair: Pair, group: Any, size: int) -> dict[str, float]:
        dist, rank = self._dist, self._rank
        large, small = self._ones(size), self._ones(SMALL_BYTES)
        other = pair[1] if rank == pair[0] else pair[0]

        def there_and_back(tensor: Any) -> None:
            for sender in pair:
                if sender == rank:
                    dist.send(tensor, other, group=group)
                else:
                    dist.recv(tensor, other, group=group)

        return {
            "copy_s": self._best(lambda: there_and_back(large)) / 2,
            "latency_s": self._best(lambda: there_and_back(small)) / 2,
            "all_reduce_s": self._best(lambda: dist.all_reduce(large, group=group)),
            "bytes": size,
        }

    def _best(self, work: Callable[[], None]) -> float:
        """Return the shortest of some times: other load only adds. The first one includes connecting."""
        return min(self._once(work) for _ in range(REPEATS + 1))

    def _once(self, work: Callable[[], Any], times: int = 1) -> float:
        began = time.perf_counter()
        for _ in range(times):
            work()
        if self._cuda:
            self._torch.cuda.synchronize()
        return (time.perf_counter() - began) / times

    def _timed(self, work: Callable[[], Any], group: Any) -> float:
        """Return the mean time of a collective, queued several times as nccl-tests does; that of the slowest rank."""
        self._once(work)
        repeats = int(min(MOST_REPEATS, max(1, TIMED_S / max(self._largest(self._once(work), group), 1e-9))))
        return self._largest(self._once(work, repeats), group)

    def _largest(self, value: float, group: Any) -> float:
        largest = self._torch.tensor(value, dtype=self._torch.float64)
        self._dist.all_reduce(largest, op=self._dist.ReduceOp.MAX, group=group)
        return float(largest)

    def _all_agree(self, mine: bool) -> bool:
        """Return whether all ranks say so; also a barrier."""
        return self._largest(float(not mine), self._control) == 0.0


if __name__ == "__main__":
    {"copies": check_copies, "pairs": measure_pairs}[sys.argv[1]]()
