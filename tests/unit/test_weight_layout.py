"""Where the elements of the model's tensors lie in the files: as transformers converts them, or not described at all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from allranks.train.models import weight_layout, weight_sources
from allranks.train.models.weight_layout import TracedTensor, ranges_of
from allranks.train.models.weight_sources import DirectReads, FileSource, WeightConversion, conversions_for, describe
from allranks.utils.safetensors_files import StoredTensor, stored_tensors
from tests.dist.architecture_configs import CONFIGS, DENSE, MOE
from tests.dist.making import save_family

MORE_CONFIGS: dict[str, dict[str, Any]] = {
    "granitemoe": {**DENSE, "num_local_experts": 5, "num_experts_per_tok": 2},
    "ernie4_5_moe": {**DENSE, "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    "dots1": {
        **DENSE, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1,
    },
    "hunyuan_v1_moe": {**DENSE, "head_dim": 8, "num_experts": 5, "moe_topk": 2},
    "minimax_m2": {**DENSE, "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_next": {
        **DENSE, **MOE, "head_dim": 8, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip
SEPARATE = [
    "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "olmoe", "deepseek_v3", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2",
    "qwen3_next",
]  # fmt: skip
STACKED = ["gpt_oss", "granitemoe"]  # in the files, too


def saved(folder: Path, family: str, dtype: torch.dtype, **how: Any) -> Path:
    config = {**CONFIGS, **MORE_CONFIGS}[family]
    sizes = {k: 5 for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in config}
    return save_family(folder, family, {**config, **sizes, "vocab_size": 40}, dtype, **how)


def opened(folder: Path, dtype: torch.dtype) -> tuple[FileSource, Any]:
    """The source of the weights, and the same model as transformers loads it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = stored_tensors(folder, "m")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    source = FileSource(stored, conversions_for(model, stored, dtype, "m"), model)
    return source, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def rows(direct: DirectReads, name: str, shape: torch.Size, first: int, count: int) -> torch.Tensor:
    """Rows of a tensor as a rank reads them."""
    start, stop = first * shape[1:].numel(), (first + count) * shape[1:].numel()
    pieces = [direct.read(name, low, high).clone() for low, high in direct.ranges(name, start, stop, 1)]
    return torch.cat(pieces).view(count, *shape[1:]) if pieces else torch.empty(0, *shape[1:])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", SEPARATE + STACKED)
