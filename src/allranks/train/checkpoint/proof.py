"""What stands in the files is what was in memory: compared from fingerprints that a fresh process took."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allranks.errors import CheckpointError
from allranks.train.checkpoint.parts import Print
from allranks.train.checkpoint.published import Published
from allranks.train.dtypes import NAME_OF

READER = Path(__file__).with_name("reread.py")
WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "module.", "_checkpoint_wrapped_module")
Files = dict[str, dict[str, Any]]  # by file: bytes, sha256, tensors


def tensor_files(folder: Path) -> list[str]:
    """Every safetensors file of a checkpoint, by its name within it."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.safetensors"))


def read_again(folder: Path, files: Sequence[str], prints: Iterable[Print], timeout_s: float) -> Files:
    """What a process of its own finds in the files.

    Raises:
        CheckpointError: a file is not whole, or the reading took too long.
    """
    if not files:
        return {}
    ranges: dict[str, list[list[int]]] = {}
    for p in prints:
        ranges.setdefault(p.key, []).append([p.offset, p.numel])
    request = json.dumps({"folder": str(folder), "files": list(files), "ranges": ranges})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(READER)],
            input=request,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{folder}: reading it again took more than {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise CheckpointError(f"{folder}: could not be read again: {done.stderr.strip().splitlines()[-1:]}")
    answer = json.loads(done.stdout)
    if "problem" in answer:
        raise CheckpointError(f"{folder}/{answer['problem']}")
    return answer


def compare(found: Files, wanted: Iterable[Print], published: Published) -> None:
    """Every tensor there, none too many, each with the dtype, shape and bytes that memory had.

    Raises:
        CheckpointError: names the first file and tensor that is not so.
    """
    shapes = {published.keys[n]: list(published.whole[n][1]) for n in published.keys}
    dtypes = {published.keys[n]: NAME_OF[published.whole[n][0]] for n in published.keys}
    missing: dict[tuple[str, int, int], Print] = {(p.key, p.offset, p.numel): p for p in wanted if p.numel}
    extra: list[tuple[str, str]] = []
    for file, facts in found.items():
        for key, offset, numel, crc, dtype, shape in facts["tensors"]:
            _refuse_wrapper(file, key)
            if not file.startswith("state/") and key in shapes and (shape, dtype) != (shapes[key], dtypes[key]):
                raise CheckpointError(f"{file}: {key} is {dtype}{shape}, the model's is {dtypes[key]}{shapes[key]}")
            if not numel:
                continue
            print_ = missing.pop((key, offset, numel), None)
            if print_ is None:
                extra.append((file, key))
            elif (print_.crc, print_.dtype) != (crc, dtype):
                raise CheckpointError(
                    f"{file}: {key} (elements {offset} to {offset + numel}) differs from memory after it was read again"
                )
    if missing:
        first = min(missing)
        raise CheckpointError(
            f"{len(missing)} ranges of tensors were not saved, first {first[0]} from element {first[1]}"
        )
    if extra:
        raise CheckpointError(f"{extra[0][0]}: {extra[0][1]} was not to be saved, or is there twice")


def _refuse_wrapper(file: str, key: str) -> None:
    if any(w in key.removeprefix("model/") for w in WRAPPERS):
        raise CheckpointError(f"{file}: {key} has a wrapper's prefix; nothing else could load it")


def require_coverage(published: Published, prints: Iterable[Print]) -> None:
    """All of each published weight is held by some rank: else a part of it would be in no fingerprint.

    Raises:
        CheckpointError: names the weight.
    """
    covered: Mapping[str, int] = dict.fromkeys(published.keys.values(), 0)
    counts = dict(covered)
    for p in prints:
        if p.key in counts:
            counts[p.key] += p.numel
    for name, key in published.keys.items():
        if counts[key] != published.whole[name][1].numel():
            raise CheckpointError(
                f"{key}: the ranks together hold {counts[key]} of its {published.whole[name][1].numel()} elements"
            )
