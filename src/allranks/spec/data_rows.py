"""Read rows of a spec, convert them to text, split them into training and held-out rows. No tokenizer, no torch."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from allranks.errors import DataError, EnvironmentNotAble
from allranks.spec import data_sources
from allranks.spec.data_columns import merged_row
from allranks.spec.data_sources import apportion, key_of, parts_of, source_of
from allranks.spec.data_templates import Example, Template, choose_template, require_task_template
from allranks.spec.records import DataSpec, RunSpec
from allranks.utils.text import format_list

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
MANY_REPEATS = 4
MAX_SHOWN = 12
MANY_CLASSES = 10
"""Fewer label values than this are never taken for a measure."""


def shuffle(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return a permutation of ``range(n)`` that depends only on the arguments: the argsort of raw Philox words.

    NumPy guarantees that the raw output of a bit generator never changes, unlike ``Generator.permutation``.
    """
    import numpy as np

    words = np.random.Philox(key=(seed & (2**64 - 1)) + (epoch << 64)).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64)


class SourceRows(msgspec.Struct, frozen=True, kw_only=True):
    """What one source of a mixture gives to an epoch. ``rows``: usable rows; ``rows_train``: with repeated ones."""

    source: str
    weight: float
    template: str
    rows: int
    rows_held_out: int
    rows_train: int


class ReadExamples(msgspec.Struct, frozen=True):
    """The rows of a spec as text. ``rows``: number in all sources; ``sources``: empty without ``data.sources``."""

    rows: int
    columns: list[str]
    template: str
    template_reason: str
    train: list[Example]
    held_out: list[Example]
    rows_empty: int
    warnings: list[str]
    sources: list[SourceRows]


class _Part(msgspec.Struct, frozen=True):
    """The chosen rows of one source."""

    data: DataSpec
    rows: list[data_sources.Row]
    template: Template
    examples: list[Example]
    empty: list[int]
    """Numbers of the rows without a trained token, which are left out."""
    empty_column: str

    def warnings(self) -> list[str]:
        """Return a sentence, if rows are left out."""
        if not self.empty:
            return []
        first = ", ".join(map(str, self.empty[:5])) + (", ..." if len(self.empty) > 5 else "")
        where = f"{self.empty_column!r} is empty or missing (row {first})"
        return [f"{len(self.empty)} rows of {source_of(self.data)} left out: {where}"]


def read_examples(spec: RunSpec, *, classifier: bool) -> ReadExamples:
    """Read and convert the rows of ``data.source`` (or ``data.sources``) and ``eval.source``.

    The held-out rows of ``data.eval_fraction`` depend only on ``data.seed``, so they never change.

    Raises:
        DataError: a file or row cannot be used; the message names the row.
        EnvironmentNotAble: the hub cannot be reached.
    """
    data = spec.data
    assert data is not None
    read = []
    for number, one in enumerate(parts_of(data)):
        with naming_source(data, number):
            read.append(_read_part(one, model=spec.model.name if spec.model else "", classifier=classifier))
    warnings = [text for part in read for text in part.warnings()]
    sources: list[SourceRows] = []
    if spec.eval.source is not None:
        try:
            apart = _read_part(eval_data(spec), held_out=spec.eval.subset or sys.maxsize, classifier=classifier)
        except DataError as error:
            raise DataError(str(error).replace("data.source", "eval.source", 1)) from None
        held_out = apart.examples
        warnings += apart.warnings()
        pools = [(part.examples, []) for part in read]
    else:
        pools = [_split(part.examples, data) for part in read]
        held_out = [example for _, held in pools for example in held]
        if spec.eval.subset is not None and len(held_out) > spec.eval.subset:
            most = spec.eval.subset  # of a mixture, chosen among those of all sources
            mixed = sorted(shuffle(len(held_out), data.seed, 1)[:most].tolist())
            held_out = held_out[:most] if data.sources is None else [held_out[i] for i in mixed]
    if data.sources is None:
        train = pools[0][0]
    else:
        train, sources = _mix(data, read, pools)
    if classifier:
        where = f"eval.source {spec.eval.source}" if spec.eval.source else f"data.source {source_of(data)}"
        require_known_labels(held_out, label_map(train), where)
    for one in sources:
        times = one.rows_train / (one.rows - one.rows_held_out)
        if times > MANY_REPEATS:
            warnings.append(
                f"each row of {one.source} occurs about {times:.0f} times in an epoch; a smaller weight repeats it less"
            )
    kinds = list(dict.fromkeys(part.template.kind for part in read))
    reasons = [f"{source_of(part.data)}: {part.template.kind}, {part.template.reason}" for part in read]
    return ReadExamples(
        rows=sum(len(part.rows) for part in read),
        columns=list(dict.fromkeys(name for part in read for name in merged_row(part.rows))),
        template=" + ".join(kinds),
        template_reason=read[0].template.reason if data.sources is None else "; ".join(reasons),
        train=train,
        held_out=held_out,
        rows_empty=sum(len(part.empty) for part in read),
        warnings=warnings,
        sources=sources,
    )


