"""Products in 8-bit floats on a GPU: those of a CPU, also in compiled layers, and without a sync with the host."""

from __future__ import annotations

import pytest
import torch

from allranks.train.models.float8 import cast_rows, scaled_product, use_float8
from allranks.train.models.lora import fuse_lora
from tests.gpu.test_lora import run
from tests.gpu.test_qlora import SIZES
from tests.unit.test_lora import adapted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@pytest.mark.parametrize("rows", [300, 4096])
def test_products_in_float8_are_those_of_a_cpu(device: str, rows: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(rows, 256).bfloat16(), torch.randn(512, 256).bfloat16()
    for a, b in ((x, w), (torch.randn(rows, 512).bfloat16(), w.t())):
        wanted = scaled_product(cast_rows(a), cast_rows(b), torch.bfloat16)
        found = scaled_product(cast_rows(a.to(device)), cast_rows(b.to(device)), torch.bfloat16)
        torch.testing.assert_close(found.cpu(), wanted, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_in_float8(device: str, compiled: bool) -> None:
    if compiled and device != "cuda":
        pytest.skip("a rehearsal on the CPU does not compile")
    exact, ours = (adapted(config=SIZES, dtype=torch.bfloat16).to(device) for _ in range(2))
    fuse_lora(exact)
    fuse_lora(ours)
    use_float8(ours, torch.device(device))
    blocks = [m.base_model.model.model.layers[0].mlp for m in (exact, ours)]
    x = torch.randn(2, 304, 256, device=device).bfloat16()
    wanted, found = run(blocks[0], x), run(torch.compile(blocks[1]) if compiled else blocks[1], x)
    for a, b in zip(found, wanted, strict=True):
        assert 0.001 < (a - b).float().norm() / b.float().norm() < 0.15
    if device == "cuda" and not compiled:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(blocks[1], x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
