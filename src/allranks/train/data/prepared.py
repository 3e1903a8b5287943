"""Prepare data: turn rows into token sequences and build them once in the cache, then memory-map them on every rank.

Rows are tokenized and packed, and it is counted what was used, cut, left out or repeated. No torch.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from allranks.errors import DataError
from allranks.rundir import shared_cache
from allranks.rundir.files import read_json, write_json
from allranks.spec import data_sources
from allranks.spec.data_rows import (
    ReadExamples,
    SourceRows,
    classes_of_head,
    eval_data,
    label_map,
    naming_file,
    read_examples,
    shuffle,
)
from allranks.spec.data_sources import parts_of, source_of
from allranks.spec.data_templates import MAX_TEMPLATE_BYTES, Example
from allranks.spec.models import DEFAULT_VOCAB
from allranks.spec.records import DataSpec, RunSpec
from allranks.train.data.chats import DEFAULT_CHAT_TEMPLATE, ChatWriter
from allranks.train.data.tokenization import (
    EncodedRow,
    encode_labelled,
    encode_text,
    head_classes,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from allranks.utils.filesystem import private_root
from allranks.utils.inputs import read_regular

FORMAT = 9  # increase it when the format changes, so that old entries are not read
WARN_SHARE = 0.03


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

    @cached_property
    def longest_row(self) -> int:
        """The tokens of the longest row."""
        return int(np.diff(self.offsets).max())


@dataclass(frozen=True)
class PreparedData:
    """Data for training and evaluation."""

    train: TokenSet
    held_out: TokenSet | None
    questions: list[dict[str, str]]
    facts: DataFacts
    tokenizer: Any
    origin: str
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
        "template": [
            hashlib.sha256(read_regular(file, MAX_TEMPLATE_BYTES)).hexdigest() if file.is_file() else part.template
            for part in parts
            for file in [Path(part.template).expanduser()]
        ],
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        _write(folder, assemble(spec, named, classifier=classifier, head=head), own_tokenizer=named is None)

    own = private_root(cache_root) / "data"
    folder, origin = shared_cache.get_or_build(cache_root / "allranks" / "data", key, build, log, private=own)
    return _load(folder, named, origin)


def _identity(data: DataSpec) -> dict[str, Any]:
    raw = msgspec.to_builtins(data)
    return {k: v for k, v in raw.items() if k not in ("source", "sources")} | {"kind": Path(source_of(data)).suffix}


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


def _load(folder: Path, named: Any, origin: str) -> PreparedData:
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
    train, questions = _map(folder, "train"), read_json(folder / "questions.json") or []
    return PreparedData(train, held_out, questions, facts=facts, tokenizer=tokenizer, origin=origin, folder=folder)


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
    """Return what is wrong with the arrays' dtypes, lengths or offsets, or None. Later code does not check them."""
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


class DataFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows were used, cut, or left out."""

    source: str
    template: str
    rows: int
    rows_train: int
    rows_eval: int
    rows_truncated: int = 0
    rows_without_target: int = 0
    tokens_cut: int = 0
    sequences: int
    tokens_real: int
    tokens_trained: int
    fill: float = 1.0
    vocab_size: int = 0
    labels: dict[str, int] = {}
    rows_empty: int = 0
    """Rows left out because they have no trained token: no response, or no text."""
    rows_eval_truncated: int = 0
    rows_eval_without_target: int = 0
    rows_duplicated: int = 0
    """Held-out rows that are identical to a training row."""
    warnings: list[str] = []
    train_hash: str = ""
    """SHA-256 of the training sequences."""
    template_reason: str = ""
    """Why the template was chosen."""
    chat_template: Literal["", "model", "default"] = ""
    """For chats: the one of the model's tokenizer, or the default of allranks."""
    rows_identical: int = 0
    """Training rows that are identical to an earlier one, not counting those that a mixture repeats."""
    sources: list[SourceRows] = []
    """Of a mixture, what each source gives."""


@dataclass(frozen=True)
class AssembledData:
    """Encoded, packed rows. ``encoded``: all training rows in ``read.train``'s order; ``kept``: those with targets."""

    read: ReadExamples
    tokenizer: Any
    encoded: list[EncodedRow]
    kept: list[EncodedRow]
    packs: list[list[int]]
    held: list[EncodedRow]
    questions: list[dict[str, str]]
    facts: DataFacts