def _read_part(data: DataSpec, *, model: str = "", held_out: int | None = None, classifier: bool) -> _Part:
    """Read ``data.subset`` rows of a source to train a model, or at most this many to hold out."""
    rows = data_sources.load_rows(data)
    template = choose_template(data, rows, classifier=classifier)
    if model:
        require_task_template(template.kind, model, classifier=classifier)
    chosen: Sequence[int] = range(len(rows))
    if held_out is not None:
        chosen = shuffle(len(rows), data.seed, 1)[:held_out].tolist()
    elif data.subset is not None and data.subset < len(rows):
        chosen = shuffle(len(rows), data.seed, 0)[: data.subset].tolist()
    kept, empty, column = [], [], ""
    with naming_file(f"data.source {source_of(data)}"):
        for number in chosen:
            example = template.render(rows[number], number)
            if example.empty:
                empty.append(number)
                column = column or example.empty
            else:
                kept.append(msgspec.structs.replace(example, row=number))
    if not kept:
        raise DataError(f"data.source {source_of(data)}: {column!r} is empty or missing in every row")
    return _Part(data, rows, template, kept, empty, column)


@contextmanager
def naming_source(data: DataSpec, number: int) -> Iterator[None]:
    """Name the source of a mixture, such as ``data.sources[1].source``, in errors about ``data.source``."""
    try:
        yield
    except (DataError, EnvironmentNotAble) as error:
        raise type(error)(str(error).replace("data.source ", f"{key_of(data, number)} ", 1)) from None


def _split(examples: list[Example], data: DataSpec) -> tuple[list[Example], list[Example]]:
    """Return training and held-out rows; the latter in the order in which they are taken."""
    fraction = data.eval_fraction
    held = max(1, round(fraction * len(examples))) if fraction and len(examples) > 1 else 0
    order = shuffle(len(examples), data.seed, 1).tolist()
    return [examples[i] for i in sorted(order[held:])], [examples[i] for i in order[:held]]


def _mix(
    data: DataSpec, read: list[_Part], pools: list[tuple[list[Example], list[Example]]]
) -> tuple[list[Example], list[SourceRows]]:
    """Return the rows of an epoch: of each source a share by its weight, chosen or repeated by ``data.seed``."""
    assert data.sources is not None
    available = [len(train) for train, _ in pools]
    total = data.subset or sum(available)
    shares = apportion(total, [one.weight for one in data.sources])
    mixed: list[Example] = []
    sources = []
    for number, (part, (train, held), share) in enumerate(zip(read, pools, shares, strict=True)):
        weight = data.sources[number].weight
        if share == 0:
            raise DataError(
                f"data.sources[{number}].weight {weight:g}: {source_of(part.data)} would give none of the {total} rows "
                "of an epoch; increase it, or remove the source"
            )
        if not train:
            raise DataError(
                f"{key_of(data, number)} {source_of(part.data)}: its only row is held out; set data.eval_fraction: 0"
            )
        repeats, rest = divmod(share, len(train))
        extra = shuffle(len(train), data.seed, 3)[:rest].tolist()
        chosen = sorted([*range(len(train))] * repeats + extra)
        mixed += [msgspec.structs.replace(train[i], source=source_of(part.data)) for i in chosen]
        sources.append(
            SourceRows(
                source=source_of(part.data),
                weight=weight,
                template=part.template.kind,
                rows=len(part.examples),
                rows_held_out=len(held),
                rows_train=share,
            )
        )
    return mixed, sources


