"""Start-up time of the light verbs, and that they import no torch.

Measures ``allranks --help`` and the light verbs on small inputs in wall time, in turns with ``python -c pass`` as the floor,
and lists what each imports by ``-X importtime``.

Run as: ``python -m benchmarks.startup [--repeats 20] [--spec SPEC]``
Exit code 0: all verbs ended as they should and none imported torch; 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.programs import ROOT, console_script, usual_environment

HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "datasets",
    "tokenizers",
    "accelerate",
    "peft",
    "pandas",
    "pyarrow",
    "plotly",
)
FORBIDDEN = "torch"
IMPORTTIME = re.compile(r"^import time:\s+(\d+) \|\s+(\d+) \| +(\S+)$", re.MULTILINE)
SPEC = """\
name: startup
model: {name: "tiny:mistral"}
data: {source: "builtin:instructions"}
cluster: {launcher: local, procs_per_node: 2}
"""
MATRIX = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\t0-31\t0
GPU1\tNV12\t X \t0-31\t0
"""
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$HEAD:29500" --rdzv-id="$SLURM_JOB_ID" train.py
"""
LOG = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 10, in <module>
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB
"""
TRACE = """\
{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 5},
{"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 8, "dur": 5}], "distributedInfo": {"rank": 0, "world_size": 1}}
"""
INPUTS = {"matrix.txt": MATRIX, "job.sbatch": SCRIPT, "rank1.log": LOG, "trace.json": TRACE}
FINDS = {"allranks diagnose FILE": 1}  # exit codes where something is found
TIMEOUT_S = 60


def commands(spec: Path) -> dict[str, list[str]]:
    """What is measured: arguments after the interpreter."""
    script = console_script()
    return {
        "python -c pass": ["-c", "pass"],
        "allranks --help": [script, "--help"],
        "allranks plan SPEC": [script, "plan", str(spec)],
        "allranks topo FILE": [script, "topo", "matrix.txt"],
        "allranks lint FILE": [script, "lint", "job.sbatch"],
        "allranks diagnose FILE": [script, "diagnose", "rank1.log"],
        "allranks trace FILE": [script, "trace", "trace.json"],
        "allranks failures": [script, "failures"],
        "allranks smoke --dry-run": [script, "smoke", "01_single", "--dry-run"],
        "allranks doctor --help": [script, "doctor", "--help"],
    }


def run_once(arguments: list[str], cwd: Path, *options: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Wall seconds from start to end of one process, and how it ended."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *options, *arguments],
        cwd=cwd,
        env=usual_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return time.perf_counter() - begin, done


def imports(stderr: str) -> dict[str, Any]:
    """Modules of an ``-X importtime`` listing: their number, the heavy packages among them, the slowest packages."""
    rows = [(name, int(own)) for own, _, name in IMPORTTIME.findall(stderr)]
    by_package: dict[str, int] = {}
    for name, own in rows:
        package = name.split(".")[0]
        by_package[package] = by_package.get(package, 0) + own
    slowest = sorted(by_package.items(), key=lambda item: -item[1])[:8]
    return {
        "modules": len(rows),
        "heavy": [p for p in HEAVY if p in by_package],
        "slowest_packages_ms": {name: round(us / 1000, 1) for name, us in slowest},
    }


def measure(repeats: int, spec: Path, cwd: Path) -> dict[str, dict[str, Any]]:
    """Each command once for its imports, which also compiles all files, then all in turns."""
    chosen = commands(spec)
    found: dict[str, dict[str, Any]] = {}
    for name, arguments in chosen.items():
        _, done = run_once(arguments, cwd, "-X", "importtime")
        found[name] = {"exit_code": done.returncode, **imports(done.stderr), "seconds": []}
        if done.returncode:
            found[name]["error"] = [x for x in done.stderr.splitlines() if not x.startswith("import time:")][-3:]
    for _ in range(repeats):
        for name, arguments in chosen.items():
            found[name]["seconds"].append(round(run_once(arguments, cwd)[0], 4))
    floor = median(found["python -c pass"]["seconds"])
    for row in found.values():
        seconds = row["seconds"]
        row |= {"median_s": round(median(seconds), 4), "min_s": min(seconds), "max_s": max(seconds)}
        row["above_python_s"] = round(row["median_s"] - floor, 4)
    return found


def problems(found: dict[str, dict[str, Any]]) -> list[str]:
    """Why this measurement is not a success."""
    failed = [
        f"{name}: exit code {row['exit_code']}" for name, row in found.items() if row["exit_code"] != FINDS.get(name, 0)
    ]
    return failed + [f"{name}: imports {FORBIDDEN}" for name, row in found.items() if FORBIDDEN in row["heavy"]]


def show(found: dict[str, dict[str, Any]]) -> None:
    """The table."""
    table = Table(title="start-up, wall seconds")
    for column in ("command", "median", "min", "max", "above python", "modules", "heavy imports"):
        table.add_column(column, justify="left" if column in ("command", "heavy imports") else "right")
    for name, row in found.items():
        times = (f"{row[k]:.3f}" for k in ("median_s", "min_s", "max_s", "above_python_s"))
        table.add_row(name, *times, str(row["modules"]), ", ".join(row["heavy"]) or "none")
    Console().print(table)


def main() -> int:
    """Measure, write, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--spec", type=Path, help="for plan; by default two local ranks of a tiny model")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "startup.json")
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        spec = args.spec.resolve() if args.spec else Path(scratch) / "spec.yaml"
        if not args.spec:
            spec.write_text(SPEC)
        for name, text in INPUTS.items():
            (Path(scratch) / name).write_text(text)
        clock = machine.CpuClock.now()
        found = measure(args.repeats, spec, Path(scratch))
    wrong = problems(found)
    result = {
        "benchmark": "startup",
        "machine": machine.facts(),
        "repeats": args.repeats,
        "disturbed": clock.disturbance(),
        "problems": wrong,
        "commands": found,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    show(found)
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
