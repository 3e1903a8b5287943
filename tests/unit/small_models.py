"""Small models with their weights, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allranks.spec.records import AdapterSpec, ModelSpec
from allranks.train.data.tokenization import train_tokenizer
from allranks.train.models.adapters import add_adapter
from tests.dist.making import CONFIG, build_model

TOKENIZER = train_tokenizer(["hello world 123"], 300, classifier=False)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def load(name: str | Path, dtype: str = "float32", labels: dict[str, int] | None = None, **spec: Any) -> Any:
    return build_model(ModelSpec(name=str(name), **spec), TOKENIZER, dtype=dtype, labels=labels or {}, seed=1)


def tiny(family: str, dtype: str = "float32", **config: Any) -> Any:
    return load(f"tiny:{family}", dtype, config={**CONFIG, **config})


def with_lora(model: Any, **adapter: Any) -> Any:
    return add_adapter(model, AdapterSpec(type="lora", **adapter), classifier=False, base="b", seed=1)
