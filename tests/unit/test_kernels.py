"""The cheaper operations do exactly what the plain ones do."""

from __future__ import annotations

import pytest
import torch

from allranks.planning.memory.activations import INDEXED_DROPOUT
from allranks.spec.records import AdapterSpec
from allranks.train.models import adapter_dropout
from allranks.train.models.adapter_dropout import LowMemoryDropout, drop_, dropped
from allranks.train.models.adapters import add_adapter
from allranks.train.strategies.base import total_norm


@pytest.mark.parametrize("p", [0.001, 0.05, INDEXED_DROPOUT, 0.2, 0.5])
def test_dropout_drops_and_scales_as_asked(p: float) -> None:
    torch.manual_seed(0)
    layer, x = LowMemoryDropout(p), torch.ones(1000, 1003, requires_grad=True)
    y = layer(x)
    share = float((y == 0).float().mean())
    assert abs(share - p) < 5 * (p * (1 - p) / 1_003_000) ** 0.5
    assert abs(float(y.mean()) - 1.0) < 0.003
    y.sum().backward()
    assert torch.equal(x.grad, y)  # type: ignore[arg-type]
    assert not torch.equal(layer(x), y)
    torch.manual_seed(0)
    assert torch.equal(layer(x), y)
    assert layer.eval()(x) is x
    assert LowMemoryDropout(0.0)(x) is x


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_neighbours_are_dropped_independently(p: float) -> None:
    torch.manual_seed(1)
    zero = (LowMemoryDropout(p)(torch.ones(2_000_000)) == 0).double()
    for shift in (1, 2, 3, 4, 8):
        together = float((zero[:-shift] * zero[shift:]).mean())
        assert abs(together - p * p) < 0.002 * 2 * p, shift


def test_every_position_is_dropped_as_often() -> None:
    """Also the first and the last, and where one round of numbers does not reach the end."""
    torch.manual_seed(2)
    counts = torch.zeros(7)
    for _ in range(20_000):
        counts[adapter_dropout._positions(7, 0.1)] += 1
    assert float((counts / 20_000 - 0.1).abs().max()) < 0.01


def test_positions_go_on_where_a_round_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_dropout.math, "sqrt", lambda x: -x / 10)
    torch.manual_seed(3)
    positions = adapter_dropout._positions(100_000, 0.05)
    assert len(positions) == len(set(positions.tolist())) and abs(len(positions) - 5000) < 350
    assert int(positions[0]) >= 0 and 99_000 < int(positions[-1]) < 100_000
    assert torch.equal(positions, positions.sort().values)


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_what_is_dropped_is_the_same_for_copies_and_in_place(p: float) -> None:
    torch.manual_seed(4)
    layer, x = LowMemoryDropout(p), torch.randn(3, 50, 70)
    which, _ = layer.draw(x)
    copy = dropped(x, which)
    assert torch.equal(drop_(x.clone(), which), copy) and bool((x != 0).all())
    assert torch.equal(dropped(x.transpose(0, 1), which), dropped(x.transpose(0, 1).contiguous(), which))
    assert 0 < int((copy == 0).sum()) < copy.numel()


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


def test_the_norm_of_joined_gradients_is_that_of_each() -> None:
    """Sharded strategies join gradients to long tensors, for which torch's own norm on a CPU is wrong by 6e-5 and
    more."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, generator=generator) * 1e-3 for n in (7, 1024, 1_000_003, 2_000_000)]
    joined = torch.cat(parts)
    for gradients in ([joined], parts, [joined.view(1, -1)]):
        assert float(total_norm(gradients, joined=True)) == pytest.approx(float(joined.double().norm()), rel=1e-6)
    assert not torch.isfinite(total_norm([*parts, torch.tensor([float("inf")])], joined=True))
