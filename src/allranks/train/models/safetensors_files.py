"""Write safetensors files from tensors in host memory without copying them.

``safetensors.torch.save_file`` first copies every tensor into a Python object; here the kernel copies it from where it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from allranks.train.models.weight_sources import NAME_OF

ALIGNMENT = 8  # of the data, as safetensors writes it
BUFFER_BYTES = 1 << 20


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, in C order; only a tensor that is not contiguous is copied."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors of the CPU to a new file, in the order of ``safetensors``: wide dtypes first, then by name.

    Raises:
        OSError: the disk is full, for instance.
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
    with path.open("wb", buffering=BUFFER_BYTES) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(bytes_view(tensors[name]))
