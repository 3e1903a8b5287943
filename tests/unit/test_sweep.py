"""Points of a sweep, what ends one early, and how they are ranked. Runs of ranks are in tests/dist/test_sweep.py."""

import json
from pathlib import Path

import pytest

from allranks.errors import RequestError
from allranks.experiments import sweep, sweep_array, sweep_trials
from allranks.experiments.sweep import DivergenceWatch, PointResult, grid_points, ranked
from allranks.launch.runs import NullObserver
from allranks.rundir.files import write_json
from allranks.rundir.paths import RunDir, create_run
from tests.conftest import tiny_spec


def test_points_are_the_product_of_the_grid_and_the_lines() -> None:
    grid = ["train.lr=1e-4, 3e-4", "adapter.targets=[a,b],[c]"]
    points = grid_points(grid, ["", "# a comment", "train.lr=1 train.seed=2"])
    assert [point.sets for point in points] == [
        ["train.lr=1e-4", "adapter.targets=[a,b]"], ["train.lr=1e-4", "adapter.targets=[c]"],
        ["train.lr=3e-4", "adapter.targets=[a,b]"], ["train.lr=3e-4", "adapter.targets=[c]"],
        ["train.lr=1", "train.seed=2"],
    ]  # fmt: skip
    assert [point.name for point in points] == ["p1", "p2", "p3", "p4", "p5"]
    big = [f"k{i}={','.join('abcdefghij')}" for i in range(4)]
    twice, ranges = ["a=1 b=2", "b=2 a=1"], ["a=1..2"]
    for grid, lines in (
        ([], []), (["train.lr"], []), (["a=1,"], []), (["a=1", "a=2"], []), (big, []), ([], ["word"]), ([], twice),
        (["a=1,2,1"], []), (ranges, []),
    ):  # fmt: skip
        with pytest.raises(RequestError):
            grid_points(grid, lines)


def test_the_same_command_continues_its_sweep_and_one_process_runs_it(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps(tiny_spec("builtin:instructions", tmp_path)))
    points = grid_points(["train.lr=1,2"])
    first = sweep.create_sweep(spec, [], points)
    assert sweep.create_sweep(spec, [], points) == first
    others = [sweep.create_sweep(spec, [], points, new=True), sweep.create_sweep(spec, ["train.seed=2"], points)]
    assert len({one.folder for one in (first, *others)}) == 3
    with sweep.only_one(first), pytest.raises(RequestError, match="another process"), sweep.only_one(first):
        pass
    before, gone = sorted(tmp_path.rglob("*")), grid_points(["cluster.python=./gone"])
    secret = ["cluster.env.HF_TOKEN=hf_" + "a1B2c3D4" * 4]
    for sets, wrong in (secret, points), ([], grid_points(["train.lrr=1"])), (["cluster.launcher=slurm"], gone):
        with pytest.raises(RequestError, match=r"hold a secret|did you mean 'train\.lr'|there is no gone") as raised:
            sweep.create_sweep(spec, sets, wrong)
        assert "a1B2" not in str(raised.value) and sorted(tmp_path.rglob("*")) == before


def test_a_point_whose_task_was_killed_by_a_second_ctrl_c_is_stopped_unless_it_had_succeeded(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps(tiny_spec("builtin:instructions", tmp_path)))
    one = sweep.create_sweep(spec, [], grid_points(["train.lr=1,2,3,4"]))
    for name, status in ("p1", "failed"), ("p2", "succeeded"), ("p3", "failed"):
        run = create_run(one.folder, name)
        write_json(run.spec, {})
        write_json(run.metrics, {"status": status})
    sweep_array.mark_stopped(one, {1, 2, 4})
    assert [result.status for result in sweep.results_of(one)] == ["stopped", "succeeded", "failed", "open"]


def test_optuna_chooses_from_ranges_and_a_continued_study_repeats_nothing(tmp_path: Path) -> None:
    grid = ["train.lr=1e-5..1e-3:log", "adapter.r=4..64", "train.schedule=linear,cosine"]
    points, space = sweep.trial_points(grid, 6)
    endings = ["succeeded", "diverged", "failed", "succeeded", "refused", "stopped"]

    def run_all(folder: Path) -> list[list[str]]:
        folder.mkdir()
        results = []
        for point, status in zip(points, endings, strict=True):
            sets = sweep_trials.suggest(folder, space, point.name)
            assert sweep_trials.read_settings(folder, point.name) == sets
            one = PointResult(name=point.name, sets=sets, run="r", status=status, message="", eval_loss=1.0)
            results.append(one)
            sweep_trials.report(folder, results)
        return [one.sets for one in results]

    chosen = run_all(tmp_path / "a")
    assert chosen == run_all(tmp_path / "b"), "the seeds are fixed"
    rates, ranks, schedules = zip(*([text.partition("=")[2] for text in sets] for sets in chosen), strict=True)
    assert len(set(rates)) == 6 and all(1e-5 <= float(rate) <= 1e-3 for rate in rates)
    assert all(4 <= int(rank) <= 64 for rank in ranks) and set(schedules) <= {"linear", "cosine"}
    states = [trial.state.name for trial in sweep_trials._study(tmp_path / "a").trials]
    assert states == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE", "FAIL", "RUNNING"]
    for grid in ([], *([item] for item in ("a=2..1", "a=0..1:log", "a=1..2:lin", "a=x..y", "a=1..2,3", "a=.."))):
        with pytest.raises(RequestError, match="--grid"):
            sweep.trial_points(grid, 3)


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([5.0 - i / 10 for i in range(40)], ""),
        ([5.0, 4.0, None], "not finite at step 3"),
        ([5.0] * 15 + [2.0] * 15 + [4.9] * 30, ""),
        ([5.0] + [2.0] * 25 + [9.0] * 15, "above the first loss"),
        ([1.0] + [20.0] * 9, ""),
    ],
)
def test_a_loss_not_finite_or_risen_for_good_ends_a_point(losses: list, reason: str, tmp_path: Path) -> None:
    ended: list[RunDir] = []
    watch = DivergenceWatch(NullObserver(), ended.append)
    watch.start(RunDir(tmp_path), None)
    for step, loss in enumerate(losses, 1):
        watch.event({"event": "step", "rank": 0, "step": step, "loss": loss})
        watch.event({"event": "step", "rank": 1, "step": step, "loss": None})
    assert reason in watch.reason and len(ended) == bool(reason)
    assert bool(watch.reason) == bool(reason)


def test_the_held_out_loss_ranks_if_all_have_it() -> None:
    def result(name: str, status: str, held: float | None, train: float | None) -> PointResult:
        return PointResult(name=name, sets=[], run=name, status=status, message="", eval_loss=held, train_loss=train)

    one, two = result("a", "succeeded", 2.0, 1.0), result("b", "succeeded", 1.0, 2.0)
    bad, worse = result("c", "failed", 0.1, 0.1), result("d", "diverged", 0.0, 0.0)
    key, order = ranked([bad, worse, one, two])
    assert (key, [r.name for r in order]) == ("eval_loss", ["b", "a", "c", "d"])
    key, order = ranked([bad, one, result("b", "succeeded", None, 2.0)])
    assert (key, [r.name for r in order]) == ("train_loss", ["a", "b", "c"])
    assert json.loads(json.dumps(order[0].sets)) == []
