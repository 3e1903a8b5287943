"""When the held-out loss ends a training, which checkpoint is the best, and what the spec must say for it."""

import math
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.metrics import best_evaluation, early_stop
from allranks.errors import CheckpointError, RequestError, SpecError
from allranks.rundir.checkpoints import best_checkpoint
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.train.checkpoint.commit import make_room
from allranks.train.evaluation import EarlyStopping, evaluations_until
from tests.unit.test_checkpoint import publish


@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "ends_after", "best"),
    [
        ([3.0, 2.0, 2.5, 2.1, 1.0], 2, 0.0, 4, 2),
        ([3.0, 2.0, 2.5, 1.9, 2.0, 1.9], 2, 0.0, 6, 4),
        ([3.0, 2.0, 2.5, 2.1], 3, 0.0, None, 2),
        ([3.0, 2.95, 2.9, 2.85], 2, 0.1, 3, 1),
        ([3.0, 2.95, 2.89, 2.85], 2, 0.1, None, 3),
        ([3.0, math.nan, math.inf], 2, 0.0, 3, 1),
        ([None, None], 2, 0.0, 2, 0),
        ([3.0, 2.0, 1.0], None, 0.0, None, 3),
    ],
)
def test_the_end_and_the_best(losses: list, patience: Any, min_delta: float, ends_after: int | None, best: int) -> None:
    stopping = EarlyStopping(patience, min_delta)
    ended = None
    for step, loss in enumerate(losses, 1):
        stopping.add(step, loss)
        if stopping.reason:
            ended = step
            break
    assert (ended, stopping.best_step) == (ends_after, best)


def test_the_evaluation_before_the_first_step_does_not_count() -> None:
    stopping = EarlyStopping(1)
    stopping.add(0, 0.5)
    stopping.add(1, 3.0)
    assert (stopping.best_step, stopping.reason) == (1, None)


def test_earlier_attempts_count_without_what_was_repeated() -> None:
    events: list[dict[str, Any]] = [
        {"event": "eval", "step": 5, "loss": 3.0},
        {"event": "step", "step": 6},
        {"event": "eval", "step": 10, "loss": 2.0},
        {"event": "eval", "step": 15, "loss": 1.0},  # after the checkpoint of step 10, where the next attempt resumed
        {"event": "resume", "from_step": 10},
        {"event": "eval", "step": 15, "loss": 1.5},
        {"event": "eval", "step": 20, "loss": None},
    ]
    assert evaluations_until(events, 20) == [(5, 3.0), (10, 2.0), (15, 1.5), (20, None)]
    assert evaluations_until(events, 10) == [(5, 3.0), (10, 2.0)]


def test_the_best_stays_and_the_pointer_names_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, 1.0)):
        publish(run, step, keep=1, loss=loss, keep_best=True)
    assert run.checkpoint_steps() == [2, 5]  # equal losses: the earlier one
    assert (run.best_checkpoint.read_text(), run.latest_checkpoint.read_text()) == ("step-2\n", "step-5\n")
    assert best_checkpoint(run) == 2
    publish(run, 6, keep=1, loss=0.5, keep_best=True)
    assert run.checkpoint_steps() == [6]
    assert run.best_checkpoint.read_text() == "step-6\n"


def test_room_is_not_made_from_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
        publish(run, step, 9, 10 << 20, loss=loss, keep_best=True)
    free = 12 << 20
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr("allranks.train.checkpoint.commit.shutil.disk_usage", lambda path: usage())
    with pytest.raises(CheckpointError, match="are needed"):
        make_room(run, 25 << 20, keep_best=True)
    assert make_room(run, 18 << 20, keep_best=True) == [2]
    assert run.checkpoint_steps() == [1, 3]


def test_a_best_that_is_missing_or_damaged_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    publish(run, 1, keep=2, loss=None, keep_best=True)
    with pytest.raises(RequestError, match=r"no checkpoint has a held-out loss.*checkpoint\.keep_best: true"):
        best_checkpoint(run)
    publish(run, 2, keep=2, loss=1.0, keep_best=True)
    (run.checkpoint(2) / "weights").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-2, the best checkpoint: weights has the wrong size"):
        best_checkpoint(run)


BASE: dict[str, Any] = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"eval": {"patience": 2}}, r"eval\.patience needs evaluations .*set eval\.every"),
        ({"eval": {"patience": 2, "every": 5}, "data": {"eval_fraction": 0}}, r"eval\.patience needs held-out rows"),
        ({"eval": {"patience": 0, "every": 5}}, r"eval\.patience: expected int >= 1"),
        ({"eval": {"min_delta": -1}}, r"eval\.min_delta: expected float >= 0"),
        ({"checkpoint": {"keep_best": True, "every": 5}}, r"checkpoint\.keep_best needs evaluations"),
        ({"checkpoint": {"keep_best": True}, "eval": {"every": 5}},
         r"checkpoint\.every is null, eval\.every is 5; set checkpoint\.every: 5"),
        ({"checkpoint": {"keep_best": True, "every": 4}, "eval": {"every": 6}},
         r"checkpoint\.every is 4, eval\.every is 6"),
        ({"checkpoint": {"keep_best": True, "mode": "none"}, "eval": {"every": 6}}, r"checkpoint\.mode is none"),
        (
            {"checkpoint": {"keep_best": True, "every": 6, "at_end": False}, "eval": {"every": 6}},
            r"at the end \(eval\.at_end\) needs a checkpoint; set checkpoint\.at_end: true",
        ),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused_with_its_keys(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_spec({**BASE, **{k: {**BASE.get(k, {}), **v} for k, v in sections.items()}})


def test_metrics_say_the_best_and_the_early_end() -> None:
    story: list[dict[str, Any]] = [
        {"event": "eval", "step": 0, "loss": 0.1},
        {"event": "eval", "step": 5, "loss": 2.0},
        {"event": "eval", "step": 10, "loss": None},
        {"event": "early_stop", "step": 10, "reason": "because"},
    ]
    assert best_evaluation(story) == {"best_step": 5, "best_eval_loss": 2.0}
    assert early_stop(story) == {"step": 10, "reason": "because"}
    assert early_stop([*story, {"event": "step", "step": 11}]) is None  # continued by a resume
    assert best_evaluation([]) == {"best_step": None, "best_eval_loss": None}
