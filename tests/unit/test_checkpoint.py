"""Which files a checkpoint has, what a rank collects and writes, and how it is published."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from allranks import __version__
from allranks.errors import CheckpointError, RequestError
from allranks.launch.restarts import decide_and_record, resume_args
from allranks.rundir.checkpoints import hash_files, newest_checkpoint
from allranks.rundir.files import SCHEMA_VERSION, write_json
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.train.checkpoint import commit, saver, snapshot
from allranks.train.checkpoint.commit import make_room, publish_checkpoint, remove_old_checkpoints
from allranks.train.checkpoint.saver import RankAgreement
from allranks.train.checkpoint.snapshot import CpuCopies, collect_parts
from allranks.train.checkpoint.writer import PublishedFiles, _shared_out
from allranks.train.models import safetensors_files
from allranks.train.models.safetensors_files import check_file, write_safetensors
from allranks.train.strategies import shards
from allranks.train.strategies.data_parallel import Single
from allranks.train.strategies.shards import TensorShard, read_shards, require_whole_tensors, share_to_write
from allranks.utils import filesystem


def test_files_of_other_ranks_must_be_here_whole_and_no_others(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"xy")
    commit.require_files(tmp_path, {"a.safetensors": {"bytes": 2}, "b.safetensors": {"bytes": 2}})
    for sizes, words in (
        ({"a": 2, "b": 2, "c": 2}, r"c\.safetensors: another rank wrote it, but it is not here"),
        ({"a": 2, "b": 3}, r"b\.safetensors: has 2 bytes, 3 were written"),
        ({"a": 2}, r"b\.safetensors: is not a file of this checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=words):
            commit.require_files(tmp_path, {f"{name}.safetensors": {"bytes": size} for name, size in sizes.items()})


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
    if max(published) <= (sum(files) + numel) / world:
        assert max(total) - min(total) <= world + 1


def test_a_layer_stays_in_one_file() -> None:
    files = _shared_out({f"model.layers.{i}.{part}": 10 for i in range(5) for part in ("up", "down", "gate")}, 4)
    assert len(files) == 4
    home = {n: i for i, part in enumerate(files) for n in part}
    assert all(len({home[f"model.layers.{i}.{p}"] for p in ("up", "down", "gate")}) == 1 for i in range(5))


def publish(run: RunDir, step: int, keep: int, size: int = 1000, *, loss: Any = None, keep_best: bool = False) -> None:
    aside = run.checkpoints / f".step-{step}.tmp"
    aside.mkdir(parents=True)
    (aside / "weights").write_bytes(b"x" * size)
    facts = {"schema_version": SCHEMA_VERSION, "step": step, "mode": "full", "world_size": 2, "eval_loss": loss}
    write_json(aside / "manifest.json", {**facts, "files": hash_files(aside)})
    publish_checkpoint(run, aside, step, keep_best=keep_best)
    remove_old_checkpoints(run, step, keep, keep_best=keep_best)


def published(folder: Path, **changes: Any) -> RunDir:
    """A run with checkpoints of steps 4 and 8, the latter with another manifest; None removes a value."""
    run = RunDir(folder)
    for step in (4, 8):
        publish(run, step, keep=2)
    file = run.checkpoint(8) / "manifest.json"
    changed = {**json.loads(file.read_text()), **changes}
    write_json(file, {key: value for key, value in changed.items() if value is not None})
    return run


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
    monkeypatch.setattr("allranks.train.checkpoint.commit.shutil.disk_usage", lambda path: SimpleNamespace(free=free))
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
    tmp_path: Path, manifest: Any, words: str
) -> None:
    run = published(tmp_path, **manifest)
    step, problems = newest_checkpoint(run)
    assert step == 4 and len(problems) == 1
    assert str(run.checkpoint(8)) in problems[0] and words in problems[0]


def test_a_restart_takes_the_newest_full_checkpoint(tmp_path: Path) -> None:
    run = published(tmp_path, mode="weights_only")
    assert newest_checkpoint(run) == (8, [])
    skipped = "step 8 is a weights-only checkpoint without optimizer state"
    assert newest_checkpoint(run, full=True) == (4, [skipped])
    spec = parse_spec({"model": {"name": "tiny:mistral"}, "data": {"source": "x"}})
    wanted = {"resume_step": 4, "inexact": False}
    assert resume_args(run, spec) == (wanted, [f"skipped: {skipped}", "resuming after step 4"])
    decided = decide_and_record(run, spec, 1, {"failure": {"id": "node_unhealthy"}, "message": "m"}, [])
    assert decided is not None and decided.resume_args(spec) == wanted


NEWER = {"schema_version": SCHEMA_VERSION + 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (NEWER, f"has schema_version {SCHEMA_VERSION + 1} (allranks 9.9);"),
        ({"schema_version": None}, "has no schema_version, as only older versions of allranks wrote (allranks 9.9);"),
        ({**NEWER, "files": ["in another form"]}, f"has schema_version {SCHEMA_VERSION + 1} (allranks 9.9);"),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_and_none_instead(tmp_path: Path, change: Any, words: str) -> None:
    run = published(tmp_path, allranks="9.9", **change)
    with pytest.raises(RequestError) as caught:
        newest_checkpoint(run)
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        f"{run.checkpoint(8) / 'manifest.json'} {words} this program, allranks {__version__}, has schema_version "
        f"{SCHEMA_VERSION}: use the version of allranks that wrote it, or start a new run"
    )


def test_a_kill_between_two_renames_loses_nothing_and_a_reader_of_a_running_run_renames_nothing(tmp_path: Path) -> None:
    """The ranks may be between the two renames; a folder renamed back would stand in their way."""
    run = published(tmp_path)
    run.checkpoint(8).rename(run.checkpoints / ".step-8.old")
    assert newest_checkpoint(run, repair=False) == (4, [])
    assert not run.checkpoint(8).exists()
    assert newest_checkpoint(run) == (8, [])


class Counting(nn.Module):
    """A module of which each forward pass changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self) -> torch.Tensor:
        self.seen += 1
        return self.weight.sum()


