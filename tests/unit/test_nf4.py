"""Weights in 4 bits: each is the nearest one that NF4 has, is packed as bitsandbytes does, and is proved."""

from functools import partial
from typing import Any

import pytest
import torch

from allranks.errors import AllranksError, ProofFailed, SpecError
from allranks.planning.model_checks import check_model
from allranks.spec import parse_spec
from allranks.train.models import nf4
from allranks.train.models.lora import fuse_lora
from allranks.train.models.nf4 import VALUES, dequantize, quantize
from allranks.train.models.quantized_base import prove_quantized, quantize_loaded, round_to_quantized
from tests.unit.test_lora import adapted, results


def nearest(weight: torch.Tensor) -> torch.Tensor:
    """The values of a weight in NF4, by a search in float64."""
    blocks = weight.double().view(len(weight), -1, 64)
    scales, values = blocks.abs().amax(-1, keepdim=True), torch.tensor(VALUES).double()
    at = ((blocks / scales.clamp_min(1e-38)).unsqueeze(-1) - values).abs().argmin(-1)
    return (values[at] * scales).view_as(weight).to(weight.dtype)


def a_weight() -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.randn(48, 256) * torch.linspace(0.1, 3, 48).unsqueeze(1)
    weight[3], weight[4, :64] = 0.0, 0.0
    return weight


@pytest.mark.parametrize("piece", [1 << 24, 1000])
def test_each_element_is_the_nearest_value(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(nf4, "NF4_PIECE", piece)
    weight = a_weight()
    packed, scales = quantize(weight, "nf4")
    wanted = nearest(weight)
    assert torch.equal(dequantize(packed, scales, torch.float32), wanted)
    assert torch.equal(dequantize(packed, scales, torch.bfloat16), wanted.bfloat16())
    firsts = torch.tensor(VALUES)[(packed[0] >> 4).long()]  # in the high bits, as bitsandbytes has them
    assert torch.equal(firsts * scales.view(torch.float32)[0].repeat_interleave(32), wanted[0, ::2])
    double, steps = quantize(weight, "nf4_double")
    assert steps.shape == (48, 8 + 4) and scales.shape == (48, 16)
    error, plain = ((found - weight).norm() for found in (dequantize(double, steps, torch.float32), wanted))
    assert error < 1.02 * plain


@pytest.mark.parametrize("mode", ["nf4", "nf4_double"])
def test_what_is_too_far_from_the_file_is_refused(mode: str) -> None:
    weight = a_weight()
    packed, scales = quantize(weight, mode)
    prove_quantized("w", weight, packed, scales, mode)
    swapped = packed.clone()
    swapped[7, 9] = 255 - swapped[7, 9]
    larger = scales.view(torch.float32).clone().mul_(1.4).view(torch.uint8) if mode == "nf4" else scales.roll(1, 0)
    for stored in ((swapped, scales), (packed, larger), (packed.roll(1, 0), scales), (packed, scales * 0 + 255)):
        with pytest.raises(ProofFailed, match=r"w: .* quantised elements differ"):
            prove_quantized("w", weight, *stored, mode)
    weight[0, 0] = torch.nan
    with pytest.raises(ProofFailed, match="not finite"):
        prove_quantized("w", weight, *quantize(weight, mode), mode)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("lora", [{}, {"lora_dropout": 0.3, "target_modules": ["q_proj", "v_proj", "down_proj"]}])
def test_layers_compute_as_those_with_the_same_values(lora: dict[str, Any], autocast: bool) -> None:
    """With and without adapter and fused forward; of a weight nothing wide is kept for backward."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    dtype = torch.bfloat16 if autocast else torch.float32
    for fused in (True, False):
        dense, packed = (adapted(config=sizes, dtype=dtype, **lora) for _ in range(2))
        if fused:
            fuse_lora(dense)
            fuse_lora(packed)
        round_to_quantized(dense, "nf4")
        for name, parameter in dense.named_parameters():
            parameter.data = parameter.data if ".lora_" in name else parameter.data.to(dtype)
        quantize_loaded(packed, "nf4")
        wide: list[torch.Size] = []
        sizes_kept = partial(lambda into, t: into.append(t.shape if t.is_floating_point() else ()) or t, wide)
        with torch.autograd.graph.saved_tensors_hooks(sizes_kept, lambda t: t):
            found = results(packed, autocast=autocast)
        assert all(map(torch.equal, found, results(dense, autocast=autocast)))
        assert not {(64, 64), (128, 64), (64, 128)} & set(wide)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"adapter": {"type": "none"}}, "adapter.type is none: weights in 4 bits cannot be trained"),
        ({"strategy": {"name": "zero3"}},
         "strategy zero3 keeps a block's weights in one tensor of one dtype; use one of"),
        ({"strategy": {"name": "deepspeed_zero2"}},
         "deepspeed_zero2 has not been tested with weights in 4 bits; use one of"),
        ({"model": {"quantize": "none", "float8": True}, "adapter": {"type": "none"}},
         "model.float8 is true, but adapter.type is none"),
        ({"model": {"float8": True}}, "model.float8 is true, but model.quantize is nf4: a weight has one form"),
        ({"model": {"quantize": "none", "float8": True}, "strategy": {"name": "deepspeed_zero2"}},
         "model.float8 is true, but strategy deepspeed_zero2"),
        ({"model": {"name": "tiny:glm4_moe", "quantize": "none", "float8": True}},
         "model.float8 does not suit .* experts"),
        ({"model": {"attention": "auto"}, "train": {"deterministic": True}}, "auto, which chooses by timing, but"),
        ({"model": {"name": "tiny:glm4_moe"}}, "its experts, which are most of its weights"),
        ({"model": {"name": "tiny:mistral", "config": {"hidden_size": 96}}}, "hidden size 96 is not a multiple of 64"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_by_plan(sections: dict[str, Any], message: str) -> None:
    spec = {"name": "q", "data": {"source": "builtin:news"}, "adapter": {"type": "lora"}, **sections}
    spec["model"] = {"name": "tiny:mistral", "quantize": "nf4", **spec.get("model", {})}
    with pytest.raises(SpecError, match=message) as raised:
        check_model(parse_spec(spec))
    assert isinstance(raised.value, AllranksError)
