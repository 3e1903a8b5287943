"""Trackers: none delays or ends a run, and each continues what it has in a later attempt. Real packages, no network."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import SpecError
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.train import trackers
from tests.conftest import tiny_spec


class Mine:
    """Writes to the run folder what it was given."""

    def __init__(self, run: trackers.TrackedRun) -> None:
        self.file = (run.folder / "mine.jsonl").open("a")

    def log(self, step: int, values: dict[str, float]) -> None:
        self.file.write(json.dumps([step, values]) + "\n")

    def finish(self, status: str) -> None:
        self.file.write(json.dumps(status) + "\n")
        self.file.close()


class Slow(Mine):
    def log(self, step: int, values: dict[str, float]) -> None:
        time.sleep(0.05)


class Raises(Mine):
    def log(self, step: int, values: dict[str, float]) -> None:
        raise SystemExit("WANDB_API_KEY=" + "0123456789" * 4)


class Hangs(Mine):
    def __init__(self, run: trackers.TrackedRun) -> None:
        time.sleep(1e6)


class HasOnlyLog:
    def log(self, step: int, values: dict[str, float]) -> None: ...


def observe(names: list[str], folder: Path, steps: range = range(1, 21), status: str = "succeeded") -> list[str]:
    """Send steps to trackers, and return what was reported."""
    tracking = {"project": "p", "group": "g", "tags": ["one"], "offline": True}
    spec = parse_spec(tiny_spec("rows.json", folder, observe={"trackers": names, "tracking": tracking}))
    said: list[str] = []
    made = trackers.make_trackers(spec, RunDir(folder), said.append, steps[0] - 1 or None)
    assert made is not None
    for step in steps:
        made.event("step", {"step": step, "loss": 1 / step, "lr": None})
        made.event("phase", {"name": "train"})
    made.close(status)
    return said


def test_no_tracker_delays_a_step_or_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 3.0)
    before = time.monotonic()
    said = observe([f"{__name__}:{name}" for name in ("Mine", "Slow", "Raises", "Hangs")], tmp_path)
    assert time.monotonic() - before < 20, "Hangs was waited for"
    assert sorted(line.split()[1].rpartition(":")[2] for line in said) == ["Hangs", "Raises"], "each once"
    assert not any("0123456789" in line for line in said)
    mine = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert [one for one in mine if one != "succeeded"] == [[n, {"train/loss": 1 / n}] for n in range(1, 21)]


def test_a_tracker_that_does_not_keep_up_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "QUEUED", 5)
    before = time.monotonic()
    (said,) = observe([f"{__name__}:Slow"], tmp_path, range(1, 101))
    assert "does not keep up" in said and time.monotonic() - before < 4, "the steps waited for it"


@pytest.mark.parametrize(("name", "text"), [("HasOnlyLog", "no method finish"), ("Absent", "cannot be imported")])
def test_a_class_that_is_no_tracker_is_refused_by_name(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"observe.trackers: .*{name}.*{text}"):
        observe([f"{__name__}:{name}"], tmp_path)


@pytest.mark.parametrize("names", [["wandbb"], ["module"], ["a b:C"]])
def test_unknown_trackers_are_refused(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"observe\.trackers: unknown tracker"):
        parse_spec(tiny_spec("rows.json", tmp_path, observe={"trackers": names}))


def _scalars(folder: Path) -> list[int]:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [one.step for one in events.Scalars("train/loss")]


def test_tensorboard_hides_steps_that_are_repeated_after_a_resume(tmp_path: Path) -> None:
    assert observe(["tensorboard"], tmp_path, range(1, 9), "failed") == []
    assert observe(["tensorboard"], tmp_path, range(5, 11)) == []
    assert _scalars(tmp_path) == list(range(1, 11))


def test_mlflow_continues_the_run_of_an_earlier_attempt(tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    assert observe(["mlflow"], tmp_path, range(1, 5), "stopped") == []
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("p").experiment_id
    assert [run.info.status for run in client.search_runs([experiment])] == ["KILLED"]
    assert observe(["mlflow"], tmp_path, range(5, 7)) == []
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED" and {"group": "g", "one": "true"}.items() <= run.data.tags.items()
    assert run.data.params["train.lr"] == "0.01"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "train/loss")] == list(range(1, 7))


def test_wandb_continues_its_run_offline_and_writes_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    key = "fedcba9876" * 4
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setattr(trackers, "CLOSE_S", 120.0)  # on a busy machine
    for steps in (range(1, 5), range(5, 7)):
        assert observe(["wandb"], tmp_path, steps) == []
        time.sleep(1.1)  # a folder of W&B is named by the second
    stores = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {path.name for path in stores} == {f"run-{tmp_path.name}.wandb"}, "one run"
    assert all(b"train/loss" in path.read_bytes() for path in stores)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
