"""Writing the files that others read. Each is written by one rank, from what it holds and from parts on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from allranks.train import shards
from allranks.train.checkpoint.parts import MODEL, Parts, Print, print_of
from allranks.train.checkpoint.published import ADAPTER_FILE, INDEX_FILE, Published, bytes_of, converted
from allranks.train.shards import Shard


def write_files(
    folder: Path, on_the_way: Path, parts: Parts, published: Published, model: nn.Module, rank: int, world: int
) -> tuple[list[Print], dict[str, str]]:
    """Write the files that are this rank's.

    Args:
        on_the_way: where the ranks put parts of weights that none of them holds whole.

    Returns:
        Fingerprints of what is in another layout than in memory, and the file of each key.
    """
    prints, places = [], {}
    for i, (file, names) in enumerate(zip(published.file_names(), published.files, strict=True)):
        if i % world != rank:
            continue
        tensors = _whole(on_the_way, parts, published, names)
        if published.adapted:
            model.save_pretrained(  # type: ignore[operator] - "auto" would ask the hub whether the vocabulary was resized
                str(folder), state_dict=tensors, safe_serialization=True, save_embedding_layers=False
            )
            assert (folder / ADAPTER_FILE).exists()
            continue
        out = {k: t.contiguous() for k, t in converted(model, tensors).items()}
        save_file(out, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(out, file)
        prints += [print_of(k, 0, t) for k, t in out.items() if k not in published.keys]
    return prints, places


def _whole(on_the_way: Path, parts: Parts, published: Published, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    tensors = {}
    away = []
    for name in names:
        dtype, shape = published.whole[name]
        if name in parts.owned:
            tensors[name] = parts.owned[name].view(shape)
            continue
        tensors[name] = torch.empty(shape, dtype=dtype)
        away.append(Shard(MODEL + name, shape.numel(), 0, tensors[name].view(-1)))
    if away:
        shards.read(away, on_the_way)
    return tensors


def write_index(folder: Path, published: Published, places: dict[str, str]) -> None:
    """What transformers needs to find weights in several files."""
    if published.adapted or len(published.files) == 1:
        return
    total = sum(bytes_of(*w) for w in published.whole.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def write_configs(folder: Path, published: Published, model: Any, tokenizer: Any) -> None:
    """The model's configuration (PEFT writes the adapter's beside its weights), and the tokenizer."""
    if not published.adapted:
        # a folder of its own: beside a config transformers removes numbered weight files that it has not written itself
        own = folder / ".configs"
        model.save_pretrained(str(own), state_dict={})
        for path in own.iterdir():
            path.rename(folder / path.name)
        own.rmdir()
    tokenizer.save_pretrained(str(folder))
