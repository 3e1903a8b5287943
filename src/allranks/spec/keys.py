"""List the keys of the spec and the values that each can have. No torch."""

from __future__ import annotations

import msgspec

from allranks.spec.data_templates import TEMPLATE_KINDS
from allranks.spec.launchers import LAUNCHERS
from allranks.spec.models import NOISE_SOURCE, tiny_names
from allranks.spec.records import Record, RunSpec
from allranks.spec.strategies import REGISTRY
from allranks.spec.validation import known_values, record_class


def all_keys(record: type[Record], path: str = "") -> list[str]:
    """Return all keys below a record, sections and values, each with its full path."""
    keys: list[str] = []
    for field in msgspec.structs.fields(record):
        keys.append(f"{path}{field.encode_name}")
        inner = record_class(field.type)
        if inner is not None:
            keys += all_keys(inner, f"{path}{field.encode_name}.")
    return keys


def settable_keys() -> dict[str, tuple[str, ...]]:
    """Return every key that ``--set`` can set, with the values that are known: words, booleans, built-in sets and models."""
    from allranks.spec.builtin_data import BUILTIN

    names = all_keys(RunSpec)
    sections = {name.rpartition(".")[0] for name in names}
    keys = {name: known_values(name) for name in names if name not in sections and name != "strategy.options"}
    for info in REGISTRY.values():
        for option, default in info.options.items():
            words = info.choices.get(option, ("true", "false") if isinstance(default, bool) else ())
            keys[f"strategy.{option}"] = tuple(dict.fromkeys([*keys.get(f"strategy.{option}", ()), *words]))
    return keys | {
        "strategy.name": tuple(REGISTRY),
        "cluster.launcher": tuple(LAUNCHERS),
        "model.name": tiny_names(),
        "data.source": (*(f"builtin:{name}" for name in BUILTIN), NOISE_SOURCE),
        "data.template": ("auto", *TEMPLATE_KINDS),
    }
