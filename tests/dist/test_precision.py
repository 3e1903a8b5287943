"""Mixed precision under every strategy and engine, against float64 and plain autocast on the same batches."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from allranks.rundir.files import read_json
from tests.dist.harness import rows_spec, run_ranks, shared_strategies, train

NAMES = shared_strategies()
LIMIT = 1.25  # times plain autocast's distance
ADAPTER_LIMIT = 2.0  # measured: 0.8 to 1.6, by chance; the loss's gradient is rounded once more before it is scaled
NOISE = 0.005  # of the update: what a few elements near AdamW's eps differ by after one step of an adapter
SHARDED = ("pytorch_ddp", "zero3", "pytorch_zero3")


def distances(folder: Path, world: int, pairs: list[tuple[str, str]], **more: Any) -> list[Any]:
    found = run_ranks("precisions", world, folder, 280, folder=folder, pairs=pairs, **more)[0]
    assert [tuple(one[:2]) for one in found] == pairs
    return found


def too_far(found: list[Any]) -> dict[str, list[float]]:
    """Ratios to plain autocast by strategy and form, where one is above the limit."""
    ratios = {}
    for name, form, ours, usual in found:
        pairs = zip(ours, usual, strict=True)
        ratios[f"{name} {form}"] = [0.0 if own < NOISE else round(own / plain, 2) for own, plain in pairs]
    return {which: r for which, r in ratios.items() if max(r) > (ADAPTER_LIMIT if " lora" in which else LIMIT)}


@pytest.mark.parametrize(
    ("names", "form", "more"),
    [
        (SHARDED, "whole", {"looks": [1, 20]}),  # weights that are gathered in bfloat16
        pytest.param(NAMES, "whole", {}, marks=pytest.mark.full),
        pytest.param(SHARDED, "lora_and_head", {}, marks=pytest.mark.full),
        pytest.param(SHARDED, "experts", {}, marks=pytest.mark.full),
    ],
)
def test_each_is_as_precise_as_plain_autocast(tmp_path: Path, names: Any, form: str, more: dict[str, Any]) -> None:
    assert too_far(distances(tmp_path, 2, [(name, form) for name in names], **more)) == {}


def test_updates_rounded_to_bfloat16_would_be_seen(tmp_path: Path) -> None:
    found = distances(tmp_path, 2, [("zero3", "whole")], looks=[1, 20], plant="stored_in_bfloat16")
    assert max(too_far(found)["zero3 whole"]) > 4


def test_a_run_in_bfloat16_saves_float32_weights_and_moments(tmp_path: Path) -> None:
    spec = rows_spec(
        tmp_path, 40, adapter={"type": "none"}, strategy={"name": "pytorch_zero3"}, checkpoint={"mode": "full"},
        train={"max_steps": 3, "lr": 1e-6}, model={"dtype": "bfloat16"},
    )  # fmt: skip
    _, run = train(tmp_path, spec, code=0)
    plan = read_json(run.plan)
    assert (plan["dtype"], plan["param_dtype"]) == ("bfloat16", "float32")
    kinds = set()
    for file in run.checkpoint(3).rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call]
            kinds |= {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
    assert kinds == {"F32"}
    config = json.loads((run.checkpoint(3) / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float32"
