"""Files of tensors that are written without copies: others read them, and parts must make whole tensors."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from allranks.errors import CheckpointError
from allranks.train.models import safetensors_files
from allranks.train.models.safetensors_files import write_safetensors
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


@pytest.mark.parametrize("most", [1, 5, 1000])
def test_a_kernel_that_writes_less_than_it_is_given_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    made = {f"t{i}": torch.arange(float(i)) for i in range(40)}
    write_safetensors(tmp_path / "usual", made, {"format": "pt"})
    monkeypatch.setattr(safetensors_files, "MAX_BUFFERS", 3)
    monkeypatch.setattr(safetensors_files, "CALL_BYTES", 64)
    monkeypatch.setattr(safetensors_files, "WRITE_BACK_BYTES", 100)
    monkeypatch.setattr(os, "writev", lambda fd, buffers: os.write(fd, b"".join(buffers)[:most]))
    write_safetensors(tmp_path / "short", made, {"format": "pt"})
    assert (tmp_path / "short").read_bytes() == (tmp_path / "usual").read_bytes()


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, buffers: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/x\.safetensors'"):
        write_safetensors(tmp_path / "x.safetensors", {"t": torch.zeros(3)}, {})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can start to write a range of a file to the disk")
def test_the_kernel_takes_the_range_that_it_is_to_write_back(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb", buffering=0) as file:
        file.write(b"x" * 10_000)
        start = safetensors_files._sync_file_range
        assert start is not None
        assert start(file.fileno(), 4096, 4096, safetensors_files.SYNC_FILE_RANGE_WRITE) == 0
        assert start(-1, 4096, 4096, safetensors_files.SYNC_FILE_RANGE_WRITE) == -1


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
