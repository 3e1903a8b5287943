"""Verify what ranks wrote, and atomically rename the complete folder of a checkpoint.

Written safetensors files are read again once. Every piece that was read is compared with the 128-bit hash (XXH3) of the same bytes in
memory, and the SHA-256 for the manifest is computed from the same reading, so it is that of what was compared. The hashes of the memory
are taken while training waits, as fast as memory is read; the file can be read later, when training has changed the memory. The
comparison is made with the file's own header: a wrong name, shape, dtype or position is found like a wrong byte. What is read usually
comes from the page cache. Damage on the disk is found when the SHA-256 is compared before a resume.

This module also checks free space, updates the pointer to the newest checkpoint and removes old ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from allranks.errors import CheckpointError
from allranks.rundir.checkpoints import best_checkpoint_step, missing_room, with_spare
from allranks.rundir.files import make_folder, write_text_atomic
from allranks.rundir.paths import RunDir, restrict_permissions
from allranks.train.models.safetensors_files import bytes_view
from allranks.train.models.weight_sources import NAME_OF

PARTS = "DCP_SHARDING_INFO"  # header key: offset of a part within its tensor
PIECE_BYTES = 1 << 20  # is hashed twice while it is in the processor's cache
WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "module.", "_checkpoint_wrapped_module")

FileFacts = dict[str, dict[str, Any]]  # by file: bytes, sha256


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a file must hold, with the content that it has in memory now.

    Attributes:
        dtype: safetensors' name of the dtype.
        shape: its shape in the file.
        offset: where it begins in the flattened full tensor; None if it is not a part.
        numel, item_bytes: number of elements in memory, and bytes of one.
        hashes: the hash of each `PIECE_BYTES` of its content.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int | None
    numel: int
    item_bytes: int
    hashes: tuple[bytes, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, shape: tuple[int, ...], offset: int | None = None) -> ExpectedTensor:
        """Read a tensor on the CPU. Its memory may change afterwards."""
        content = bytes_view(tensor)
        hashes = tuple(content_hash(content[at : at + PIECE_BYTES]) for at in range(0, len(content), PIECE_BYTES))
        return cls(NAME_OF[tensor.dtype], shape, offset, tensor.numel(), tensor.element_size(), hashes)


def content_hash(content: memoryview) -> bytes:
    """Return a 128-bit hash of bytes. It is as fast as memory is read. It finds errors and damage, not forgery."""
    return xxhash.xxh3_128_digest(content)


@dataclass(frozen=True)
class _Range:
    """Where a tensor is in the file."""

    key: str
    low: int
    high: int
    wanted: ExpectedTensor


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
            _compare_bytes(file, ranges, whole)
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
    content = bytearray(count)
    if not _fill(file, memoryview(content)):
        raise ValueError("is truncated within its header")
    return bytes(content)


def _fill(file: BinaryIO, view: memoryview) -> bool:
    """Read until the view is full; return False at the end of the file."""
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined] - a raw file
        if not count:
            return False
        view = view[count:]
    return True


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
    dtype, shape = wanted.dtype, list(wanted.shape)
    if (found["dtype"], found["shape"]) != (dtype, shape):
        raise ValueError(f"{key} is {found['dtype']}{found['shape']}, the model's is {dtype}{shape}")
    if (None if part is None else part["saved_offsets"][0]) != wanted.offset:
        raise ValueError(f"{key} begins at {part} in the file, in memory at {wanted.offset}")
    low, high = found["data_offsets"]
    if math.prod(shape) != wanted.numel or high - low != wanted.numel * wanted.item_bytes:
        raise ValueError(f"{key} has {high - low} bytes for {dtype}{shape}, {wanted.numel} elements are in memory")
    return _Range(key, begin + low, begin + high, wanted)


def _compare_bytes(file: BinaryIO, ranges: list[_Range], whole: Any) -> None:
    """Read the ranges, which follow each other to the end of the file; update the hash `whole`."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    for r in ranges:
        for number, wanted in enumerate(r.wanted.hashes):
            low = number * PIECE_BYTES
            high = min(low + PIECE_BYTES, r.high - r.low)
            piece = buffer[: high - low]
            if not _fill(file, piece):
                raise ValueError(f"is truncated within {r.key}")
            whole.update(piece)
            if content_hash(piece) != wanted:
                item = r.wanted.item_bytes
                where = f"elements {low // item} to {-(-high // item)}"
                raise ValueError(f"{r.key} ({where}) differs from memory after it was read again")


