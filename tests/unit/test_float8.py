"""Products in 8-bit floats next to LoRA: those of torch's scaled products, the same in every way they are computed."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from allranks.errors import ProofFailed
from allranks.train.distributed import SINGLE_PROCESS
from allranks.train.models import float8
from allranks.train.models.block_forward import Compilation, set_block_forward
from allranks.train.models.float8 import cast_rows, scaled_product, use_float8, verify_products, without_float8
from allranks.train.models.lora import fuse_lora
from allranks.train.models.losses import LossModel
from tests import sampling
from tests.unit.test_lora import adapted, results
from tests.unit.test_packed_attention import packed_batch

CPU, DRAW = torch.device("cpu"), torch.Generator()
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 300}


def model_of(fused: bool = True, **lora: Any) -> Any:
    model = adapted(config=SIZES, **lora)
    model.config.use_cache = False
    fuse_lora(model) if fused else None
    layers = 2 * 7
    assert use_float8(model, CPU)[0].startswith(f"model.float8: {layers} linear layers")
    return model


@pytest.mark.parametrize("piece", [1 << 24, 1000])
def test_products_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Called as on a GPU: torch has these products for CPUs, too."""
    monkeypatch.setattr(float8, "NF4_PIECE", piece)
    torch.manual_seed(0)
    x = torch.randn(40, 128).bfloat16() * torch.linspace(1e-5, 9, 40)[:, None].bfloat16()
    w = torch.randn(48, 128).bfloat16()
    x[3] = 0
    a, b = cast_rows(x), cast_rows(w)
    assert a.values.float().abs().max() == 448 and b.values.is_contiguous() and cast_rows(w.t()).values.is_contiguous()
    found, exact = scaled_product(a, b, torch.bfloat16).float(), x.float() @ w.float().t()
    how = {"scale_a": a.scales, "scale_b": b.scales.t(), "out_dtype": torch.bfloat16, "use_fast_accum": True}
    theirs = torch._scaled_mm(a.values, b.values.t(), **how)
    torch.testing.assert_close(found, theirs.float(), rtol=1e-2, atol=1e-3)
    off = (found - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(1e-9)
    assert off.max() < 0.06  # of each row, however large it is


def alone(model: Any) -> list[torch.Tensor]:
    """The outputs of layers that read one input, its gradient, and those of their adapters: nothing is cast twice."""
    attention = model.base_model.model.model.layers[0].self_attn
    x = torch.randn(2, 18, 64, generator=DRAW.manual_seed(1))
    x.requires_grad_()
    model.zero_grad()
    torch.manual_seed(3)
    outputs = [getattr(attention, f"{name}_proj")(x) for name in "qkv"]
    sum(out.square().sum() for out in outputs).backward()  # type: ignore[union-attr]
    gradients = [p.grad for p in attention.parameters() if p.grad is not None]
    return [*outputs, x.grad, *gradients]  # type: ignore[list-item]


def apart(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    pairs = zip(found, wanted, strict=True)
    return [float((one - other).detach().norm() / other.detach().norm()) for one, other in pairs]


MORE = [{"lora_dropout": 0.3}, {"target_modules": ["q_proj", "v_proj", "down_proj"]}]


@pytest.mark.parametrize("lora", [{}, *(pytest.param(how, marks=pytest.mark.full) for how in MORE)])
def test_layers_are_computed_in_float8_in_every_way(lora: dict[str, Any]) -> None:
    fused, plain = model_of(**lora), model_of(fused=False, **lora)
    single, found = alone(fused), results(fused)
    assert max(apart(single, alone(plain))) < 1e-5
    for mode, backend in (("selective", None), ("full", None), ("none", "aot_eager"))[: 2 + sampling.ALL]:
        same = model_of(**lora)
        how = Compilation(static=True, report=pytest.fail, backend=backend) if backend and not lora else None
        set_block_forward(same, mode, how)
        assert max(apart(results(same), found)) < 1e-5
    with without_float8(fused):
        exact = alone(fused), results(fused)
    assert max(apart(exact[0], alone(adapted(config=SIZES, **lora)))) < 1e-5
    for off, most in ((apart(single, exact[0]), 0.07), (apart(found, exact[1]), 0.3)):
        assert min(off) > 1e-3 and max(off) < most


def test_wrong_products_are_refused_and_right_ones_in_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LossModel(model_of(), classifier=False)
    verify = partial(verify_products, SINGLE_PROCESS, model, packed_batch())
    off, _, change = verify()
    assert 0.03 < off < 0.06 and 0 < abs(change) < 0.05 and model.training
    for name, weight in model.named_parameters():  # a model whose logits small errors change: by how much is no measure
        weight.data *= 8 if "base_layer" in name else 1
    assert verify()[0] < 0.06
    usual = float8._cast_rows
    wrong = {
        "roll": lambda m: float8.Cast(usual(m).values, usual(m).scales.roll(1)),
        "nan": lambda m: usual(m * math.nan),
    }
    down = model.model.base_model.model.model.layers[1].mlp.down_proj.base_layer.weight  # type: ignore[union-attr]
    for cast in wrong.values():  # also of one layer in one direction, which few logits would show
        monkeypatch.setattr(
            float8, "_cast_rows", lambda m, cast=cast: (cast if m.data_ptr() == down.data_ptr() else usual)(m)
        )
        with pytest.raises(
            ProofFailed, match=r"products of .*layers\.1\.mlp\.down_proj.* differ by .* at most 10% is allowed"
        ):
            verify()
