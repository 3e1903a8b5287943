"""Specs and facts for the tests of `fit`."""

from typing import Any

from allranks.planning.memory import Fit, fit, make_plan
from allranks.spec import parse_spec
from allranks.utils.machine import Gpu, MachineFacts

GIB = 1 << 30
SMALL = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip


def facts(gpus: int = 0, memory_bytes: int = 64 * GIB, gpu_bytes: int = 80 * GIB) -> MachineFacts:
    found = [Gpu(index=i, name="NVIDIA H100 80GB HBM3", memory_bytes=gpu_bytes) for i in range(gpus)]
    return MachineFacts(host="n1", cpus=64, memory_bytes=memory_bytes, gpus=found, cpu_model="x", system="Linux")


def raw(**sections: Any) -> dict[str, Any]:
    """A spec of a small Llama on two CPU ranks, with whole sections replaced."""
    data = {"source": "builtin:instructions", "max_length": 128}
    spec: dict[str, Any] = {"model": {"name": "tiny:llama", "config": SMALL}, "data": data}
    return {**spec, **sections}


def estimated(spec: dict[str, Any], sets: tuple[str, ...] = (), **there: Any) -> Fit:
    """The estimate for a spec on a machine with these facts."""
    parsed, known = parse_spec(spec, sets), facts(**there)
    return fit(parsed, make_plan(parsed, known), known)
