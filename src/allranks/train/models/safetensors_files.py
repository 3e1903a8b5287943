"""Write safetensors files from tensors in host memory without copying them.

``safetensors.torch.save_file`` first copies every tensor into a Python object; here the kernel copies it from where it is. The
kernel can be told to start writing to the disk while the rest of the file is still being written, so that a flush at the end is
short. This takes time of the writing thread, a quarter more than the copy alone.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from allranks.train.models.weight_sources import NAME_OF

ALIGNMENT = 8  # of the data, as safetensors writes it
MAX_BUFFERS = 256  # of one system call; Linux allows 1024
CALL_BYTES = (
    256 << 10
)  # for more, Linux caches the file in pages of up to 2 MiB, which a virtual machine may first have to get from its host
WRITE_BACK_BYTES = 8 << 20
SYNC_FILE_RANGE_WRITE = 2


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, in C order; only a tensor that is not contiguous is copied."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):  # not Linux
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _find_sync_file_range()


def start_write_back(fd: int, begin: int, end: int) -> None:
    """Ask the kernel to start writing a range of a file to the disk. It is no flush: errors are reported by the later fsync."""
    if _sync_file_range is not None:
        _sync_file_range(fd, begin, end - begin, SYNC_FILE_RANGE_WRITE)


def _write_all(fd: int, first: memoryview, views: Iterable[memoryview], *, write_back: bool) -> None:
    """Write buffers one after the other, many with one call."""
    started, at = 0, len(first)
    waiting, size = [first], len(first)
    for view in views:
        for begin in range(0, len(view), CALL_BYTES):
            part = view[begin : begin + CALL_BYTES]
            waiting.append(part)
            size += len(part)
            at += len(part)
            if size >= CALL_BYTES or len(waiting) == MAX_BUFFERS:
                _write_now(fd, waiting)
                waiting, size = [], 0
                if write_back and at - started >= WRITE_BACK_BYTES:
                    start_write_back(fd, started, at)
                    started = at
    _write_now(fd, waiting)


def _write_now(fd: int, buffers: list[memoryview]) -> None:
    while buffers:
        count = os.writev(fd, buffers)
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:  # the kernel may write less, for instance the last bytes that fit on the disk
            buffers[0] = buffers[0][count:]


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], *, write_back: bool = True
) -> None:
    """Write tensors of the CPU to a new file, in the order of ``safetensors``: wide dtypes first, then by name.

    Args:
        write_back: let the kernel start to write to the disk meanwhile, for a flush that is waited for.

    Raises:
        OSError: the disk is full, for instance. It names the file.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        header[name] = {"dtype": NAME_OF[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    try:
        with path.open("wb", buffering=0) as file:
            _write_all(
                file.fileno(),
                memoryview(len(text).to_bytes(8, "little") + text),
                (bytes_view(tensors[n]) for n in names),
                write_back=write_back,
            )
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
