"""LoRA on a GPU in bfloat16: as close to float32 as PEFT's, and without a sync with the host."""

from typing import Any

import pytest
import torch

from allranks.train.models.lora import fuse_lora
from allranks.train.models.lora_experts import GpuGroups, fuse_expert_lora
from tests.unit.test_lora import HIDDEN, adapted, moe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]
Result = list[torch.Tensor]


def run(part: Any, x: torch.Tensor, *args: torch.Tensor) -> Result:
    x = x.detach().requires_grad_()
    out = part(x, *args)
    slope = torch.linspace(-1, 1, out.numel(), device=x.device).reshape(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, [x, *(p for p in part.parameters() if p.requires_grad)], slope)]


def ratio(found: Result, plain: Result, wanted: Result) -> float:
    """Mean ratio of the distances of `found` and `plain` to `wanted`."""
    own, theirs = (
        torch.stack([(a.float().cpu() - b).norm() for a, b in zip(one, wanted, strict=True)]) for one in (found, plain)
    )
    return float((own / theirs).log().mean().exp())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_layers_of_one_input(device: str, dropout: float) -> None:
    plain, ours = (adapted(dtype=torch.bfloat16, lora_dropout=dropout).to(device) for _ in range(2))
    fuse_lora(ours)
    parts = [m.base_model.model.model.layers[0].mlp for m in (plain, ours)]
    x = torch.randn(2, 300, HIDDEN).bfloat16()
    if dropout:  # masks differ: the mean over many
        drawn = [torch.stack([run(part, x.to(device))[0].detach().float() for _ in range(200)]) for part in parts]
        mean, other = (each.mean(0) for each in drawn)
        error = (sum(each.var(0) for each in drawn) / 200).sqrt()  # of the difference of the means
        assert bool(((mean - other).abs() < 6 * error + 0.01 * mean.abs().mean()).all())
        return
    exact = adapted(dtype=torch.bfloat16).float().base_model.model.model.layers[0].mlp
    usual, found = (run(part, x.to(device)) for part in parts)
    assert ratio(found, usual, run(exact, x.float())) < 2  # PEFT's products of adapters are in float32


def test_experts(device: str) -> None:
    exact, plain, ours = (moe("glm4_moe", torch.bfloat16) for _ in range(3))
    fuse_expert_lora(ours)
    x, chosen, shares = torch.randn(400, HIDDEN).bfloat16(), torch.arange(800).reshape(400, 2) % 7, torch.rand(400, 2)
    # the eighth expert has no tokens
    parts = [m.base_model.model.model.layers[0].mlp.experts for m in (exact.float(), plain.to(device), ours.to(device))]
    on_device = [t.to(device) for t in (x, chosen, shares)]
    if device == "cuda":
        assert GpuGroups.fits(on_device[0], parts[2].get_param())
    usual, found = (run(part, *on_device) for part in parts[1:])
    assert all(bool(torch.isfinite(t).all()) for t in found)
    assert ratio(found, usual, run(parts[0], x.float(), chosen, shares)) < 1.3


@pytest.mark.parametrize("part", ["mlp", "experts"])
def test_no_sync_with_the_host(cuda: str, part: str) -> None:
    model = (moe("glm4_moe", torch.bfloat16) if part == "experts" else adapted(dtype=torch.bfloat16)).to(cuda)
    fuse_lora(model)
    fuse_expert_lora(model)
    layer = model.base_model.model.model.layers[0].mlp
    args = [torch.randn(64, HIDDEN, device=cuda).bfloat16()]
    if part == "experts":
        layer = layer.experts
        args += [torch.arange(128, device=cuda).reshape(64, 2) % 8, torch.rand(64, 2, device=cuda)]
    run(layer, *args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(layer, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
