"""A test of the ladder and what became of it, as frozen records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from allranks.facts import MachineFacts
from allranks.smoke.evidence import Evidence

State = Literal["passed", "failed", "not reached", "not testable"]
PASSED: State = "passed"
FAILED: State = "failed"
NOT_REACHED: State = "not reached"
NOT_TESTABLE: State = "not testable"
PlaceName = Literal["local", "slurm", "cluster"]
Scale = Literal["fit", "seed", "tiny"]
Dependence = Literal["hardware", "size", "ranks"]


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What a criterion found: the measured value beside its threshold, in words with units."""

    state: State
    measured: str
    threshold: str
    why: str = ""


class Criterion(msgspec.Struct, frozen=True):
    """One line of a test's list. ``judge`` is pure: a function over the run folder's records. ``late``: wherever it stands in the
    list, it is known at the very end only."""

    key: str
    title: str
    judge: Callable[[Evidence], Judgement]
    late: bool = False


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A criterion with its judgement."""

    key: str
    title: str
    state: State
    measured: str
    threshold: str
    why: str = ""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a test's spec is built from. ``nodes`` and ``ranks`` (a node) are those of this place; ``gpu``: ranks run on GPUs."""

    machine: MachineFacts
    place: PlaceName
    scale: Scale
    nodes: int
    ranks: int
    gpu: bool

    @property
    def world(self) -> int:
        return self.nodes * self.ranks


class Sized(msgspec.Struct, frozen=True, kw_only=True):
    """A spec as plain values, and a sentence for each thing that is not as the notes have it."""

    spec: dict[str, Any]
    scaled: list[str]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the notes, and how it is measured here by the same definition.

    Attributes:
        seed: the value that the notes give; None where they give none.
        correct: what it should have been by its own name, where they count it wrongly; ``correction`` says why.
        measure: None where this run does not tell.
        depends: what it depends on: ``hardware`` (only GPUs are set beside GPUs), ``size`` (only equal models), or both.
    """

    name: str
    unit: str
    definition: str
    seed: float | None
    measure: Callable[[Evidence], float | None]
    depends: tuple[Dependence, ...]
    correct: float | None = None
    correction: str = ""


class FigureRow(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the notes beside ours. ``comparable`` is empty if it is, else says why not."""

    name: str
    unit: str
    definition: str
    seed: float | None
    correct: float | None
    correction: str
    ours: float | None
    not_comparable: str


class SmokeTest(msgspec.Struct, frozen=True, kw_only=True):
    """One rung. ``nodes`` and ``ranks`` (a node) are the notes'; ``least_nodes`` those below which it proves nothing, unless it is
    worth running on one node with a GPU (``one_gpu_node``); ``cpu_ranks`` those of a node without GPUs."""

    name: str
    title: str
    source: str
    hardware: str
    nodes: int
    ranks: int
    least_nodes: int
    cpu_ranks: int
    parameters: int | None
    build: Callable[[Asked], Sized]
    criteria: tuple[Criterion, ...]
    figures: tuple[Figure, ...]
    one_gpu_node: bool = False


class TestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one test. ``status``: passed | failed | not run."""

    name: str
    title: str
    source: str
    status: Literal["passed", "failed", "not run"]
    message: str
    seconds: float
    folder: str | None
    setting: str
    hardware: str
    seed_hardware: str
    scaled: list[str]
    untested: list[str]
    criteria: list[Judged]
    figures: list[FigureRow]
    path: str


class Ladder(msgspec.Struct, frozen=True, kw_only=True):
    """A whole climb."""

    name: str
    place: str
    scale: str
    started: str
    seconds: float
    machine: dict[str, Any]
    versions: dict[str, str]
    tests: list[TestResult]

    @property
    def failed(self) -> bool:
        return any(test.status == "failed" for test in self.tests)

    @property
    def ran(self) -> bool:
        return any(test.status != "not run" for test in self.tests)