def own_vocabulary(spec: RunSpec) -> int:
    """Return the vocabulary size of a model that is built from its config."""
    assert spec.model is not None
    return int(spec.model.config.get("vocab_size", DEFAULT_VOCAB))


def assemble(spec: RunSpec, tokenizer: Any, *, classifier: bool, head: Sequence[str] = ()) -> AssembledData:
    """Read, convert, tokenize and pack the rows of a spec.

    Args:
        tokenizer: None trains one on the rows.
        head: names of the classes of a classifier that is already trained.

    Raises:
        DataError: the data cannot be used with this spec.
    """
    data = spec.data
    assert data is not None
    read = read_examples(spec, classifier=classifier)
    if tokenizer is None:
        texts = ["".join(text for text, _ in e.turns) or " ".join(m["content"] for m in e.messages) for e in read.train]
        tokenizer = train_tokenizer(texts, own_vocabulary(spec), classifier=classifier)
    chats = any(e.messages for e in [*read.train, *read.held_out])
    chat_template: Literal["", "model", "default"] = ""
    if chats:
        chat_template = "model" if tokenizer.chat_template not in (None, DEFAULT_CHAT_TEMPLATE) else "default"
        if not tokenizer.chat_template:
            tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    labels: dict[str, int] = {}
    label_notes: list[str] = []
    if classifier and spec.model is not None:
        labels, label_notes = classes_of_head(label_map(read.train), head, spec.model.name)
    with naming_file(f"data.source {source_of(data)}"):
        encoded = _encode(data, read.train, tokenizer, labels if classifier else None)
    kept = encoded if classifier else [row for row in encoded if row.mask[1:].any()]
    if not kept:
        raise DataError(
            f"data.source {source_of(data)}: no row has a trained token within data.max_length {data.max_length}; "
            "increase it"
        )
    lost = len(encoded) - len(kept)
    packs = _pack(data, kept, classifier=classifier)
    held_out = f"eval.source {spec.eval.source}" if spec.eval.source else f"data.source {source_of(data)}"
    with naming_file(held_out):
        held = _encode(data, read.held_out, tokenizer, labels if classifier else None, evaluating=True)
    if held and not classifier and not any(row.mask[1:].any() for row in held):
        raise DataError(
            f"{held_out}: no held-out row has a scored token within data.max_length {data.max_length}: every prompt is "
            "longer; increase it, hold out more rows, or set data.eval_fraction: 0"
        )
    real = sum(len(r.ids) for r in kept)
    trained_texts = {_text_of(example) for example in read.train} if read.held_out else set()
    facts = DataFacts(
        source=source_of(data),
        sources=read.sources,
        template=read.template,
        template_reason=read.template_reason,
        chat_template=chat_template,
        rows=read.rows,
        rows_train=len(encoded),
        rows_eval=len(held),
        rows_truncated=sum(r.cut_tokens > 0 for r in encoded),
        rows_without_target=lost,
        tokens_cut=sum(r.cut_tokens for r in encoded),
        sequences=len(packs),
        tokens_real=real,
        tokens_trained=len(kept) if classifier else sum(int(r.mask[1:].sum()) for r in kept),
        fill=round(real / (len(packs) * data.max_length), 4),
        vocab_size=len(tokenizer),
        labels=labels,
        rows_empty=read.rows_empty,
        rows_eval_truncated=sum(r.cut_tokens > 0 for r in held),
        rows_eval_without_target=0 if classifier else sum(not r.mask[1:].any() for r in held),
        rows_duplicated=sum(_text_of(example) in trained_texts for example in read.held_out),
        rows_identical=len(identical_rows(read.train)),
    )
    warnings = [*read.warnings, *label_notes, *_split_chats(encoded), *data_warnings(facts, data.max_length)]
    questions = _questions(read.held_out, None if classifier else tokenizer)
    return AssembledData(
        read, tokenizer, encoded, kept, packs, held, questions, msgspec.structs.replace(facts, warnings=warnings)
    )


def _encode(
    data: DataSpec, examples: list[Example], tokenizer: Any, labels: dict[str, int] | None, *, evaluating: bool = False
) -> list[EncodedRow]:
    if labels is not None:
        return encode_labelled(examples, tokenizer, labels, max_length=data.max_length)
    keep_whole = data.packing == "wrapped" and not evaluating
    return encode_text(
        examples, tokenizer, max_length=None if keep_whole else data.max_length, mask_prompt=data.mask_prompt
    )


