"""Perceptrons on noise: the notes' counts to the last parameter, the loss, the rows, and what is refused."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from allranks.errors import SpecError
from allranks.planning.memory import fit
from allranks.planning.planner import make_plan
from allranks.spec import parse_spec
from allranks.spec.models import mlp_shape
from allranks.spec.records import DataSpec, EvalSpec
from allranks.train.data.batches import noise_batch, prepared_noise
from allranks.train.tasks import Mlp, MlpConfig
from tests.unit.test_plan import facts

COUNTS = {
    (1024, 3, "wide"): 25_175_040, (2048, 3, "wide"): 100_681_728,
    (4096, 6, "blocks"): 805_429_248, (4096, 8, "blocks"): 1_073_905_664,
}  # fmt: skip
"""What the notes count, by width, layers and shape."""


def spec_of(width: int = 8, layers: int = 2, shape: str = "blocks", **sections: Any) -> dict[str, Any]:
    model = {"name": f"mlp:{width}x{layers}", "config": {"shape": shape}, **sections.pop("model", {})}
    base = {"model": model, "data": {"source": "builtin:noise"}, "cluster": {"device": "cpu", "procs_per_node": 2}}
    return base | sections


@pytest.mark.parametrize("sizes", COUNTS, ids=str)
def test_the_notes_models_to_the_last_parameter(sizes: tuple[int, int, str]) -> None:
    width, layers, shape = sizes
    assert mlp_shape(f"mlp:{width}x{layers}", {"shape": shape}).parameters == COUNTS[sizes]
    with torch.device("meta"):
        model = Mlp(MlpConfig(width=width, layers=layers, shape=shape))
        assert sum(p.numel() for p in model.parameters()) == COUNTS[sizes]
        assert model(torch.empty(3, width)).shape == (3, width)
    spec = parse_spec(spec_of(*sizes))
    assert fit(spec, make_plan(spec, facts()), facts()).parameters == COUNTS[sizes]


def test_a_row_is_the_same_in_every_batch() -> None:
    data = DataSpec(source="builtin:noise", subset=100, eval_fraction=0.2)
    made = prepared_noise(data, EvalSpec())
    assert (len(made.train), len(made.held_out or [])) == (80, 20)
    one = noise_batch(data, made.train, np.array([3, 7, 9]), 16, torch.float32)
    other = noise_batch(data, made.train, np.array([9]), 16, torch.float32)
    assert torch.equal(one.inputs[2], other.inputs[0]) and torch.equal(one.targets[2], other.targets[0])
    assert not torch.equal(one.inputs[0], one.targets[0]) and not torch.equal(one.inputs[0], one.inputs[1])
    assert made.held_out is not None
    held = noise_batch(data, made.held_out, np.array([0]), 16, torch.float32)
    everything = noise_batch(data, made.train, np.arange(80), 16, torch.float32).inputs
    assert not any(torch.equal(held.inputs[0], row) for row in everything)
    again = noise_batch(msgspec.structs.replace(data, seed=43), made.train, np.array([9]), 16, torch.float32)
    assert not torch.equal(again.inputs, other.inputs)
    assert noise_batch(data, made.train, np.array([1]), 16, torch.bfloat16).inputs.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (spec_of(model={"name": "mlp:big"}), "mlp:<width>x<layers>"),
        (spec_of(model={"name": "mlp:0x2"}), "mlp:<width>x<layers>"),
        (spec_of(model={"config": {"hidden_size": 4}}), "unknown setting"),
        (spec_of(8, 1, "wide"), "at least 2 layers"),
        (spec_of(shape="deep"), "model.config"),
        (spec_of(data={"source": "builtin:news"}), "builtin:noise"),
        (spec_of(adapter={"type": "lora"}), "supports only full training"),
        (spec_of(model={"gradient_checkpointing": True}), "does not support it"),
        (spec_of(eval={"source": "builtin:news"}), "its own noise"),
        ({"model": {"name": "tiny:bert"}, "data": {"source": "builtin:noise"}}, "is for mlp: models"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(spec)
    assert said in str(caught.value)
