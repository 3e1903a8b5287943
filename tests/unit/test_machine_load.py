"""What is said of an overloaded machine: during a run, in its summary, and in a comparison."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.analysis.machine_load import load_of_hosts, load_records, loads_of_run, machine_notes, read_load
from allranks.analysis.metrics import own_time
from allranks.analysis.stragglers import StragglerDetector
from allranks.experiments.conclusions import recommend_strategy
from allranks.experiments.gates import counted_repeats, evaluate_strategies, load_conclusions, load_figures
from tests.unit.test_compare import measured, rank

STEPS = 60
STEP_S = 0.1


def load(r: int, time: float, taken: float, **changes: Any) -> dict[str, Any]:
    """One second of a rank that wanted one of two cores and got ``1 - taken`` of it; others used what it did not
    get."""
    return {
        "event": "cpu_load", "rank": r, "time": time, "compute_threads": 1, "seconds": 1.0, "cores": "0-1", "core_count": 2, "cpu_s": 1 - taken,
        "queued_s": taken, "queued_main_s": taken, "busy_threads": 1, "machine_s": 2.0, "steal_s": 0.0, "throttled_s": None, **changes,
    }  # fmt: skip


def story(r: int, own: float, queued: float, taken: float, **changes: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"event": "start", "rank": r, "host": "n1", "world_size": 2, "time": 0.0}]
    for s in range(1, STEPS + 1):
        found.append(
            {
                "event": "step", "rank": r, "step": s, "time": s * STEP_S, "own_s": own, "own_queued_s": queued,
                "step_time_s": STEP_S,
            }
        )  # fmt: skip
        if s % 10 == 0:
            found.append(load(r, s * STEP_S, taken, **changes))
    return found


def said(ranks: dict[int, list[dict[str, Any]]]) -> list[str]:
    listener = StragglerDetector()
    return [text for moment in zip(*ranks.values(), strict=True) for event in moment for text in listener.take(event)]


def test_a_rank_that_had_no_core_is_not_named_but_the_machine_is_once() -> None:
    ranks = {0: story(0, 0.02, 0.0, 0.5), 1: story(1, 0.08, 0.06, 0.5)}
    (text,) = said(ranks)
    assert text.startswith(
        "n1 is overloaded: 49% of the CPU time of its ranks was taken (other processes used 1.0 of 2 cores"
    )
    assert text.endswith("no rank is called slow for it")
    found = own_time(ranks)
    assert found is not None
    assert found["stragglers"] == []
    assert {r["rank"]: r["reason"] for r in found["ranks"]} == {0: None, 1: "machine"}
    notes = machine_notes({"own_time": found, "machine_load": [vars_of(m) for m in loads_of_run(ranks)]})
    assert notes == [text.replace("49%", "50%")]  # over a longer time the error of the clock is smaller


def vars_of(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def test_a_slow_rank_on_a_loaded_machine_is_named_and_the_machine_too() -> None:
    texts = said({0: story(0, 0.02, 0.0, 0.5), 1: story(1, 0.08, 0.02, 0.5)})
    assert len(texts) == 2
    assert "rank 1 on n1 is slow: its own work (data and forward) takes 3.0 times" in texts[0]
    assert "n1 is overloaded" in texts[1]


def test_ranks_that_take_the_cores_from_each_other_are_told_apart_from_other_processes() -> None:
    ranks = {r: story(r, own, own - 0.02, 0.5, cpu_s=1.0, queued_s=3.0) for r, own in ((0, 0.02), (1, 0.08))}
    (text,) = said(ranks)
    assert text.startswith(
        "the ranks on n1 compete for its cores: 75% of the CPU time that they want goes to each other"
    )
    assert "thread" not in text.lower(), "they have one each"
    several = {r: [{**e, "compute_threads": 4} if e["event"] == "cpu_load" else e for e in s] for r, s in ranks.items()}
    assert "busy threads" in said(several)[0] and "OMP_NUM_THREADS" in said(several)[0]


def test_a_slow_rank_is_named_only_once_its_load_is_known() -> None:
    """Torch's threads may have waited for a core; what the main thread measures does not show that."""
    alone = {r: [e for e in story(r, own, 0.0, 0.0) if e["event"] != "cpu_load"] for r, own in ((0, 0.02), (1, 0.08))}
    assert said(alone) == []
    several = {r: story(r, own, 0.0, 0.0, compute_threads=4, queued_s=0.8) for r, own in ((0, 0.02), (1, 0.08))}
    assert not any("is slow" in text for text in said(several))


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": 0}, {"seconds": "x"}, {"cpu_s": None}, {"time": float("nan")}, {"seconds": float("inf")},
        {"compute_threads": "4"},
    ],
)  # fmt: skip
def test_damaged_records_are_left_out(changes: dict[str, Any]) -> None:
    assert read_load(load(0, 1.0, 0.5)) is not None
    assert read_load({**load(0, 1.0, 0.5), **changes}) is None