class CompleteFiles:
    """Complete files of one checkpoint on this rank, which are read again and flushed to the disk in threads.

    Args:
        after_writing: begin only when all files are written, because training waits for that and the processor is needed for it.
    """

    def __init__(self, run: RunDir, aside: Path, threads: ThreadPoolExecutor, *, after_writing: bool) -> None:
        self._run, self._aside, self._threads, self._after_writing = run, aside, threads, after_writing
        self._waiting: list[Callable[[], None]] = []
        self._checks: dict[str, Future[dict[str, Any]]] = {}
        self._flushes: dict[str, Future[None]] = {}

    def check(self, name: str, expected: Mapping[str, ExpectedTensor]) -> None:
        """Compare a complete file of tensors with what was in memory, and flush it."""
        self.flush(name)
        self._begin(self._checks, name, partial(check_file, self._aside, name, expected))

    def flush(self, name: str) -> None:
        """Flush a complete file to the disk."""
        self._begin(self._flushes, name, partial(flush_file, self._run, self._aside / name))

    def flush_events(self, flush: Callable[[], None]) -> None:
        """Flush what led up to the checkpoint to the disk."""
        self._begin(self._flushes, "", flush)

    def _begin(self, futures: dict[str, Future[Any]], name: str, action: Callable[[], Any]) -> None:
        def begin() -> None:
            futures[name] = self._threads.submit(action)

        if self._after_writing:
            self._waiting.append(begin)
        else:
            begin()

    def all_written(self) -> None:
        """Begin what had to wait for the writing."""
        for begin in self._waiting:
            begin()
        self._waiting.clear()

    @property
    def write_back(self) -> bool:
        """Whether the kernel is to start to write a file to the disk before it is complete."""
        return not self._after_writing

    @property
    def flushed(self) -> list[str]:
        """Names of the files whose flush was started."""
        return [name for name in self._flushes if name]

    def compared(self) -> FileFacts:
        """Wait until all files are compared; return their facts.

        Raises:
            CheckpointError: a file is incomplete, or differs from memory.
            OSError: a file cannot be read.
        """
        return {name: check.result() for name, check in self._checks.items()}

    def wait_for_disk(self) -> None:
        """Wait until all files are on the disk.

        Raises:
            OSError: a file cannot be flushed.
        """
        for flush in self._flushes.values():
            flush.result()


