"""Files of tensors that are written without copies: others read them, and parts must make whole tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from allranks.errors import CheckpointError
from allranks.train.models import safetensors_files
from allranks.train.models.safetensors_files import check_file, write_safetensors
from allranks.train.strategies.shards import (
    TensorShard,
    read_shards,
    require_whole_tensors,
    shard_file,
    share_to_write,
    write_parts,
)


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
        shard = TensorShard("model/w", 11, low, whole[low:high], copy=rank // 2, copies=2)
        own = share_to_write(shard, rank, 4)
        assert 2 <= own.tensor.numel() <= 3
        write_parts([own], tmp_path / shard_file(rank))
    back = torch.zeros(5)
    read_shards([TensorShard("model/w", 11, 6, back)], tmp_path)
    assert torch.equal(back, whole[6:])


@pytest.mark.parametrize(
    "parts",
    [
        [("w", 0, 3, 10), ("w", 4, 6, 10)],
        [("w", 0, 5, 10), ("w", 4, 6, 10)],
        [("w", 0, 5, 10)],
        [("w", 0, 5, 10), ("w", 5, 6, 10)],
        [("w", 0, 5, 10), ("w", 5, 5, 11)],
        [("w", 0, 10, 10), ("w", 0, 10, 10)],
    ],
)
def test_parts_with_a_gap_or_an_overlap_are_refused(parts: list[tuple[str, int, int, int]]) -> None:
    require_whole_tensors([("w", 5, 5, 10), ("w", 0, 5, 10)])
    with pytest.raises(CheckpointError, match="w: the ranks together hold"):
        require_whole_tensors(parts)
