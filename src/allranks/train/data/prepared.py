"""Prepare data: build it once in the cache, then memory-map it on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
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
from allranks.spec.data_checks import classes_of_head, label_warnings
from allranks.spec.data_rows import eval_data, label_map, read_examples, shuffle
from allranks.spec.data_templates import MAX_TEMPLATE_BYTES, Example, Template
from allranks.spec.models import DEFAULT_VOCAB
from allranks.spec.records import DataSpec, RunSpec
from allranks.train.data.sampler import pack_isolated
from allranks.train.data.tokenization import (
    EncodedRow,
    encode_labelled,
    encode_text,
    head_classes,
    load_tokenizer,
    to_turns,
    tokenizer_hash,
    train_tokenizer,
)
from allranks.utils.caches import private_root
from allranks.utils.inputs import read_regular

FORMAT = 5  # increase it when the format changes, so that old entries are not read


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


class DataFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows were used, cut, or left out."""

    source: str
    template: str
    rows: int
    rows_train: int
    rows_eval: int
    rows_truncated: int
    rows_without_target: int
    tokens_cut: int
    sequences: int
    tokens_real: int
    tokens_trained: int
    fill: float
    vocab_size: int
    labels: dict[str, int]
    rows_empty: int = 0
    """Rows left out because they have no trained token: no response, or no text."""
    rows_eval_truncated: int = 0
    rows_eval_without_target: int = 0
    rows_duplicated: int = 0
    """Held-out rows that are identical to a training row."""
    warnings: list[str] = []
    train_hash: str = ""
    """SHA-256 of the training sequences."""


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
    vocab = int(spec.model.config.get("vocab_size", DEFAULT_VOCAB))
    head = head_classes(spec.model.name, spec.model.revision) if classifier and named is not None else []
    identity = {
        "format": FORMAT,
        "data": _identity(spec.data),
        "source": data_sources.source_fingerprint(spec.data),
        "eval": [spec.eval.subset, spec.eval.source and data_sources.source_fingerprint(eval_data(spec))],
        "tokenizer": tokenizer_hash(named) if named is not None else f"trained {vocab}",
        "classifier": classifier,
        "head": head,
        "template": _template_hash(spec.data.template),
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        Builder(spec, named, vocab, classifier, head).build(folder)

    own = private_root(cache_root) / "data"
    folder, how = shared_cache.get_or_build(cache_root / "allranks" / "data", key, build, log, private=own)
    return _load(folder, named, how)


def _identity(data: DataSpec) -> dict[str, Any]:
    raw = msgspec.to_builtins(data)
    return {k: v for k, v in raw.items() if k != "source"} | {"kind": Path(data.source).suffix}


def _template_hash(name: str) -> str:
    path = Path(name).expanduser()
    return hashlib.sha256(read_regular(path, MAX_TEMPLATE_BYTES)).hexdigest() if path.is_file() else name


class Builder:
    """Turn rows into the files of a cache entry."""

    def __init__(self, spec: RunSpec, tokenizer: Any, vocab: int, classifier: bool, head: Sequence[str] = ()) -> None:
        assert spec.data is not None
        self._spec, self._data = spec, spec.data
        self._tokenizer, self._vocab, self._classifier, self._head = tokenizer, vocab, classifier, head

    def build(self, folder: Path) -> None:
        read = read_examples(self._spec, classifier=self._classifier)
        train, held_out, template = read.train, read.held_out, read.template
        if self._tokenizer is None:
            texts = ["".join(text for text, _ in e.turns) or " ".join(m["content"] for m in e.messages) for e in train]
            self._tokenizer = train_tokenizer(texts, self._vocab, classifier=self._classifier)
            self._tokenizer.save_pretrained(folder / "tokenizer")
        labels, label_notes = self._labels(train)
        encoded = self._encode(train, labels)
        kept = encoded if self._classifier else [row for row in encoded if row.mask[1:].any()]
        if not kept:
            raise DataError(
                f"data.source {self._data.source}: no row has a trained token within data.max_length {self._data.max_length}; increase it"
            )
        packs = self._pack(kept)
        train_hash = _save(folder, "train", kept, packs)
        if held_out:
            held = self._encode(held_out, labels, evaluating=True)
            if not self._classifier and not any(row.mask[1:].any() for row in held):
                raise DataError(
                    f"{'eval.source' if self._spec.eval.source else 'data.source'} {self._spec.eval.source or self._data.source}: no held-out "
                    f"row has a scored token within data.max_length {self._data.max_length}: every prompt is longer; increase it, hold out "
                    "more rows, or set data.eval_fraction: 0"
                )
            _save(folder, "eval", held, [[i] for i in range(len(held))])
        else:
            held = []
        write_json(folder / "questions.json", self._questions(held_out))
        facts = self._facts(read.rows, template, encoded, kept, packs, len(held_out), labels)
        facts = msgspec.structs.replace(
            facts,
            rows_empty=len(read.empty.numbers),
            rows_eval_truncated=sum(r.cut_tokens > 0 for r in held),
            rows_eval_without_target=0 if self._classifier else sum(not r.mask[1:].any() for r in held),
            rows_duplicated=_count_common(train, held_out),
            train_hash=train_hash,
        )
        warnings = [*read.empty.warnings(), *label_notes, *data_warnings(facts, self._data.max_length)]
        write_json(folder / "facts.json", msgspec.to_builtins(msgspec.structs.replace(facts, warnings=warnings)))

    def _labels(self, train: Sequence[Example]) -> tuple[dict[str, int], list[str]]:
        """Return the class number of each label, and warnings. Without a classifier there are none."""
        if not self._classifier:
            return {}, []
        assert self._spec.model is not None
        own = label_map(train)
        labels, notes = classes_of_head(own, self._head, self._spec.model.name)
        return labels, [*label_warnings(own), *notes]

    def _encode(self, examples: list[Example], labels: dict[str, int], *, evaluating: bool = False) -> list[EncodedRow]:
        length = self._data.max_length
        if self._classifier:
            return encode_labelled(examples, self._tokenizer, labels, max_length=length)
        keep_whole = self._data.packing == "wrapped" and not evaluating
        return encode_text(
            examples, self._tokenizer, max_length=None if keep_whole else length, mask_prompt=self._data.mask_prompt
        )

    def _pack(self, rows: list[EncodedRow]) -> list[list[int]]:
        if self._classifier or self._data.packing == "none":
            return [[i] for i in range(len(rows))]
        if self._data.packing == "isolated":
            return pack_isolated([len(r.ids) for r in rows], self._data.max_length, self._data.seed)
        joined = shuffle(len(rows), self._data.seed, 2)
        ids = np.concatenate([rows[i].ids for i in joined])
        mask = np.concatenate([rows[i].mask for i in joined])
        size = self._data.max_length
        rows[:] = [EncodedRow(ids=ids[at : at + size], mask=mask[at : at + size]) for at in range(0, len(ids), size)]
        if len(rows) > 1 and not rows[-1].mask[1:].any():
            rows.pop()
        return [[i] for i in range(len(rows))]

    def _questions(self, held_out: list[Example]) -> list[dict[str, str]]:
        """Return held-out prompts with their reference answers."""
        found = []
        for example in held_out:
            turned = example if self._classifier else to_turns(example, self._tokenizer)
            if turned.answer is not None and turned.prompt:
                found.append({"prompt": turned.prompt, "answer": turned.answer})
        return found

    def _facts(
        self,
        total: int,
        template: Template,
        encoded: list[EncodedRow],
        kept: list[EncodedRow],
        packs: list[list[int]],
        held: int,
        labels: dict[str, int],
    ) -> DataFacts:
        real = sum(len(r.ids) for r in kept)
        trained = len(kept) if self._classifier else sum(int(r.mask[1:].sum()) for r in kept)
        return DataFacts(
            source=self._data.source,
            template=template.kind,
            rows=total,
            rows_train=len(encoded),
            rows_eval=held,
            rows_truncated=sum(r.cut_tokens > 0 for r in encoded),
            rows_without_target=0 if self._classifier else sum(not r.mask[1:].any() for r in encoded),
            tokens_cut=sum(r.cut_tokens for r in encoded),
            sequences=len(packs),
            tokens_real=real,
            tokens_trained=trained,
            fill=round(real / (len(packs) * self._data.max_length), 4),
            vocab_size=len(self._tokenizer),
            labels=labels,
        )


WARN_SHARE = 0.03


def data_warnings(facts: DataFacts, max_length: int) -> list[str]:
    """Return warnings on the data: many rows cut or left out, rows that are both trained and held out."""
    train, held = max(facts.rows_train, 1), max(facts.rows_eval, 1)
    shares = (
        ((facts.rows_truncated - facts.rows_without_target) / train, "of the training rows are longer than data.max_length {} and are cut"),
        (facts.rows_without_target / train, "of the training rows are left out: their prompt alone is longer than data.max_length {}"),
        ((facts.rows_eval_truncated - facts.rows_eval_without_target) / held, "of the held-out rows are longer than data.max_length {} and are cut"),
        (facts.rows_eval_without_target / held, "of the held-out rows are not scored: their prompt alone is longer than data.max_length {}"),
    )  # fmt: skip
    found = [f"{share:.0%} {words.format(max_length)}" for share, words in shares if share >= WARN_SHARE]
    if facts.rows_duplicated:
        found.append(
            f"{facts.rows_duplicated} of {facts.rows_eval} held-out rows are also training rows: the held-out loss is too low; remove duplicates"
        )
    return found


def _count_common(train: Sequence[Example], held_out: Sequence[Example]) -> int:
    """Return how many held-out rows are training rows, too."""
    trained = {_text_of(example) for example in train} if held_out else set()
    return sum(_text_of(example) in trained for example in held_out)


def _text_of(example: Example) -> bytes:
    return hashlib.blake2b(
        repr((example.turns, example.messages, example.label)).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()


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
