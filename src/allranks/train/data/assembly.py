"""Turn the rows of a spec into token sequences, and count what was used, cut, left out or repeated. Nothing is written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from allranks.errors import DataError
from allranks.spec.data_rows import (
    ReadExamples,
    SourceRows,
    classes_of_head,
    label_map,
    label_warnings,
    read_examples,
    shuffle,
)
from allranks.spec.data_sources import source_of
from allranks.spec.data_templates import Example
from allranks.spec.models import DEFAULT_VOCAB
from allranks.spec.records import DataSpec, RunSpec
from allranks.train.data.sampler import pack_isolated
from allranks.train.data.tokenization import (
    DEFAULT_CHAT_TEMPLATE,
    EncodedRow,
    encode_labelled,
    encode_text,
    to_turns,
    train_tokenizer,
)


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
    """Encoded rows and their packing. ``encoded`` are all training rows, in the order of ``read.train``; ``kept`` those with a target."""

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
    labels, label_notes = _labels(spec, read.train, head) if classifier else ({}, [])
    encoded = _encode(data, read.train, tokenizer, labels if classifier else None)
    kept = encoded if classifier else [row for row in encoded if row.mask[1:].any()]
    if not kept:
        raise DataError(
            f"data.source {source_of(data)}: no row has a trained token within data.max_length {data.max_length}; increase it"
        )
    lost = len(encoded) - len(kept)
    packs = _pack(data, kept, classifier=classifier)
    held = _encode(data, read.held_out, tokenizer, labels if classifier else None, evaluating=True)
    if held and not classifier and not any(row.mask[1:].any() for row in held):
        raise DataError(
            f"{'eval.source' if spec.eval.source else 'data.source'} {spec.eval.source or source_of(data)}: no held-out "
            f"row has a scored token within data.max_length {data.max_length}: every prompt is longer; increase it, hold out "
            "more rows, or set data.eval_fraction: 0"
        )
    real = sum(len(r.ids) for r in kept)
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
        rows_duplicated=_count_common(read.train, read.held_out),
        rows_identical=len(identical_rows(read.train)),
    )
    warnings = [*read.warnings, *label_notes, *data_warnings(facts, data.max_length)]
    questions = _questions(read.held_out, None if classifier else tokenizer)
    return AssembledData(
        read, tokenizer, encoded, kept, packs, held, questions, msgspec.structs.replace(facts, warnings=warnings)
    )


def _labels(spec: RunSpec, train: Sequence[Example], head: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Return the class number of each label, and warnings."""
    assert spec.model is not None
    own = label_map(train)
    labels, notes = classes_of_head(own, head, spec.model.name)
    return labels, [*label_warnings(own), *notes]


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


def _questions(held_out: list[Example], tokenizer: Any | None) -> list[dict[str, str]]:
    """Return held-out prompts with their reference answers."""
    found = []
    for example in held_out:
        turned = to_turns(example, tokenizer) if tokenizer is not None else example
        if turned.answer is not None and turned.prompt:
            found.append({"prompt": turned.prompt, "answer": turned.answer})
    return found


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


def identical_rows(train: Sequence[Example]) -> list[int]:
    """Return the positions of rows that are identical to an earlier row; a row that a mixture repeats is one row."""
    seen: dict[bytes, tuple[str, int]] = {}
    found = []
    for position, example in enumerate(train):
        row = (example.source, example.row)
        if seen.setdefault(_text_of(example), row) != row:
            found.append(position)
    return found


def _text_of(example: Example) -> bytes:
    return hashlib.blake2b(
        repr((example.turns, example.messages, example.label)).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()
