"""Records of smoke tests, criteria and results, and the evaluation of criteria on the evidence of a run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from allranks.lab.smoke.evidence import Evidence
from allranks.utils.machine import MachineFacts

CriterionState = Literal["passed", "failed", "not reached", "not testable"]
PASSED: CriterionState = "passed"
FAILED: CriterionState = "failed"
NOT_REACHED: CriterionState = "not reached"
NOT_TESTABLE: CriterionState = "not testable"
PlaceName = Literal["local", "slurm", "cluster"]
Scale = Literal["fit", "seed", "tiny"]
ComparableBy = Literal["hardware", "size", "ranks"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a criterion found: the measured value beside its threshold, in words with units."""

    state: CriterionState
    measured: str
    threshold: str
    why: str = ""


class Criterion(msgspec.Struct, frozen=True):
    """One line of a test's list. ``judge`` is pure: a function over the run folder's records. ``late``: wherever it stands in the
    list, it is known at the very end only."""

    key: str
    title: str
    judge: Callable[[Evidence], Verdict]
    late: bool = False


class CriterionResult(msgspec.Struct, frozen=True, kw_only=True):
    """A criterion with its judgement."""

    key: str
    title: str
    state: CriterionState
    measured: str
    threshold: str
    why: str = ""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
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


class SizedSpec(msgspec.Struct, frozen=True, kw_only=True):
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
    depends: tuple[ComparableBy, ...]
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
    min_nodes: int
    cpu_ranks: int
    parameters: int | None
    build: Callable[[Placement], SizedSpec]
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
    criteria: list[CriterionResult]
    figures: list[FigureRow]
    path: str


class SmokeReport(msgspec.Struct, frozen=True, kw_only=True):
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


def passed(measured: str, threshold: str) -> Verdict:
    """It is as it must be."""
    return Verdict(state=PASSED, measured=measured, threshold=threshold)


def failed(measured: str, threshold: str, why: str = "") -> Verdict:
    """The records show that it is not."""
    return Verdict(state=FAILED, measured=measured, threshold=threshold, why=why)


def not_reached(threshold: str) -> Verdict:
    """The run broke off before: nothing is known of it."""
    return Verdict(state=NOT_REACHED, measured="-", threshold=threshold)


def not_testable(threshold: str, why: str) -> Verdict:
    """This machine has not what it needs."""
    return Verdict(state=NOT_TESTABLE, measured="-", threshold=threshold, why=why)


def decide(ok: bool, measured: str, threshold: str, why: str = "") -> Verdict:
    """Passed or failed."""
    return passed(measured, threshold) if ok else failed(measured, threshold, why)


def evaluate_criteria(criteria: tuple[Criterion, ...], evidence: Evidence) -> Iterator[CriterionResult]:
    """In order. Only what the records contradict is red. Where a run broke off and none of its criteria says why, the first
    that it did not reach is red, with the run's own message; those behind it stay undecided."""
    found = [criterion.judge(evidence) for criterion in criteria]
    if evidence.message and not any(j.state == FAILED for j in found):
        left = [i for i, j in enumerate(found) if j.state == NOT_REACHED]
        first = min(left, key=lambda i: (criteria[i].late, i), default=None)
        if first is not None:
            found[first] = failed("the run broke off", found[first].threshold, evidence.message)
    for criterion, j in zip(criteria, found, strict=True):
        yield CriterionResult(
            key=criterion.key,
            title=criterion.title,
            state=j.state,
            measured=j.measured,
            threshold=j.threshold,
            why=j.why,
        )
