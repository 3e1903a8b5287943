"""Recompute from the documentation (docs/data.md, docs/how-it-works.md) what each rank must train in each step.

A second implementation of rows, masks, sequences and their order. Of the package it uses only what reads files and renders
templates, and the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from allranks.planning.records import BatchPlan
from allranks.spec import data_sources
from allranks.spec.data_templates import Example, choose_template
from allranks.spec.models import is_mlp
from allranks.spec.records import RunSpec
from allranks.train.data.prepared import PreparedData, TokenSet
from allranks.train.data.tokenization import DEFAULT_CHAT_TEMPLATE

MAX_ROWS = 100_000
"""Larger sets are taken as prepared: encoding them a second time would take minutes."""


@dataclass(frozen=True)
class PlainRow:
    """A row as it is trained: its tokens, and whether each is a target. A classifier's row has a class, noise only a number."""

    ids: Sequence[int]
    wanted: Sequence[bool]
    label: int = -1

    @property
    def targets(self) -> int:
        """Return how many targets carry loss; the first token has no predecessor that could predict it."""
        return 1 if self.label >= 0 else sum(map(bool, self.wanted[1:]))

    @property
    def tokens(self) -> int:
        """Return the tokens that count in tokens/s; a row of noise counts as one."""
        return max(len(self.ids), 1)


PlainSequence = list[PlainRow]


def permutation(n: int, seed: int, stream: int) -> list[int]:
    """Return the order of `n` raw Philox words with the key (`seed`, `stream`)."""
    words = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(n)
    return np.lexsort((np.arange(n), words)).tolist()


class PlannedRows:
    """The sequences of each rank's micro-batches: one endless stream of permutations, cut into global batches.

    Position ``s*G + (m*W + r)*B + k`` of the stream is entry ``k`` of micro-batch ``m`` of rank ``r`` in step ``s``.
    """

    def __init__(self, n: int, seed: int, batch: BatchPlan, world_size: int) -> None:
        self._n, self._seed, self.batch, self.world_size = n, seed, batch, world_size
        self._epoch = lru_cache(maxsize=2)(lambda epoch: permutation(n, seed, 1 + epoch))

    def of_rank(self, step: int, rank: int) -> list[list[int]]:
        """Return the sequences of a rank's micro-batches in a step (from 0)."""
        size, out = self.batch.micro_batch_size, []
        for micro in range(self.batch.grad_accum):
            first = step * self.batch.global_batch_size + (micro * self.world_size + rank) * size
            out.append([self._at(first + k) for k in range(size)])
        return out

    def _at(self, position: int) -> int:
        epoch, within = divmod(position, self._n)
        return self._epoch(epoch)[within]


def plain_sequences(spec: RunSpec, data: PreparedData, *, classifier: bool) -> tuple[list[PlainSequence], str | None]:
    """Return all training sequences, and how the prepared ones differ from them, or None.

    Mixtures (``data.sources``) and sets of more than `MAX_ROWS` rows are not recomputed: their sequences are those that were prepared.
    """
    assert spec.model is not None and spec.data is not None
    if is_mlp(spec.model.name):
        rows = spec.data.subset or 65_536
        held = max(1, round(spec.data.eval_fraction * rows)) if spec.data.eval_fraction and rows > 1 else 0
        held = min(held, spec.eval.subset or held)
        return [[PlainRow([], [], label=i)] for i in range(rows - held)], None
    if data.facts.rows > MAX_ROWS or spec.data.sources is not None:
        return _as_prepared(data.train), None
    examples = _training_examples(spec, classifier=classifier)
    rows = _labelled(examples, spec, data) if classifier else _texts(examples, spec, data.tokenizer)
    sequences = [[row] for row in rows] if classifier else _sequences(rows, spec)
    return sequences, _difference(sequences, data.train, classifier=classifier)


