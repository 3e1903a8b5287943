"""Read written safetensors files again: compare every byte with memory, and compute the SHA-256 of what was read, in one pass.

The comparison is made with the file's own header: a wrong name, shape, dtype or position is found like a wrong byte. What is read
usually comes from the page cache. Damage on the disk is found when the hash is compared before a resume.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from allranks.errors import CheckpointError
from allranks.train.models.weight_sources import NAME_OF

PARTS = "DCP_SHARDING_INFO"  # header key: offset of a part within its tensor
CHUNK_BYTES = 1 << 20  # is compared and hashed while it is in the processor's cache
WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "module.", "_checkpoint_wrapped_module")

_memcmp = ctypes.CDLL(None).memcmp  # without the interpreter's lock
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a file must hold.

    Attributes:
        tensor: its content in memory, on the CPU.
        shape: its shape in the file.
        offset: where it begins in the flattened full tensor; None if it is not a part.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: int | None = None


@dataclass(frozen=True)
class _Range:
    """Where a tensor is in the file and in memory."""

    key: str
    low: int
    high: int
    memory: torch.Tensor

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


def check_file(folder: Path, name: str, expected: Mapping[str, ExpectedTensor]) -> dict[str, Any]:
    """Read a file once and compare it with memory.

    Args:
        name: the file's name relative to the folder.
        expected: all tensors that it must hold, by key.

    Returns:
        Its size (``bytes``) and its SHA-256 as hex (``sha256``).

    Raises:
        CheckpointError: the file is incomplete, or differs from memory. It names the first tensor that differs.
    """
    try:
        with (folder / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            prefix, header = _read_header(file, size)
            ranges = _compare_header(header, len(prefix), size, expected)
            whole = hashlib.sha256(prefix)
            _compare_bytes(file, len(prefix), ranges, whole)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # also a header of another form
        raise CheckpointError(f"{folder / name}: {error}") from None
    return {"bytes": size, "sha256": whole.hexdigest()}


def _read_header(file: BinaryIO, size: int) -> tuple[bytes, dict[str, Any]]:
    if size < 8:
        raise ValueError("is too short")
    length = _exactly(file, 8)
    count = int.from_bytes(length, "little")
    if 8 + count > size:
        raise ValueError("is truncated within its header")
    text = _exactly(file, count)
    return length + text, json.loads(text)


def _exactly(file: BinaryIO, count: int) -> bytes:
    parts = []
    while count and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    if count:
        raise ValueError("is truncated within its header")
    return b"".join(parts)


def _compare_header(
    header: dict[str, Any], begin: int, size: int, expected: Mapping[str, ExpectedTensor]
) -> list[_Range]:
    """Compare names, shapes, dtypes and offsets; return where each tensor is, without gaps, in the order of the file.

    Args:
        begin: bytes of the header: the position of the first tensor.
        size: bytes of the file.
    """
    offsets = json.loads(header.pop("__metadata__", {}).get(PARTS, "{}"))
    for key in header:
        if any(w in key.removeprefix("model/") for w in WRAPPERS):
            raise ValueError(f"{key} has a wrapper's prefix; other programs could not load it")
    missing = sorted(expected.keys() - header.keys())
    if missing:
        raise ValueError(f"{len(missing)} tensors were not saved, first {missing[0]}")
    ranges = []
    for key, found in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if key not in expected:
            raise ValueError(f"{key} is not a tensor of this file")
        ranges.append(_compare_tensor(key, found, offsets.get(key), begin, expected[key]))
    end = begin
    for r in ranges:
        if r.low != end or r.high > size:
            raise ValueError(f"is truncated within {r.key}" if r.high > size else f"{r.key} is not where it should be")
        end = r.high
    if end != size:
        raise ValueError(f"has {size - end} bytes after its last tensor")
    return [r for r in ranges if r.high > r.low]


def _compare_tensor(key: str, found: dict[str, Any], part: Any, begin: int, wanted: ExpectedTensor) -> _Range:
    dtype, shape = NAME_OF[wanted.tensor.dtype], list(wanted.shape)
    if (found["dtype"], found["shape"]) != (dtype, shape):
        raise ValueError(f"{key} is {found['dtype']}{found['shape']}, the model's is {dtype}{shape}")
    if (None if part is None else part["saved_offsets"][0]) != wanted.offset:
        raise ValueError(f"{key} begins at {part} in the file, in memory at {wanted.offset}")
    low, high = found["data_offsets"]
    memory = wanted.tensor.detach().contiguous().view(-1)
    if math.prod(shape) != memory.numel() or high - low != memory.numel() * memory.element_size():
        raise ValueError(f"{key} has {high - low} bytes for {dtype}{shape}, {memory.numel()} elements are in memory")
    return _Range(key, begin + low, begin + high, memory)


def _compare_bytes(file: BinaryIO, at: int, ranges: list[_Range], whole: Any) -> None:
    """Read from byte `at`, which is the first of the first range, to the end; update the hash `whole`."""
    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    address, view = buffer.data_ptr(), buffer.numpy().data
    number = 0
    while count := file.readinto(view):  # type: ignore[attr-defined] - a raw file
        whole.update(view[:count])
        while number < len(ranges) and ranges[number].low < at + count:
            r = ranges[number]
            low, high = max(r.low, at), min(r.high, at + count)
            if _memcmp(r.address + low - r.low, address + low - at, high - low):
                item = r.memory.element_size()
                where = f"elements {(low - r.low) // item} to {-(-(high - r.low) // item)}"
                raise ValueError(f"{r.key} ({where}) differs from memory after it was read again")
            if r.high > at + count:
                break
            number += 1
        at += count
    if number < len(ranges):
        raise ValueError(f"is truncated within {ranges[number].key}")
