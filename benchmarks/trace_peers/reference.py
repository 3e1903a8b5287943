"""A third opinion on a GPU trace, slow and plain: kernels by name, time painted at a tenth of a microsecond.

``python reference.py FOLDER`` prints microseconds of each rank, over the whole trace and within its step marks.
It shares nothing with either analyser; it is what a difference between them is judged by.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

RESOLUTION = 10  # cells a microsecond
WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def kind(event: dict[str, Any]) -> str:
    """compute, comm or copy."""
    if event["cat"] != "kernel":
        return "copy"
    name = event["name"].lower()
    is_nccl = name.startswith(("nccl", "rccl"))
    return "comm" if is_nccl or "Collective name" in event.get("args", {}) else "compute"


def figures(events: list[dict[str, Any]], steps_only: bool) -> dict[str, float] | None:
    """Compute, what is not compute but busy, and overlap; None without kernels or steps."""
    marks = [
        e for e in events if str(e.get("name", "")).startswith("ProfilerStep") and e.get("cat") == "user_annotation"
    ]
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in WORK]
    if not work or (steps_only and not marks):
        return None
    spans = [(kind(e), round(e["ts"] * RESOLUTION), round((e["ts"] + e["dur"]) * RESOLUTION)) for e in work]
    zero = min(start for _, start, _ in spans)
    painted = {"compute": bytearray(), "comm": bytearray(), "copy": bytearray()}
    length = max(end for _, _, end in spans) - zero
    for cells in painted.values():
        cells.extend(bytes(length))
    for what, start, end in spans:
        painted[what][start - zero : end - zero] = b"\1" * (end - start)
    windows = [(0, length)]
    if steps_only:
        windows = [(round(m["ts"] * RESOLUTION) - zero, round((m["ts"] + m["dur"]) * RESOLUTION) - zero) for m in marks]
    compute, comm, copy = (_number(painted[what], windows, length) for what in ("compute", "comm", "copy"))
    busy = compute | comm | copy
    micro = {"compute_us": compute, "non_compute_us": busy & ~compute, "comm_us": comm, "overlapped_us": compute & comm}
    told = {name: bits.bit_count() / 8 / RESOLUTION for name, bits in micro.items()}
    return told | {"overlap_percent": 100 * told["overlapped_us"] / told["comm_us"] if told["comm_us"] else None}  # type: ignore[dict-item]


def _number(cells: bytearray, windows: list[tuple[int, int]], length: int) -> int:
    """Cells within the windows as one number, eight bits a cell."""
    kept = bytearray(length)
    for start, end in windows:
        a, b = max(start, 0), max(min(end, length), 0)
        kept[a:b] = cells[a:b]
    return int.from_bytes(kept.replace(b"\1", b"\xff"), "little")


def main() -> None:
    ranks = {}
    for path in sorted(Path(sys.argv[1]).glob("*.json.gz")):
        document = json.loads(gzip.decompress(path.read_bytes()))
        rank = str(document.get("distributedInfo", {}).get("rank", 0))
        events = document["traceEvents"]
        ranks[rank] = {"whole": figures(events, False), "steps": figures(events, True)}
    print(json.dumps({"ranks": ranks}))


if __name__ == "__main__":
    main()
