"""The wall time of a run over its attempts, against parts computed by hand."""

from typing import Any

import pytest

from allranks.analysis.effective_time import KINDS, AttemptRecord, effective_training_time

Events = list[dict[str, Any]]
BEGAN = AttemptRecord(began=100.0)


def phases(attempt: int, start: float, *marks: tuple[float, str]) -> Events:
    made = [{"event": "phase", "time": at, "name": name} for at, name in marks]
    return [{"event": "start", "time": start, "attempt": attempt}, *made]


def steps(*at: tuple[float, int], count: int = 1) -> Events:
    return [{"event": "step", "time": t, "step": n, "steps": count} for t, n in at]


def reports(*at: tuple[float, int | None]) -> Events:
    shown = [(t, {} if n is None else {"step": n}) for t, n in at]
    return [{"event": "progress", "time": t, "source": "report", "last": t, **step} for t, step in shown]


FIRST = [
    *phases(1, 103.0, (104.0, "prepare"), (105.0, "build"), (107.0, "train"), (112.0, "save"), (113.0, "train")),
    *steps((109.0, 1), (111.0, 2), (114.0, 3)),
]
KILLED = AttemptRecord(began=100.0, verdict=118.0, faults=[116.0], ends=[116.0, 117.0])
SECOND = [
    *phases(2, 121.0, (122.0, "train"), (130.0, "evaluate"), (131.0, "train"), (135.0, "done")),
    *steps((126.0, 3), (129.0, 4), (134.0, 5)),
]
AGAIN = AttemptRecord(began=118.1, ends=[136.0])
ONE = {"startup": 7, "productive": 5 + 1, "checkpoint": 1, "other": 2, "detection": 2}
TWO = {"restart": 3, "startup": 1, "repeated": 4, "productive": 4 + 4, "evaluation": 1, "other": 1}
LOGGED = [*phases(2, 121.0, (122.0, "train")), *steps((132.0, 10), count=10)]
CUT = phases(1, 103.0, (104.0, "prepare"), (107.5, "train"))
HUNG = AttemptRecord(began=100.0, verdict=150.0, faults=[149.0], hung=True)
OWN = [*phases(1, 103.0), *reports((110.0, 1), (120.0, 6))]
OWN_AGAIN = [*phases(2, 124.0), *reports((125.0, 5), (127.0, 7), (129.0, 9))]
OWN_FAILED = AttemptRecord(began=100.0, verdict=122.0, faults=[121.0])


@pytest.mark.parametrize(
    ("events", "records", "launched", "expected"),
    [
        pytest.param(FIRST + SECOND, {1: KILLED, 2: AGAIN}, [99.0], [ONE, TWO], id="killed and started again"),
        pytest.param(FIRST, {1: KILLED}, [99.0], [ONE], id="killed"),
        pytest.param(FIRST, {}, [], [{"startup": 4, "productive": 6, "checkpoint": 1}], id="no records"),
        pytest.param(CUT, {1: BEGAN}, [99.0], [{"startup": 7.5}], id="cut off at the first step"),
        pytest.param([], {1: BEGAN}, [99.0], [{}], id="cut off before its ranks started"),
        pytest.param(
            FIRST, {1: HUNG}, [], [{"startup": 7, "productive": 6, "checkpoint": 1, "detection": 36}],
            id="hang: from the last step"
        ),
        pytest.param(
            FIRST + SECOND, {1: KILLED, 2: AGAIN}, [99.0, 118.05],
            [ONE, {k: 3.9 if k == "startup" else s for k, s in TWO.items() if k != "restart"}],
            id="resumed by the user",
        ),
        pytest.param(
            FIRST + LOGGED, {1: KILLED, 2: AGAIN}, [99.0],
            [ONE, {"restart": 3, "startup": 1, "repeated": 3, "productive": 11}], id="steps logged ten at a time",
        ),
        pytest.param(
            [{**e, "time": e["time"] + 3600} for e in FIRST], {1: KILLED}, [99.0], [{"other": 18}], id="clocks differ"
        ),
        pytest.param(FIRST[1:], {}, [], None, id="no start"),
    ],
)  # fmt: skip
def test_parts_of_a_training(
    events: Events, records: dict[int, AttemptRecord], launched: list[float], expected: list[dict[str, float]] | None
) -> None:
    ahead = [{**e, "time": e["time"] + 3600} for e in events]  # the clock of another rank does not count
    result = effective_training_time({1: ahead, 0: events}, records, launched, program=False)
    assert (result and [parts(one) for one in result["attempts"]]) == expected and adds_up(result)


def test_of_a_program_only_reported_steps_are_training() -> None:
    attempts = {1: OWN_FAILED, 2: AttemptRecord(began=122.1, ends=[136.0])}
    result = effective_training_time({0: OWN + OWN_AGAIN}, attempts, [99.0], program=True)
    assert result is not None and adds_up(result) and result["evaluation_s"] is result["checkpoint_s"] is None
    one = {"startup": 3, "other": 7 + 1, "productive": 10, "detection": 1}
    two = {"restart": 2, "other": 1 + 7, "repeated": 1, "productive": 3}
    assert [parts(attempt) for attempt in result["attempts"]] == [one, two]
    assert result["share"] == pytest.approx(13 / 36, abs=1e-3)
    silent = effective_training_time({0: phases(1, 103.0)}, {1: OWN_FAILED}, [], program=True)
    assert silent is not None and silent["share"] is silent["productive_s"] is None and silent["other_s"] == 18


def parts(one: dict[str, Any]) -> dict[str, float]:
    return {kind: value for kind in KINDS if (value := one[f"{kind}_s"])}


def adds_up(result: dict[str, Any] | None) -> bool:
    each = [] if result is None else [result, *result["attempts"]]
    return all(sum(round(1000 * (r[f"{k}_s"] or 0)) for k in KINDS) == round(1000 * r["wall_time_s"]) for r in each)
