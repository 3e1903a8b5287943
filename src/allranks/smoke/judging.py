"""Criteria on evidence, one after another. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.smoke.evidence import Evidence
from allranks.smoke.records import FAILED, NOT_REACHED, NOT_TESTABLE, PASSED, Criterion, Judged, Judgement


def passed(measured: str, threshold: str) -> Judgement:
    """It is as it must be."""
    return Judgement(state=PASSED, measured=measured, threshold=threshold)


def failed(measured: str, threshold: str, why: str = "") -> Judgement:
    """The records show that it is not."""
    return Judgement(state=FAILED, measured=measured, threshold=threshold, why=why)


def not_reached(threshold: str) -> Judgement:
    """The run broke off before: nothing is known of it."""
    return Judgement(state=NOT_REACHED, measured="-", threshold=threshold)


def not_testable(threshold: str, why: str) -> Judgement:
    """This machine has not what it needs."""
    return Judgement(state=NOT_TESTABLE, measured="-", threshold=threshold, why=why)


def decide(ok: bool, measured: str, threshold: str, why: str = "") -> Judgement:
    """Passed or failed."""
    return passed(measured, threshold) if ok else failed(measured, threshold, why)


def judge_all(criteria: tuple[Criterion, ...], evidence: Evidence) -> Iterator[Judged]:
    """In order. Only what the records contradict is red. Where a run broke off and none of its criteria says why, the first
    that it did not reach is red, with the run's own message; those behind it stay undecided."""
    found = [criterion.judge(evidence) for criterion in criteria]
    if evidence.message and not any(j.state == FAILED for j in found):
        left = [i for i, j in enumerate(found) if j.state == NOT_REACHED]
        first = min(left, key=lambda i: (criteria[i].late, i), default=None)
        if first is not None:
            found[first] = failed("the run broke off", found[first].threshold, evidence.message)
    for criterion, j in zip(criteria, found, strict=True):
        yield Judged(
            key=criterion.key,
            title=criterion.title,
            state=j.state,
            measured=j.measured,
            threshold=j.threshold,
            why=j.why,
        )
