"""Which files a checkpoint has, and how it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks import __version__
from allranks.errors import CheckpointError, RequestError
from allranks.rundir.checkpoints import hash_files, newest_checkpoint
from allranks.rundir.files import SCHEMA_VERSION, write_json
from allranks.rundir.paths import RunDir
from allranks.train.checkpoint import commit, snapshot
from allranks.train.checkpoint.commit import make_room, publish_checkpoint, remove_old_checkpoints
from allranks.train.checkpoint.writer import PublishedFiles, _shared_out
from allranks.train.strategies.shards import TensorShard, share_to_write


def test_files_of_other_ranks_must_be_here_whole_and_no_others(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"xy")
    facts = {"a.safetensors": {"bytes": 2}, "b.safetensors": {"bytes": 2}}
    commit.require_files(tmp_path, facts)
    with pytest.raises(CheckpointError, match=r"c\.safetensors: another rank wrote it, but it is not here"):
        commit.require_files(tmp_path, {**facts, "c.safetensors": {"bytes": 2}})
    with pytest.raises(CheckpointError, match=r"b\.safetensors: has 2 bytes, 3 were written"):
        commit.require_files(tmp_path, {**facts, "b.safetensors": {"bytes": 3}})
    with pytest.raises(CheckpointError, match=r"b\.safetensors: is not a file of this checkpoint"):
        commit.require_files(tmp_path, {"a.safetensors": {"bytes": 2}})


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 400))
def test_ranks_share_the_state_so_that_all_write_the_same(files: list[int], world: int, numel: int) -> None:
    names = [f"w{i}" for i in range(len(files))]
    whole = {n: (torch.float32, torch.Size((size,))) for n, size in zip(names, files, strict=True)}
    plan = PublishedFiles(tuple((n,) for n in names), {n: n for n in names}, whole, adapted=False)
    state = torch.arange(float(numel))
    ends = snapshot.ends_of_shares(plan, world, 4 * numel)
    shares = [share_to_write(TensorShard("s", numel, 0, state, everywhere=True), r, world, ends) for r in range(world)]
    assert torch.cat([s.tensor for s in shares]).equal(state)
    assert [s.offset for s in shares] == [sum(t.tensor.numel() for t in shares[:r]) for r in range(world)]
    published = [sum(files[r::world]) for r in range(world)]
    total = [p + s.tensor.numel() for p, s in zip(published, shares, strict=True)]
    even = (sum(files) + numel) / world
    if max(published) <= even:
        assert max(total) - min(total) <= world + 1


def test_a_layer_stays_in_one_file() -> None:
    sizes = {f"model.layers.{i}.{part}": 10 for i in range(5) for part in ("up", "down", "gate")}
    files = _shared_out(sizes, 4)
    assert len(files) == 4
    home = {n: i for i, part in enumerate(files) for n in part}
    assert all(len({home[f"model.layers.{i}.{p}"] for p in ("up", "down", "gate")}) == 1 for i in range(5))


def written(run: RunDir, step: int, size: int = 1000) -> Path:
    aside = run.checkpoints / f".step-{step}.tmp"
    aside.mkdir(parents=True)
    (aside / "weights").write_bytes(b"x" * size)
    facts = {"schema_version": SCHEMA_VERSION, "step": step, "mode": "full", "world_size": 2}
    write_json(aside / "manifest.json", {**facts, "files": hash_files(aside)})
    return aside


def publish(run: RunDir, step: int, keep: int, size: int = 1000) -> None:
    publish_checkpoint(run, written(run, step, size), step)
    remove_old_checkpoints(run, step, keep)


def test_publishing_points_to_the_newest_and_keeps_so_many(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (5, 10, 15, 20):
        publish(run, step, keep=2)
        assert run.latest_checkpoint.read_text() == f"step-{step}\n"
    assert run.checkpoint_steps() == [15, 20]
    publish(run, 20, keep=2, size=2000)
    assert (run.checkpoint(20) / "weights").stat().st_size == 2000
    publish(run, 8, keep=1)  # an older one, gone on from and saved again: never what was just published
    assert 8 in run.checkpoint_steps()
    assert not [p for p in run.checkpoints.iterdir() if p.name.startswith(".")]


def test_room_is_made_from_the_oldest_and_never_from_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    for step in (1, 2, 3):
        publish(run, step, keep=9, size=10 << 20)
    free = 12 << 20
    monkeypatch.setattr(
        "allranks.train.checkpoint.commit.shutil.disk_usage", lambda path: type("Usage", (), {"free": free})()
    )
    assert make_room(run, 5 << 20) == []
    with pytest.raises(CheckpointError, match=r"40\.0 MiB are needed, 12\.0 MiB are free"):
        make_room(run, 40 << 20)
    assert run.checkpoint_steps() == [1, 2, 3]
    assert make_room(run, 25 << 20) == [1, 2]
    assert run.checkpoint_steps() == [3]


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"files": {}}, "manifest is missing or unreadable"),
        ({"files": {"weights": {}}}, "weights has the wrong size"),
        ({"files": {"weights": 7}}, "has no size and hash of weights"),
        ({"mode": None}, "has no mode"),
        ({"world_size": "2"}, "number of ranks"),
        ({"step": 4}, "manifest is that of step 4"),  # a folder that was renamed, or copied over another
    ],
)
def test_a_manifest_that_is_damaged_or_anothers_is_passed_over_by_name(
    tmp_path: Path, manifest: dict[str, Any], words: str
) -> None:
    run = RunDir(tmp_path)
    for step in (4, 8):
        publish(run, step, keep=2)
    file = run.checkpoint(8) / "manifest.json"
    write_json(file, {**json.loads(file.read_text()), **manifest})
    step, problems = newest_checkpoint(run)
    assert step == 4 and len(problems) == 1
    assert str(run.checkpoint(8)) in problems[0] and words in problems[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": SCHEMA_VERSION + 1}, f"has schema_version {SCHEMA_VERSION + 1} (allranks 9.9);"),
        ({"schema_version": None}, "has no schema_version, as only older versions of allranks wrote (allranks 9.9);"),
        ({"schema_version": SCHEMA_VERSION + 1, "files": ["in another form"]},
        f"has schema_version {SCHEMA_VERSION + 1} (allranks 9.9);"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_version_is_refused_and_none_taken_in_its_place(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    run = RunDir(tmp_path)
    for step in (4, 8):
        publish(run, step, keep=2)
    file = run.checkpoint(8) / "manifest.json"
    changed = {**json.loads(file.read_text()), "allranks": "9.9", **change}
    write_json(file, {key: value for key, value in changed.items() if value is not None})
    with pytest.raises(RequestError) as caught:
        newest_checkpoint(run)
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        f"{file} {words} this program, allranks {__version__}, has schema_version {SCHEMA_VERSION}: "
        "use the version of allranks that wrote it, or start a new run"
    )


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    publish(run, 4, keep=2)
    run.checkpoint(4).rename(run.checkpoints / ".step-4.old")
    assert newest_checkpoint(run) == (4, [])


def test_a_reader_of_a_running_run_renames_nothing(tmp_path: Path) -> None:
    """The ranks may be between the two renames; a folder renamed back would stand in their way."""
    run = RunDir(tmp_path)
    for step in (4, 8):
        publish(run, step, keep=2)
    run.checkpoint(8).rename(run.checkpoints / ".step-8.old")
    assert newest_checkpoint(run, repair=False) == (4, [])
    assert not run.checkpoint(8).exists()
