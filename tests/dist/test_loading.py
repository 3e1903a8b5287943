"""Loading on real gloo ranks: the same weights as transformers and PEFT give, read by one rank, kept in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.spec.records import ModelSpec
from tests.dist.harness import run_ranks
from tests.dist.making import CONFIG, build_model, model_of

pytestmark = pytest.mark.dist
PARTS = ["pytorch_zero2", "pytorch_zero3", "zero3", "deepspeed_zero3"]
WHOLE = ["pytorch_ddp", "zero2", "simple_ddp"]


def saved(folder: Path, family: str = "mistral", dtype: str = "float32", **config: Any) -> Path:
    """A model folder in several files, as the hub has them (experts apart)."""
    _, tokenizer = model_of()
    spec = ModelSpec(name=f"tiny:{family}", config={**CONFIG, **config})
    build_model(spec, tokenizer, dtype=dtype, labels={}, seed=7).save_pretrained(folder, max_shard_size="30KB")  # type: ignore[operator]
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def check(found: list[Any], names: list[str], world: int) -> None:
    for name in names:
        ranks = [f[name] for f in found]
        assert all("error" not in r for r in ranks), ranks
        assert all(r["bad"] == [] and r["same_digest"] and r["trained_as"] and r["published"] for r in ranks), (
            name,
            ranks,
        )
        if name.partition(":")[0] in PARTS:
            assert [r["how"] for r in ranks] == ["parts"] * world
            assert all(r["read"] == 0 for r in ranks[1:]), (name, ranks)
            assert all(r["kept"] < 1.3 * r["total"] / world + r["whole"] for r in ranks), (name, ranks)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("lora", [False, True])
def test_files_give_what_transformers_gives(world: int, lora: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", intermediate_size=61)
    names = [*PARTS, *WHOLE, *(["pytorch_zero3:sharded"] if lora else [])]
    found = run_ranks("loads", world, tmp_path, module="loads", model=folder, names=names, lora=lora)
    check(found, names, world)
    assert all(f[n]["how"] == "whole" for f in found for n in WHOLE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_weights_fused_experts_and_other_dtypes(dtype: str, tmp_path: Path) -> None:
    for family, config in (("glm4_moe", {"num_hidden_layers": 3}), ("llama", {"tie_word_embeddings": True})):
        mixed = (
            family == "glm4_moe" and dtype == "bfloat16"
        )  # DeepSpeed trains in one dtype; the routers are in float32
        names = ["pytorch_zero3", "zero3", "pytorch_ddp", *([] if mixed else ["deepspeed_zero3"])]
        folder = saved(tmp_path / family, family, "bfloat16", **config)
        found = run_ranks("loads", 2, tmp_path, module="loads", model=folder, names=names, dtype=dtype)
        check(found, names, 2)


def test_a_config_gives_what_one_process_draws(tmp_path: Path) -> None:
    names = [*PARTS, *WHOLE]
    for lora in (False, True):
        found = run_ranks(
            "loads",
            2,
            tmp_path,
            limit_s=240,
            module="loads",
            model="tiny:mistral",
            config=CONFIG,
            names=names,
            lora=lora,
        )
        check(found, names, 2)


@pytest.mark.parametrize("bug", ["dropped", "other_rows"])
def test_a_part_that_went_astray_is_seen(bug: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    found = run_ranks("loads", 2, tmp_path, module="loads", model=folder, names=["pytorch_zero3"], plant=bug)
    assert all("differ from those that rank 0 read" in f["pytorch_zero3"]["error"] for f in found), found
    assert all(f["pytorch_zero3"]["exit_code"] == 1 for f in found)


def test_weights_of_another_layer_would_be_seen_here(tmp_path: Path) -> None:
    """The comparison with transformers sees a name that was mixed up, which no checksum of what was read can."""
    folder = saved(tmp_path / "model")
    (first, _) = run_ranks("loads", 2, tmp_path, module="loads", model=folder, names=["zero3"], plant="swapped")
    assert (
        first["zero3"]["bad"] == ["model.model.layers.0.self_attn.k_proj.weight"] and not first["zero3"]["same_digest"]
    )


def test_all_ranks_hear_why_one_cannot_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    found = run_ranks(
        "loads", 3, tmp_path, limit_s=240, module="loads", model=folder, names=["pytorch_zero3"], plant="unreadable"
    )
    assert all("cannot be read: [Errno 5]" in f["pytorch_zero3"]["error"] for f in found), found
    assert all(f["pytorch_zero3"]["exit_code"] == 3 for f in found)


def test_all_ranks_refuse_damaged_files(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"]["model.norm.weight"]
    file.write_bytes(file.read_bytes()[:-1])
    for name in ("zero3", "pytorch_ddp"):
        found = run_ranks("refusal", 2, tmp_path, limit_s=240, module="loads", model=folder, name=name)
        assert all(
            f and f["exit_code"] == 3 and "is truncated" in f["error"] and file.name in f["error"] for f in found
        ), found


def test_ranks_end_when_the_reader_is_killed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    with pytest.raises(AssertionError, match=r"rank 1, exit ") as caught:
        run_ranks(
            "loads", 3, tmp_path, limit_s=240, module="loads", model=folder, names=["pytorch_zero3"], plant="killed"
        )
    assert "rank 2, exit " in str(caught.value)
