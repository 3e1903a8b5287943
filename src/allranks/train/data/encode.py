"""Examples to token ids, with a mark on every token that carries loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from allranks.errors import DataError
from allranks.train.data.templates import Example

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
BATCH = 1000


@dataclass(frozen=True)
class EncodedRow:
    """One row: token ids, and 1 where the token is a target of the loss. ``label`` is the class, -1 for text."""

    ids: Ids
    mask: Mask
    label: int = -1
    cut_tokens: int = 0


def to_turns(example: Example, tokenizer: Any, number: int) -> Example:
    """Chat messages as text turns, by the tokenizer's own template; assistant turns are trained.

    A template may render a message differently once others follow; then only the last assistant turn is trained.
    """
    if not example.messages:
        return example
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"row {number}: chat data, but the tokenizer has no chat template; use data.template: a .jinja file"
        )
    messages = list(example.messages)

    def render(upto: int, generation: bool) -> str:
        return tokenizer.apply_chat_template(messages[:upto], tokenize=False, add_generation_prompt=generation)

    whole = render(len(messages), False)
    assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not assistants:
        raise DataError(f"row {number}: chat without an assistant message; there is nothing to learn")
    for wanted in (assistants, assistants[-1:]):
        turns, at = [], 0
        for i in wanted:
            before, after = render(i, True), render(i + 1, False)
            if not (whole.startswith(before) and whole.startswith(after) and at <= len(before) <= len(after)):
                break
            turns += [(whole[at : len(before)], False), (whole[len(before) : len(after)], True)]
            at = len(after)
        else:
            return Example(turns=(*turns, (whole[at:], False)) if whole[at:] else tuple(turns), answer=example.answer)
    raise DataError(
        f"row {number}: the tokenizer's chat template gives no text whose assistant turns can be told apart; use a .jinja template"
    )


def encode_text(
    examples: Sequence[Example], tokenizer: Any, *, max_length: int | None, mask_prompt: bool
) -> list[EncodedRow]:
    """Token ids of text rows. The whole text is encoded at once, so that words at a turn's edge split as they do at
    inference; a token is trained if any of it lies in a trained turn. The end-of-text token is appended and trained.

    Args:
        max_length: rows are cut to this many tokens; None keeps them whole.
    """
    bos, eos = _edges(tokenizer)
    rows = []
    for start in range(0, len(examples), BATCH):
        part = [to_turns(e, tokenizer, start + i) for i, e in enumerate(examples[start : start + BATCH])]
        encoded = tokenizer(
            ["".join(text for text, _ in e.turns) for e in part],
            add_special_tokens=False,
            return_offsets_mapping=tokenizer.is_fast,
        )
        for i, example in enumerate(part):
            ids = list(encoded["input_ids"][i])
            marks = _marks(
                example, ids, encoded["offset_mapping"][i] if tokenizer.is_fast else None, tokenizer, mask_prompt
            )
            if bos is not None and (not ids or ids[0] != bos):
                ids, marks = [bos, *ids], [0, *marks]
            if not example.turns or example.turns[-1][1]:
                if ids[-1:] != [eos]:
                    ids, marks = [*ids, eos], [*marks, 1]
                else:
                    marks[-1] = 1
            rows.append(_cut(ids, marks, max_length))
    return rows


def _edges(tokenizer: Any) -> tuple[int | None, int]:
    """The beginning token, if this tokenizer puts one, and the end token."""
    probe = tokenizer("x")["input_ids"]
    bos = (
        tokenizer.bos_token_id if tokenizer.bos_token_id is not None and probe[:1] == [tokenizer.bos_token_id] else None
    )
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if eos is None:
        raise DataError("the tokenizer has no end-of-text token; rows could not be told apart")
    return bos, eos


def _marks(example: Example, ids: list[int], offsets: Any, tokenizer: Any, mask_prompt: bool) -> list[int]:
    if not mask_prompt:
        return [1] * len(ids)
    if offsets is None:  # a slow tokenizer gives no offsets: count the tokens of each turn
        marks: list[int] = []
        for text, trained in example.turns:
            marks += [int(trained)] * len(tokenizer(text, add_special_tokens=False)["input_ids"])
        return (marks + [marks[-1] if marks else 1] * len(ids))[: len(ids)]
    spans, at = [], 0
    for text, trained in example.turns:
        if trained:
            spans.append((at, at + len(text)))
        at += len(text)
    return [int(any(start < hi and end > lo for lo, hi in spans)) for start, end in offsets]


def _cut(ids: list[int], marks: list[int], max_length: int | None) -> EncodedRow:
    cut = max(0, len(ids) - max_length) if max_length is not None else 0
    keep = len(ids) - cut
    return EncodedRow(ids=np.asarray(ids[:keep], np.int32), mask=np.asarray(marks[:keep], np.uint8), cut_tokens=cut)


def encode_labelled(
    examples: Sequence[Example], tokenizer: Any, labels: dict[str, int], *, max_length: int
) -> list[EncodedRow]:
    """Token ids and class of labelled rows; the model's own special tokens are added, and kept when a row is cut."""
    rows = []
    for start in range(0, len(examples), BATCH):
        part = examples[start : start + BATCH]
        texts = [e.prompt for e in part]
        full = tokenizer(texts, add_special_tokens=True, truncation=False, verbose=False)["input_ids"]
        cut = tokenizer(texts, add_special_tokens=True, truncation=True, max_length=max_length)["input_ids"]
        for i, example in enumerate(part):
            assert example.label is not None
            if example.label not in labels:
                raise DataError(
                    f"row {start + i}: label {example.label!r} is not among those of the training rows: {', '.join(labels)}"
                )
            ids = np.asarray(cut[i], np.int32)
            rows.append(
                EncodedRow(
                    ids=ids,
                    mask=np.zeros(len(ids), np.uint8),
                    label=labels[example.label],
                    cut_tokens=len(full[i]) - len(ids),
                )
            )
    return rows


def label_map(examples: Sequence[Example]) -> dict[str, int]:
    """Class numbers of the label values, numbers in numeric order, texts in alphabetic order."""
    values = {e.label for e in examples if e.label is not None}
    try:
        ordered = sorted(values, key=float)
    except ValueError:
        ordered = sorted(values)
    if len(ordered) < 2:
        raise DataError(
            f"classification needs at least two label values, the data has {len(ordered)}: {', '.join(ordered)}"
        )
    return {value: number for number, value in enumerate(ordered)}
