"""QLoRA on a GPU: the bits of a CPU, layers as those with the same values, memory as planned, no sync with the host."""

import pytest
import torch

from allranks.train.models.lora import fuse_lora
from allranks.train.models.nf4 import dequantize, quantize
from allranks.train.models.quantized_base import prove_quantized, quantize_loaded, round_to_quantized
from tests.gpu.test_lora import run
from tests.unit.test_lora import adapted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "head_dim": 64}


@pytest.mark.parametrize("mode", ["nf4", "nf4_double"])
def test_weights_have_the_bits_of_a_cpu(device: str, mode: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4096, 11008 if device == "cuda" else 256)
    stored, there = quantize(weight, mode), quantize(weight.to(device), mode)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(stored, there, strict=True))
    prove_quantized("w", weight.to(device), *there, mode)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize(*stored, dtype), dequantize(*there, dtype).cpu())


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_compute_as_those_with_the_same_values(device: str, compiled: bool) -> None:
    if compiled and device != "cuda":
        pytest.skip("a rehearsal on the CPU does not compile")
    dense, packed = (adapted(config=SIZES, dtype=torch.bfloat16) for _ in range(2))
    round_to_quantized(dense, "nf4")
    quantize_loaded(packed, "nf4")
    blocks = []
    for model in (dense, packed):
        fuse_lora(model)
        for name, parameter in model.named_parameters():
            if ".lora_" not in name and parameter.is_floating_point():
                parameter.data = parameter.data.bfloat16()
        blocks.append(model.to(device).base_model.model.model.layers[0].mlp)
    x = torch.randn(2, 300, 256, device=device).bfloat16()
    wanted = run(blocks[0], x)
    for a, b in zip(run(torch.compile(blocks[1]) if compiled else blocks[1], x), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05 if compiled else 0, atol=0.05 if compiled else 0)


def test_no_weight_is_dense_between_passes_and_nothing_waits(cuda: str) -> None:
    packed = adapted(config={**SIZES, "hidden_size": 1024, "intermediate_size": 4096}, dtype=torch.bfloat16)
    quantize_loaded(packed, "nf4")
    fuse_lora(packed)
    block = packed.to(cuda).base_model.model.model.layers[0].mlp
    x = torch.randn(64, 1024, device=cuda).bfloat16()
    run(block, x)
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        block(x.requires_grad_())  # its graph is freed at once
        torch.cuda.reset_peak_memory_stats()
        out = block(x)
        assert torch.cuda.memory_allocated() - before < 2 * 1024 * 4096  # one weight in bfloat16
        del out
    finally:
        torch.cuda.set_sync_debug_mode("default")
