"""Read safetensors files again and report their content.

The script runs in a separate process with the standard library only: it shares no memory, cached tensors or imports with the
writer.

Standard input: ``{"folder", "files": [...], "ranges": {key: [[offset, numel], ...]}}``. Standard output: by file, its bytes and SHA-256 and,
for each range of each tensor, ``[key, offset, numel, crc, dtype, shape]``; or ``{"problem": ...}``.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import sys
import zlib
from typing import Any

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
PARTS = "DCP_SHARDING_INFO"  # header key: offset of a part within its tensor


def reread(path: str, ranges: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Read one file. A part of a tensor is one range; a full tensor has the requested ranges, or one for all of it.

    Raises:
        ValueError: it is not a complete safetensors file.
    """
    with open(path, "rb") as file:  # noqa: PTH123 - imports are kept minimal
        if hasattr(os, "posix_fadvise"):  # read from the disk, not from the page cache of the writer
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError("is too short")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            begin = 8 + int.from_bytes(data[:8], "little")
            if begin > size:
                raise ValueError("is truncated within its header")
            header = json.loads(data[8:begin])
            offsets = json.loads(header.pop("__metadata__", {}).get(PARTS, "{}"))
            with memoryview(data) as view:
                found = [
                    line
                    for key, tensor in header.items()
                    for line in _tensor(view, begin, key, tensor, offsets.get(key), ranges.get(key))
                ]
                return {"bytes": size, "sha256": hashlib.sha256(view).hexdigest(), "tensors": found}


def _tensor(
    view: memoryview, begin: int, key: str, tensor: dict[str, Any], part: Any, ranges: list[list[int]] | None
) -> list[list[Any]]:
    low, high = tensor["data_offsets"]
    item = BITS[tensor["dtype"]] // 8
    numel = math.prod(tensor["shape"])
    if high - low != numel * item or begin + high > len(view):
        raise ValueError(f"is truncated within {key}")
    if part is not None:
        cuts = [(0, numel)]
        first = part["saved_offsets"][0] if isinstance(part, dict) else part[0]
    else:
        cuts, first = [(o, n) for o, n in ranges or [[0, numel]] if o + n <= numel], 0
    out = []
    for offset, count in cuts:
        at = begin + low + offset * item
        crc = zlib.crc32(view[at : at + count * item])
        out.append([key, first + offset, count, crc, tensor["dtype"], tensor["shape"]])
    return out


def main() -> None:
    """Read one request from standard input and print the answer."""
    request = json.load(sys.stdin)
    answer: dict[str, Any] = {}
    for name in request["files"]:
        try:
            answer[name] = reread(os.path.join(request["folder"], name), request["ranges"])  # noqa: PTH118
        except (OSError, ValueError, KeyError, TypeError) as error:
            answer = {"problem": f"{name}: {error}"}
            break
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
