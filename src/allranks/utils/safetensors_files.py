"""Read the headers of safetensors files: names, shapes and places of the tensors, without torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.utils.inputs import open_regular, read_regular

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PATTERNS = (SINGLE, INDEX, "model-*.safetensors")  # files to download from the hub: one set of weights only
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")
MAX_HEADER = 100_000_000  # limit of the format, bytes
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in a file. ``dtype``: the format's name (F32, BF16, ...); ``offset``: of its first byte in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    offset: int


def stored_tensors(folder: Path, name: str) -> dict[str, StoredTensor]:
    """Return the tensors in a model's folder by stored name.

    Args:
        name: the model's name in the spec, for messages.

    Raises:
        SpecError: the weights are pickles.
        EnvironmentNotAble: a file is missing, truncated or damaged; the message names the file and a lost tensor.
    """
    if (folder / INDEX).is_file():
        return _of_index(folder / INDEX)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    other = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if other:
        raise SpecError(
            f"model.name {name}: {folder / other[0]} is a pickle or another format that can run code when loaded, so "
            f"it is not opened; use a revision with {SINGLE}, or convert it if you trust it: "
            "AutoModel.from_pretrained(...).save_pretrained(folder)"
        )
    raise EnvironmentNotAble(
        f"model.name {name}: {folder} has neither {SINGLE} nor {INDEX}: download the weights again"
    )


def _of_index(index: Path) -> dict[str, StoredTensor]:
    try:
        listed = json.loads(read_regular(index))["weight_map"]
        files: dict[str, list[str]] = {}
        for tensor, file in listed.items():
            files.setdefault(file, []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise EnvironmentNotAble(f"{index}: is not an index of safetensors files; download it again") from None
    stored: dict[str, StoredTensor] = {}
    for file, tensors in sorted(files.items()):
        if Path(file).name != file:
            raise EnvironmentNotAble(f"{index}: lists {file!r}, which is not a file beside it")
        path = index.with_name(file)
        if not path.is_file():
            raise EnvironmentNotAble(
                f"{path}: is missing; according to {index.name} it holds {_first_and_count(tensors)}. Download the "
                "model again"
            )
        inside = read_header(path)
        lost = [t for t in tensors if t not in inside]
        if lost:
            raise EnvironmentNotAble(
                f"{path}: does not hold {_first_and_count(lost)}, which {index.name} lists for this file"
            )
        stored |= {t: inside[t] for t in tensors}
    return stored


def _first_and_count(names: list[str]) -> str:
    return min(names) + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file.

    Raises:
        EnvironmentNotAble: the file is truncated or damaged.
    """
    try:
        size = file.stat().st_size
        with open_regular(file) as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise EnvironmentNotAble(f"{file}: is a Git LFS pointer, not the weights; run git lfs pull")
            if len(start) < 8 or length > MAX_HEADER or 8 + length > size:
                raise EnvironmentNotAble(
                    f"{file}: is truncated within its header, or not a safetensors file; download it again"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise EnvironmentNotAble(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise EnvironmentNotAble(f"{file}: its header is damaged; fetch it again") from None
    try:
        entries = {n: e for n, e in header.items() if n != "__metadata__"}
        ends = {n: _check_entry(file, n, e) for n, e in entries.items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        raise EnvironmentNotAble(f"{file}: its header is damaged; fetch it again") from None
    there = size - 8 - length
    cut = sorted((end, n) for n, end in ends.items() if end > there)
    if cut:
        raise EnvironmentNotAble(
            f"{file}: is truncated: it has {there} of {max(ends.values())} bytes of weights; the first incomplete "
            f"tensor is {cut[0][1]}. Download it again"
        )
    return {
        n: StoredTensor(
            file=file,
            dtype=e["dtype"],
            shape=tuple(e["shape"]),
            bytes=e["data_offsets"][1] - e["data_offsets"][0],
            offset=8 + length + e["data_offsets"][0],
        )
        for n, e in entries.items()
    }


def _check_entry(file: Path, name: str, entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    item = ITEM_BYTES.get(entry["dtype"])
    if item is None:
        raise EnvironmentNotAble(f"{file}: {name} has the unknown dtype {entry['dtype']}")
    if begin < 0 or end - begin != math.prod(entry["shape"]) * item:
        raise EnvironmentNotAble(
            f"{file}: {name} of shape {tuple(entry['shape'])} and dtype {entry['dtype']} do not match its "
            f"{end - begin} bytes: the file is damaged"
        )
    return end