def _training_examples(spec: RunSpec, *, classifier: bool) -> list[Example]:
    data = spec.data
    assert data is not None
    raw = data_sources.load_rows(data)
    template = choose_template(data, raw, classifier=classifier)
    chosen = list(range(len(raw)))
    if data.subset is not None and data.subset < len(raw):
        chosen = permutation(len(raw), data.seed, 0)[: data.subset]
    examples = [e for e in (template.render(raw[i], i) for i in chosen) if not e.empty]
    if spec.eval.source is not None or not data.eval_fraction or len(examples) < 2:
        return examples
    held = set(permutation(len(examples), data.seed, 1)[: max(1, round(data.eval_fraction * len(examples)))])
    return [e for i, e in enumerate(examples) if i not in held]


def _labelled(examples: list[Example], spec: RunSpec, data: PreparedData) -> list[PlainRow]:
    """Return rows with a class; the tokenizer adds its special tokens and cuts."""
    assert spec.data is not None
    values = {e.label for e in examples if e.label is not None}
    numeric = all(_is_number(v) for v in values)
    classes = {v: i for i, v in enumerate(sorted(values, key=float if numeric else str))}
    if not spec.model or not spec.model.name.startswith("tiny:"):
        classes = data.facts.labels  # a trained head has an order of its own
    found = []
    for example in examples:
        text = "".join(text for text, _ in example.turns)
        ids = data.tokenizer(text, truncation=True, max_length=spec.data.max_length)["input_ids"]
        found.append(PlainRow(ids, [False] * len(ids), label=classes[example.label or ""]))
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _texts(examples: list[Example], spec: RunSpec, tokenizer: Any) -> list[PlainRow]:
    """Return text rows: a token is a target if a part of it is in a trained turn; the end-of-text token is one, too."""
    assert spec.data is not None
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    begin = tokenizer.bos_token_id
    if begin is not None and tokenizer("x")["input_ids"][0] != begin:
        begin = None
    limit = None if spec.data.packing == "wrapped" else spec.data.max_length
    rows = []
    for example in examples:
        turns = _chat_turns(example, tokenizer) if example.messages else list(example.turns)
        ids, wanted = _encode(turns, tokenizer)
        if not spec.data.mask_prompt:
            wanted = [True] * len(ids)
        if begin is not None and (not ids or ids[0] != begin):
            ids, wanted = [begin, *ids], [False, *wanted]
        if not turns or turns[-1][1]:
            if ids and ids[-1] == end:
                ids, wanted = ids[:-1], wanted[:-1]
            ids, wanted = [*ids, end], [*wanted, True]
        row = PlainRow(ids[:limit], wanted[:limit])
        if row.targets:
            rows.append(row)
    return rows


