"""The cheaper operations do exactly what the plain ones do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from allranks.spec.records import AdapterSpec
from allranks.train.models.adapters import add_adapter
from allranks.train.models.losses import LowMemoryDropout, sum_cross_entropy


@pytest.mark.parametrize("ignored", [0, 7, 20])
def test_sum_cross_entropy_equals_torchs(ignored: int) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(20, 50) * 30).requires_grad_()
    other = logits.detach().clone().requires_grad_()
    targets = torch.randint(0, 50, (20,))
    targets[:ignored] = -100
    ours, theirs = (
        sum_cross_entropy(logits, targets, -100),
        F.cross_entropy(other, targets, ignore_index=-100, reduction="sum"),
    )
    (ours * 0.3).backward()
    (theirs * 0.3).backward()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(logits.grad, other.grad)


def test_dropout_drops_and_scales_as_asked() -> None:
    torch.manual_seed(0)
    layer, x = LowMemoryDropout(0.2), torch.ones(1000, 1003, requires_grad=True)
    y = layer(x)
    dropped = float((y == 0).float().mean())
    assert abs(dropped - 0.2) < 0.002
    assert abs(float(y.mean()) - 1.0) < 0.003
    y.sum().backward()
    assert torch.equal(x.grad, y)  # type: ignore[arg-type]
    assert not torch.equal(layer(x), y)
    torch.manual_seed(0)
    assert torch.equal(layer(x), y)
    assert layer.eval()(x) is x
    assert LowMemoryDropout(0.0)(x) is x


def test_neighbours_are_dropped_independently() -> None:
    torch.manual_seed(1)
    zero = (LowMemoryDropout(0.5)(torch.ones(2_000_000)) == 0).double()
    for shift in (1, 2, 3, 4, 8):
        together = float((zero[:-shift] * zero[shift:]).mean())
        assert abs(together - 0.25) < 0.002, shift


def test_lora_uses_it_and_saves_as_before() -> None:
    from tests.unit.test_model import SMALL, model_of, train_tokenizer

    assert SMALL
    tokenizer = train_tokenizer(["a b"], 300, classifier=False)
    model = add_adapter(
        model_of("mistral", tokenizer),
        AdapterSpec(type="lora", dropout=0.1, targets=["q_proj"]),
        classifier=False,
        base="b",
        seed=1,
    )
    assert sum(isinstance(m, LowMemoryDropout) for m in model.modules()) == 2
    assert not any(type(m) is torch.nn.Dropout and m.p > 0 for m in model.modules())


def test_the_fused_forward_is_pefts_own_up_to_rounding() -> None:
    from allranks.train.models.lora import fuse_lora
    from tests.unit.test_model import model_of, train_tokenizer

    tokenizer = train_tokenizer(["a b"], 300, classifier=False)
    spec = AdapterSpec(type="lora", r=4, alpha=16, targets=["q_proj", "down_proj"])
    model = add_adapter(model_of("llama", tokenizer), spec, classifier=False, base="b", seed=1).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(10, 40).reshape(2, 15)
    found = []
    for fused in (True, False):
        for module in model.modules():
            if "forward" in vars(module):
                del module.forward
        assert not fused or fuse_lora(model) == 4
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters() if p.requires_grad)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    fuse_lora(model)
    with torch.no_grad(), model.disable_adapter():
        off = model(ids).logits
    assert not torch.allclose(off, model(ids).logits)


def test_hooks_on_the_layers_within_are_called() -> None:
    """DeepSpeed's stage 3 gathers a layer's weights in them."""
    from tests.unit.test_model import model_of, train_tokenizer

    tokenizer = train_tokenizer(["a b"], 300, classifier=False)
    spec = AdapterSpec(type="lora", r=4, targets=["q_proj"])
    model = add_adapter(model_of("llama", tokenizer), spec, classifier=False, base="b", seed=1)
    (layer,) = [m for n, m in model.named_modules() if n.endswith("layers.0.self_attn.q_proj")]
    called: list[str] = []
    for name in ("lora_A.default", "lora_B.default", "base_layer"):
        handle = layer.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
        model(torch.arange(10)[None])
        handle.remove()
    assert called == ["lora_A.default", "lora_B.default", "base_layer"]