class Trained(Single):
    """A strategy whose optimizer has state for each weight."""

    def __init__(self, module: nn.Module) -> None:
        group: Any = None
        named = list(module.named_parameters())
        self._hold(module, named, lambda own: torch.optim.AdamW([p for _, p in own], lr=0.1), group, None)
        self.update()

    def update(self) -> None:
        self.module().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parts(self, progress: dict[str, Any] | None) -> Any:
        whole = {n: (t.dtype, t.shape) for n, t in self.module.state_dict().items()}
        files = PublishedFiles((("weight",),), {"weight": "weight"}, whole, adapted=True)
        return collect_parts(self, files, 0, 1, progress)


def test_a_full_checkpoint_has_weights_buffers_and_the_optimizers_state_and_another_has_the_weights() -> None:
    strategy = Trained(Counting())
    parts = strategy.parts({})
    assert list(parts.owned) == ["weight"] and parts.scattered == ()
    moments = [f"optimizer/weight/{key}" for key in ("exp_avg", "exp_avg_sq")]
    assert sorted(s.key for s in parts.state) == sorted(["model/seen", "scalar/weight/step", *moments])
    weights_only = strategy.parts(None)
    assert list(weights_only.owned) == ["weight"] and weights_only.state == () and weights_only.random is None


def test_copies_hold_the_values_of_their_moment_and_reuse_their_memory() -> None:
    module, copies = Counting(), CpuCopies()
    strategy = Trained(module)

    first = copies.of(strategy.parts({}))
    place = first.owned["weight"].data_ptr()
    weight = module.weight.tolist()
    strategy.update()
    assert first.owned["weight"].tolist() == weight != module.weight.tolist()
    assert {s.key: s.tensor.tolist() for s in first.state}["model/seen"] == [1, 1, 1]
    second = copies.of(strategy.parts({}))
    assert second.owned["weight"].tolist() == module.weight.tolist()
    assert {s.key: s.tensor.tolist() for s in second.state}["model/seen"] == [2, 2, 2]
    assert second.owned["weight"].data_ptr() == place


