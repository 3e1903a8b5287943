"""``allranks diagnose`` on large logs: time and memory of the whole verb, a fresh process each.

``python -m benchmarks.diagnose [--ranks 1024] [--repeats 3] [--json benchmarks/results/diagnose.json]``.
Sets: a job of 1,024 ranks with 1 MB each; a file of 100 MB as training writes it; one of 100 MB in which no two lines
are alike (the worst case for the table of forms); one line of 1 GB, which must be reported: only its beginning is read.
The others must name the planted failure. Exit code 1: a planted failure is not named, the job takes over 20 s on two
cores, a 100 MB file over 3 s, or memory passes 400 MB. The result keeps figures of logs new to the rules (``unseen``).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.diagnose_logs import write_endless, write_job, write_one
from benchmarks.processes import measure

JOB_S, FILE_S, MEMORY_BYTES, TIMEOUT_S = 20.0, 3.0, 400 << 20, 600
MB = 1_000_000


def sets(folder: Path, ranks: int, scale: float) -> dict[str, tuple[Path, int, float | None]]:
    """Path, bytes and time limit of each set."""
    size = int(100 * MB * scale)
    paths = {name: folder / f"{name}.log" for name in ("training", "unlike_lines", "endless_line")}
    return {
        "job": (folder / "job", write_job(folder / "job", ranks, int(MB * scale)), JOB_S),
        "training": (paths["training"], write_one(paths["training"], size, unique=False), FILE_S),
        "unlike_lines": (paths["unlike_lines"], write_one(paths["unlike_lines"], size, unique=True), FILE_S),
        "endless_line": (paths["endless_line"], write_endless(paths["endless_line"], size * 10), None),
    }


def run(path: Path, repeats: int) -> dict[str, Any]:
    """Times, memory and the first finding."""
    command = [sys.executable, "-m", "allranks.cli.main", "diagnose", "--json", str(path)]
    runs = [measure(command, TIMEOUT_S) for _ in range(repeats)]
    document = json.loads(runs[-1].stdout)
    found = document["findings"]
    first = {key: found[0][key] for key in ("id", "rank", "host")} if found else None
    return {
        "wall_s": [round(r.wall_s, 3) for r in runs],
        "cpu_s": [round(r.cpu_s, 3) for r in runs],
        "peak_bytes": max(r.peak_bytes for r in runs),
        "first": first,
        "problems": document["problems"],
    }


def kept(path: Path | None, name: str) -> Any:
    """A part of an earlier result that cannot be taken again: logs are unseen only once."""
    return json.loads(path.read_text()).get(name) if path and path.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="size of the logs; below 1 for a quick look")
    parser.add_argument("--work", type=Path, help="folder for the logs (default: a temporary one)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.work))
    try:
        results, good = {}, True
        for name, (path, size, limit) in sets(folder, options.ranks, options.scale).items():
            result = {"bytes": size, "limit_s": limit, **run(path, options.repeats)}
            fast = limit is None or median(result["wall_s"]) <= limit
            right = result["first"] is not None and result["first"]["id"] == "cuda_oom"
            if name == "endless_line":
                right = any("its rest was skipped" in problem["text"] for problem in result["problems"])
            result["met"] = fast and right and result["peak_bytes"] <= MEMORY_BYTES
            good &= result["met"]
            results[name] = result
            told = f"{median(result['wall_s']):6.2f} s {result['peak_bytes'] / MB:6.0f} MB  {result['first']}"
            print(f"{name:<13} {size / MB:7.0f} MB  {told}{'' if result['met'] else '  NOT MET'}", flush=True)
        document = {"machine": machine.facts(), "ranks": options.ranks, "scale": options.scale, "sets": results}
        if options.json:
            document["unseen"] = kept(options.json, "unseen")
            document["verdict_rounds"] = kept(options.json, "verdict_rounds")
            options.json.write_text(json.dumps(document, indent=2) + "\n")
        return 0 if good else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
