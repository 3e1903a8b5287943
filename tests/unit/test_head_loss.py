"""The loss in parts equals the loss of all logits, in value and gradients, for every kind of output projection."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.planning.memory import activations
from allranks.planning.memory.activations import MicroBatch as FitBatch
from allranks.planning.memory.activations import logits_bytes, loss_chunk_tokens
from allranks.planning.memory.model_config import read_model_config
from allranks.planning.memory.weights import shapes_of
from allranks.spec.records import AdapterSpec
from allranks.train.models import precision
from allranks.train.models.adapters import add_adapter
from allranks.train.models.losses import LossModel
from tests.unit.test_packed_attention import CPU, gradients, model_of, packed_batch, single

LORA = AdapterSpec(type="lora", r=4, targets=["q_proj", "v_proj"])
HEAD = AdapterSpec(type="lora", r=4, targets=["q_proj", "lm_head"])
SAVED = AdapterSpec(type="lora", r=4, targets=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of 16 tokens at a time."""
    monkeypatch.setattr(activations, "MIN_LOSS_CHUNK", 16)
    monkeypatch.setitem(activations.LOSS_CHUNK_BYTES, "cpu", 1)


def whole(model: LossModel) -> LossModel:
    model._head = None
    return model


def both_ways(make: Any) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    found = []
    for change in (lambda m: m, whole):
        model = change(LossModel(make(), classifier=False))
        loss = model(packed_batch())
        (loss * 0.3).backward()
        found.append((loss.detach(), gradients(model)))
    return found


def adapted(spec: AdapterSpec, family: str = "mistral", **config: Any) -> Any:
    model = add_adapter(model_of(family, **config), spec, classifier=False, base="b", seed=1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05, generator=torch.Generator().manual_seed(3))
    return model


CASES = {
    "trained": lambda: model_of("mistral", tie_word_embeddings=False),
    "tied": lambda: model_of("mistral", tie_word_embeddings=True), "frozen": lambda: adapted(LORA),
    "with an adapter": lambda: adapted(HEAD), "trained in full beside adapters": lambda: adapted(SAVED),
    "with a bias": lambda: model_of("phi"), "multiplied afterwards": lambda: model_of("granite", logits_scaling=0.25),
    "multiplied afterwards, with an adapter": lambda: adapted(
        HEAD, "cohere", logit_scale=3.0, tie_word_embeddings=False
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_all_logits(case: str, small_chunks: None) -> None:
    (mine, ours), (its, theirs) = both_ways(lambda: CASES[case]().eval())
    torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-4)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max() + 1e-3))


def test_mixed_precision_gives_gradients_as_near_as_before(small_chunks: None) -> None:
    """The weight's gradient is added in float32, nearer to the exact one than that of all logits in bfloat16."""

    def mixed() -> Any:
        model = model_of("mistral", tie_word_embeddings=False)
        assert precision.use_autocast(model, torch.bfloat16, CPU)
        return model

    exact = LossModel(model_of("mistral", tie_word_embeddings=False), classifier=False)
    (exact(packed_batch()) * 0.3).backward()
    wanted = gradients(exact)["model.lm_head.weight"]
    (mine, ours), (its, theirs) = both_ways(mixed)
    torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-3)
    off = [float((g["model.lm_head.weight"] - wanted).norm() / wanted.norm()) for g in (ours, theirs)]
    assert off[0] <= 1.05 * off[1] < 0.02, off


def test_a_batch_without_targets_has_loss_0_and_gradients() -> None:
    """Every rank takes part in communication, whatever its rows are."""
    model = LossModel(model_of("mistral"), classifier=False)
    batch = single(torch.arange(10, 16))
    batch.targets.fill_(-100)
    loss = model(batch)
    loss.backward()
    assert float(loss.detach()) == 0 and float(model.token_losses(batch).sum()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_soft_capped_logits_keep_the_usual_way(small_chunks: None) -> None:
    model = LossModel(model_of("gemma3_text", final_logit_softcapping=20.0), classifier=False)
    assert model._head is None and "more than a factor" in model.whole_logits
    logits, targets = model.token_logits(packed_batch())
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    wanted.backward()
    theirs = gradients(model)
    model.zero_grad()
    loss = model(packed_batch())
    loss.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradients(model), theirs)


class LiveLogits(TorchDispatchMode):
    """Records the most bytes of tensors with a last dimension of the vocabulary that one operation reads and writes."""

    def __init__(self, vocabulary: int, model: nn.Module) -> None:
        super().__init__()
        self.vocabulary, self.bytes = vocabulary, 0
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, out))
        logits = [t for t in leaves if isinstance(t, torch.Tensor) and t.ndim >= 2 and t.shape[-1] == self.vocabulary]
        found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in logits}
        self.bytes = max(self.bytes, sum(size for place, size in found.items() if place not in self.weights))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
def test_logits_that_exist_are_those_of_the_estimate(dtype: torch.dtype) -> None:
    vocabulary, length = 20_000, 1024
    model = model_of("mistral", vocab_size=vocabulary, tie_word_embeddings=False).to(dtype)
    loss_model = LossModel(model, classifier=False)
    batch = single(torch.randint(4, 250, (length,)))
    batch.targets.copy_(batch.input_ids)
    shapes = shapes_of(read_model_config(model.config.to_dict(), "mistral"))
    seen = FitBatch(sequences=1, length=length, element=dtype.itemsize, device="cpu")
    chunk = loss_chunk_tokens(vocabulary, "cpu")
    assert chunk < length
    with LiveLogits(vocabulary, model) as live:
        loss_model(batch).backward()
    # log_softmax converts logits in bfloat16, which exist beside its input and output
    beside = 0 if dtype == torch.float32 else chunk * vocabulary * 2
    assert logits_bytes(shapes, seen) == pytest.approx(live.bytes + beside, rel=0.01)
    with LiveLogits(vocabulary, model) as live:
        whole(loss_model)(batch).backward()
    assert live.bytes >= 1.9 * logits_bytes(shapes, seen)
