"""The comparison of training throughput with the peers: order, pairs, goals, isolated rows and the floor of a step."""

import numpy as np
import pytest
import torch
from benchmarks import step_floor
from benchmarks.step_floor import Shapes, floor
from benchmarks.train_throughput import document_attention
from benchmarks.train_throughput.compare import compared
from benchmarks.train_throughput.measure import attends_across
from benchmarks.train_throughput.packing import best_fit, filled_up, joined
from benchmarks.train_throughput.run import MACHINE_PATH
from benchmarks.train_throughput.variants import FLOOR, VARIANTS, rotated
from benchmarks.train_throughput.workload import IGNORED, SEQ_LEN
from transformers import MistralConfig, MistralForCausalLM

LENGTHS = (5, 3, 6)


def test_each_repeat_runs_all_once_and_begins_elsewhere() -> None:
    orders = [rotated(list(VARIANTS), repeat, 5) for repeat in range(5)]
    assert all(sorted(order) == sorted(VARIANTS) for order in orders) and len({order[0] for order in orders}) == 5


def _run(variant: str, repeat: int, rate: float, loss: float = 7.8, mib: int = 100, *, counts: bool = True) -> dict:
    rates = dict.fromkeys(("total", "median", "with_warmup"), rate)
    memory = {"grown_bytes": mib << 20, "useful_tokens": 1, "steps": 1}
    record = {"tokens_per_s_per_rank": rates, "heldout_loss": loss, **memory}
    return {"variant": variant, "repeat": repeat, "counts": counts, "record": record}


def _floor(repeat: int, wrapped: float, isolated: float) -> dict:
    record = {
        "parts": {"wide_s": 0.1}, "product_flops": 1e9, "products_s": 0.1, "product_flops_per_s": 2e10,
        "copy_bytes_per_s": 1e9, "tokens": 512, "tokens_per_s": {"wrapped": wrapped, "isolated": isolated},
    }  # fmt: skip
    return {"variant": FLOOR, "repeat": repeat, "counts": True, "record": record}


def test_ratios_are_formed_within_a_repeat_by_runs_that_count() -> None:
    runs = [_run("d", 0, 100), _run("c", 0, 50), _run("c", 1, 10, counts=False), _run("d", 1, 300), _run("c", 1, 100)]
    assert compared(runs, [])["ratios"]["d/c"] == {"per_repeat": [2.0, 3.0], "median": 2.5, "min": 2.0, "max": 3.0}


@pytest.mark.parametrize(("left", "goal", "met"), [(1.5, 1.2, False), (1.2, 1.2, False), (1.1, 0.99, True)])
def test_the_goal_is_what_is_left_where_that_is_less(left: float, goal: float, met: bool) -> None:
    found = compared([_run("d", 0, 1100), _run("c", 0, 1000), _floor(0, left * 1000, 9e9)], [])
    assert found["headroom"]["variants"]["c"]["left"]["median"] == left
    (said,) = found["goals"]
    assert (said["goal"], said["met"]) == (pytest.approx(goal), met)


def test_rows_hold_whole_documents() -> None:
    row = joined([np.arange(1, 1 + n) for n in LENGTHS])
    assert row["position_ids"].tolist() == [*range(5), *range(3), *range(6)]
    assert row["labels"][row["position_ids"] == 0].tolist() == [IGNORED] * 3
    assert row["labels"][row["position_ids"] > 0].tolist() == row["input_ids"][row["position_ids"] > 0].tolist()
    full = filled_up(row, pad_id=99)
    assert {np.shape(full[name]) for name in ("input_ids", "labels", "position_ids")} == {(SEQ_LEN,)}
    assert set(full["labels"][14:].tolist()) == {IGNORED}
    assert best_fit(np.array([500, 300, 212, 12])) == [[0, 3], [1, 2]]


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    drawn = np.random.default_rng(0)
    row = joined([drawn.integers(1, 60, n) for n in LENGTHS])
    return {name: torch.from_numpy(values)[None] for name, values in row.items() if name != "labels"}


def _model(attention: str) -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=None, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = attention
    return MistralForCausalLM(config)


def test_attention_by_document_equals_the_dense_mask(batch: dict[str, torch.Tensor]) -> None:
    dense, model = _model("sdpa"), _model(document_attention.NAME)
    assert not attends_across(dense, batch)
    assert attends_across(dense, {**batch, "attention_mask": torch.ones_like(batch["input_ids"])})
    given = {**batch, "cu_seq_lens_q": torch.tensor([0, *np.cumsum(LENGTHS)])}
    assert not attends_across(model, given)
    assert attends_across(model, batch)  # nothing says where documents end
    torch.testing.assert_close(model(**given).logits, dense(**batch).logits, rtol=1e-4, atol=1e-5)


def test_the_floor_counts_the_products_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_floor, "seconds", lambda action, device: [action(), 0.001][1])
    found = floor(Shapes(16, 16, 8, 12, 2, 2, 1, 4, 24, 2, full=False), [10, 6], torch.device("cpu"), torch.float32)
    block = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12
    adapters = 2 * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 2 * (8 + 12) + (12 + 8))
    assert found["product_flops"] == 2 * 16 * (2 * (2 * block + 8 * 24) - 8 * (8 + 4 + 4) + 3 * 2 * adapters)
    products = sum(found["parts"][name] for name in ("wide_s", "narrow_s", "head_s"))
    for rate, attention in (("tokens_per_s", "attention_s"), ("documents_tokens_per_s", "attention_of_documents_s")):
        assert found[rate] == pytest.approx(16 / (products + found["parts"][attention]))


def test_a_failure_names_no_path_of_the_machine() -> None:
    said = 'exit code 1\n  File "/home/me/lib/peer.py", line 3\nsee /var/tmp/a-b/run.log; src/x.py'
    assert MACHINE_PATH.sub("", said) == 'exit code 1\n  File "peer.py", line 3\nsee run.log; src/x.py'
