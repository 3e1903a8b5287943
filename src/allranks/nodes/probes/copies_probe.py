"""Test copies between all pairs of GPUs of one node, comparing every value. Runs on the nodes, with torch.

    python -m allranks.nodes.probes.copies_probe --json-args '{"devices": null, "limit_s": 20}'

A pair with broken peer-to-peer does not fail: it hangs, or copies wrong values. So the copies run in a separate process,
which reports each copy before it starts; if it hangs, it is killed, the pair has failed, and another process continues.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import permutations
from typing import Any

CHILD = "ALLRANKS_COPIES_CHILD"
WORDS = 4 * 2**20
START_S = 60.0


def main() -> None:
    """Run the node's part, which prints one JSON line, or the copying process."""
    request = json.loads(sys.argv[sys.argv.index("--json-args") + 1])
    if CHILD in os.environ:
        copy_all(request["devices"], request["skip"])
        return
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    command = [sys.executable, "-m", "allranks.nodes.probes.copies_probe"]
    found = supervise(command, request.get("devices"), request.get("limit_s", 20.0))
    sys.stdout.write(json.dumps({"host": host, **found}) + "\n")
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
        under_way, ended, told = _watch(command, {"devices": devices, "skip": done}, limit_s, done, failed)
        if under_way is None:
            error = "" if ended == 0 else told or f"the copying process ended with {ended}"
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
    """Follow one process until its end or first hang; return the pair in which it hung or died, its exit code and last output."""
    process = subprocess.Popen(
        [*command, "--json-args", json.dumps(request)],
        env={**os.environ, CHILD: "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
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
        while (line := lines.get(timeout=limit_s if pair else START_S)) is not None:
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
        source = torch.arange(WORDS, dtype=torch.int32, device=names[a]) * (a + 3)
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


if __name__ == "__main__":
    main()
