"""Show what a run would train on: rows as the model reads them, which tokens carry loss, and what is cut or left out.

A process of its own, so that the launcher side does not import transformers:

    python -m allranks.train.inspection    reads one JSON request from stdin, writes one JSON answer to stdout
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import msgspec
import numpy as np

from allranks.errors import EXIT_ENVIRONMENT, AllranksError
from allranks.spec.data_templates import Example
from allranks.spec.loader import parse_spec
from allranks.spec.records import RunSpec
from allranks.train.data.prepared import AssembledData, DataFacts, assemble, identical_rows
from allranks.train.data.tokenization import EncodedRow, head_classes, load_tokenizer
from allranks.utils.machine import run_short_process

MAX_NUMBERS = 10  # row numbers of one kind


class Segment(msgspec.Struct, frozen=True):
    """A part of a row: neighbouring tokens that all carry loss, or all do not."""

    text: str
    trained: bool


class ShownRow(msgspec.Struct, frozen=True, kw_only=True):
    """One training row as the model reads it. ``cut_tokens`` are beyond ``data.max_length`` and not in ``segments``.

    A chat may be several training rows: this is ``part`` of ``parts``, from 1.
    """

    source: str
    row: int
    part: int
    parts: int
    tokens: int
    tokens_trained: int
    cut_tokens: int
    label: str | None
    segments: list[Segment]


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a training row, cut rows included as they are after the cut."""

    shortest: int
    median: int
    longest: int


class RowNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """The first rows of each kind, by their number in the file, from 0."""

    cut: list[int]
    dropped: list[int]
    identical: list[int]


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would train on."""

    columns: list[str]
    tokenizer: str
    facts: DataFacts
    row_tokens: TokenCounts
    numbers: RowNumbers
    shown: list[ShownRow]


def inspect(spec: RunSpec, *, classifier: bool | None, rows: int) -> Inspection:
    """Read, convert and tokenize the rows of a spec, each once, and show the first `rows` of them.

    Args:
        classifier: None: find out from the model's config.

    Raises:
        DataError, EnvironmentNotAble: the data cannot be used with this spec, or cannot be loaded.
    """
    model = spec.model
    assert model is not None
    if classifier is None:
        from allranks.train.models.build import is_classifier

        classifier = is_classifier(spec)
    named = None if model.name.startswith("tiny:") else load_tokenizer(model.name, model.revision)
    head = head_classes(model.name, model.revision) if classifier and named is not None else []
    built = assemble(spec, named, classifier=classifier, head=head)
    lengths = np.array([len(row.ids) for row in built.encoded])
    train = built.read.train

    def numbers(chosen: Iterator[int]) -> list[int]:
        return list(islice(dict.fromkeys(train[i].row for i in chosen), MAX_NUMBERS))

    by_example = ((position, list(parts)) for position, parts in groupby(built.encoded, key=lambda row: row.example))
    return Inspection(
        columns=built.read.columns,
        tokenizer="trained on these rows" if named is None else f"of {model.name}",
        facts=built.facts,
        row_tokens=TokenCounts(shortest=int(lengths.min()), median=int(np.median(lengths)), longest=int(lengths.max())),
        numbers=RowNumbers(
            cut=numbers(row.example for row in built.encoded if row.cut_tokens),
            dropped=numbers(row.example for row in built.encoded if not classifier and not row.mask[1:].any()),
            identical=numbers(iter(identical_rows(train))),
        ),
        shown=[
            _shown(built, train[position], row, part, len(parts))
            for position, parts in islice(by_example, rows)
            for part, row in enumerate(parts, 1)
        ],
    )


def _shown(built: AssembledData, example: Example, row: EncodedRow, part: int, parts: int) -> ShownRow:
    labelled = example.label is not None
    return ShownRow(
        source=example.source or built.facts.source,
        row=example.row,
        part=part,
        parts=parts,
        tokens=len(row.ids),
        tokens_trained=0 if labelled else int(row.mask[1:].sum()),
        cut_tokens=row.cut_tokens,
        label=example.label,
        segments=_segments(built.tokenizer, row.ids.tolist(), [int(m) for m in row.mask]),
    )


def _segments(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> list[Segment]:
    """Return the text of each run of equal mask, cut from longer decoded text: many decoders drop a leading blank."""
    segments: list[Segment] = []
    start = 0
    marks = [0, *mask[1:]]  # the first token has no predecessor, so it is never a target
    for end in range(1, len(ids) + 1):
        if end == len(ids) or marks[end] != marks[start]:
            before, upto = _decoded(tokenizer, ids[:start]), _decoded(tokenizer, ids[:end])
            text = upto[len(before) :] if upto.startswith(before) else _decoded(tokenizer, ids[start:end])
            segments.append(Segment(text, bool(marks[start])))
            start = end
    return segments


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""


def main() -> None:
    """Answer one request. Libraries print to standard error, so that only the answer is on standard output."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    try:
        inspection = inspect(parse_spec(request["spec"]), classifier=request["classifier"], rows=request["rows"])
        answer: Any = msgspec.to_builtins(inspection)
    except AllranksError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    except ImportError as error:
        answer = {"error": f"{error}; pip install 'allranks[train]'", "exit_code": EXIT_ENVIRONMENT}
    out.write(json.dumps(answer).encode())
    out.close()


if __name__ == "__main__":
    run_short_process(main)
