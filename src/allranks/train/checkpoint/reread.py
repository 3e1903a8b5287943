"""Read safetensors files again and report their content.

The script runs in a separate process with the standard library only: it shares no memory, cached tensors or imports with the
writer.

Each line of standard input is a request: ``{"folder", "files": [...], "ranges": {key: [[offset, numel], ...]}}``. Each line of standard
output is an answer: by file, its bytes and SHA-256 and, for each range of each tensor, ``[key, offset, numel, crc, dtype, shape]``; or
``{"problem": ...}``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import zlib
from typing import Any, BinaryIO

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
PARTS = "DCP_SHARDING_INFO"  # header key: offset of a part within its tensor
CHUNK_BYTES = 1 << 20  # both digests of a chunk are computed while it is in the processor's cache


def reread(path: str, ranges: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Read one file once. A part of a tensor is one range; a full tensor has the requested ranges, or one for all of it.

    Raises:
        ValueError: it is not a complete safetensors file.
    """
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - imports are kept minimal
        if hasattr(os, "posix_fadvise"):  # read from the disk what is not only in the page cache of the writer
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError("is too short")
        length = _exactly(file, 8)
        begin = 8 + int.from_bytes(length, "little")
        if begin > size:
            raise ValueError("is truncated within its header")
        text = _exactly(file, begin - 8)
        header = json.loads(text)
        offsets = json.loads(header.pop("__metadata__", {}).get(PARTS, "{}"))
        cuts = [
            cut
            for key, tensor in header.items()
            for cut in _ranges(begin, size, key, tensor, offsets.get(key), ranges.get(key))
        ]
        whole = hashlib.sha256(length + text)
        crcs = _digests(file, begin, [(low, high) for low, high, _ in cuts], whole)
    found = [[*line[:3], crc, *line[3:]] for (_, _, line), crc in zip(cuts, crcs, strict=True)]
    return {"bytes": size, "sha256": whole.hexdigest(), "tensors": found}


def _exactly(file: BinaryIO, count: int) -> bytes:
    parts = []
    while count and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    if count:
        raise ValueError("is truncated within its header")
    return b"".join(parts)


def _ranges(
    begin: int, size: int, key: str, tensor: dict[str, Any], part: Any, ranges: list[list[int]] | None
) -> list[tuple[int, int, list[Any]]]:
    """Return for each range of a tensor its first and last byte in the file, and its line of the answer without the CRC."""
    low, high = tensor["data_offsets"]
    item = BITS[tensor["dtype"]] // 8
    numel = math.prod(tensor["shape"])
    if high - low != numel * item or begin + high > size:
        raise ValueError(f"is truncated within {key}")
    if part is not None:
        cuts = [(0, numel)]
        first = part["saved_offsets"][0] if isinstance(part, dict) else part[0]
    else:
        cuts, first = [(o, n) for o, n in ranges or [[0, numel]] if o + n <= numel], 0
    at = begin + low
    return [
        (
            at + offset * item,
            at + (offset + count) * item,
            [key, first + offset, count, tensor["dtype"], tensor["shape"]],
        )
        for offset, count in cuts
    ]


def _digests(file: BinaryIO, at: int, ranges: list[tuple[int, int]], whole: Any) -> list[int]:
    """Read from byte `at` to the end; update the hash `whole`, and return the CRC-32 of each range (first byte, byte after the last)."""
    crcs = [0] * len(ranges)
    waiting = sorted(range(len(ranges)), key=ranges.__getitem__, reverse=True)
    active: list[int] = []
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while count := file.readinto(buffer):  # type: ignore[attr-defined] - a raw file
        chunk = buffer[:count]
        whole.update(chunk)
        while waiting and ranges[waiting[-1]][0] < at + count:
            active.append(waiting.pop())
        for i in active:
            low, high = ranges[i]
            crcs[i] = zlib.crc32(chunk[max(low - at, 0) : high - at], crcs[i])
        at += count
        active = [i for i in active if ranges[i][1] > at]
    return crcs


def main() -> None:
    """Answer the requests of standard input."""
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        for name in request["files"]:
            try:
                answer[name] = reread(os.path.join(request["folder"], name), request["ranges"])  # noqa: PTH118
            except (OSError, ValueError, KeyError, TypeError) as error:
                answer = {"problem": f"{name}: {error}"}
                break
        json.dump(answer, sys.stdout)
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
