"""Read the rows of a spec, convert them to text and split them into training and held-out rows. No tokenizer, no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from allranks.errors import DataError
from allranks.spec import data_sources
from allranks.spec.data_checks import require_classes
from allranks.spec.data_examples import Example
from allranks.spec.data_templates import Template, choose_template, require_task_template
from allranks.spec.records import DataSpec, RunSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def shuffle(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return a permutation of ``range(n)`` that depends only on the arguments: the argsort of raw Philox words.

    NumPy guarantees that the raw output of a bit generator never changes, unlike ``Generator.permutation``.
    """
    import numpy as np

    words = np.random.Philox(key=(seed & (2**64 - 1)) + (epoch << 64)).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64)


@dataclass(frozen=True)
class ReadExamples:
    """The rows of a spec as text. ``rows`` counts all rows of ``data.source``."""

    rows: int
    columns: list[str]
    template: Template
    train: list[Example]
    held_out: list[Example]
    empty: EmptyRows


def read_examples(spec: RunSpec, *, classifier: bool) -> ReadExamples:
    """Read and convert the rows of ``data.source`` and ``eval.source``.

    The held-out rows of ``data.eval_fraction`` depend only on ``data.seed``, so they never change.

    Raises:
        DataError: a file or row cannot be used; the message names the row.
        EnvironmentNotAble: the hub cannot be reached.
    """
    data = spec.data
    assert data is not None
    rows = data_sources.load_rows(data)
    template = choose_template(data, rows, classifier=classifier)
    if spec.model is not None:
        require_task_template(template.kind, spec.model.name, classifier=classifier)
    empty = EmptyRows(data.source)
    examples = _convert(data.source, rows, template, _choose(data, len(rows)), empty)
    limit = spec.eval.subset
    if spec.eval.source is not None:
        train, held_out = examples, _read_held_out(eval_data(spec), limit, empty, classifier=classifier)
    else:
        fraction = data.eval_fraction
        held = max(1, round(fraction * len(examples))) if fraction and len(examples) > 1 else 0
        order = shuffle(len(examples), data.seed, 1).tolist()
        train = [examples[i] for i in sorted(order[held:])]
        held_out = [examples[i] for i in order[:held][: limit or held]]
    if classifier:
        where = f"eval.source {spec.eval.source}" if spec.eval.source else f"data.source {data.source}"
        require_known_labels(held_out, label_map(train), where)
    return ReadExamples(
        rows=len(rows), columns=list(rows[0]), template=template, train=train, held_out=held_out, empty=empty
    )


def _convert(
    source: str, rows: list[data_sources.Row], template: Template, chosen: Iterable[int], empty: EmptyRows
) -> list[Example]:
    try:
        return empty.remove((number, template.render(rows[number], number)) for number in chosen)
    except DataError as error:
        text = str(error)
        raise DataError(f"data.source {source}, {text}" if text.startswith("row ") else text) from None


def _choose(data: DataSpec, n: int) -> Sequence[int]:
    if data.subset is None or data.subset >= n:
        return range(n)
    return shuffle(n, data.seed, 0)[: data.subset].tolist()


def eval_data(spec: RunSpec) -> DataSpec:
    """Return ``spec.data`` for the rows of ``eval.source``."""
    assert spec.data is not None and spec.eval.source is not None
    return msgspec.structs.replace(spec.data, source=spec.eval.source, subset=None)


def _read_held_out(data: DataSpec, limit: int | None, empty: EmptyRows, *, classifier: bool) -> list[Example]:
    try:
        rows = data_sources.load_rows(data)
        template = choose_template(data, rows, classifier=classifier)
        chosen = shuffle(len(rows), data.seed, 1)[: limit or len(rows)]
        own = EmptyRows(data.source)
        held_out = _convert(data.source, rows, template, chosen.tolist(), own)
    except DataError as error:
        raise DataError(str(error).replace("data.source", "eval.source", 1)) from None
    empty.others.append(own)
    return held_out


class EmptyRows:
    """Find and count rows without a trained token."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.numbers: list[int] = []
        self.others: list[EmptyRows] = []
        self._where = ""

    def remove(self, examples: Iterable[tuple[int, Example]]) -> list[Example]:
        """Return the other rows.

        Raises:
            DataError: there are none.
        """
        kept = []
        for number, example in examples:
            if example.empty:
                self.numbers.append(number)
                self._where = self._where or example.empty
            else:
                kept.append(replace(example, row=number))
        if not kept:
            raise DataError(f"data.source {self._source}: {self._where!r} is empty or missing in every row")
        return kept

    def warnings(self) -> list[str]:
        """Return a sentence for each source that has such rows."""
        own = []
        if self.numbers:
            first = ", ".join(map(str, self.numbers[:5])) + (", ..." if len(self.numbers) > 5 else "")
            own.append(
                f"{len(self.numbers)} rows of {self._source} left out: {self._where!r} is empty or missing (row {first})"
            )
        return [*own, *(text for other in self.others for text in other.warnings())]


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
    for example in held_out:
        if example.label not in labels:
            raise DataError(
                f"{where}, row {example.row}: label {example.label!r} is not among those of the training rows: {', '.join(labels)}"
            )
