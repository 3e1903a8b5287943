"""Small models with their weights, in one process."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Watch(TorchDispatchMode):
    """Calls a function with each operation of torch, its arguments and its result."""

    def __init__(self, see: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(func.overloadpacket, args, out)
        return out


class Largest(Watch):
    """Elements of the largest storage that an operation returns, other than those of some parameters."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(self._compare)
        self._known, self.elements = {t.untyped_storage().data_ptr() for t in known}, 0

    def _compare(self, func: Any, args: Any, out: Any) -> None:
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self._known:
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())


def kept_in(graphs: list[Any]) -> Callable[..., Any]:
    """A backend of torch.compile that keeps the graphs and computes them as they are."""
    return lambda graph, inputs: (graphs.append(graph), graph.forward)[1]
