"""Prove the program on one GPU: `make gpu`, or ``python -m benchmarks.gpu --stage correctness speed model``.

See README.md here. Stages of at most ten minutes, together at most 28. A stage that is recorded for this source and
this device is not repeated, and one that was cut off goes on at its first check without a result. No network.
``--device cpu`` rehearses everything with tiny sizes; its record says so, and nothing counts it as a result of a GPU.
Exit code: 0 nothing failed, 1 a check failed, 3 no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from allranks.utils.machine import visible_gpus
from benchmarks.gpu_checks import STAGES
from benchmarks.gpu_kit import FAILED, NO_END, SKIPPED, Check, Kit, Result, Stage
from benchmarks.machine import PACKAGES, facts
from benchmarks.programs import ROOT, exit_on_sigterm

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
WORK = ROOT / "benchmarks" / "work" / "gpu"
SOURCES = (
    "src",
    "tests/gpu",
    "tests/dist",
    "benchmarks/gpu.py",
    "benchmarks/gpu_benches.py",
    "benchmarks/gpu_checks.py",
    "benchmarks/gpu_kit.py",
    "benchmarks/step_floor.py",
    "benchmarks/gpu_lora_mfu.yaml",
)
WHAT = "make gpu: checks on one GPU, by stage"
REHEARSAL = "REHEARSAL on a CPU with tiny sizes; not a result of a GPU. " + WHAT
LEAST_S = 10.0  # a check that has less time is not started
TIME_IS_UP = "the time of the stage was used up; run the stage again"
CORES_PER_LANE = 2  # a run on one GPU keeps one core busy, and starts with imports on another
CPU_SLACK = 4.0  # limits of a rehearsal, which may run on two busy cores
VERSIONS = (*PACKAGES, "deepspeed", "triton", "safetensors", "msgspec", "pytest")

ASK_TORCH = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
found["gpus"] = torch.cuda.device_count()
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    found |= {"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"}
    found["multiprocessors"] = p.multi_processor_count
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


def torch_facts() -> dict[str, Any]:
    """Return what torch says of itself and of the device; of a torch that cannot be imported, why."""
    done = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"], "gpus": 0}
    return json.loads(done.stdout.splitlines()[-1])


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n", 1)[0].strip() or None


def source_digest() -> str:
    """Return the hash of everything that a result depends on. A copied tree without .git has one too."""
    digest = hashlib.sha256()
    for place in SOURCES:
        path = ROOT / place
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".py", ".j2", ".json"))
        for file in files:
            digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """Return the commit, with ``+changes`` behind it; of a tree without .git what ALLRANKS_COMMIT says."""

    def git(*words: str) -> str:
        try:
            return subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    head = git("rev-parse", "HEAD")
    if not head:
        return os.environ.get("ALLRANKS_COMMIT", "unknown")
    return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def slug(name: str) -> str:
    """Return a device's name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class Record:
    """The JSON document of one device and one source; written after every check."""

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self.path, self.content = self._begun(folder, head)

    @staticmethod
    def _begun(folder: Path, head: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
        """Return the newest record of this source and device, or a new one that overwrites nothing."""
        name = f"{'rehearsal-' if head['rehearsal'] else ''}{slug(head['device']['name'])}"
        same = ("source", "rehearsal", "device", "versions")
        for path in sorted(folder.glob(f"{name}-*.json"), key=lambda p: p.stat().st_mtime, reverse=True):
            try:
                found = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if all(found.get(key) == head[key] for key in same):
                return path, found
        folder.mkdir(parents=True, exist_ok=True)
        today = head["machine"]["date"][:10]
        free = (folder / f"{name}-{today}{f'-{n}' if n > 1 else ''}.json" for n in range(1, 1000))
        return next(path for path in free if not path.exists()), {**head, "stages": {}}

    def stage(self, name: str) -> dict[str, Any]:
        """Return the record of a stage."""
        return self.content["stages"].setdefault(name, {"finished": False, "seconds": 0.0, "done": [], "checks": {}})

    def add(self, stage: str, check: Check, found: list[Result], *, done: bool) -> None:
        """Add the results of a check; one that is not done runs again when the stage does."""
        with self._lock:
            into = self.stage(stage)
            into["checks"] |= {
                r.name: {"title": r.title, "status": r.status, "reason": r.reason, "seconds": r.seconds,
                         "limit_s": check.limit_s, "figures": r.figures}
                for r in found
            }  # fmt: skip
            into["done"] += [check.name] if done else []
            self.write()

    def write(self) -> None:
        """Replace the file."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        part.replace(self.path)


def run_check(kit: Kit, check: Check, deadline: float) -> list[Result]:
    """Run one check within its limit and the stage's; whatever goes wrong in it is its own result."""
    began = time.monotonic()
    limit = min(check.limit_s * kit.slack, deadline - began)
    try:
        found = check.run(kit, check, limit)
    except Exception as error:  # noqa: BLE001 - one check must not prevent the others
        found = [Result(check.name, check.title, FAILED, f"{type(error).__name__}: {error}")]
    if limit < check.limit_s * kit.slack and len(found) == 1 and found[0].reason.startswith(NO_END):
        found[0].status, found[0].reason = SKIPPED, TIME_IS_UP
    if len(found) == 1 and not found[0].seconds:
        found[0].seconds = round(time.monotonic() - began, 1)
    return found


def run_stage(kit: Kit, stage: Stage, record: Record, only: list[str], until: float) -> None:
    """Run the checks of a stage that have no result yet, only those of `only` if it names any."""
    began, known = time.monotonic(), record.stage(stage.name)
    deadline = min(began + stage.limit_s * kit.slack, until)
    left = [c for c in stage.checks if c.name not in known["done"] and (not only or c.name in only)]
    lanes = max(1, min(stage.lanes, kit.cores // CORES_PER_LANE))
    print(
        f"{stage.name}: {len(left)} checks, at most {(deadline - began) / 60:.0f} minutes, {lanes} at a time",
        flush=True,
    )

    def one(check: Check) -> None:
        late = deadline - time.monotonic() < LEAST_S
        found = [Result(check.name, check.title, SKIPPED, TIME_IS_UP)] if late else run_check(kit, check, deadline)
        record.add(stage.name, check, found, done=all(r.reason != TIME_IS_UP for r in found))
        for r in found:
            reason = f": {r.reason.splitlines()[0][:300]}" if r.reason else ""
            print(f"  {r.status:8} {r.seconds:6.1f} s  {r.name}{reason}", flush=True)

    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(one, left))
    known["finished"], known["seconds"] = (
        all(c.name in known["done"] for c in stage.checks),
        round(known["seconds"] + time.monotonic() - began, 1),
    )
    record.write()


def head_of(rehearsal: bool) -> dict[str, Any]:
    """Return what identifies a record: device, source, versions.

    Raises:
        SystemExit: there is no GPU, or torch cannot use it.
    """
    known, machine, gpus = torch_facts(), facts(), [] if rehearsal else visible_gpus()
    if "error" in known:
        sys.exit(f"gpu: torch cannot be imported: {known['error']}")
    if not rehearsal and not (gpus and known["gpus"]):
        seen = f"nvidia-smi shows {len(gpus)} GPUs, torch {known['torch']} sees {known['gpus']}"
        print(f"gpu: no usable GPU: {seen}; DEVICE=cpu rehearses on the CPU", file=sys.stderr)
        sys.exit(3)
    device = {"name": "cpu" if rehearsal else known["name"], "count": known["gpus"] if not rehearsal else 0}
    if not rehearsal:
        device |= {k: known[k] for k in ("memory_bytes", "capability", "multiprocessors")} | {
            "driver": driver_version()
        }
    return {
        "what": REHEARSAL if rehearsal else WHAT,
        "rehearsal": rehearsal,
        "device": device,
        "commit": commit(),
        "source": source_digest(),
        "versions": {
            "python": platform.python_version(),
            **{k: known[k] for k in ("torch", "cuda", "hip", "nccl") if known.get(k)},
            **facts_of_packages(),
        },
        "compiler": next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None),
        "machine": machine,
    }


def facts_of_packages() -> dict[str, str]:
    """Return the versions of the packages that matter here."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {k: v for k, v in found.items() if k not in ("torch", "allranks")}


def page(record: dict[str, Any]) -> str:
    """Return the record as a Markdown page."""
    from scripts.make_pages import device_page

    return device_page(record)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--stage", nargs="*", choices=[s.name for s in STAGES], default=[s.name for s in STAGES])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: rehearse with tiny sizes")
    parser.add_argument("--check", nargs="*", default=[], help="these checks of the stages only")
    parser.add_argument(
        "--time-s", type=float, default=math.inf, help="end after this many seconds; what is left runs in the next call"
    )
    parser.add_argument("--again", action="store_true", help="run stages again that are recorded")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=WORK, help="models, runs and logs; 40 GB for the full model")
    given = parser.parse_args()
    exit_on_sigterm()
    rehearsal = given.device == "cpu" or os.environ.get("ALLRANKS_GPU_REHEARSAL") == "1"
    record = Record(given.results, head_of(rehearsal))
    work = given.work / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    work.mkdir(parents=True)
    head = record.content
    slack, count = (CPU_SLACK if rehearsal else 1.0), head["device"]["count"]
    kit = Kit(
        work, rehearsal, count, head["machine"]["cores"], head["device"].get("memory_bytes"), head["compiler"], slack
    )
    device, torch_version = head["device"]["name"], head["versions"]["torch"]
    print(f"{head['what']}\n{device}, torch {torch_version}, commit {head['commit'][:12]} -> {record.path}", flush=True)
    began = time.monotonic()
    for stage in STAGES:
        if stage.name not in given.stage or (given.check and not {c.name for c in stage.checks} & set(given.check)):
            continue
        if given.again:
            head["stages"].pop(stage.name, None)
        if record.stage(stage.name)["finished"]:
            print(f"{stage.name}: recorded, not repeated (AGAIN=1 repeats it)")
            continue
        run_stage(kit, stage, record, given.check, began + given.time_s)
    shutil.rmtree(kit.models, ignore_errors=True)
    record.path.with_suffix(".md").write_text(page(head))
    checks = [c for s in head["stages"].values() for c in s["checks"].values()]
    counts = {status: sum(c["status"] == status for c in checks) for status in ("passed", FAILED, SKIPPED)}
    print(
        ", ".join(f"{n} {status}" for status, n in counts.items())
        + f" in {time.monotonic() - began:.0f} s -> {record.path}"
    )
    sys.exit(1 if counts[FAILED] else 0)


if __name__ == "__main__":
    main()
