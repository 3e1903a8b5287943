"""What the checks of `benchmarks.gpu` are made of: results, limits, and programs on the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.errors import EXIT_ENVIRONMENT
from benchmarks.programs import ROOT, end_group

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
NO_END = "no end after"


class CheckFailed(Exception):
    """What a check expected did not happen."""


class NotPossible(Exception):
    """The machine lacks what a check needs."""


@dataclass
class Result:
    """Result of a check, or of one of its cases."""

    name: str
    title: str
    status: str
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Check:
    """One check. ``run(kit, check, limit_s)`` returns its results."""

    name: str
    title: str
    limit_s: float
    run: Callable[[Kit, Check, float], list[Result]]


@dataclass(frozen=True)
class Stage:
    """Checks that run in one call of at most ten minutes; up to ``lanes`` of them at a time, each with two cores."""

    name: str
    limit_s: float
    checks: tuple[Check, ...]
    lanes: int = 1


@dataclass
class Kit:
    """The machine, and how programs are started on it."""

    work: Path
    rehearsal: bool
    gpus: int
    cores: int
    memory_bytes: int | None
    compiler: str | None
    slack: float
    bench: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The device of the ranks."""
        return "cpu" if self.rehearsal else "cuda"

    @property
    def models(self) -> Path:
        """Base models, which are removed at the end."""
        return self.work / "models"

    def command(
        self, name: str, words: list[str], limit_s: float, env: dict[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Run a Python command to its end or its limit; return exit code, standard output and standard error.

        Raises:
            CheckFailed: it ran longer than the limit.
        """
        out, err = self.work / f"{name}.out", self.work / f"{name}.err"
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **(env or {})}
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env={**os.environ, **quiet}, stdin=subprocess.DEVNULL,
                stdout=stdout, stderr=stderr, start_new_session=True,
            )  # fmt: skip
            late = False
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                end_group(process)
        if late:
            raise CheckFailed(f"{NO_END} {limit_s:.0f} s: {tail(err) or tail(out)}")
        return process.returncode, out.read_text(errors="replace"), err.read_text(errors="replace")

    def allranks(self, name: str, words: list[str], limit_s: float, ok: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """Run a verb with ``--json`` and return its document.

        Raises:
            NotPossible: the environment lacks what the verb needs.
            CheckFailed: another exit code than `ok`, or no JSON.
        """
        code, out, err = self.command(name, ["-m", "allranks", *words, "--json"], limit_s)
        if code == EXIT_ENVIRONMENT and code not in ok:
            raise NotPossible(" ".join(err.split())[-900:])
        if code not in ok:
            raise CheckFailed(f"exit code {code}: {' '.join(err.split())[-900:]}")
        try:
            return json.loads(out)
        except ValueError as error:
            raise CheckFailed(f"exit code {code}, no JSON: {out[:200]!r} {err[-300:]!r}") from error

    def settings(self, procs: int = 1) -> list[str]:
        """``--set`` words that put a run on this device and into the work folder."""
        values = {
            "cluster.device": self.device,
            "cluster.procs_per_node": procs,
            "cluster.cache": self.work / "cache",
            "run_root": self.work / "runs",
        }
        return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def tail(file: Path, size: int = 600) -> str:
    """Return the end of a file on one line."""
    return " ".join(file.read_text(errors="replace")[-size:].split())


def simple(action: Callable[[Kit, float], dict[str, Any]]) -> Callable[[Kit, Check, float], list[Result]]:
    """A check with one result: it passes with the figures that `action` returns."""

    def run(kit: Kit, check: Check, limit_s: float) -> list[Result]:
        try:
            return [Result(check.name, check.title, PASSED, figures=action(kit, limit_s))]
        except CheckFailed as error:
            return [Result(check.name, check.title, FAILED, str(error))]
        except NotPossible as error:
            return [Result(check.name, check.title, SKIPPED, str(error))]

    return run
