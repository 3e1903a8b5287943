"""Rotary frequencies that depend on the length: each row gets those of the row alone, as transformers computes it in a
new model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from allranks.train.data.batches import IGNORE, Batch, packed_rows
from allranks.train.models.losses import LossModel
from allranks.train.models.packed_attention import use_packed_attention
from allranks.train.models.rope import row_lengths, use_row_lengths

LIMIT = 16
SCALED = {
    "phi3": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": LIMIT,
    },
    "llama": {"rope_type": "dynamic", "factor": 2.5},
}
LENGTHS = (40, 7, LIMIT, LIMIT + 1, 24)


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        max_position_embeddings=64 if kind == "phi3" else LIMIT,
        original_max_position_embeddings=LIMIT,
        rope_parameters={"rope_theta": 100.0, **SCALED[kind]},
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        if p.ndim > 1:
            p.data.normal_(0, 0.3)
    return model


def rows_of() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (n,), generator=generator) for n in LENGTHS]


def targets_of(row: torch.Tensor) -> torch.Tensor:
    return torch.cat([row[1:], torch.tensor([IGNORE])])


def padded(rows: list[torch.Tensor]) -> Batch:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence([targets_of(r) for r in rows], batch_first=True, padding_value=IGNORE)
    lengths = torch.tensor([len(r) for r in rows])
    return Batch(ids, targets, None, None, int(lengths.sum()), int((targets != IGNORE).sum()), lengths=lengths)


def packed(rows: list[torch.Tensor]) -> Batch:
    ids, targets = torch.cat(rows)[None], torch.cat([targets_of(r) for r in rows])[None]
    positions = torch.cat([torch.arange(len(r)) for r in rows])[None]
    layout = packed_rows([[len(r) for r in rows]], ids.shape[1])
    return Batch(ids, targets, positions, None, ids.numel(), ids.numel() - len(rows), rows=layout)


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_a_row_is_computed_as_if_it_were_alone(kind: str) -> None:
    """Packed or padded, in training and in evaluation, whatever came before."""
    plain, rows = model_of(kind), rows_of()
    losses = []
    for row in rows:
        logits = copy.deepcopy(plain)(input_ids=row[None]).logits[0, :-1].float()
        losses.append(F.cross_entropy(logits, row[1:], reduction="none").detach())
    loss_model = LossModel(copy.deepcopy(plain), classifier=False)
    loss_model.packed = use_packed_attention(loss_model.model, torch.device("cpu"), torch.float32)
    for make in (padded, packed):
        for order in (rows, rows[::-1]):
            batch = make(order)
            wanted = torch.cat(losses if order is rows else losses[::-1])
            each = loss_model.eval().token_losses(batch)
            torch.testing.assert_close(each[each != 0], wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(loss_model.train()(batch), wanted.sum(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_replies_do_not_depend_on_the_other_prompts(kind: str) -> None:
    plain, (long, short) = model_of(kind).eval(), rows_of()[:2]
    (wanted,) = copy.deepcopy(plain).generate(short[None], max_new_tokens=6, do_sample=False, use_cache=True).tolist()
    assert use_row_lengths(plain)
    mask = torch.cat([torch.zeros(len(long) - len(short)), torch.ones(len(short))]).long()
    ids = torch.stack([long, F.pad(short, (len(long) - len(short), 0))])
    asked = {"attention_mask": torch.stack([torch.ones_like(mask), mask]), "max_new_tokens": 6, "do_sample": False}
    out = plain.generate(ids, use_cache=True, **asked)[1]
    assert out[len(long) - len(short) :].tolist()[: len(wanted)] == wanted


def test_rows_are_told_apart_by_their_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [1, 1, 0, 1, 2, 3], [9, 9, 9, 9, 9, 9]])
    assert row_lengths(positions).tolist() == [[3, 3, 3, 2, 2, 1], [2, 2, 4, 4, 4, 4], [10] * 6]
    assert not use_row_lengths(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{
        "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8
    })))  # fmt: skip
