"""What a comparison concludes: only what its figures carry, whatever the figures are."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.experiments.conclusions import (
    MAX_MODEL_ERROR,
    CommunicationModel,
    Prediction,
    _fastest,
    communication_time_s,
    exposed_share,
    model_error,
    predict_step_time,
    recommend_strategy,
)
from allranks.experiments.gates import ComparisonRow, Gates
from tests.sampling import examples

PASSED = Gates(parity=True, mechanism=True, equal_work=True)
LINK = CommunicationModel(alpha_s=50e-6, beta_s=0.5e-9, residual=0.0, points=9)
SENT = [{"kind": "all_reduce", "count": 2, "bytes": 2e7}]


def figures(**changes: Any) -> dict[str, Any]:
    """Figures of a strategy on two ranks, whose profile agrees with `LINK`: 10.1 ms of a step of 100 ms are exposed."""
    comm = communication_time_s(SENT, LINK, 2)
    return {
        "tokens_per_s": {"median": 1000.0, "min": 950.0, "max": 1050.0}, "step_time_s": {"median": 0.1, "p90": 0.11},
        "profiled_step_s": 0.1, "comm_s": comm, "exposed_comm_s": comm, "idle_s": 0.0, "compute_s": 0.08, "overlap": 0.0, "collectives": SENT,
        "memory": {"peak_bytes": 1000, "state_bytes": 400}, **changes,
    }  # fmt: skip


def row(name: str, **changes: Any) -> ComparisonRow:
    return ComparisonRow(
        strategy=name, gates=PASSED, reasons=[], marks=[], parity_error=0.0, figures=figures(**changes)
    )


def measured(rows: list[ComparisonRow], world: int = 2) -> dict[str, Any]:
    sizes = (1e5, 1e7)
    timed = [
        ["all_reduce", size, communication_time_s([{"kind": "all_reduce", "count": 1, "bytes": size}], LINK, world)]
        for size in sizes
    ]
    known = {"verified": {"window": {"collectives": timed}}, "repeats": [{"tokens": [50, 50]}]}
    return {"world_size": world, "nodes": 1, "device": "cpu", "ranks": [{r.strategy: known for r in rows}] * world}


def said(*rows: ComparisonRow) -> str:
    return " ".join(recommend_strategy(measured([*rows]), [*rows])[0])


def test_shares_are_of_the_profiled_step() -> None:
    """The timed step is shorter than a profiled one: 25 ms of communication in a step of 10 ms were "254 % of its
    step"."""
    text = said(
        row("a", step_time_s={"median": 0.01, "p90": 0.01}, profiled_step_s=0.1, exposed_comm_s=0.0254, comm_s=0.0254)
    )
    assert "25% of its profiled step is exposed communication" in text


@pytest.mark.parametrize("exposed", [0.2, -0.1])
def test_a_profile_that_contradicts_itself_gives_no_share_and_no_prediction(exposed: float) -> None:
    one = row("a", exposed_comm_s=exposed)
    assert one.figures and exposed_share(one.figures) is None
    text, _, predicted = recommend_strategy(measured([one]), [one])
    assert "exposed" not in text[0] and predicted == []
    assert "its profile is inconsistent" in " ".join(text)


def test_a_prediction_adds_the_growth_of_communication_to_the_measured_step() -> None:
    step_s, speed = predict_step_time(figures(overlap=0.5), LINK, 100, 2, 16)
    growth = communication_time_s(SENT, LINK, 16) - communication_time_s(SENT, LINK, 2)
    assert step_s == pytest.approx(0.1 + 0.5 * growth) and speed == pytest.approx(16 * 100 / step_s)


def test_no_prediction_where_the_model_misses_what_was_measured() -> None:
    good, bad = row("good"), row("bad", exposed_comm_s=0.09, comm_s=0.09)
    assert bad.figures and model_error(bad.figures, LINK, 2) > MAX_MODEL_ERROR
    text, _, predicted = recommend_strategy(measured([good, bad]), [good, bad])
    assert {p.strategy for p in predicted} == {"good"} and all(p.error <= MAX_MODEL_ERROR for p in predicted)
    assert "Not predicted, because the model misses the measured step time by more than 20%: bad (by" in " ".join(text)


