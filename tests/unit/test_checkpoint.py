"""What a checkpoint's files are to hold, and what reading them again finds."""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from allranks import __version__
from allranks.errors import CheckpointError, RequestError
from allranks.rundir.checkpoints import hash_files, newest_checkpoint
from allranks.rundir.files import SCHEMA_VERSION, write_json
from allranks.rundir.paths import RunDir
from allranks.train.checkpoint import commit, snapshot, writer
from allranks.train.checkpoint.commit import ExpectedTensor, check_file, make_room, publish_checkpoint
from allranks.train.checkpoint.writer import PublishedFiles, _shared_out, digest_of
from allranks.train.models.safetensors_files import write_safetensors
from allranks.train.strategies.shards import TensorShard, shard_file, share_to_write, write_parts
from tests.sampling import examples


def held(tensors: dict[str, torch.Tensor]) -> dict[str, ExpectedTensor]:
    return {name: ExpectedTensor.of(t, tuple(t.shape)) for name, t in tensors.items()}


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["F32", "BF16", "I64", "BOOL"]), st.integers(0, 7)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([1, 7, 1 << 20]),
    st.integers(0, 10**6),
)
def test_one_reading_compares_every_byte_with_memory_and_hashes_the_file(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[int, str, int]], chunk: int, where: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool}
    made = {
        f"t{i}": torch.arange(rows * columns).reshape(rows, columns).to(dtypes[d])
        for i, (rows, d, columns) in enumerate(tensors)
    }
    file = folder / "a.safetensors"
    save_file(made, file)
    content = bytearray(file.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "PIECE_BYTES", chunk)
        facts = check_file(folder, file.name, held(made))
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        begin = 8 + int.from_bytes(content[:8], "little")
        if begin < len(content):
            content[begin + where % (len(content) - begin)] ^= 1 << where % 8
            file.write_bytes(content)
            with pytest.raises(CheckpointError, match=r"a\.safetensors: t\d \(elements .*differs from memory"):
                check_file(folder, file.name, held(made))


def test_memory_may_change_between_the_writing_and_the_reading(tmp_path: Path) -> None:
    made = {"a": torch.arange(600_000.0), "b": torch.arange(5.0).to(torch.bfloat16)}
    write_safetensors(tmp_path / "m.safetensors", made, {"format": "pt"}, write_back=False)
    then = held(made)
    made["a"].add_(1)
    assert check_file(tmp_path, "m.safetensors", then)["bytes"] == (tmp_path / "m.safetensors").stat().st_size
    with pytest.raises(CheckpointError, match=r"a .* differs from memory"):
        check_file(tmp_path, "m.safetensors", held(made))


@pytest.mark.parametrize("after_writing", [True, False])
def test_nothing_is_read_or_flushed_while_training_waits_for_the_writing(tmp_path: Path, after_writing: bool) -> None:
    save_file({"t": torch.arange(8.0)}, tmp_path / "a.safetensors")
    events: list[str] = []
    with ThreadPoolExecutor(2) as threads:
        files = commit.CompleteFiles(RunDir(tmp_path), tmp_path, threads, after_writing=after_writing)
        files.flush_events(lambda: events.append("flushed"))
        files.check("a.safetensors", held({"t": torch.arange(8.0)}))
        begun = ["a.safetensors"] if not after_writing else []
        assert files.flushed == list(files.compared()) == begun
        assert files.write_back != after_writing
        files.all_written()
        files.wait_for_disk()
        assert files.flushed == list(files.compared()) == ["a.safetensors"]
    assert events == ["flushed"]


def test_the_tensor_and_the_elements_that_differ_are_named(tmp_path: Path) -> None:
    made = {"a": torch.arange(600_000.0), "b": torch.arange(5.0)}
    write_safetensors(tmp_path / "m.safetensors", made, {"format": "pt"})
    made["a"][450_000] += 1
    with pytest.raises(CheckpointError, match=r"a \(elements (\d+) to (\d+)\) differs") as caught:
        check_file(tmp_path, "m.safetensors", held(made))
    low, high = map(int, re.findall(r"elements (\d+) to (\d+)", str(caught.value))[0])
    assert low <= 450_000 < high and high - low <= 1 << 18