def _pack(data: DataSpec, rows: list[EncodedRow], *, classifier: bool) -> list[list[int]]:
    """Return the rows of each sequence; ``wrapped`` replaces the rows by equal parts of all of them, joined."""
    if classifier or data.packing == "none":
        return [[i] for i in range(len(rows))]
    if data.packing == "isolated":
        return pack_isolated([len(r.ids) for r in rows], data.max_length, data.seed)
    joined = shuffle(len(rows), data.seed, 2)
    ids = np.concatenate([rows[i].ids for i in joined])
    mask = np.concatenate([rows[i].mask for i in joined])
    size = data.max_length
    rows[:] = [EncodedRow(ids=ids[at : at + size], mask=mask[at : at + size]) for at in range(0, len(ids), size)]
    if len(rows) > 1 and not rows[-1].mask[1:].any():
        rows.pop()
    return [[i] for i in range(len(rows))]


def pack_isolated(lengths: Sequence[int], capacity: int, seed: int) -> list[list[int]]:
    """Pack by best-fit decreasing: take rows longest first, and put each into the fullest sequence with enough space.

    Rows of equal length are shuffled with `seed`, so that neighbours in the file do not stay together.
    Source of the algorithm: Johnson, "Fast algorithms for bin packing", 1974; it wastes at most about 22 %.
    """
    shuffled = shuffle(len(lengths), seed, 0)
    order = sorted(shuffled.tolist(), key=lambda row: -lengths[row])
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for row in order:
        need = lengths[row]
        at = bisect_left(free, (need, -1))
        if at == len(free):
            packs.append([row])
            left, pack = capacity - need, len(packs) - 1
        else:
            space, pack = free.pop(at)
            packs[pack].append(row)
            left = space - need
        if left > 0:
            insort(free, (left, pack))
    return packs


def _questions(held_out: list[Example], tokenizer: Any | None) -> list[dict[str, str]]:
    """Return held-out prompts with their reference answers; of a chat, the text before its last reply."""
    writer = ChatWriter(tokenizer) if tokenizer is not None else None
    questions = []
    for example in held_out:
        if example.answer is None:
            continue
        prompt = example.prompt
        if writer is not None and example.messages:
            prompt = writer.prompt(example.messages[:-1], example.tools, example.place)
        if prompt:
            questions.append({"prompt": prompt, "answer": example.answer})
    return questions


def _split_chats(encoded: list[EncodedRow]) -> list[str]:
    """Return a sentence if chats are several training rows."""
    rows = [count for count in Counter(row.example for row in encoded).values() if count > 1]
    if not rows:
        return []
    return [
        f"{len(rows)} chats are {sum(rows)} rows: the chat template writes earlier replies differently once messages "
        "follow, and each reply is trained after the text that the model then reads"
    ]


def data_warnings(facts: DataFacts, max_length: int) -> list[str]:
    """Return warnings on the data: many rows cut or left out, rows that are both trained and held out."""
    train, held = max(facts.rows_train, 1), max(facts.rows_eval, 1)
    cut = facts.rows_truncated - facts.rows_without_target
    held_cut = facts.rows_eval_truncated - facts.rows_eval_without_target
    longer, alone = f"longer than data.max_length {max_length}", "their prompt alone is"
    shares = (
        (cut / train, f"of the training rows are {longer} and are cut"),
        (facts.rows_without_target / train, f"of the training rows are left out: {alone} {longer}"),
        (held_cut / held, f"of the held-out rows are {longer} and are cut"),
        (facts.rows_eval_without_target / held, f"of the held-out rows are not scored: {alone} {longer}"),
    )
    warnings = [f"{share:.0%} {words}" for share, words in shares if share >= WARN_SHARE]
    if facts.rows_duplicated:
        warnings.append(
            f"{facts.rows_duplicated} of {facts.rows_eval} held-out rows are also training rows: the held-out loss is "
            "too low; remove duplicates"
        )
    return warnings


def identical_rows(train: Sequence[Example]) -> list[int]:
    """Return the positions of rows that are identical to an earlier row; a row that a mixture repeats is one row."""
    seen: dict[bytes, tuple[str, int]] = {}
    rows = [(example.source, example.row) for example in train]
    return [i for i, row in enumerate(rows) if seen.setdefault(_text_of(train[i]), row) != row]


def _text_of(example: Example) -> bytes:
    return hashlib.blake2b(
        repr((example.turns, example.messages, example.label)).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()
