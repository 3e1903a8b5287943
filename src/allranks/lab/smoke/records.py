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
    """Result of a criterion: the measured value and its threshold, as text with units."""

    state: CriterionState
    measured: str
    threshold: str
    why: str = ""


class Criterion(msgspec.Struct, frozen=True):
    """One criterion of a test. ``judge`` is a pure function of the run folder's records.

    ``late``: it is only known at the very end, independent of its position in the list.
    """

    key: str
    title: str
    judge: Callable[[Evidence], Verdict]
    late: bool = False


class CriterionResult(msgspec.Struct, frozen=True, kw_only=True):
    """A criterion with its result."""

    key: str
    title: str
    state: CriterionState
    measured: str
    threshold: str
    why: str = ""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The place for which a test's spec is built. ``nodes`` and ``ranks`` (per node) are those of this place; ``gpu``: ranks run on GPUs."""

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
    """A spec as plain values, and a sentence for each difference from the notes."""

    spec: dict[str, Any]
    scaled: list[str]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the notes, and how it is measured here with the same definition.

    Attributes:
        seed: the value in the notes; None if there is none.
        correct: the correct value, if the notes compute it wrongly; ``correction`` says why.
        measure: returns None if this run does not contain the value.
        depends: what it depends on: ``hardware`` (GPUs are only compared with GPUs), ``size`` (only equal models), or both.
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
    """A figure of the notes and the measured one. ``comparable`` is empty if they are comparable, else the reason."""

    name: str
    unit: str
    definition: str
    seed: float | None
    correct: float | None
    correction: str
    ours: float | None
    not_comparable: str


class SmokeTest(msgspec.Struct, frozen=True, kw_only=True):
    """One smoke test. ``nodes`` and ``ranks`` (per node) are those of the notes.

    ``min_nodes``: with fewer nodes it is not run, unless it is useful on one node with a GPU (``one_gpu_node``);
    ``cpu_ranks``: ranks of a node without GPUs.
    """

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
    """The result of one test. ``status``: passed | failed | not run."""

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
    """The result of all tests."""

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
    """Return that the criterion is met."""
    return Verdict(state=PASSED, measured=measured, threshold=threshold)


def failed(measured: str, threshold: str, why: str = "") -> Verdict:
    """Return that the records contradict the criterion."""
    return Verdict(state=FAILED, measured=measured, threshold=threshold, why=why)


def not_reached(threshold: str) -> Verdict:
    """Return that the run ended before the criterion could be checked."""
    return Verdict(state=NOT_REACHED, measured="-", threshold=threshold)


def not_testable(threshold: str, why: str) -> Verdict:
    """Return the result "not testable": this machine lacks a requirement of the criterion."""
    return Verdict(state=NOT_TESTABLE, measured="-", threshold=threshold, why=why)


def decide(ok: bool, measured: str, threshold: str, why: str = "") -> Verdict:
    """Return passed or failed."""
    return passed(measured, threshold) if ok else failed(measured, threshold, why)


def evaluate_criteria(criteria: tuple[Criterion, ...], evidence: Evidence) -> Iterator[CriterionResult]:
    """Evaluate criteria in order. Only those that the records contradict fail.

    If a run ended early and no failed criterion explains it, the first criterion that was not reached fails with the run's
    message; later ones stay undecided.
    """
    found = [criterion.judge(evidence) for criterion in criteria]
    if evidence.message and not any(j.state == FAILED for j in found):
        left = [i for i, j in enumerate(found) if j.state == NOT_REACHED]
        first = min(left, key=lambda i: (criteria[i].late, i), default=None)
        if first is not None:
            found[first] = failed("the run ended early", found[first].threshold, evidence.message)
    for criterion, j in zip(criteria, found, strict=True):
        yield CriterionResult(
            key=criterion.key,
            title=criterion.title,
            state=j.state,
            measured=j.measured,
            threshold=j.threshold,
            why=j.why,
        )
