"""What is wrong with a value of the spec, in words that name the key and what it may be. Pure."""

from __future__ import annotations

import difflib
import re
import types
import typing
from typing import Any

import msgspec

from allranks.errors import SpecError
from allranks.spec.records import Record, RunSpec

# What people write in place of a section: its most important key's value.
MAIN_KEYS = {"model": "name", "data": "source", "adapter": "type", "checkpoint": "mode", "strategy": "name", "script": "path"}  # fmt: skip
_NAME = (
    "a run's name has letters, digits, '.', '_' and '-' only, begins with a letter or digit, and is at most 100 long"
)


def readable(message: str) -> str:
    """msgspec's ``Expected `int`, got `str` - at `$.train.max_steps` `` as ``train.max_steps: expected int, got str``."""
    text, _, place = message.partition(" - at ")
    key = place.strip("`").removeprefix("$").removeprefix(".") or "spec"
    if wrong := re.match(r"Invalid enum value '?(.*?)'?$", text):
        return f"{key}: {_one_of(key, wrong.group(1))}"
    text = text.replace("`", "").replace("xpected object", "xpected a section of keys")
    text = re.sub(r"\barray\b", "list", text).replace(" | null", " or null")
    if key == "name" and "regex" in text:
        text = _NAME
    return f"{key}: {text[:1].lower()}{text[1:]}"


def _one_of(key: str, given: str) -> str:
    known = [value for value in _choices(key) if isinstance(value, str)]
    near = difflib.get_close_matches(given, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"there is no {given!r}{hint} (known: {', '.join(known)})"


def _choices(key: str) -> tuple[Any, ...]:
    """The values that an annotation such as ``Literal["a", "b"] | None`` lists for a key."""
    annotation: Any = RunSpec
    for part in key.split("."):
        record = record_of(annotation)
        fields = {f.encode_name: f.type for f in msgspec.structs.fields(record)} if record else {}
        annotation = fields.get(part)
    return tuple(_literals(annotation))


def _literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [value for part in typing.get_args(annotation) for value in _literals(part)]


def record_of(annotation: Any) -> type[Record] | None:
    """The record class inside an annotation such as ``DataSpec | None``."""
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return annotation
    for part in typing.get_args(annotation):
        found = record_of(part)
        if found is not None:
            return found
    return None


def require_sections(raw: dict[str, Any], where: str) -> None:
    """Refuse a plain value where a section belongs, with the way to write it.

    Raises:
        SpecError: ``model: tiny:mistral``.
    """
    problems = [
        f"{section}: write it as {{{key}: {raw[section]}}}"
        for section, key in MAIN_KEYS.items()
        if isinstance(raw.get(section), str)
    ]
    if problems:
        raise SpecError(f"{where}: " + "; ".join(problems))


def without_empty_sections(raw: dict[str, Any], record: type[Record] = RunSpec) -> dict[str, Any]:
    """A section whose keys are all commented out is null to YAML; it means that all is left at its default."""
    kinds = {f.encode_name: f.type for f in msgspec.structs.fields(record)}
    out: dict[str, Any] = {}
    for key, value in raw.items():
        inner = record_of(kinds.get(key))
        if inner is None or not (value is None or isinstance(value, dict)):
            out[key] = value
        elif value is not None:
            out[key] = without_empty_sections(value, inner)
        elif _may_be_null(kinds[key]):
            out[key] = None
    return out


def _may_be_null(annotation: Any) -> bool:
    return annotation is types.NoneType or any(_may_be_null(part) for part in typing.get_args(annotation))