def test_a_host_of_which_a_rank_reports_nothing_is_not_judged() -> None:
    """That rank's CPU time would count as that of other processes."""
    ranks = {0: story(0, 0.02, 0.0, 0.5), 1: story(1, 0.02, 0.0, 0.5)}
    hosts = {0: "n1", 1: "n1"}
    one = {0: load_records(ranks[0]), 1: []}
    assert load_of_hosts(one, hosts) == []
    assert [m.host for m in loads_of_run(ranks)] == ["n1"]
    assert machine_notes({"machine_load": "x", "own_time": 3}) == []


def repeat(taken: float | None, speed: float = 1.0) -> dict[str, Any]:
    one = rank()["repeats"][0]
    use = {} if taken is None else {"load": {"host": "n1", **load(0, 0.0, taken, machine_s=2.0)}}
    return {**one, "step_time_s": [t / speed for t in one["step_time_s"]], **use}


def comparison(**repeats: list[dict[str, Any]]) -> dict[str, Any]:
    return measured([{name: {**rank(), "repeats": own} for name, own in repeats.items()} for _ in range(2)])


def rate(found: dict[str, Any], name: str) -> dict[str, Any]:
    row = next(r for r in evaluate_strategies(found) if r.strategy == name)
    assert row.figures is not None, row.reasons
    return row.figures["tokens_per_s"]


def test_figures_are_of_the_undisturbed_repeats() -> None:
    found = comparison(zero1=[repeat(0.5, 0.4), repeat(0.0, 1.0), repeat(0.0, 1.1)], zero2=[repeat(0.0)])
    assert counted_repeats(found, "zero1") == [1, 2]
    assert rate(found, "zero1") == {"median": pytest.approx(420), "min": pytest.approx(400), "max": pytest.approx(440)}
    known = load_figures(found, "zero1")
    assert known["taken_share"] == pytest.approx(0.48, abs=0.03)
    assert {**known, "taken_share": 0} == {
        "repeats": 3, "counted": 2, "disturbed": 1, "taken_share": 0, "undisturbed": True,
    }  # fmt: skip
    row = evaluate_strategies(found)[0]
    assert "1 of 3 repeats are not counted: the machine was overloaded" in row.marks
    (text,) = load_conclusions(found, ["zero1", "zero2"])
    assert "was overloaded in 1 of 4 timed repeats: on n1 up to" in text
    assert "other processes used 1.0 of 2 cores" in text
    assert text.endswith("These repeats are not counted.")


def test_figures_of_an_overloaded_machine_alone_are_marked_first_of_all() -> None:
    found = comparison(zero1=[repeat(0.5, 0.4), repeat(0.5, 0.5)], zero2=[repeat(0.0)])
    assert rate(found, "zero1")["max"] == pytest.approx(200)
    rows = evaluate_strategies(found)
    assert any("timed on an overloaded machine in all 2 repeats" in mark for mark in rows[0].marks)
    advice = recommend_strategy(found, rows)
    assert "The figures of zero1 are those of an overloaded machine; repeat the comparison on an idle one." in advice[0]
    both = comparison(zero1=[repeat(0.5)], zero2=[repeat(0.5)])
    assert "All figures are those" in recommend_strategy(both, evaluate_strategies(both))[0]


def test_the_other_rank_is_no_other_process() -> None:
    """Two ranks that fill both cores: judged one at a time, each would be disturbed by the other."""
    busy = {"host": "n1", **load(0, 0.0, 0.0, cpu_s=0.95, queued_s=0.05, machine_s=1.98)}
    one = {**rank()["repeats"][0], "load": busy}
    assert load_figures(comparison(zero1=[one]), "zero1")["disturbed"] == 0
    damaged = comparison(zero1=[{**one, "load": {"host": "n1"}}])
    assert load_figures(damaged, "zero1")["taken_share"] is None
