"""JSON Schema of the spec, for editors (VS Code, PyCharm) that check YAML while it is written."""

from __future__ import annotations

from typing import Any

import msgspec

from allranks.spec.records import RunSpec
from allranks.train.strategies import REGISTRY


def json_schema() -> dict[str, Any]:
    """The schema, draft 2020-12. A strategy's options stand beside its name, as in YAML."""
    (root,), components = msgspec.json.schema_components((RunSpec,), ref_template="#/$defs/{name}")
    options = sorted({option for entry in REGISTRY.values() for option in entry.options})
    components["StrategySpec"] = {
        "title": "StrategySpec",
        "description": "Name and options of the strategy.",
        "type": "object",
        "properties": {"name": {"enum": list(REGISTRY), "default": "pytorch_ddp"}, **{o: {} for o in options}},
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "allranks run spec",
        **root,
        "$defs": components,
    }