@pytest.mark.parametrize("damage", ["", "x" * 4, "cut", "header", "no json", "beyond", "longer", "a gap", "no object"])
def test_damaged_files_are_told_by_name(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "a.safetensors"
    tensor = torch.arange(8.0)
    save_file({"t": tensor}, file)
    content = file.read_bytes()
    if damage == "cut":
        os.truncate(file, len(content) - 3)
    elif damage == "header":
        file.write_bytes((10**12).to_bytes(8, "little") + content[8:])
    elif damage == "no json":
        file.write_bytes(content[:8] + b"\xff" * (len(content) - 8))
    elif damage == "no object":
        file.write_bytes((2).to_bytes(8, "little") + b"[]" + content[-32:])
    elif damage in ("beyond", "a gap"):
        first = 96 if damage == "beyond" else 8
        header = json.dumps({"t": {"dtype": "F32", "shape": [8], "data_offsets": [first, first + 32]}}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[-40:])
    elif damage == "longer":
        file.write_bytes(content + b"x")
    else:
        file.write_text(damage)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: "):
        check_file(tmp_path, "a.safetensors", held({"t": tensor}))


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"t": torch.arange(8.0)}
    save_file(made, tmp_path / "a.safetensors")
    usual = commit._compare_header

    def cut(*args: Any) -> Any:
        os.truncate(tmp_path / "a.safetensors", (tmp_path / "a.safetensors").stat().st_size - 3)
        return usual(*args)

    monkeypatch.setattr(commit, "_compare_header", cut)
    with pytest.raises(CheckpointError, match="is truncated within t"):
        check_file(tmp_path, "a.safetensors", held(made))


def test_too_little_too_much_and_other_forms_are_refused(tmp_path: Path) -> None:
    good = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4.0)}

    def check(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, tmp_path / "m.safetensors")
        check_file(tmp_path, "m.safetensors", held(good))

    check(good)
    for tensors, words in (
        ({"a": good["a"]}, "not saved, first b"),
        ({**good, "c": good["b"].clone()}, "c is not a tensor of this file"),
        ({**good, "b": good["b"] + 1}, "b .* differs"),
        ({**good, "a": good["a"].reshape(3, 2)}, r"a is F32\[3, 2\], the model's is F32\[2, 3\]"),
        ({**good, "b": good["b"].to(torch.bfloat16)}, "b is BF16"),
        ({"module.a": good["a"], "b": good["b"]}, "wrapper's prefix"),
    ):
        with pytest.raises(CheckpointError, match=words):
            check(tensors)


def test_a_part_at_another_place_is_refused(tmp_path: Path) -> None:
    part = torch.arange(4.0)
    write_parts([TensorShard("model/w", 9, 5, part)], tmp_path / shard_file(0))
    check_file(tmp_path, shard_file(0), {"model/w": ExpectedTensor.of(part, (4,), 5)})
    for offset in (4, None):
        with pytest.raises(CheckpointError, match=r"model/w begins at .* in memory at"):
            check_file(tmp_path, shard_file(0), {"model/w": ExpectedTensor.of(part, (4,), offset)})


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


def test_weights_put_together_from_parts_must_have_the_bytes_of_the_parts() -> None:
    whole = torch.arange(10.0)
    parts = [digest_of("model/w", o, whole[o : o + 5]) for o in (0, 5)]
    commit.compare_digests(parts, [digest_of("model/w", o, whole[o : o + 5]) for o in (5, 0)])
    whole[7] += 1
    with pytest.raises(CheckpointError, match=r"model/w \(elements 5 to 10\) differs from the memory of the rank"):
        commit.compare_digests(parts, [digest_of("model/w", o, whole[o : o + 5]) for o in (0, 5)])


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


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 10**9), min_size=1, max_size=30),
    st.integers(1, 9),
)
def test_every_weight_is_in_one_file(sizes: dict[str, int], count: int) -> None:
    files = _shared_out(sizes, count)
    assert sorted(n for part in files for n in part) == sorted(sizes)
    assert len(files) <= count
    assert all(files)


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


