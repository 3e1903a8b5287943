"""Prepare data: build it once in the cache, then memory-map it on every rank."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from allranks.errors import DataError
from allranks.rundir import shared_cache
from allranks.rundir.files import read_json, write_json
from allranks.spec import data_sources
from allranks.spec.data_rows import eval_data
from allranks.spec.data_sources import parts_of, source_of
from allranks.spec.data_templates import MAX_TEMPLATE_BYTES
from allranks.spec.records import DataSpec, RunSpec
from allranks.train.data.assembly import AssembledData, DataFacts, assemble, own_vocabulary
from allranks.train.data.tokenization import (
    DEFAULT_CHAT_TEMPLATE,
    EncodedRow,
    head_classes,
    load_tokenizer,
    tokenizer_hash,
)
from allranks.utils.filesystem import private_root
from allranks.utils.inputs import read_regular

FORMAT = 6  # increase it when the format changes, so that old entries are not read


@dataclass(frozen=True)
class TokenSet:
    """Sequences on disk. Sequence ``i`` consists of the rows ``pack_rows[pack_offsets[i]:pack_offsets[i+1]]``.

    ``ids`` int32 and ``mask`` uint8 hold all rows one after another; row ``r`` is ``offsets[r]:offsets[r+1]``.
    ``real`` and ``trained`` are tokens per sequence (``trained``: targets of the loss; for classifiers, labels).
    """

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    pack_offsets: npt.NDArray[np.int64]
    pack_rows: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    real: npt.NDArray[np.int64]
    trained: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.pack_offsets) - 1

    def rows_of(self, sequence: int) -> npt.NDArray[np.int64]:
        """Return the rows of a sequence, in order."""
        return self.pack_rows[self.pack_offsets[sequence] : self.pack_offsets[sequence + 1]]


@dataclass(frozen=True)
class PreparedData:
    """Data for training and evaluation."""

    train: TokenSet
    held_out: TokenSet | None
    questions: list[dict[str, str]]
    facts: DataFacts
    tokenizer: Any
    how: str
    folder: Path


def prepare(spec: RunSpec, cache_root: Path, *, classifier: bool, log: shared_cache.Log) -> PreparedData:
    """Find, wait for, or build the prepared data of a spec. Any number of ranks may call it at the same time.

    Raises:
        DataError: the data cannot be used with this spec.
        EnvironmentNotAble: the cache cannot be written, or the hub cannot be reached.
    """
    assert spec.data is not None and spec.model is not None
    named = None if spec.model.name.startswith("tiny:") else load_tokenizer(spec.model.name, spec.model.revision)
    parts = parts_of(spec.data)
    head = head_classes(spec.model.name, spec.model.revision) if classifier and named is not None else []
    identity = {
        "format": FORMAT,
        "data": [_identity(part) for part in [spec.data, *parts]],
        "sources": [data_sources.source_fingerprint(part) for part in parts],
        "weights": [one.weight for one in spec.data.sources or []],
        "eval": [spec.eval.subset, spec.eval.source and data_sources.source_fingerprint(eval_data(spec))],
        "tokenizer": tokenizer_hash(named) if named is not None else f"trained {own_vocabulary(spec)}",
        "classifier": classifier,
        "head": head,
        "template": [_template_hash(part.template) for part in parts],
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        _write(folder, assemble(spec, named, classifier=classifier, head=head), own_tokenizer=named is None)

    own = private_root(cache_root) / "data"
    folder, how = shared_cache.get_or_build(cache_root / "allranks" / "data", key, build, log, private=own)
    return _load(folder, named, how)


def _identity(data: DataSpec) -> dict[str, Any]:
    raw = msgspec.to_builtins(data)
    return {k: v for k, v in raw.items() if k not in ("source", "sources")} | {"kind": Path(source_of(data)).suffix}


def _template_hash(name: str) -> str:
    path = Path(name).expanduser()
    return hashlib.sha256(read_regular(path, MAX_TEMPLATE_BYTES)).hexdigest() if path.is_file() else name


def _write(folder: Path, built: AssembledData, *, own_tokenizer: bool) -> None:
    if own_tokenizer:
        built.tokenizer.save_pretrained(folder / "tokenizer")
    train_hash = _save(folder, "train", built.kept, built.packs)
    if built.held:
        _save(folder, "eval", built.held, [[i] for i in range(len(built.held))])
    write_json(folder / "questions.json", built.questions)
    write_json(folder / "facts.json", msgspec.to_builtins(msgspec.structs.replace(built.facts, train_hash=train_hash)))


def _save(folder: Path, name: str, rows: list[EncodedRow], packs: list[list[int]]) -> str:
    """Write the sequences and return the SHA-256 of their content."""
    lengths = np.array([len(r.ids) for r in rows], np.int64)
    labels = np.array([r.label for r in rows], np.int64)
    # The first token of a row has no predecessor, so it is never a target.
    targets = np.array([1 if r.label >= 0 else int(r.mask[1:].sum()) for r in rows], np.int64)
    arrays = {
        "ids": np.concatenate([r.ids for r in rows]),
        "mask": np.concatenate([r.mask for r in rows]),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "pack_offsets": np.concatenate([[0], np.cumsum([len(p) for p in packs])]).astype(np.int64),
        "pack_rows": np.concatenate([np.asarray(p, np.int64) for p in packs]),
        "labels": labels,
        "real": np.array([lengths[p].sum() for p in packs], np.int64),
        "trained": np.array([targets[p].sum() for p in packs], np.int64),
    }
    digest = hashlib.sha256()
    for array, values in arrays.items():
        np.save(folder / f"{name}.{array}.npy", values, allow_pickle=False)
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def _load(folder: Path, named: Any, how: str) -> PreparedData:
    tokenizer = named if named is not None else load_tokenizer(str(folder / "tokenizer"), None)
    try:
        facts = msgspec.convert(read_json(folder / "facts.json"), DataFacts)
    except msgspec.ValidationError as error:
        raise DataError(
            f"cache entry {folder}: facts.json does not fit this version: {error}; remove the entry"
        ) from None
    if facts.chat_template == "default":
        tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE  # saved with the model, so that it is used at inference
    held_out = _map(folder, "eval") if (folder / "eval.ids.npy").exists() else None
    return PreparedData(
        train=_map(folder, "train"),
        held_out=held_out,
        questions=read_json(folder / "questions.json") or [],
        facts=facts,
        tokenizer=tokenizer,
        how=how,
        folder=folder,
    )


def _map(folder: Path, name: str) -> TokenSet:
    arrays = ("ids", "mask", "offsets", "pack_offsets", "pack_rows", "labels", "real", "trained")
    try:
        loaded = {a: np.load(folder / f"{name}.{a}.npy", mmap_mode="r", allow_pickle=False) for a in arrays}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cache entry {folder}: {name}: {error}; remove the entry") from None
    if (problem := _wrong_shape(loaded)) is not None:
        raise DataError(f"cache entry {folder}: {name}: {problem}; remove the entry")
    return TokenSet(**loaded)


def _wrong_shape(arrays: dict[str, Any]) -> str | None:
    """Return what is wrong with the arrays, or None: dtypes, lengths, offsets out of range. Later code does not check them."""
    types = {"ids": np.int32, "mask": np.uint8}
    for name, values in arrays.items():
        if values.dtype != types.get(name, np.int64) or values.ndim != 1:
            return f"{name} has the type {values.dtype} and {values.ndim} dimensions"
    rows, sequences = len(arrays["labels"]), len(arrays["real"])
    lengths = {"mask": len(arrays["ids"]), "offsets": rows + 1, "pack_offsets": sequences + 1, "trained": sequences}
    for name, length in lengths.items():
        if len(arrays[name]) != length:
            return f"{name} has {len(arrays[name])} values, not {length}"
    for name, end in (("offsets", len(arrays["ids"])), ("pack_offsets", len(arrays["pack_rows"]))):
        offsets = arrays[name]
        if offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
            return f"{name} does not go from 0 to {end}"
    chosen = arrays["pack_rows"]
    if len(chosen) and (chosen.min() < 0 or chosen.max() >= rows):
        return f"pack_rows has a row number beyond the {rows} rows"
    return None
