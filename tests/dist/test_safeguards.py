"""Checkpoints on request and by time, and weights that change silently on one rank: whole runs on gloo ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from tests.dist import harness
from tests.dist.harness import allranks, equal, rows_spec, run_ranks, train, weights_of, write_spec


def test_a_requested_checkpoint_is_full_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = rows_spec(tmp_path, train={"max_steps": 30}, checkpoint={"mode": "weights_only"})
    _, undisturbed = train(tmp_path, spec, code=0)
    harness.slow_down(monkeypatch, 0.2)
    background = harness.Background(tmp_path, "run", str(write_spec(tmp_path, {**spec, "name": "asked"})))
    monkeypatch.delenv("STUCK")
    run = background.run
    background.until_step(3)
    done = allranks("checkpoint", run.name, cwd=tmp_path, code=0)
    step = int(done.stdout.split(" of step ")[1].split()[0])
    assert str(run.checkpoint(step)) in done.stdout and step < 30
    assert read_json(run.checkpoint(step) / "manifest.json")["mode"] == "full"
    assert "asked its ranks" in allranks("checkpoint", run.name, "--no-wait", cwd=tmp_path, code=0).stdout
    code, out = background.wait()
    assert code == 0, out
    saved = {r: [(e["step"], e["mode"]) for e in background.events(r) if e["event"] == "checkpoint"] for r in (0, 1)}
    assert saved[0] == saved[1] and [mode for _, mode in saved[0]] == ["full", "full", "weights_only"]
    assert equal(weights_of(run, 30), weights_of(undisturbed, 30))
    # what cannot save
    plan = read_json(run.plan)
    for change, said in (
        (lambda: None, f"does not run; there is nothing to save; its newest checkpoint is {run.checkpoint(30)}"),
        (lambda: run.plan.write_text(json.dumps({**plan, "batch": None})), "runs your own program"),
        (lambda: run.compare.write_text("{}"), "compares strategies"),
    ):
        change()
        assert said in allranks("checkpoint", run.name, cwd=tmp_path, code=2).stderr
    assert "no run" in allranks("checkpoint", "another", cwd=tmp_path, code=2).stderr


@pytest.mark.parametrize("every", [pytest.param("1s", marks=pytest.mark.full), "auto"])
def test_ranks_save_together_after_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: str) -> None:
    harness.slow_down(monkeypatch, 0.1)
    _, run = train(tmp_path, rows_spec(tmp_path, train={"max_steps": 30}, checkpoint={"every": every}), code=0)
    events = {rank: list(read_events(run.events_of(rank))) for rank in (0, 1)}
    saved = {rank: [e["step"] for e in events[rank] if e["event"] == "checkpoint"] for rank in events}
    assert saved[0] == saved[1] and 5 <= saved[0][0] < 30
    chosen = [(e["step"], e["every_s"], e["mtbf_h"]) for e in events[0] if e["event"] == "checkpoint_interval"]
    if every == "auto":  # one save measures the cost
        assert saved[0][0] <= 8 and len(saved[0]) == 2 and chosen[0][::2] == (saved[0][0], 1000.0)
        assert chosen[0][1] >= 60 and "checkpoint every " in run.rank_logs(1)[0].read_text()
    else:
        assert len(saved[0]) >= 3 and not chosen


@pytest.mark.parametrize("what", ["trained", pytest.param("frozen", marks=pytest.mark.full)])
def test_a_flipped_bit_is_found_named_and_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    saves = {"every": 6, "mode": "full", "async": False}  # on the disk before the weights are found to differ
    more: dict[str, Any] = {"observe": {"verify_every": 4}, "checkpoint": saves}
    spec = rows_spec(tmp_path, train={"max_steps": 12}, cluster={"procs_per_node": 3, "restarts": {"max": 3}}, **more)
    _, undisturbed = train(tmp_path, spec, code=0)
    assert [e["step"] for e in read_events(undisturbed.events_of(0)) if e["event"] == "verify"] == [4, 6, 8, 12]
    harness.stall_ranks(monkeypatch, f"flip_{what}_weight:1:1")
    monkeypatch.setenv("STUCK_ATTEMPTS", "0")
    done, run = train(tmp_path, spec, code=0)
    (one,) = read_json(run.restarts)
    named = (one["action"], one["failure"], one["rank"], bool(one["host"]), one["after_step"])
    assert named == ("restart", "replicas_diverged", 1, True, 6)
    assert f"after step 8 the weights of rank 1 on {one['host']} differ" in one["message"]
    assert "they last agreed after step 6" in one["message"] and "restart  after step 6" in done.stdout
    assert equal(weights_of(run, 12), weights_of(undisturbed, 12))


@pytest.mark.full
def test_changed_bits_are_found_under_every_kind_of_replica(tmp_path: Path) -> None:
    """State is compared where several ranks hold it; with two replicas, on two nodes, the wrong one is unknown."""
    hsdp: dict[str, Any] = {"options": {"replicate": "nodes"}}
    pairs = [("pytorch_ddp", {"lora": True}), ("zero1", {}), ("zero2", {}), ("pytorch_zero3", hsdp), ("zero3", {})]
    by_rank = run_ranks("changed_bits", 4, tmp_path, module="saves", limit_s=200, pairs=pairs, ranks_per_node=2)
    for name, _ in pairs:
        nothing, *others = by_rank[0][name]
        assert nothing is None and all(rank[name][1:] == others for rank in by_rank)
        said = [bool(text) for text in others]
        weights, state = [name != "zero3"] * 4, [False, name in ("pytorch_ddp", "pytorch_zero3")]
        assert said == [*weights, *state], (name, others)
    assert "the weights of rank 3 on " in by_rank[0]["zero1"][1]
    assert "the weights of ranks 1 (" in by_rank[0]["pytorch_zero3"][1] and "unknown" in by_rank[0]["pytorch_zero3"][1]
