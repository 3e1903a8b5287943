"""What can be known to fail before anything is started on this machine. Each check is one function."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from allranks.errors import DataError, EnvironmentNotAble
from allranks.facts import MachineFacts
from allranks.plan import LaunchPlan
from allranks.spec.records import DataSpec, RunSpec

MIN_FREE_BYTES = 64 * 2**20


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One fact about one node, and whether it is as it must be."""

    name: str
    ok: bool
    found: str
    cure: str = ""


class PreflightReport(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of one node."""

    host: str
    checks: list[Check]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def line(self) -> str:
        """One line a node: ``hpc07 OK py=3.11 torch=ok ...``."""
        return f"{self.host} {'OK' if self.ok else 'FAIL'} " + " ".join(
            f"{c.name}={c.found if c.ok else 'BAD(' + c.found + ')'}" for c in self.checks
        )


def check_request(spec: RunSpec) -> None:
    """Refuse what is wrong whatever the machine: an unknown model, a missing or empty data file, a missing column.

    Raises:
        SpecError, DataError: with the key and the cure.
    """
    from allranks.train.tiny import check_folder, family

    if spec.model is not None:
        if spec.model.name.startswith("tiny:"):
            family(spec.model.name)
        else:
            check_folder(spec.model.name)
    if spec.data is not None:
        _check_data(spec, spec.data)
    if spec.data is not None and spec.eval.source is not None:
        _check_data(spec, msgspec.structs.replace(spec.data, source=spec.eval.source))


def _check_data(spec: RunSpec, data: DataSpec) -> None:
    from allranks.train.data import sources
    from allranks.train.data.templates import choose_template
    from allranks.train.tiny import ENCODERS, family

    if data.source.startswith("builtin:"):
        sources.builtin(data.source)
        return
    if not sources.looks_like_file(data.source):
        return
    path = Path(data.source).expanduser()
    row = sources.peek(path)
    if row is None:
        if path.stat().st_size == 0:
            raise DataError(f"data.source {path}: the file is empty")
        return
    tiny = spec.model is not None and spec.model.name.startswith("tiny:")
    if tiny or data.template != "auto":
        assert spec.model is not None
        choose_template(data, [row], classifier=tiny and family(spec.model.name) in ENCODERS)


def local_report(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts, run_root: Path) -> PreflightReport:
    """Every check of this machine."""
    checks: list[Callable[[], Check]] = [
        _python,
        lambda: _packages(spec),
        lambda: _disk(run_root),
        lambda: _threads(plan, facts),
    ]
    return PreflightReport(host=facts.host, checks=[check() for check in checks])


def require(report: PreflightReport) -> None:
    """Refuse to go on with a failed check.

    Raises:
        EnvironmentNotAble: the message holds every failure with its cure.
    """
    bad = [c for c in report.checks if not c.ok]
    if bad:
        raise EnvironmentNotAble(
            f"{report.host} is not ready: " + "; ".join(f"{c.name}: {c.found}; {c.cure}" for c in bad)
        )


def _python() -> Check:
    return Check(name="python", ok=True, found=".".join(map(str, sys.version_info[:3])))


def _packages(spec: RunSpec) -> Check:
    needed = ["torch", "transformers", "tokenizers", "safetensors", "numpy"] + (
        ["peft"] if spec.adapter.type == "lora" else []
    )
    if spec.script is not None:
        needed = ["torch"]
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
