"""Forward passes in a lower dtype than that of the trained weights, and two dtypes that a strategy cannot train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from allranks.errors import SpecError
from allranks.train.models.precision import cast_trained_weights, use_autocast
from allranks.train.strategies.data_parallel import PyTorchZero1


def test_a_trained_embedding_before_frozen_layer_norms() -> None:
    """The embedding's float32 output meets layer norms in bfloat16, for which CPUs have no kernel."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    plain = GPT2LMHeadModel(config)
    model = GPT2LMHeadModel(config)
    model.load_state_dict(plain.state_dict())
    adapted = get_peft_model(
        model.to(torch.bfloat16), LoraConfig(r=4, target_modules=["c_attn"], modules_to_save=["wte"])
    )
    cast_trained_weights(adapted, torch.float32)
    assert use_autocast(adapted, torch.bfloat16, torch.device("cpu"))
    ids = torch.arange(16)[None]
    loss = adapted(input_ids=ids, labels=ids).loss
    loss.backward()
    assert abs(float(loss) - float(plain(input_ids=ids, labels=ids).loss)) < 0.02
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert any("wte" in name for name in trained)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained.values())


def test_two_dtypes_are_refused_under_zero1_with_the_names_of_both() -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 2).bfloat16(), "adapter": nn.Linear(2, 2)})
    nobody: Any = None  # no rank is asked before
    with pytest.raises(SpecError, match=r"adapter.weight is torch.float32, head.weight is torch.bfloat16.*pytorch_ddp"):
        PyTorchZero1(25, False).setup(model, nobody, nobody, None)