def test_publishing_points_to_the_newest_and_keeps_so_many(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (5, 10, 15, 20):
        publish_checkpoint(run, written(run, step), step, keep=2)
        assert run.latest_checkpoint.read_text() == f"step-{step}\n"
    assert run.checkpoint_steps() == [15, 20]
    publish_checkpoint(run, written(run, 20, 2000), 20, keep=2)
    assert (run.checkpoint(20) / "weights").stat().st_size == 2000
    publish_checkpoint(
        run, written(run, 8), 8, keep=1
    )  # an older one, gone on from and saved again: never what was just published
    assert 8 in run.checkpoint_steps()
    assert not [p for p in run.checkpoints.iterdir() if p.name.startswith(".")]


def test_room_is_made_from_the_oldest_and_never_from_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    for step in (1, 2, 3):
        publish_checkpoint(run, written(run, step, 10 << 20), step, keep=9)
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
        publish_checkpoint(run, written(run, step), step, keep=2)
    file = run.checkpoint(8) / "manifest.json"
    write_json(file, {**json.loads(file.read_text()), **manifest})
    step, problems = newest_checkpoint(run)
    assert step == 4 and len(problems) == 1
    assert str(run.checkpoint(8)) in problems[0] and words in problems[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": SCHEMA_VERSION + 1}, f"has schema_version {SCHEMA_VERSION + 1} (allranks 9.9);"),
        ({"schema_version": "x"}, "has schema_version 'x' (allranks 9.9);"),
        ({"schema_version": True}, "has schema_version True (allranks 9.9);"),
        ({"schema_version": None}, "has no schema_version, as only older versions of allranks wrote (allranks 9.9);"),
        ({"schema_version": SCHEMA_VERSION + 1, "files": ["in another form"]}, f"has schema_version {SCHEMA_VERSION + 1} (allranks 9.9);"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_version_is_refused_and_none_taken_in_its_place(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    run = RunDir(tmp_path)
    for step in (4, 8):
        publish_checkpoint(run, written(run, step), step, keep=2)
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


def test_a_damaged_manifest_without_a_version_is_damaged_and_not_of_another_version(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (4, 8):
        publish_checkpoint(run, written(run, step), step, keep=2)
    write_json(run.checkpoint(8) / "manifest.json", {})
    assert newest_checkpoint(run)[0] == 4


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    publish_checkpoint(run, written(run, 4), 4, keep=2)
    run.checkpoint(4).rename(run.checkpoints / ".step-4.old")
    assert newest_checkpoint(run) == (4, [])


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
def test_a_whole_model_is_written_as_transformers_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied weights once, fused experts by their stored names; in one file and in several."""
    sizes: dict[str, Any] = {"vocab_size": 64, "num_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    sizes |= (
        {"n_embd": 16, "n_layer": 2, "n_head": 2}
        if kind == "gpt2"
        else {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2}
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    model.save_pretrained(str(tmp_path / "theirs"))
    wanted = {k: t for f in (tmp_path / "theirs").glob("*.safetensors") for k, t in load_file(f).items()}
    for name, limit in (("one", writer.LARGE_BYTES), ("several", 8192)):
        monkeypatch.setattr(writer, "LARGE_BYTES", limit)
        writer.write_model(tmp_path / name, model, NoTokenizer())
        files = list((tmp_path / name).glob("*.safetensors"))
        assert (len(files) > 1) == (name == "several")
        found = {k: t for f in files for k, t in load_file(f).items()}
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[k], t) for k, t in wanted.items())
        again: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path / name))
        assert all(torch.equal(t, again.state_dict()[k]) for k, t in model.state_dict().items())
        configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("theirs", name)]
        assert configs[0] == configs[1]


class NoTokenizer:
    """A tokenizer that writes nothing."""

    def save_pretrained(self, folder: str) -> None: ...


def test_a_reader_of_a_running_run_renames_nothing(tmp_path: Path) -> None:
    """The ranks may be between the two renames; a folder renamed back would stand in their way."""
    run = RunDir(tmp_path)
    for step in (4, 8):
        publish_checkpoint(run, written(run, step), step, keep=2)
    run.checkpoint(8).rename(run.checkpoints / ".step-8.old")
    assert newest_checkpoint(run, repair=False) == (4, [])
    assert not run.checkpoint(8).exists()
