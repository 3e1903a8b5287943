"""Attention in blocks gives what torch's attention gives, for shapes around every edge of its blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from allranks.train.data.batches import packed_rows
from allranks.train.models import blockwise_attention, packed_attention
from allranks.train.models.attention_in_rows import attention_in_rows
from allranks.train.models.losses import LossModel
from allranks.train.models.packed_attention import RowMask, use_packed_attention
from allranks.train.tasks import whole_model
from tests.unit.test_packed_attention import dense_mask, gradients, model_of, packed_batch, single
from tests.unit.test_reference_rows import prepared

FIRST = blockwise_attention.LENGTHS.start


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(heads: int, kv_heads: int, length: int, width: int = 8, batch: int = 1) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient, laid out as layers of transformers make them."""
    torch.manual_seed(length)
    return [torch.randn(batch, length, n, width).transpose(1, 2) for n in (heads, kv_heads, kv_heads, heads)]


def expected(given: list[torch.Tensor], scale: float | None = None) -> list[torch.Tensor]:
    """Output and gradients of plain attention in float64."""
    q, k, v, slope = (t.double() for t in given)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in leaves[1:])
    out = F.scaled_dot_product_attention(leaves[0], keys, values, is_causal=True, scale=scale)
    return [t.float() for t in (out.detach(), *torch.autograd.grad(out, leaves, slope))]