@pytest.mark.parametrize(("factor", "predicted"), [(1.2, True), (3.0, False)])
def test_no_prediction_where_the_model_misses_the_measured_collectives(factor: float, predicted: bool) -> None:
    """One of three sizes takes longer than a message and its bytes explain; the step times agree with the model all the
    same."""
    one = row("a", exposed_comm_s=0.0, comm_s=0.0, collectives=[])
    told = measured([one])
    for rank in told["ranks"]:
        window = rank["a"]["verified"]["window"]
        odd = [{"kind": "all_reduce", "count": 1, "bytes": 1e6}]
        window["collectives"].append(["all_reduce", 1e6, factor * communication_time_s(odd, LINK, 2)])
    text, model, found = recommend_strategy(told, [one])
    assert model is not None and (model.residual <= MAX_MODEL_ERROR) is predicted and bool(found) is predicted
    assert ("Nothing is predicted for more ranks, because this error is above 20%" in " ".join(text)) is not predicted
    assert f"its error is {model.residual:.0%}" in " ".join(text)


@settings(max_examples=examples(200), deadline=None)
@given(
    step=st.floats(1e-5, 100), profiled=st.floats(1e-5, 100), exposed=st.floats(0, 100), overlap=st.none() | st.floats(0, 1),
    tokens=st.floats(1, 1e6), count=st.integers(0, 1000), size=st.floats(0, 1e12), alpha=st.floats(0, 1), beta=st.floats(0, 1e-6),
)  # fmt: skip
def test_no_prediction_exceeds_linear_scaling(
    step: float, profiled: float, exposed: float, overlap: float | None, tokens: float, count: int, size: float, alpha: float, beta: float
) -> None:  # fmt: skip
    link = CommunicationModel(alpha_s=alpha, beta_s=beta, residual=0.1, points=3)
    told = figures(
        step_time_s={"median": step, "p90": step}, profiled_step_s=profiled, exposed_comm_s=exposed, overlap=overlap,
        collectives=[{"kind": kind, "count": count, "bytes": size} for kind in ("all_reduce", "all_gather", "broadcast")],
    )  # fmt: skip
    for world in (8, 64, 1024):
        step_s, speed = predict_step_time(told, link, tokens, 2, world)
        assert step_s >= step and speed <= world * tokens / step * (1 + 1e-9)


def test_nothing_is_predicted_for_fewer_ranks_than_were_measured() -> None:
    one = row("a")
    _, _, predicted = recommend_strategy(measured([one], world=64), [one])
    assert {p.ranks for p in predicted} <= {256, 1024}


def test_strategies_whose_ranges_overlap_are_not_told_apart() -> None:
    near, slow = {"median": 990.0, "min": 940.0, "max": 1040.0}, {"median": 1.0, "min": 1.0, "max": 1.0}
    text = said(row("a"), row("b", tokens_per_s=near), row("c", tokens_per_s=slow))
    assert "Fastest on 2 ranks on 1 node (cpu): a with 1,000 tokens/s [950 to 1,050]" in text
    assert "Not distinguishable from it in this measurement: b." in text


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
    text, _, predicted = recommend_strategy(measured(rows), rows)
    words = " ".join(text)
    assert "nan" not in words and "inf" not in words.replace("information", "")
    shares = [int(n) for n in re.findall(r"(\d+)% (?:of its|slower)", words)]
    assert all(0 <= share <= 100 for share in shares), words
    best = max(r.figures["tokens_per_s"]["median"] for r in rows if r.figures)
    for p in predicted:
        assert p.tokens_per_s <= p.ranks / 2 * max(best, 2 * 50 / min(g["step"] for g in given_figures)) * (1 + 1e-9)


def test_a_prediction_is_no_finer_than_the_model_that_made_it() -> None:
    told = [
        Prediction(strategy=s, ranks=8, step_time_s=1.0, tokens_per_s=v, error=0.0)
        for s, v in (("a", 100.0), ("b", 93.0), ("c", 60.0))
    ]

    def turn(residual: float) -> str:
        return _fastest(told, CommunicationModel(alpha_s=1e-5, beta_s=1e-9, residual=residual, points=9))

    assert turn(0.01) == "a"
    assert turn(0.1) == "a (within 10%: b)"
    assert turn(0.5) == "no strategy is clearly faster"
