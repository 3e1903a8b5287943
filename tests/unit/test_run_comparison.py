"""Runs side by side: equal points, differences with what they change, and the page."""

import json
from pathlib import Path

import pytest
import yaml

from allranks.analysis.report.comparison_page import write_page
from allranks.analysis.report.run_comparison import RunComparison, compare_runs, effect_of
from allranks.analysis.report.run_data import RankHistory, RunData, read_history
from tests.unit.report_runs import START, complete_run
from tests.unit.test_run_status import verb


def run_data(name: str, losses: dict[int, float], tokens: int, spec: dict | None = None, **data: str) -> RunData:
    def history(rank: int) -> RankHistory:
        step = {"event": "step", "time": START, "rank": rank, "tokens": tokens, "step_time_s": 1.0}
        steps = [{**step, "step": n, "loss": v} for n, v in losses.items()]
        return read_history([{"event": "data", "time": START, "rank": rank, **data}, *steps])

    text, histories = yaml.safe_dump(spec or {}), {0: history(0), 1: history(1)}
    return RunData(name, {}, {"world_size": 2}, {}, [], text, histories, {}, {}, None)


def compared(*data: RunData) -> RunComparison:
    return compare_runs(data, ["" for _ in data])


def test_losses_are_compared_at_equal_steps_and_at_equal_tokens() -> None:
    one = run_data("a", {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}, tokens=10)
    by_axis = {point.axis: point for point in compared(one, run_data("b", {1: 5.0, 2: 1.5}, tokens=30)).equal}
    assert (by_axis["step"].at, by_axis["step"].values) == (2.0, [3.0, 1.5])
    # two ranks: 80 tokens after 4 steps of the first run, which the second has between its steps (60 and 120 tokens)
    assert by_axis["tokens"].at == 80.0
    assert by_axis["tokens"].values == pytest.approx([1.0, 5.0 + (1.5 - 5.0) * 20 / 60])


def test_differences_say_what_they_change() -> None:
    one = run_data("a", {1: 1.0}, 1, {"train": {"lr": 1e-3}, "observe": {"log_every": 1}, "name": "a"}, train_hash="x")
    two = run_data("b", {1: 1.0}, 1, {"train": {"lr": 3e-3}, "observe": {"log_every": 5}, "name": "b"}, train_hash="y")
    comparison = compared(one, two)
    assert [(d.key, d.values, d.changes) for d in comparison.differences] == [
        ("train.lr", [1e-3, 3e-3], "what is trained"),
        ("observe.log_every", [1, 5], "neither result nor speed"),
    ]
    assert comparison.data_equal is False
    assert compared(one, run_data("c", {1: 1.0}, 1)).data_equal is None, "an unknown hash is no evidence"
    assert effect_of("strategy.name") == effect_of("package.torch") == "speed and memory"


def test_the_page_and_the_table_of_two_runs(tmp_path: Path) -> None:
    runs = [complete_run(tmp_path, name, seed=seed) for name, seed in (("one", 1), ("two", 2))]
    names = [str(run.root) for run in runs]
    code, shown = verb("compare-runs", *names, "--out", str(tmp_path / "page.html"))
    assert code == 0 and "held-out loss after step 10" in shown
    assert "Train loss by tokens" in (tmp_path / "page.html").read_text()
    assert len(json.loads(verb("compare-runs", *names, "--json")[1])["runs"]) == 2
    for wrong in (names[:1], [names[0], names[0]], [names[0], "nope"]):
        assert verb("compare-runs", *wrong)[0] == 2, wrong


def test_runs_without_a_common_figure_still_give_a_page(tmp_path: Path) -> None:
    write_page(compared(run_data("a", {}, 1), run_data("b", {}, 1)), tmp_path / "page.html")
    assert "are equal" in (tmp_path / "page.html").read_text()
