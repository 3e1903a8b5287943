"""`allranks plan` says how much memory a rank will take; this trains the same and looks.

Every case of ``benchmarks/fit_cases.json`` is estimated (from the spec alone), then measured, each in fresh processes. What is
compared, and how it is measured, stands in that file, which was written before the first measurement.

Run as: ``python -m benchmarks.fit [--cases 1,5,11] [--predict] [--file CASES] [--keep]``
Exit code 0: every error is within 10 %; 1 otherwise. The result is `benchmarks/results/fit.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.programs import ROOT

CASES = Path(__file__).with_name("fit_cases.json")
RESULT = ROOT / "benchmarks" / "results" / "fit.json"
LIMIT = 0.10
TIMEOUT_S = 900


def read_cases(path: Path) -> list[dict[str, Any]]:
    """Cases with their defaults, and the spec that each of them is."""
    found = json.loads(path.read_text())
    return [
        {**found["defaults"], **case, "spec": spec_of({**found["defaults"], **case}, found)} for case in found["cases"]
    ]


def spec_of(case: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The spec as a user would write it."""
    model = found["models"][case["model"]]
    return {
        "name": f"case{case['id']}",
        "model": {**model, "dtype": case["dtype"], "gradient_checkpointing": case["gradient_checkpointing"]},
        "data": {"source": "builtin:instructions", "max_length": case["max_length"], "packing": case["packing"]},
        "adapter": {"type": "lora", "r": 8, "dropout": 0.05} if case["adapter"] == "lora" else {"type": "none"},
        "strategy": {"name": case["strategy"]},
        "train": {
            "micro_batch_size": case["micro_batch_size"],
            "grad_accum": case["grad_accum"],
            "max_steps": case["steps"],
        },
        "cluster": {"procs_per_node": case["ranks"], "device": "cpu"},
    }


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 measured, or {"failed": why}."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(case))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fit_rank", str(folder / "case.json"), str(folder / "result.json")],
                cwd=ROOT,
                env=_environment(case["ranks"], rank, port),
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"err{rank}").open("wb"),
            )
            for rank in range(case["ranks"])
        ]
        end = time.monotonic() + TIMEOUT_S
        try:
            for process in ranks:
                process.wait(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return {"failed": f"no end within {TIMEOUT_S} s"}
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
        if not (folder / "result.json").exists():
            return {"failed": "".join((folder / f"err{r}").read_text()[-1500:] for r in range(case["ranks"]))}
        return json.loads((folder / "result.json").read_text())


def _environment(ranks: int, rank: int, port: int) -> dict[str, str]:
    own = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": 1, "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    return os.environ | {k: str(v) for k, v in own.items()}


def main() -> int:
    """Estimate, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases")
    parser.add_argument("--file", type=Path, default=CASES)
    args = parser.parse_args()
    wanted = set(map(int, args.cases.split(","))) if args.cases else None
    for case in read_cases(args.file):
        if wanted and case["id"] not in wanted:
            continue
        began = time.perf_counter()
        found = measure(case)
        took = time.perf_counter() - began
        print(
            case["id"],
            case["model"],
            case["strategy"],
            case["adapter"],
            f"{took:.0f}s",
            json.dumps(found)[:2000],
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