@pytest.mark.parametrize("elements", [1 << 12, blockwise_attention.MATRIX_ELEMENTS])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 3), (6, 1)])
def test_blocks_give_what_torch_gives(
    heads: int, kv_heads: int, length: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with so little memory that heads are computed one by one."""
    monkeypatch.setattr(blockwise_attention, "MATRIX_ELEMENTS", elements)
    given = drawn(heads, kv_heads, length)
    query, key, value, slope = (t[0] for t in given)
    out, sums = torch.empty_like(query), query.new_empty(query.shape[:2])
    blockwise_attention.forward(query, key, value, 0.3, out, sums)
    found = [out, *blockwise_attention.backward(slope, query, key, value, sums, 0.3)]
    for mine, its in zip(found, expected(given, 0.3), strict=True):
        torch.testing.assert_close(mine, its[0], rtol=1e-4, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    """The largest score of each query is subtracted before the exponential."""
    given = [t[0] for t in drawn(2, 1, 100)]
    out, sums = torch.empty_like(given[0]), given[0].new_empty(2, 100)
    blockwise_attention.forward(*given[:3], 40.0, out, sums)
    found = [out, *blockwise_attention.backward(given[3], *given[:3], sums, 40.0)]
    for mine, its in zip(found, expected([t[None] for t in given], 40.0), strict=True):
        torch.testing.assert_close(mine, its[0], rtol=1e-3, atol=1e-2)


def test_memory_is_used_again_also_after_inference() -> None:
    """New memory for each call fragments the heap; what is made in inference mode could not be written to outside of
    it."""
    with torch.inference_mode():
        big = blockwise_attention._Matrices(2, 4, 2, 300)._memory
    small = blockwise_attention._Matrices(1, 2, 2, 100)._memory
    assert small[0].data_ptr() == big[0].data_ptr() != big[1].data_ptr()
    given = [t[0] for t in drawn(4, 2, 70)]
    sums = given[0].new_empty(4, 70)
    blockwise_attention.forward(*given[:3], 0.3, torch.empty_like(given[0]), sums)
    blockwise_attention.backward(given[3], *given[:3], sums, 0.3)


def attention(given: list[torch.Tensor], mask: RowMask | None, **more: Any) -> list[torch.Tensor]:
    """Output and gradients by what transformers calls in training."""
    leaves = [t.detach().requires_grad_() for t in given[:3]]
    out, _ = packed_attention._attention(no_sdpa, torch.nn.Identity(), *leaves, mask, **more)  # type: ignore[arg-type]
    return [out.detach().transpose(1, 2), *torch.autograd.grad(out, leaves, given[3].transpose(1, 2))]


def no_sdpa(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("computed by transformers")


def test_whole_sequences_are_trained_in_blocks() -> None:
    given = drawn(4, 2, FIRST, batch=2)
    for mine, its in zip(attention(given, None), expected(given), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, FIRST, 100])
def test_rows_in_blocks_and_by_torch_stand_side_by_side(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row, which only without a shorter window is computed in blocks, between short ones."""
    called: list[int] = []
    plain = blockwise_attention.backward
    monkeypatch.setattr(blockwise_attention, "backward", lambda *a: called.append(a[1].shape[1]) or plain(*a))
    lengths = [[20, FIRST + 6], [FIRST, 26]]
    given = drawn(4, 2, FIRST + 26, batch=2)
    mask = RowMask(packed_rows(lengths, FIRST + 26), window, None)
    found = attention(given, mask)
    dense = dense_mask(mask, torch.device("cpu"))
    leaves = [t.double().requires_grad_() for t in given[:3]]
    keys, values = (t.repeat_interleave(2, 1) for t in leaves[1:])
    out = F.scaled_dot_product_attention(leaves[0], keys, values, dense)
    for mine, its in zip(found, [out, *torch.autograd.grad(out, leaves, given[3].double())], strict=True):
        torch.testing.assert_close(mine, its.float(), rtol=1e-4, atol=1e-5)
    assert called == {None: [FIRST + 6, FIRST], FIRST: [FIRST], 100: []}[window]


@pytest.mark.parametrize("threads", [(1, 2), (2, 1)])
def test_either_backward_reads_what_the_other_forward_kept(threads: tuple[int, int]) -> None:
    """The number of threads, which decides between blocks and torch's kernel, may change in between."""
    given = drawn(4, 2, FIRST)
    leaves = [t.detach().requires_grad_() for t in given[:3]]
    ends = torch.tensor([0, FIRST])
    torch.set_num_threads(threads[0])
    out = attention_in_rows(*leaves, ends, None, None)
    torch.set_num_threads(threads[1])
    found = torch.autograd.grad(out, leaves, given[3].transpose(1, 2))
    for mine, its in zip(found, expected(given)[1:], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("why", ["short", "long", "threads", "bfloat16", "evaluation", "both directions", "dropout"])
def test_what_blocks_do_not_compute_is_left_to_transformers(why: str) -> None:
    length = {"short": FIRST - 1, "long": blockwise_attention.LENGTHS.stop}.get(why, FIRST)
    given = [t.to(torch.bfloat16) if why == "bfloat16" else t for t in drawn(2, 1, length)[:3]]
    given[0].requires_grad_(why != "evaluation")
    torch.set_num_threads(2 if why == "threads" else 1)
    more: dict[str, Any] = {"both directions": {"is_causal": False}, "dropout": {"dropout": 0.1}}.get(why, {})
    with pytest.raises(AssertionError, match="computed by transformers"):
        packed_attention._attention(no_sdpa, torch.nn.Identity(), *given, None, **more)  # type: ignore[arg-type]


@pytest.mark.full
def test_compiled_blocks_of_long_sequences_compute_the_same() -> None:
    config = {"sliding_window": None, "max_position_embeddings": 2 * FIRST}
    plain, compiled = (LossModel(model_of("mistral", **config), classifier=False).train() for _ in range(2))
    for model in (plain, compiled):
        use_packed_attention(model.model, torch.device("cpu"), torch.float32)
    for block in compiled.model.model.layers:  # type: ignore[union-attr]
        block.compile(backend="aot_eager", fullgraph=True)
    whole = single(torch.arange(4, 4 + FIRST) % 250)
    for batch in (whole, packed_batch([[FIRST + 6, 20], [20, FIRST + 6]])):
        torch.testing.assert_close(compiled(batch), plain(batch))
        for model in (plain, compiled):
            model.zero_grad()
            model(batch).backward()
        for mine, its in zip(gradients(compiled).values(), gradients(plain).values(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("packing", ["isolated", "wrapped", "none"])
def test_long_sequences_are_trained_in_blocks_on_a_cpu(
    tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the packing is; what the model answers without gradients is computed as transformers does."""
    calls: list[int] = []
    plain = blockwise_attention.forward
    monkeypatch.setattr(blockwise_attention, "forward", lambda *a: calls.append(a[0].shape[1]) or plain(*a))
    more = {"data": {"source": "builtin:instructions", "subset": 90, "max_length": 256, "packing": packing}}
    _, task, data = prepared(tmp_path, more)
    module = task.loss_model(whole_model(task, data, "float32"))
    assert (module.packed is not None) == (packing == "isolated")
    layers = len(module.model.model.layers)
    document = torch.arange(4, 244) % 200
    whole = single(document)
    module(whole).backward()
    assert calls == [240] * layers
    with torch.no_grad():
        module(whole)
    assert calls == [240] * layers
