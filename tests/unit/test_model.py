"""Models, adapters, losses and checkpoints in one process, with real transformers and PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from allranks.errors import SpecError
from allranks.spec.records import AdapterSpec, ModelSpec, TrainSpec
from allranks.train.data.batches import IGNORE, collate, collate_labelled
from allranks.train.data.prepared import TokenSet, _map, _save
from allranks.train.data.tokenization import EncodedRow, train_tokenizer
from allranks.train.distributed import rng_state, set_rng_state
from allranks.train.loop import adamw
from allranks.train.models.adapters import add_adapter
from allranks.train.models.losses import LossModel
from allranks.train.step_metrics import TokenCounts
from allranks.train.strategies.base import clip_and_update, trained_parameters
from tests.dist.making import build_model

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = ["mistral", "llama", "glm4_moe"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["hello world 123"], 300, classifier=False)


def model_of(family: str, tokenizer: Any, **config: Any) -> Any:
    spec = ModelSpec(name=f"tiny:{family}", config={**SMALL, **config})
    return build_model(spec, tokenizer, dtype="float32", labels={}, seed=1)


def tokens_of(tmp_path: Path, packs: list[list[int]]) -> TokenSet:
    import numpy as np

    rng = np.random.default_rng(0)
    rows = []
    for i in range(1 + max(r for p in packs for r in p)):
        ids = rng.integers(4, 255, 7 + 5 * i).astype(np.int32)
        mask = np.ones(len(ids), np.uint8)
        mask[:3] = 0
        rows.append(EncodedRow(ids=ids, mask=mask))
    _save(tmp_path, "train", rows, packs)
    return _map(tmp_path, "train")


def rows(*numbers: int) -> Any:
    import numpy as np

    return np.array(numbers, np.int64)


def test_pairs_of_attention_are_those_within_rows(tmp_path: Path) -> None:
    """Rows of 7, 12 and 17 tokens. Padding attends to nothing that counts."""
    tokens = tokens_of(tmp_path, [[0, 1, 2], [1]])
    each = [7 * 8 // 2, 12 * 13 // 2, 17 * 18 // 2]
    assert collate(tokens, rows(0), 0, 64).attention_pairs == sum(each)
    assert collate(tokens, rows(0, 1), 0, None).attention_pairs == sum(each) + each[1]
    counts = TokenCounts()
    for _ in range(2):
        counts.add(collate(tokens, rows(1), 0, 50))
    assert counts.attention_pairs == 2 * each[1]
    tokens = replace(tokens, labels=rows(0, 0, 0))
    assert collate_labelled(tokens, rows(0, 2), 0).attention_pairs == 7**2 + 17**2


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_do_not_see_each_other(family: str, tokenizer: Any, tmp_path: Path) -> None:
    """A packed row gives the logits of the row alone; with plain positions (the planted bug) it does not."""
    model = model_of(family, tokenizer).eval()
    tokens = tokens_of(tmp_path, [[0, 1, 2], [1]])
    packed, alone = collate(tokens, rows(0), 0, 64), collate(tokens, rows(1), 0, None)
    start, n = 7, alone.input_ids.shape[1]
    with torch.no_grad():
        together = model(input_ids=packed.input_ids, position_ids=packed.position_ids).logits[0, start : start + n]
        single = model(input_ids=alone.input_ids).logits[0]
        leaking = model(input_ids=packed.input_ids).logits[0, start : start + n]
    torch.testing.assert_close(together, single, rtol=1e-4, atol=1e-5)
    assert (leaking - single).abs().max() > 1e-3


def test_packed_loss_is_the_sum_of_the_rows_losses(tokenizer: Any, tmp_path: Path) -> None:
    loss_model = LossModel(model_of("mistral", tokenizer), classifier=False).eval()
    tokens = tokens_of(tmp_path, [[0, 2, 1], [0], [1], [2]])
    with torch.no_grad():
        packed = loss_model(collate(tokens, rows(0), 0, None))
        apart = sum(loss_model(collate(tokens, rows(i), 0, None)) for i in (1, 2, 3))
        padded = loss_model(collate(tokens, rows(1, 2, 3), 0, 50))
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(padded, apart, rtol=1e-5, atol=1e-4)


def test_loss_equals_transformers_own_and_skipped_positions_change_nothing(tokenizer: Any, tmp_path: Path) -> None:
    model = model_of("llama", tokenizer).eval()
    tokens = tokens_of(tmp_path, [[1]])
    batch = collate(tokens, rows(0), 0, 32)
    labels = torch.full_like(batch.input_ids, IGNORE)
    labels[:, 1:] = batch.targets[:, :-1]
    with torch.no_grad():
        ours = LossModel(model, classifier=False)(batch) / batch.tokens_trained
        theirs = model(input_ids=batch.input_ids, labels=labels).loss
        full = F.cross_entropy(
            model(input_ids=batch.input_ids).logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE
        )
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours, full)
    assert batch.tokens_trained == 12 - 3
    assert batch.tokens_padded == 32 - 12


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("mistral", AdapterSpec(type="lora", r=4, targets=["q_proj", "v_proj"])),
        ("llama", AdapterSpec(type="lora", r=4, modules_to_save=["embed_tokens", "lm_head"])),
        (
            "glm4_moe",
            AdapterSpec(
                type="lora",
                r=4,
                targets=["q_proj"],
                target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            ),
        ),
    ],
)
def test_saved_adapters_reload_in_plain_peft_with_the_same_logits(
    family: str, adapter: AdapterSpec, tokenizer: Any, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = model_of(family, tokenizer)
    base.save_pretrained(tmp_path / "base")
    model: Any = add_adapter(base, adapter, classifier=False, base=str(tmp_path / "base"), seed=1)
    named = trained_parameters(model)
    assert all("lora" in n or "modules_to_save" in n for n, _ in named)
    if family == "glm4_moe":
        assert any("experts" in n for n, _ in named)
    ids = torch.arange(10, 30).unsqueeze(0)
    optimizer = adamw(TrainSpec(lr=0.05))(named)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        clip_and_update(optimizer, (p for _, p in named), None)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "adapter")
    )
    with torch.no_grad():
        ours, theirs, untouched = (
            m.eval()(input_ids=ids).logits
            for m in (model, plain, AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
        )
    torch.testing.assert_close(ours, theirs)  # equal up to rounding: adapters of experts are computed in another order
    assert not torch.equal(ours, untouched)


def test_full_models_reload_in_plain_transformers(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for family in FAMILIES:
        model = model_of(family, tokenizer).eval()
        model.save_pretrained(tmp_path / family)
        tokenizer.save_pretrained(tmp_path / family)
        ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / family)("hello 12")["input_ids"]])
        with torch.no_grad():
            assert torch.equal(
                model(ids).logits, AutoModelForCausalLM.from_pretrained(tmp_path / family).eval()(ids).logits
            )


def test_unknown_names_say_what_there_is(tokenizer: Any) -> None:
    with pytest.raises(SpecError, match="tiny:mistral"):
        model_of("mistrall", tokenizer)
    with pytest.raises(SpecError, match=r"hidden_sise.*hidden_size"):
        model_of("mistral", tokenizer, hidden_sise=3)
    with pytest.raises(SpecError, match="q_proj"):
        add_adapter(
            model_of("mistral", tokenizer),
            AdapterSpec(type="lora", targets=["query"]),
            classifier=False,
            base="b",
            seed=1,
        )


def test_a_gradient_that_is_not_finite_changes_nothing_then_or_later() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = adamw(TrainSpec(lr=0.1))([("w", weight)])
    weight.grad = torch.ones(3)
    clip_and_update(optimizer, [weight], 1.0)
    good = weight.detach().clone()
    assert not torch.equal(good, torch.ones(3))
    for gradient in (torch.tensor([1.0, float("nan"), 1.0]), torch.ones(3)):
        weight.grad = gradient
        clip_and_update(optimizer, [weight], 1.0)
        assert torch.equal(weight.detach(), good)
    assert float(optimizer.state[weight]["step"]) == 1.0


def test_clipping_gives_the_norm_before_and_scales() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    weight.grad = torch.full((2, 2), 3.0)
    norm = clip_and_update(optimizer, [weight], 1.0)
    assert float(norm) == pytest.approx(6.0)
    assert float(weight.detach().norm()) == pytest.approx(1.0, rel=1e-4)


def test_random_states_come_back() -> None:
    import random

    import numpy as np

    state = rng_state()
    first = (random.random(), np.random.rand(), torch.rand(3))
    set_rng_state(state)
    again = (random.random(), np.random.rand(), torch.rand(3))
    assert first[:2] == again[:2]
    assert torch.equal(first[2], again[2])
