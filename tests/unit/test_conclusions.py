"""What a comparison concludes: only what its figures carry, whatever the figures are."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.experiments.conclusions import exposed_share, recommend_strategy
from allranks.experiments.gates import ComparisonRow, Gates
from tests.sampling import examples

PASSED = Gates(parity=True, mechanism=True, equal_work=True)
SENT = [{"kind": "all_reduce", "count": 2, "bytes": 2e7}]


def figures(**changes: Any) -> dict[str, Any]:
    """Figures of a strategy on two ranks: 10 ms of a step of 100 ms are exposed."""
    comm = 0.01
    return {
        "tokens_per_s": {"median": 1000.0, "min": 950.0, "max": 1050.0}, "step_time_s": {"median": 0.1, "p90": 0.11},
        "profiled_step_s": 0.1, "comm_s": comm, "exposed_comm_s": comm, "idle_s": 0.0, "compute_s": 0.08, "overlap": 0.0, "collectives": SENT,
        "memory": {"peak_bytes": 1000, "state_bytes": 400}, **changes,
    }  # fmt: skip


def row(name: str, **changes: Any) -> ComparisonRow:
    return ComparisonRow(
        strategy=name, gates=PASSED, reasons=[], marks=[], parity_error=0.0, figures=figures(**changes)
    )


def measured(rows: list[ComparisonRow]) -> dict[str, Any]:
    known = {"verified": {"window": {"collectives": []}}, "repeats": [{"tokens": [50, 50]}]}
    return {"world_size": 2, "nodes": 1, "device": "cpu", "ranks": [{r.strategy: known for r in rows}] * 2}


def said(*rows: ComparisonRow) -> str:
    return " ".join(recommend_strategy(measured([*rows]), [*rows]))


def test_shares_are_of_the_profiled_step() -> None:
    """The timed step is shorter than a profiled one: 25 ms of communication in a step of 10 ms were "254 % of its
    step"."""
    text = said(
        row("a", step_time_s={"median": 0.01, "p90": 0.01}, profiled_step_s=0.1, exposed_comm_s=0.0254, comm_s=0.0254)
    )
    assert "25% of its profiled step is exposed communication" in text


@pytest.mark.parametrize("exposed", [0.2, -0.1])
def test_a_profile_that_contradicts_itself_gives_no_share(exposed: float) -> None:
    one = row("a", exposed_comm_s=exposed)
    assert one.figures and exposed_share(one.figures) is None
    assert "exposed" not in said(one)


NUMBER = st.floats(0, 1e9)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"low": NUMBER, "more": NUMBER, "step": st.floats(1e-6, 1e3), "profiled": NUMBER, "exposed": NUMBER, "overlap": st.none() | st.floats(0, 1),
             "peak": st.integers(0, 2**50), "state": st.integers(0, 2**50)}
        ),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_whatever_is_measured_no_sentence_has_an_impossible_figure(given_figures: list[dict[str, Any]]) -> None:
    rows = [
        row(
            f"s{i}", tokens_per_s={"median": g["low"] + g["more"] / 2, "min": g["low"], "max": g["low"] + g["more"]},
            step_time_s={"median": g["step"], "p90": g["step"]},
            profiled_step_s=g["profiled"], exposed_comm_s=g["exposed"], overlap=g["overlap"], memory={"peak_bytes": g["peak"], "state_bytes": g["state"]},
        )
        for i, g in enumerate(given_figures)
    ]  # fmt: skip
    words = said(*rows)
    assert "nan" not in words and "inf" not in words.replace("information", "")
    shares = [int(n) for n in re.findall(r"(\d+)% (?:of its|slower)", words)]
    assert all(0 <= share <= 100 for share in shares), words
