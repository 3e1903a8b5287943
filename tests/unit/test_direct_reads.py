"""Reading ranges of weight files: the right elements, in pieces, and what is told of files that differ or change."""

from __future__ import annotations

import os
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from allranks.errors import AllranksError
from allranks.train.models import weight_sources
from allranks.train.models.weight_sources import DirectReads, WeightFiles, crc_followed_by, difference, facts_of
from allranks.utils.safetensors_files import read_header

WEIGHTS = {
    "a": torch.arange(3000, dtype=torch.float32).view(30, 100) * 0.37,
    "b": (torch.arange(5000) * 0.11).to(torch.bfloat16).view(50, 10, 10),
    "c": torch.arange(7, dtype=torch.int64),
    "none": torch.empty(0, 4),
    "one": torch.tensor(2.5, dtype=torch.float16),
}


def files(folder: Path, *more: str) -> WeightFiles:
    paths = [folder / name for name in ("x.safetensors", *more)]
    for path in paths:
        save_file(WEIGHTS, path)
    stored = {f"{i}{name}": entry for i, path in enumerate(paths) for name, entry in read_header(path).items()}
    return WeightFiles({path: facts_of(path) for path in paths}, stored)


def reads(known: WeightFiles, dtype: torch.dtype | None = None) -> DirectReads:
    return DirectReads(known, {name: dtype or WEIGHTS[name[1:]].dtype for name in known.stored})


def pieces(direct: DirectReads, name: str, start: int, stop: int) -> list[tuple[int, torch.Tensor]]:
    return [(low, piece.clone()) for low, _, piece in direct.pieces(name, start, stop)]


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_pieces_are_the_tensors_elements(
    dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sources, "PIECE_BYTES", 1000)
    direct, total = reads(files(tmp_path, "y.safetensors"), dtype), 0
    for name, whole in WEIGHTS.items():
        n = whole.numel()
        for start, stop in ((0, n), (0, n // 2), (n // 3, n), (n // 2, n // 2), (max(n - 1, 0), n)):
            for file in "01":
                found, next_one = [torch.empty(0, dtype=dtype or whole.dtype)], start
                for at, piece in pieces(direct, file + name, start, stop):
                    assert at == next_one and piece.numel() * whole.itemsize <= 1000
                    found.append(piece)
                    next_one += piece.numel()
                assert torch.equal(torch.cat(found), whole.flatten()[start:stop].to(dtype or whole.dtype))
                total += (stop - start) * whole.itemsize
    direct.close()
    assert direct.read_bytes == total


def test_a_difference_is_named(tmp_path: Path) -> None:
    (known,) = files(tmp_path).facts.values()
    path, content = known.path, bytearray(known.path.read_bytes())

    def now(data: bytes | bytearray, later_ns: int = 0) -> str:
        path.write_bytes(data)
        os.utime(path, ns=(known.changed_ns, known.changed_ns + later_ns))
        return difference(known)

    assert now(content) == ""
    assert "another time of change" in now(content, 1)
    assert f"finds {len(content) - 1} bytes in {path}, rank 0 {len(content)}" in now(content[:-1])
    for at in (0, 20, -1, -4000):
        other = content.copy()
        other[at] ^= 1
        assert "finds other content" in now(other), at
    now(b"\xff" * 8 + content[8:])  # a header of 2^64 bytes
    path.unlink()
    assert difference(known) == f"does not see {path}"
    os.mkfifo(path)
    assert difference(known) == f"cannot read {path}: it is a named pipe (FIFO), not a regular file"


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    known = files(tmp_path)
    (path,) = known.facts
    content = path.read_bytes()
    direct = reads(known)
    assert len(pieces(direct, "0a", 0, 10)) == 1
    os.truncate(path, known.stored["0a"].offset + 50)
    with pytest.raises(AllranksError, match=f"{path}: 0a cannot be read: the file was truncated"):
        pieces(direct, "0a", 0, 3000)
    with pytest.raises(AllranksError, match=f"{path}: was changed while the model was loaded"):
        direct.close()
    with pytest.raises(AllranksError, match="was changed"):  # before the first piece
        pieces(reads(known), "0a", 0, 1)
    path.write_bytes(content)
    path.unlink()
    with pytest.raises(AllranksError, match="0a cannot be read: No such file"):
        pieces(reads(known), "0a", 0, 1)


def test_the_crc_of_parts_is_that_of_the_whole() -> None:
    data = bytes(torch.randint(0, 256, (5003,), dtype=torch.uint8).tolist())
    for cuts in ((0, 5003), (0, 0, 1, 4999, 5003), (0, 1000, 1000, 3001, 5003)):
        total = 0
        for low, high in pairwise(cuts):
            total ^= crc_followed_by(zlib.crc32(data[low:high]), len(data) - high)
        assert total == zlib.crc32(data)
    assert crc_followed_by(zlib.crc32(b"a"), 1 << 40) != crc_followed_by(zlib.crc32(b"a"), (1 << 40) + 1)


def test_a_tensor_in_another_layout_is_not_read_as_ranges(tmp_path: Path) -> None:
    direct = DirectReads(files(tmp_path), {})
    assert "0a" in direct and "fused" not in direct
