"""A training step does not wait for the device: no value of a tensor is read on the host. Counted on the CPU, where
reading is the same call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.spec.records import ModelSpec, TrainSpec
from allranks.train.data.batches import Batch, packed_rows
from allranks.train.data.tokenization import train_tokenizer
from allranks.train.loop import adamw
from allranks.train.models.losses import LossModel
from allranks.train.models.packed_attention import use_packed_attention
from allranks.train.strategies.base import clip_and_update
from tests.dist.making import build_model

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.is_nonzero)
"""Operations after which a host waits for a GPU."""
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 1, 2]])


class Reads(TorchDispatchMode):
    """Counts values of tensors that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in READS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["hello world 123"], 300, classifier=False)


def made(name: str, tokenizer: Any, *, packed: bool = False) -> LossModel:
    model = build_model(ModelSpec(name=name, config=SMALL), tokenizer, dtype="float32", labels={}, seed=1)
    if packed:
        assert use_packed_attention(model, torch.device("cpu"), torch.float32).within_rows
    loss_model = LossModel(model, classifier=False)
    loss_model._keeps = False  # on a CPU, logits are computed where there are targets, which are looked up
    return loss_model


def batch_of(positions: torch.Tensor | None) -> Batch:
    ids = torch.arange(24).view(2, 12) + 10
    return Batch(
        input_ids=ids,
        targets=ids.clone(),
        position_ids=positions,
        attention_mask=None,
        tokens_real=24,
        tokens_trained=24,
        rows=None if positions is None else packed_rows([[3, 6, 3], [8, 1, 3]], 12),
        scored=torch.arange(24),
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["tiny:mistral", "tiny:llama", "tiny:glm4_moe"])
def test_a_step_reads_no_value_on_the_host(name: str, packed: bool, tokenizer: Any) -> None:
    model = made(name, tokenizer, packed=packed)
    named = list(model.named_parameters())
    optimizer = adamw(TrainSpec())(named)
    with Reads() as reads:
        model(batch_of(PACKED if packed else None)).backward()
        clip_and_update(optimizer, [p for _, p in named], 1.0)
    assert reads.found == []
    with Reads() as reads:  # the counter counts
        float(torch.ones(()))
    assert len(reads.found) == 1


@pytest.mark.parametrize("name", ["tiny:mistral", "tiny:glm4_moe"])
def test_packed_rows_are_those_that_transformers_finds_itself(name: str, tokenizer: Any) -> None:
    model = made(name, tokenizer).eval()
    for positions in (PACKED, None):
        batch = batch_of(positions)
        mine, _ = model.token_logits(batch)
        theirs = model.model(input_ids=batch.input_ids, position_ids=positions).logits  # type: ignore[operator]
        assert torch.equal(mine, theirs.float())
    plain, _ = model.token_logits(batch_of(None))
    packed, _ = model.token_logits(batch_of(PACKED))
    assert torch.allclose(plain[:, :3], packed[:, :3], atol=1e-5) and not torch.allclose(
        plain[:, 3:], packed[:, 3:], atol=1e-3
    )
