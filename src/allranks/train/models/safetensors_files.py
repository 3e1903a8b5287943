"""Write safetensors files from tensors in host memory without copying them, and read them again once to verify them.

``safetensors.torch.save_file`` first copies every tensor into a Python object; here the kernel copies it from where it
is. What is written is hashed on the way (128-bit XXH3, as fast as memory is read), so that the file can be compared
later, when training has changed the memory. The manifest's SHA-256 is computed from the reading that is compared. What
is read usually comes from the page cache; disk damage is found when the SHA-256 is compared before a resume.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash

from allranks.errors import CheckpointError
from allranks.train.models.weight_sources import NAME_OF

ALIGNMENT = 8  # of the data, as safetensors writes it
# for more, Linux caches the file in pages of up to 2 MiB, which a virtual machine may first have to get from its host
CALL_BYTES = 256 << 10
WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "module.", "_checkpoint_wrapped_module")
PIECE_BYTES = 1 << 20  # is hashed twice while it is in the processor's cache


def content_hash(tensor: torch.Tensor) -> bytes:
    """Return a 128-bit hash of the bytes of a CPU tensor. It finds errors and damage, not forgery."""
    return xxhash.xxh3_128_digest(_bytes_view(tensor))


def _bytes_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, in C order; only a tensor that is not contiguous is copied."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Write tensors of the CPU to a new file, in the order of ``safetensors``: wide dtypes first, then by name.

    Returns:
        The 128-bit hash of the file, for `check_file`.

    Raises:
        CheckpointError: a name has the prefix of a wrapper.
        OSError: the disk is full, for instance. It names the file.
    """
    if wrapped := [name for name in tensors if any(wrapper in name for wrapper in WRAPPERS)]:
        raise CheckpointError(f"{path}: {wrapped[0]} has a wrapper's prefix; other programs could not load it")
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        header[name] = {"dtype": NAME_OF[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    digest = xxhash.xxh3_128()
    try:
        with path.open("wb", buffering=0) as file:
            start = memoryview(len(text).to_bytes(8, "little") + text)
            for view in chain([start], (_bytes_view(tensors[name]) for name in names)):
                for begin in range(0, len(view), CALL_BYTES):
                    part = view[begin : begin + CALL_BYTES]
                    digest.update(part)
                    while part:  # the kernel may write less, for instance the last bytes that fit on the disk
                        part = part[file.write(part) :]
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return digest.digest()


def check_file(path: Path, written: bytes) -> dict[str, Any]:
    """Read a file once and compare it with what was written.

    Args:
        written: what `write_safetensors` returned.

    Returns:
        Its size (``bytes``) and its SHA-256 as hex (``sha256``).

    Raises:
        CheckpointError: the file is incomplete, or differs from what was in memory when it was written.
    """
    fast_digest, whole, size = xxhash.xxh3_128(), hashlib.sha256(), 0
    buffer = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined] - a raw file
            fast_digest.update(buffer[:count])
            whole.update(buffer[:count])
            size += count
    if fast_digest.digest() != written:
        raise CheckpointError(f"{path}: differs from memory after it was read again")
    return {"bytes": size, "sha256": whole.hexdigest()}