@contextmanager
def naming_file(where: str) -> Iterator[None]:
    """Name the key and the file in errors that begin with a row; in a mixture they begin with the source's name."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}, {error}" if str(error).startswith("row ") else str(error)) from None


def eval_data(spec: RunSpec) -> DataSpec:
    """Return ``spec.data`` for the rows of ``eval.source``."""
    assert spec.data is not None and spec.eval.source is not None
    return msgspec.structs.replace(spec.data, source=spec.eval.source, sources=None, subset=None)


def label_map(examples: Sequence[Example]) -> dict[str, int]:
    """Return class numbers of the label values; numbers in numeric order, texts in alphabetic order.

    Raises:
        DataError: there are fewer than two values, or they are no classes.
    """
    require_classes(examples)
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


def require_known_labels(held_out: Iterable[Example], labels: Collection[str], where: str) -> None:
    if unknown := next((example for example in held_out if example.label not in labels), None):
        raise DataError(
            f"{where}, row {unknown.row}: label {unknown.label!r} is not among those of the training rows: "
            f"{', '.join(labels)}"
        )


def require_classes(examples: Sequence[Example]) -> None:
    """Refuse labels that spell one class in several ways, or are measures or texts; `DataError` names the values."""
    values = sorted({e.label for e in examples if e.label is not None})
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for value in values:
        groups[_class_of(value)].append(value)
    for same in groups.values():
        if len(same) > 1:
            raise DataError(
                f"the labels {shown(same)} differ only in blanks or in how a number is written, but would be "
                f"{len(same)} classes; write them identically"
            )
    if len(values) >= MANY_CLASSES and len(values) > len(examples) / 2:
        raise DataError(
            f"{len(examples)} rows have {len(values)} label values ({shown(values)}), so that most would be a class of "
            "one row: classification needs classes, not measures or texts; group the values, or name another column "
            "with data.columns.label"
        )


def classes_of_head(labels: dict[str, int], head: Sequence[str], model: str) -> tuple[dict[str, int], list[str]]:
    """Return the class number of each label for a classifier that is already trained, and warnings.

    The classes keep the numbers that the model has for them; names are compared without blanks and upper case.

    Args:
        labels: the label values of the data, with the numbers that a new classifier would give them.
        head: names of the model's classes, in their order; empty if the model has no classifier yet.
        model: the model's name, for the messages.

    Raises:
        DataError: the model has other classes.
    """
    if not head:
        return labels, []
    by_name = {name.strip().casefold(): number for number, name in enumerate(head)}
    if len(by_name) == len(head) and all(value.strip().casefold() in by_name for value in labels):
        own = {by_name[value.strip().casefold()]: value for value in labels}
        return {own.get(number, name): number for number, name in enumerate(head)}, []
    if all(value.isdecimal() and int(value) < len(head) for value in labels):  # class numbers
        return {str(number): number for number in range(len(head))}, []
    if len(labels) != len(head):
        raise DataError(
            f"model.name {model}: its classifier has {len(head)} classes ({shown(head)}), the data has {len(labels)} "
            f"labels ({shown(labels)}); use data with these classes, or a model without a classifier"
        )
    return labels, [
        f"the classifier of {model} has other class names than the data; they are matched in this order: "
        f"{shown([f'{value} = {head[number]}' for value, number in labels.items()])}. Without training, accuracy and "
        "loss are wrong if the classes differ"
    ]


def _class_of(label: str) -> str:
    """Return the same for labels that only differ in blanks or in how a number is written."""
    text = " ".join(label.split())
    try:
        return repr(float(text))
    except ValueError:
        return text


def shown(values: Iterable[str]) -> str:
    """Return the first values as a list in words; quoted where blanks matter."""
    return format_list([repr(value) if value != value.strip() else value for value in values], MAX_SHOWN)