def _encode(turns: list[tuple[str, bool]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Encode the whole text, and mark the tokens that contain a character of a trained turn."""
    text = "".join(text for text, _ in turns)
    if not tokenizer.is_fast:
        parts = [(tokenizer(t, add_special_tokens=False)["input_ids"], trained) for t, trained in turns]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        marks = [trained for part, trained in parts for _ in part]
        return ids, (marks + [marks[-1] if marks else True] * len(ids))[: len(ids)]
    trained = list(chain.from_iterable([kind] * len(part) for part, kind in turns))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [any(trained[a:b]) for a, b in encoded["offset_mapping"]]


def _chat_turns(example: Example, tokenizer: Any) -> list[tuple[str, bool]]:
    """Return the rendered chat as turns, those of the assistant trained; the last one alone if the template rewrites earlier ones.

    A reply that the template ends with the end-of-text token ends there.
    """
    messages, template = list(example.messages), tokenizer.chat_template or DEFAULT_CHAT_TEMPLATE

    def render(count: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:count],
            tools=list(example.tools) or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=prompt,
        )

    text = render(len(messages), False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i >= example.first_trained:
            spans.append((render(i, True), render(i + 1, False)))
    if not all(text.startswith(before) and text.startswith(after) for before, after in spans):
        spans = spans[-1:]
    turns, done = [], 0
    for before, after in spans:
        stripped = after.rstrip()
        end = len(stripped) if tokenizer.eos_token and stripped.endswith(tokenizer.eos_token) else len(after)
        turns += [(text[done : len(before)], False), (text[len(before) : end], True)]
        done = end
    return [*turns, (text[done:], False)] if text[done:].strip() else turns


def _sequences(rows: list[PlainRow], spec: RunSpec) -> list[PlainSequence]:
    data = spec.data
    assert data is not None
    if data.packing == "none":
        return [[row] for row in rows]
    if data.packing == "wrapped":
        order = permutation(len(rows), data.seed, 2)
        ids = list(chain.from_iterable(rows[i].ids for i in order))
        wanted = list(chain.from_iterable(rows[i].wanted for i in order))
        ends = range(0, len(ids), data.max_length)
        cut = [PlainRow(ids[at : at + data.max_length], wanted[at : at + data.max_length]) for at in ends]
        return [[row] for i, row in enumerate(cut) if i == 0 or i < len(cut) - 1 or row.targets]
    return _best_fit([rows[i] for i in permutation(len(rows), data.seed, 0)], data.max_length)


def _best_fit(rows: list[PlainRow], capacity: int) -> list[PlainSequence]:
    """Pack longest first, each row into the fullest sequence that has space, the first of equally full ones."""
    packs: list[PlainSequence] = []
    with_space: dict[int, list[int]] = {}
    spaces = 0  # bit i: a sequence has space for i tokens
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        need = len(row.ids)
        fitting = spaces >> need
        space = need + (fitting & -fitting).bit_length() - 1 if fitting else capacity
        if fitting:
            pack = min(with_space[space])
            with_space[space].remove(pack)
            if not with_space[space]:
                spaces &= ~(1 << space)
        else:
            pack = len(packs)
            packs.append([])
        packs[pack].append(row)
        if space > need:
            with_space.setdefault(space - need, []).append(pack)
            spaces |= 1 << (space - need)
    return packs


def _as_prepared(tokens: TokenSet) -> list[PlainSequence]:
    def row(r: int) -> PlainRow:
        part = slice(int(tokens.offsets[r]), int(tokens.offsets[r + 1]))
        return PlainRow(tokens.ids[part].tolist(), tokens.mask[part].astype(bool).tolist(), int(tokens.labels[r]))

    return [[row(int(r)) for r in tokens.rows_of(i)] for i in range(len(tokens))]


def _difference(ours: list[PlainSequence], tokens: TokenSet, *, classifier: bool) -> str | None:
    """Return the first way in which the prepared sequences differ from `ours`."""
    if len(ours) != len(tokens):
        return f"{len(tokens)} sequences were prepared, the documented rules give {len(ours)}"
    for i, sequence in enumerate(ours):
        rows = tokens.rows_of(i)
        if len(rows) != len(sequence):
            return f"sequence {i} was prepared with {len(rows)} rows, the documented rules give {len(sequence)}"
        for r, row in zip(rows, sequence, strict=True):
            part = slice(int(tokens.offsets[r]), int(tokens.offsets[r + 1]))
            if not _equal(tokens.ids[part], row.ids):
                return f"sequence {i} was prepared with other tokens than the documented rules give"
            if classifier and int(tokens.labels[r]) != row.label:
                return f"sequence {i} was prepared with class {int(tokens.labels[r])}, the documented rules give {row.label}"
            if not classifier and not _equal(tokens.mask[part][1:].astype(bool), row.wanted[1:]):
                return f"sequence {i} was prepared with other trained tokens than the documented rules give"
    return None


def _equal(ours: npt.NDArray[Any], wanted: Sequence[Any]) -> bool:
    return len(ours) == len(wanted) and bool((ours == np.asarray(wanted, ours.dtype)).all())
