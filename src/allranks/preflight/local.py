"""What can be known to fail before ranks are started on this machine. Each check is one function."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from allranks.facts import MachineFacts
from allranks.planning import LaunchPlan
from allranks.preflight.records import Check, PreflightReport
from allranks.preflight.wish import needed_packages
from allranks.spec.records import RunSpec

MIN_FREE_BYTES = 64 * 2**20


def local_report(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts, run_root: Path) -> PreflightReport:
    """Every check of this machine."""
    checks: list[Callable[[], Check]] = [
        _python,
        lambda: _packages(spec),
        lambda: _disk(run_root),
        lambda: _threads(plan, facts),
    ]
    return PreflightReport(host=facts.host, checks=[check() for check in checks])


def _python() -> Check:
    return Check(name="python", ok=True, found=".".join(map(str, sys.version_info[:3])))


def _packages(spec: RunSpec) -> Check:
    needed = needed_packages(spec)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return Check(
        name="packages",
        ok=not missing,
        found=f"missing {', '.join(missing)}" if missing else "ok",
        cure="pip install 'allranks[train]'",
    )


def _disk(run_root: Path) -> Check:
    folder = run_root
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return Check(
        name="disk",
        ok=free > MIN_FREE_BYTES,
        found=f"{free / 2**30:.1f}GiB-free",
        cure=f"less than {MIN_FREE_BYTES >> 20} MiB are free for {run_root}",
    )


def _threads(plan: LaunchPlan, facts: MachineFacts) -> Check:
    threads = next((e.value for e in plan.environment if e.name == "OMP_NUM_THREADS"), "?")
    return Check(name="threads", ok=True, found=f"{plan.procs_per_node}x{threads}/{facts.cpus}-cores")


def stamp() -> str:
    """The time, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S")