def test_rows_of_every_mixture_of_experts_are_those_of_transformers(
    family: str, sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sources, "PIECE_BYTES", 5000)
    monkeypatch.setattr(weight_sources, "OPEN_FILES", 2)
    for stored, dtype in ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        folder = saved(tmp_path / str(dtype), family, stored, max_shard_size="20KB" if sharded else "1GB")
        assert (len(list(folder.glob("*.safetensors"))) > 1) == sharded
        source, theirs = opened(folder, dtype)
        known, wanted, ranks = describe(source), theirs.state_dict(), 3
        assert set(known.places) == set(source.names)
        stacked = [n for n in source.names if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
        assert stacked and all(wanted[n].shape[0] == 5 for n in stacked)
        read = []
        for rank in range(ranks):
            direct = DirectReads(known, {n: t.dtype for n, t in wanted.items()})
            for name in source.names:
                shape = wanted[name].shape
                each = -(-shape[0] // ranks)
                first = min(rank * each, shape[0])
                own = rows(direct, name, shape, first, min(each, shape[0] - first))
                assert torch.equal(own, wanted[name][first : first + each]), (name, rank)
            direct.close()
            read.append(direct.read_bytes)
        assert sum(read) == sum(entry.bytes for entry in stored_tensors(folder, "m").values())
        assert max(read) < 0.5 * sum(read)


def numbered(*shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    sizes = [math.prod(s) for s in shapes]
    return {f"t{i}": torch.arange(n).view(shapes[i]) + sum(sizes[:i]) for i, n in enumerate(sizes)}


def untraced(traced: TracedTensor, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    parts = [stored[name].flatten()[start : start + length] for name, start, length in traced.ranges]
    return torch.cat(parts).view(traced.shape)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_functions_move_elements_as_those_of_torch(dim: int) -> None:
    stored = numbered((2, 3, 4), (2, 3, 4), (2, 3, 4))
    real, traced = list(stored.values()), [TracedTensor.of(n, t.shape) for n, t in stored.items()]
    for make in (
        lambda x: torch.stack(x, dim=dim),
        lambda x: torch.cat(x, dim),
        lambda x: torch.cat([torch.stack(x[:2], dim=0), torch.stack(x[1:])], dim=dim).contiguous(),
        lambda x: torch.cat(
            torch.split(torch.cat(x, dim=dim), [2, 0, 2, 3 * x[0].shape[dim] - 4], dim=dim)[::2], dim=0
        ),
    ):
        assert torch.equal(untraced(make(traced), stored), make(real))
    for make_all in (
        lambda x: torch.chunk(torch.cat(x, dim=dim), 4, dim=dim),
        lambda x: torch.chunk(x[0], 3, dim),
        lambda x: torch.split(torch.stack(x, dim=1), 2, dim=dim),
    ):
        found, right = make_all(traced), make_all(real)
        assert len(found) == len(right)
        for a, b in zip(found, right, strict=True):
            assert torch.equal(untraced(a, stored), b)


def test_only_moves_of_long_ranges_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import (
        Chunk,
        Concatenate,
        Interleave,
        MergeModulelist,
        Transpose,
        WeightConverter,
    )

    stored = {
        f"x.{i}.{k}": StoredTensor(file=Path("f"), dtype="F32", shape=(4, 6), bytes=96, offset=0)
        for i in range(3)
        for k in "ab"
    }
    parts = [(f"x.*.{k}", f"x.{i}.{k}") for k in "ab" for i in range(3)]

    class Model:
        config = None

    def described(*operations: Any, parts: list[tuple[str, str]] = parts, targets: str | list[str] = "y") -> Any:
        rule = WeightConverter(list(dict.fromkeys(p for p, _ in parts)), targets, operations=list(operations))
        return WeightConversion("y", rule, parts).ranges(stored, Model())

    found = described(MergeModulelist(dim=0), Concatenate(dim=1))["y"]
    assert found == [(f"x.{i}.{k}", 0, 24) for i in range(3) for k in "ab"]
    only = parts[:1]
    assert described(Chunk(dim=0), parts=only, targets=["y", "z"]) == {
        "y": [("x.0.a", 0, 12)],
        "z": [("x.0.a", 12, 12)],
    }
    assert described(Transpose(0, 1), parts=only) == {}
    assert described(Interleave(dim=0), parts=only) == {}
    assert described(MergeModulelist(dim=0), parts=parts[:3]) != {}
    assert described(MergeModulelist(dim=0), Transpose(1, 2), parts=parts[:3]) == {}

    class Doubled(MergeModulelist):
        def convert(self, *args: Any, **more: Any) -> Any:
            return {name: tensor * 2 for name, tensor in super().convert(*args, **more).items()}

    assert described(Doubled(dim=0), parts=parts[:3]) == {}
    rows_apart = MergeModulelist(dim=0), Concatenate(dim=2)
    assert described(*rows_apart) == {}  # 24 ranges of 6 elements
    monkeypatch.setattr(weight_layout, "LEAST_ELEMENTS", 6)
    assert len(described(*rows_apart)["y"]) == 24
    monkeypatch.setattr(weight_layout, "MOST_RANGES", 11)
    assert described(*rows_apart) == {}
    assert ranges_of(torch.ones(2), 1) == []


def test_stored_dtypes_may_differ_within_a_tensor(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3_moe", torch.bfloat16)
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as stream:
        tensors = {n: stream.get_tensor(n) for n in stream.keys()}  # noqa: SIM118 - it is not a dict
    first = "model.layers.0.mlp.experts.1.up_proj.weight"
    save_file({n: t.float() * 1.001 if n == first else t for n, t in tensors.items()}, file, {"format": "pt"})
    for dtype in (torch.float32, torch.bfloat16):
        source, theirs = opened(folder, dtype)
        known, wanted = describe(source), theirs.state_dict()
        name = "model.layers.0.mlp.experts.gate_up_proj"
        assert {place.dtype for place in known.places[name]} == {"BF16", "F32"}
        direct = DirectReads(known, {n: t.dtype for n, t in wanted.items()})
        assert torch.equal(rows(direct, name, wanted[name].shape, 0, 5), wanted[name])
        assert torch.equal(rows(direct, name, wanted[name].shape, 1, 1), wanted[name][1:2])
        assert torch.equal(source.take(name), wanted[name])
        direct.close()
