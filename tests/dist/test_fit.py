"""The estimate against two real ranks: every live tensor of rank 0, at its most, within the 10 % that `fit` claims."""

from typing import Any

import pytest
from benchmarks.fit import LIMIT, measure, predict, spec_of

SIZES = {
    "hidden_size": 320, "intermediate_size": 900, "num_hidden_layers": 4, "num_attention_heads": 5,
    "num_key_value_heads": 5, "vocab_size": 3000,
}  # fmt: skip
MODELS = {"small": {"name": "tiny:llama", "config": SIZES}}
CASE: dict[str, Any] = {
    "id": 1, "model": "small", "adapter": "none", "gradient_checkpointing": False, "micro_batch_size": 1,
    "max_length": 128, "packing": "none", "grad_accum": 1, "dtype": "float32", "ranks": 2, "steps": 3,
    "measure": "storages",
}  # fmt: skip
MIXED = {"dtype": "bfloat16", "param_dtype": "float32"}


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("bucket_ddp_async", {"grad_accum": 2}),
        ("zero2", {}),
        ("zero3", {"gradient_checkpointing": True}),
        ("pytorch_zero3", {"adapter": "lora", "max_length": 512}),
        ("pytorch_ddp", {**MIXED, "gradient_checkpointing": True}),
        ("pytorch_zero3", MIXED),
    ],
)
def test_live_tensors_are_as_many_as_estimated(strategy: str, more: dict[str, Any]) -> None:
    case = {**CASE, "strategy": strategy, **more}
    case["spec"] = spec_of(case, {"models": MODELS})
    expected = predict(case)["bytes"]
    measured = []
    for _ in range(3):  # what gloo's threads give back is not always seen: a measurement may be too large
        found = measure(case)
        assert "ranks" in found, found
        measured.append(found["ranks"][0]["bytes"])
        if abs(expected / min(measured) - 1) <= LIMIT:
            break
    assert expected == pytest.approx(min(measured), rel=LIMIT), measured