@pytest.mark.parametrize("error", [RuntimeError("unexpected pos 64 vs 0"), OSError(5, "Input/output error", "x.pt")])
def test_a_full_disk_is_told_by_any_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """torch's own writer does not tell that the disk is full."""
    alone: Any = RankAgreement.__new__(RankAgreement)
    alone.size, alone.group, alone._run = 1, None, RunDir(tmp_path)
    monkeypatch.setattr(saver.dist, "all_gather_object", lambda answers, mine, group: answers.__setitem__(0, mine))

    def fail() -> None:
        raise error

    folder = alone._run.checkpoints
    for free, said in ((2**19, True), (2**40, False)):
        monkeypatch.setattr(filesystem.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        with pytest.raises(CheckpointError) as caught:
            alone.each("write its files", fail)
        assert (f"(512 KiB are free in {folder})" in str(caught.value), "free" in str(caught.value)) == (said, said)
    alone._run = RunDir(tmp_path / ("long" * 100))  # stat fails, as for a stale handle
    with pytest.raises(CheckpointError, match="failed to write its files"):
        alone.each("write its files", fail)


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    made = {
        "b": torch.arange(7, dtype=torch.bfloat16),
        "a": torch.rand(300_000, 3).t(),  # not contiguous, and more than the buffer
        "scalar": torch.tensor(3.5),
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
        "long": torch.arange(5),
    }
    write_safetensors(tmp_path / "x.safetensors", made, {"format": "pt"})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_file_is_written_in_pieces_and_read_again_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {f"t{i}": torch.arange(float(i)) for i in range(40)}
    usual = write_safetensors(tmp_path / "usual", made, {"format": "pt"})
    monkeypatch.setattr(safetensors_files, "CALL_BYTES", 64)
    monkeypatch.setattr(safetensors_files, "PIECE_BYTES", 100)
    pieces = write_safetensors(tmp_path / "pieces", made, {"format": "pt"})
    content = (tmp_path / "pieces").read_bytes()
    assert content == (tmp_path / "usual").read_bytes() and pieces == usual
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert check_file(tmp_path / "pieces", pieces) == facts


@pytest.mark.parametrize("at", [0, 9, -9, -1])
@pytest.mark.parametrize("damage", ["a bit", "cut", "longer"])
def test_a_file_that_is_not_what_was_in_memory_is_refused_by_name(tmp_path: Path, damage: str, at: int) -> None:
    file = tmp_path / "a.safetensors"
    tensor = torch.arange(600_000.0)
    written = write_safetensors(file, {"t": tensor, "b": torch.ones(5)}, {"format": "pt"})
    tensor.add_(1)  # the file is compared with what was in memory then
    check_file(file, written)
    content = bytearray(file.read_bytes())
    if damage == "a bit":
        content[at] ^= 4
    else:
        content = content[:at] if damage == "cut" else content + b"x"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: differs from memory after it was read again"):
        check_file(file, written)


def test_a_name_with_the_prefix_of_a_wrapper_is_refused(tmp_path: Path) -> None:
    for name in ("_orig_mod.a", "model/module.a"):
        with pytest.raises(CheckpointError, match=f"{name} has a wrapper's prefix"):
            write_safetensors(tmp_path / "x.safetensors", {name: torch.ones(2)}, {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_full_disk_is_told_with_the_file() -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        write_safetensors(Path("/dev/full"), {"t": torch.zeros(3)}, {})


def test_each_of_two_copies_writes_half_and_all_is_read(tmp_path: Path) -> None:
    whole = torch.rand(11)
    for rank in range(4):
        low, high = (0, 6) if rank % 2 == 0 else (6, 11)
        own = share_to_write(TensorShard("model/w", 11, low, whole[low:high], copy=rank // 2, copies=2), rank, 4)
        assert 2 <= own.tensor.numel() <= 3
        shards.write_parts([own], tmp_path / shards.shard_file(rank))
    back = torch.zeros(5)
    read_shards([TensorShard("model/w", 11, 6, back)], tmp_path)
    assert torch.equal(back, whole[6:])


def test_parts_with_a_gap_or_an_overlap_are_refused() -> None:
    require_whole_tensors([("w", 5, 5, 10), ("w", 0, 5, 10)])
    pairs = [((0, 3, 10), (4, 6, 10)), ((0, 5, 10), (4, 6, 10)), ((0, 5, 10), (5, 6, 10)), ((0, 5, 10), (5, 5, 11))]
    for parts in (*pairs, [(0, 5, 10)], [(0, 10, 10), (0, 10, 10)]):
        with pytest.raises(CheckpointError, match="w: the ranks together hold"):
            require_whole_tensors([("w", *part) for part in parts])
