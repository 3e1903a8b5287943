"""What the safetensors files of a folder hold. Only their headers are read, and everything in them is checked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import EnvironmentNotAble, SpecError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PATTERNS = (SINGLE, INDEX, "model-*.safetensors")  # fetched of a hub model: one set of weights, no others beside it
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")
MAX_HEADER = 100_000_000  # the format's own limit, bytes
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in a file. ``dtype`` is the format's word (F32, BF16, ...)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def stored_tensors(folder: Path, name: str) -> dict[str, Stored]:
    """Every tensor of a model's folder, by its stored name.

    Args:
        name: the model's name in the spec, for messages.

    Raises:
        SpecError: the weights are pickles.
        EnvironmentNotAble: a file is missing, cut off or damaged; the message names it, and a tensor that is lost.
    """
    if (folder / INDEX).is_file():
        return _of_index(folder / INDEX)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    other = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if other:
        raise SpecError(
            f"model.name {name}: {folder / other[0]} is a pickle or another form that can run code while it is read, and is not opened; "
            f"take a revision with {SINGLE}, or convert it where you trust it: AutoModel.from_pretrained(...).save_pretrained(folder)"
        )
    raise EnvironmentNotAble(f"model.name {name}: {folder} holds neither {SINGLE} nor {INDEX}: fetch the weights again")


def _of_index(index: Path) -> dict[str, Stored]:
    try:
        listed = json.loads(index.read_bytes())["weight_map"]
        files: dict[str, list[str]] = {}
        for tensor, file in listed.items():
            files.setdefault(file, []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise EnvironmentNotAble(f"{index}: is no index of safetensors files; fetch it again") from None
    found: dict[str, Stored] = {}
    for file, tensors in sorted(files.items()):
        if Path(file).name != file:
            raise EnvironmentNotAble(f"{index}: lists {file!r}, which is not a file beside it")
        path = index.with_name(file)
        if not path.is_file():
            raise EnvironmentNotAble(
                f"{path}: is missing; it holds {_first(tensors)} by {index.name}. Fetch the model again"
            )
        inside = read_header(path)
        lost = [t for t in tensors if t not in inside]
        if lost:
            raise EnvironmentNotAble(f"{path}: does not hold {_first(lost)}, which {index.name} puts there")
        found |= {t: inside[t] for t in tensors}
    return found


def _first(names: list[str]) -> str:
    return min(names) + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file.

    Raises:
        EnvironmentNotAble: it is cut off, or not what it says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise EnvironmentNotAble(f"{file}: is a Git LFS pointer, not the weights: git lfs pull")
            if len(start) < 8 or length > MAX_HEADER or 8 + length > size:
                raise EnvironmentNotAble(
                    f"{file}: is cut off within its header, or no safetensors file; fetch it again"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise EnvironmentNotAble(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise EnvironmentNotAble(f"{file}: its header is damaged; fetch it again") from None
    try:
        entries = {n: e for n, e in header.items() if n != "__metadata__"}
        ends = {n: _check(file, n, e) for n, e in entries.items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        raise EnvironmentNotAble(f"{file}: its header is damaged; fetch it again") from None
    there = size - 8 - length
    cut = sorted((end, n) for n, end in ends.items() if end > there)
    if cut:
        raise EnvironmentNotAble(
            f"{file}: is cut off: {there} of {max(ends.values())} bytes of weights are there; the first tensor that is lost is "
            f"{cut[0][1]}. Fetch it again"
        )
    return {
        n: Stored(
            file=file, dtype=e["dtype"], shape=tuple(e["shape"]), bytes=e["data_offsets"][1] - e["data_offsets"][0]
        )
        for n, e in entries.items()
    }


def _check(file: Path, name: str, entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    item = ITEM_BYTES.get(entry["dtype"])
    if item is None:
        raise EnvironmentNotAble(f"{file}: {name} has dtype {entry['dtype']}, which is not known here")
    if begin < 0 or end - begin != math.prod(entry["shape"]) * item:
        raise EnvironmentNotAble(
            f"{file}: {name} of shape {tuple(entry['shape'])} and dtype {entry['dtype']} cannot fill {end - begin} bytes: the file is damaged"
        )
    return end
