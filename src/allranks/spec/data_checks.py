"""Check the labels of a data set, and match them with the classes of a classifier that is already trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from allranks.errors import DataError
from allranks.spec.data_examples import Example
from allranks.utils.formatting import format_list

MAX_SHOWN = 12
MANY_CLASSES = 10
"""Fewer label values than this are never taken for a measure."""


def require_classes(examples: Sequence[Example]) -> None:
    """Refuse label values that are one class in several spellings, or that are measures or texts.

    Raises:
        DataError: names the values.
    """
    values = sorted({e.label for e in examples if e.label is not None})
    for same in _by(values, _class_of).values():
        if len(same) > 1:
            raise DataError(
                f"the labels {shown(same)} differ only in blanks or in how a number is written, but would be {len(same)} classes; "
                "write them alike"
            )
    if len(values) >= MANY_CLASSES and len(values) > len(examples) / 2:
        raise DataError(
            f"{len(examples)} rows have {len(values)} label values ({shown(values)}), so that most would be a class of one row: "
            "classification needs classes, not measures or texts; group the values, or name another column with data.columns.label"
        )


def label_warnings(labels: Iterable[str]) -> list[str]:
    """Return a warning for each group of labels that differ only in upper case."""
    return [
        f"the labels {shown(same)} differ only in upper case, and are {len(same)} classes"
        for same in _by(labels, lambda value: value.strip().casefold()).values()
        if len(same) > 1
    ]


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
    if all(value.isdecimal() and int(value) < len(head) for value in labels):
        said = [f"the labels are taken as class numbers of {model}: {_pairs({v: int(v) for v in labels}, head)}"]
        return {str(number): number for number in range(len(head))}, [] if _unnamed(head) else said
    if len(labels) != len(head):
        raise DataError(
            f"model.name {model}: its classifier has {len(head)} classes ({shown(head)}), the data has {len(labels)} labels ({shown(labels)}); "
            "use data with these classes, or a model without a classifier"
        )
    return labels, [
        f"the classifier of {model} has other class names than the data; they are matched in this order: {_pairs(labels, head)}. "
        "Without training, accuracy and loss are wrong if the classes differ"
    ]


def _pairs(labels: Mapping[str, int], head: Sequence[str]) -> str:
    return shown([f"{value} = {head[number]}" for value, number in labels.items()])


def _unnamed(head: Sequence[str]) -> bool:
    """Return whether these are the names that transformers gives to classes without names."""
    return list(head) == [f"LABEL_{number}" for number in range(len(head))]


def _class_of(label: str) -> str:
    """Return the same for labels that only differ in blanks or in how a number is written."""
    text = " ".join(label.split())
    try:
        return repr(float(text))
    except ValueError:
        return text


def _by(values: Iterable[str], key: Callable[[str], str]) -> dict[str, list[str]]:
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for value in values:
        groups[key(value)].append(value)
    return groups


def shown(values: Iterable[str]) -> str:
    """Return the first values as a list in words; quoted where blanks matter."""
    return format_list([repr(value) if value != value.strip() else value for value in values], MAX_SHOWN)