def tensor_files(folder: Path) -> list[str]:
    """Return the safetensors files of a checkpoint, relative to it."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.safetensors"))


def require_files(folder: Path, facts: FileFacts) -> None:
    """Check that this rank finds exactly the files that all ranks wrote and checked, with their sizes.

    Raises:
        CheckpointError: names the first file that is missing, incomplete, or was not checked.
    """
    for name, fact in facts.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder / name}: another rank wrote it, but it is not here: the run folder must be shared by all nodes"
            ) from None
        if size != fact["bytes"]:
            raise CheckpointError(f"{folder / name}: has {size} bytes, {fact['bytes']} were written")
    extra = sorted(set(tensor_files(folder)) - facts.keys())
    if extra:
        raise CheckpointError(f"{folder / extra[0]}: is not a file of this checkpoint")


@dataclass(frozen=True)
class TensorDigest:
    """Digest of a range of a weight in memory: in that of the rank that holds it, or of the rank that writes the weight's file.

    Attributes:
        key: ``model/<name>``.
        offset, numel: first element of the range in the flattened tensor, and number of elements.
        hash: `content_hash` of the bytes.
        dtype: safetensors' name of the dtype.
    """

    key: str
    offset: int
    numel: int
    hash: bytes
    dtype: str


def compare_digests(wanted: Iterable[TensorDigest], found: Iterable[TensorDigest]) -> None:
    """Check that the weights that were put together from parts have the bytes of the ranks that hold the parts.

    Args:
        wanted: digests of the parts, by the ranks that hold them.
        found: digests of the same ranges, by the ranks that write the files.

    Raises:
        CheckpointError: names the first range that differs.
    """
    there = set(found)
    for digest in wanted:
        if digest not in there:
            end = digest.offset + digest.numel
            raise CheckpointError(
                f"{digest.key} (elements {digest.offset} to {end}) differs from the memory of the rank that holds it"
            )


def require_room(run: RunDir, need_bytes: int, *, keep_best: bool = False) -> dict[int, int]:
    """Return the steps whose checkpoints may be removed to free `need_bytes` bytes, oldest first, with their sizes.

    Args:
        keep_best: never remove the one with the lowest held-out loss.

    Raises:
        CheckpointError: removing all of them would not free enough.
    """
    make_folder(run.checkpoints)
    best = best_checkpoint_step(run) if keep_best else None
    sizes = {step: _bytes_below(run.checkpoint(step)) for step in run.checkpoint_steps()[:-1] if step != best}
    if problem := missing_room(run.checkpoints, need_bytes, sum(sizes.values())):
        raise CheckpointError(problem)
    return sizes


def make_room(run: RunDir, need_bytes: int, *, keep_best: bool = False) -> list[int]:
    """Remove the oldest checkpoints, never the newest, until `need_bytes` bytes are free.

    Args:
        keep_best: never remove the one with the lowest held-out loss either.

    Returns:
        The steps whose checkpoints were removed.

    Raises:
        CheckpointError: that does not free enough; nothing is removed then.
    """
    sizes = require_room(run, need_bytes, keep_best=keep_best)
    free = shutil.disk_usage(run.checkpoints).free
    removed = []
    for step, size in sizes.items():
        if free >= with_spare(need_bytes):
            break
        shutil.rmtree(run.checkpoint(step), ignore_errors=True)
        free += size
        removed.append(step)
    return removed


def _bytes_below(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def publish_checkpoint(
    run: RunDir,
    aside: Path,
    step: int,
    keep: int | None,
    *,
    keep_best: bool = False,
    flushed: Collection[str] = (),
) -> None:
    """Atomically rename the complete folder, update the pointers to the newest and the best one, and remove old ones.

    Args:
        keep: the number of newest checkpoints that stay; None: nothing is removed until `remove_old_checkpoints`.
        keep_best: keep the one with the lowest held-out loss, too, and let ``checkpoints/best`` name it.
        flushed: files, relative to the folder, that `flush_file` has flushed to the disk.
    """
    restrict_permissions(run, aside)
    sync_tree(aside, flushed)
    final = run.checkpoint(step)
    if final.exists():  # saved again in full at a stop, or the step was repeated
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    aside.rename(final)
    best = best_checkpoint_step(run) if keep_best else None
    point_latest_to(run, step)
    if best is not None:
        _point_to(run, run.best_checkpoint, best)
    sync(run.checkpoints)
    if keep is not None:
        remove_old_checkpoints(run, step, keep, keep_best=keep_best)


def remove_old_checkpoints(run: RunDir, step: int, keep: int, *, keep_best: bool = False) -> None:
    """Remove checkpoints beyond the newest `keep`, and those that were replaced; never that of `step`, which is published."""
    best = best_checkpoint_step(run) if keep_best else None
    shutil.rmtree(run.checkpoints / f".{run.checkpoint(step).name}.old", ignore_errors=True)
    for number in run.checkpoint_steps()[:-keep]:
        if number not in (step, best):
            shutil.rmtree(run.checkpoint(number), ignore_errors=True)


def point_latest_to(run: RunDir, step: int) -> None:
    """Write the name of the newest checkpoint to ``checkpoints/latest``."""
    _point_to(run, run.latest_checkpoint, step)


def _point_to(run: RunDir, pointer: Path, step: int) -> None:
    write_text_atomic(pointer, f"{run.checkpoint(step).name}\n")


def flush_file(run: RunDir, path: Path) -> None:
    """Restrict the permissions of a complete file, and flush it to the disk."""
    restrict_permissions(run, path)
    sync(path)


def sync_tree(folder: Path, flushed: Collection[str] = ()) -> None:
    """Flush a folder to the disk, with all files and folders below it, except the files in `flushed`."""
    for path in folder.rglob("*"):
        if str(path.relative_to(folder)) not in flushed:
            sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:  # a full disk is told here by file systems that allocate late
        error.filename = str(path)
        raise
    finally:
        os.close(fd)
