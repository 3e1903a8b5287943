"""Packed rows give what single rows give, and attention in blocks what torch gives; no tensor grows with the square."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers import modeling_flash_attention_utils as utils
from transformers.integrations import flash_attention, sdpa_attention
from transformers.masking_utils import flash_attention_mask

from allranks.spec.models import TYPES, dense_mask_reason, packs_rows
from allranks.train.data.batches import IGNORE, Batch, collate, packed_rows
from allranks.train.data.prepared import TokenSet
from allranks.train.models import blockwise_attention, packed_attention
from allranks.train.models.attention_in_rows import attention_in_rows
from allranks.train.models.block_forward import Compilation, set_block_forward
from allranks.train.models.losses import LossModel
from allranks.train.models.packed_attention import RowMask, attention_row_by_row, trial, use_packed_attention
from allranks.train.models.rope import row_lengths, use_row_lengths
from allranks.train.patches import repeat_keys_in_float32
from allranks.train.tasks import whole_model
from tests.dist.architecture_cases import CONFIGS
from tests.unit.small_models import Largest, kept_in, load, with_lora
from tests.unit.test_reference_rows import prepared

CPU = torch.device("cpu")
LENGTHS = [[9, 12, 3], [14, 10]]
TEXT = [e.model_type for e in TYPES.tested if (e.task, e.attention) == ("text", "sdpa")]
USUAL = {"mistral", "gemma3_text", "deepseek_v3", "gpt2", "granite"}
"""Grouped heads; windows in some layers; values narrower than keys; learned positions; logits times a number."""
KINDS = [k if k in USUAL else pytest.param(k, marks=pytest.mark.full) for k in TEXT if not dense_mask_reason(k, "sdpa")]


def model_of(kind: str, **more: Any) -> Any:
    tokens = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "use_cache": False}
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **{**CONFIGS[kind], **tokens, **more})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def packed_model(kind: str = "mistral", **config: Any) -> LossModel:
    model = LossModel(model_of(kind, **config), classifier=False)
    assert use_packed_attention(model.model, CPU, torch.float32).within_rows
    return model


def recomputed(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def adapted(model: Any) -> Any:
    model = with_lora(model, r=4, targets=["q_proj", "v_proj", "down_proj", "lm_head"])
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    return model


def documents(lengths: list[list[int]] = LENGTHS) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(4, 250, (n,), generator=draw) for row in lengths for n in row]


def targets_of(document: torch.Tensor) -> torch.Tensor:
    shifted = torch.cat([document[1:], torch.tensor([IGNORE])])
    shifted[: len(document) // 3] = IGNORE
    return shifted


def packed_batch(lengths: list[list[int]] = LENGTHS) -> Batch:
    each = iter(documents(lengths))
    rows = [[next(each) for _ in row] for row in lengths]
    ids = torch.stack([torch.cat(row) for row in rows])
    targets = torch.stack([torch.cat([targets_of(d) for d in row]) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    scored = (targets.flatten() != IGNORE).nonzero().squeeze(1)
    layout = packed_rows(lengths, ids.shape[1], ids.shape[1])
    return Batch(ids, targets, positions, None, ids.numel(), len(scored), rows=layout, scored=scored)


def single(document: torch.Tensor) -> Batch:
    return Batch(document[None], targets_of(document)[None], None, None, len(document), len(document))


def gradients(model: LossModel) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_as_single_rows(model: LossModel, lengths: list[list[int]] = LENGTHS, after: Any = lambda: None) -> None:
    """``after``: what is called between the packed rows and the single ones."""
    loss = model(packed_batch(lengths))
    loss.backward()
    after()
    packed = gradients(model)
    model.zero_grad()
    alone = torch.tensor(0.0)
    for document in documents(lengths):
        part = model(single(document))
        part.backward()
        alone = alone + part.detach()
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-4)
    wanted = gradients(model)
    assert packed.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(packed[name], gradient, rtol=1e-4, atol=2e-5 * float(gradient.abs().max() + 1e-3))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_give_the_loss_and_gradients_of_single_rows(kind: str) -> None:
    model = packed_model(kind).eval()
    assert packs_rows(kind) and not model.whole_logits
    assert_as_single_rows(model)


@pytest.mark.parametrize("window", [5, 12, 100])
def test_windows_are_counted_within_rows(window: int) -> None:
    """A window that is shorter than the longest row, as long as a row, and longer than all."""
    assert_as_single_rows(packed_model(sliding_window=window))


@pytest.mark.parametrize("change", [recomputed, adapted])
def test_recomputed_and_adapted_blocks_attend_within_rows(change: Callable[[Any], Any]) -> None:
    model = LossModel(change(model_of("mistral")), classifier=False).train()
    use_packed_attention(model.model, CPU, torch.float32)
    assert_as_single_rows(model)


def test_what_is_not_packed_is_computed_by_sdpa() -> None:
    """Evaluation and generation: the same logits and answers as of the model as it was."""
    plain, ours = model_of("mistral").eval(), model_of("mistral").eval()
    use_packed_attention(ours, CPU, torch.float32)
    ids = documents()[1][None]
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, ours(input_ids=ids).logits)
        more = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "use_cache": True}
        assert torch.equal(plain.generate(ids, **more), ours.generate(ids, **more))


def test_other_models_keep_the_dense_mask_and_say_why() -> None:
    assert "bert is not among" in dense_mask_reason("bert", "sdpa")
    model = load("tiny:mistral", attention="eager")
    remark = use_packed_attention(model, CPU, torch.float32)
    assert not remark.within_rows and "dense mask" in remark.remark and "model.attention is eager" in remark.remark
    assert model.config._attn_implementation == "eager"
    kernel, why = packed_attention._gpu_kernel(model_of("mistral").config, CPU, torch.bfloat16)
    assert kernel is None and why.startswith("torch.nn.attention.varlen: ")


def test_a_saved_model_does_not_name_the_implementation(tmp_path: Any) -> None:
    packed_model().model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert packed_attention.NAME not in (tmp_path / "config.json").read_text()


def losses_of_blocks_compiled_once(model: LossModel, batches: list[Batch]) -> list[torch.Tensor]:
    graphs: list[Any] = []
    set_block_forward(model.model, "none", Compilation(static=True, report=pytest.fail, backend=kept_in(graphs)))
    losses = [model(batches[0])]
    first = len(graphs)
    losses += [model(batch) for batch in batches[1:]]
    assert len(graphs) == first > 0
    return losses


def test_compiled_blocks_of_static_shapes_take_any_number_of_rows() -> None:
    """Otherwise each number of rows is compiled, until torch gives up."""
    plain, compiled = (packed_model(sliding_window=None).train() for _ in range(2))
    batches = [packed_batch([[20, 4], [*[2] * (rows - 1), 26 - 2 * rows]]) for rows in range(2, 7)]
    assert_close(losses_of_blocks_compiled_once(compiled, batches), [plain(batch) for batch in batches])


def largest_of(length: int, *, within: bool) -> int:
    model = model_of("mistral", vocab_size=40)
    if within:
        use_packed_attention(model, CPU, torch.float32)
    loss_model = LossModel(model, classifier=False)
    batch = packed_batch([[32] * (length // 32)])
    batch.input_ids.remainder_(40)
    batch.targets.masked_fill_(batch.targets >= 40, 7)
    with Largest() as largest:
        loss_model(batch).backward()
    return largest.elements


def test_no_tensor_grows_with_the_square_of_the_packed_length() -> None:
    short, long = largest_of(512, within=True), largest_of(2048, within=True)
    assert long <= 4.01 * short and long < 2048 * 2048
    assert largest_of(2048, within=False) >= 2048 * 2048  # the dense mask, which this test would see


def dense_mask(mask: RowMask) -> torch.Tensor:
    """Return the boolean mask (B, 1, L, L) that says the same."""
    batch, length = mask.rows.shape
    starts = torch.zeros(batch * length, dtype=torch.int64)
    starts[mask.rows.ends[:-1]] = 1
    number = starts.cumsum(0).view(batch, 1, length)
    allowed = (number.unsqueeze(-1) == number.unsqueeze(-2)).tril()
    return allowed if mask.window is None else allowed.triu(1 - mask.window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("kv_heads", "value_width"), [(4, 8), (2, 8), (4, 5)])
def test_rows_equal_a_dense_mask(window: int | None, kv_heads: int, value_width: int, dtype: torch.dtype) -> None:
    mask = RowMask(packed_rows(LENGTHS, 24), window, None)
    given = [t.to(dtype) for t in projections(4, kv_heads, 24, value_width=value_width, batch=2)]
    found = trained_attention(given, mask, scaling=0.3)
    assert {t.dtype for t in found} == {dtype}
    rounding = (1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 3e-2)
    assert_close([t.float() for t in found], expected(given, 0.3, dense_mask(mask)), *rounding)


@pytest.mark.full
def test_the_operation_is_right_for_autograd_and_for_tracing() -> None:
    given = [t.requires_grad_() for t in projections(4, 2, 24, batch=2)[:3]]
    ends = packed_rows(LENGTHS, 24).ends
    for window in (None, 4):
        torch.library.opcheck(torch.ops.allranks.attention_in_rows.default, (*given, ends, None, window))


def test_a_kernel_is_used_only_if_it_computes_the_same() -> None:
    """The trial that decides on GPUs, with kernels that are right and wrong."""

    def leaks(query: Any, key: Any, value: Any, mask: RowMask, scale: float | None) -> torch.Tensor:
        return attention_row_by_row(query, key, value, RowMask(packed_rows([[128], [128]], 128), None, None), scale)

    def ignores_the_window(query: Any, key: Any, value: Any, mask: RowMask, scale: float | None) -> torch.Tensor:
        return attention_row_by_row(query, key, value, RowMask(mask.rows, None, None), scale)

    def wrong_gradient(query: Any, key: Any, value: Any, mask: RowMask, scale: float | None) -> torch.Tensor:
        return attention_row_by_row(query, key, value.detach() * 0.5 + value * 0.5, mask, scale)

    for dtype in (torch.float32, torch.bfloat16):
        assert trial(attention_row_by_row, CPU, dtype, 4, 2, 16, window=True) == ""
        assert "output differs" in trial(leaks, CPU, dtype, 4, 2, 16, window=False)
        assert "output differs" in trial(ignores_the_window, CPU, dtype, 4, 2, 16, window=True)
        assert "value's gradient differs" in trial(wrong_gradient, CPU, dtype, 4, 2, 16, window=False)


class ReferenceFlash:
    """Stands in for the functions of flash-attn, which need a GPU, where transformers takes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # real kernels do not compute in float32; transformers looks for the dtype in a layer that GPT-2 does not have
        monkeypatch.setattr(flash_attention, "get_target_dtype", lambda *_: None)
        self.layers = self.looked = 0  # computed; of these, which found the rows by position ids
        self.limits: set[int] = set()
        functions = (None, self.varlen, None, None, None), (utils._lazy_define_process_function(self.varlen), None)
        monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *_, **__: functions)
        usual = utils._is_packed_sequence
        monkeypatch.setattr(utils, "_is_packed_sequence", lambda *args: (self.look(), usual(*args))[1])

    def look(self) -> None:
        self.looked += 1

    def varlen(self, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
        dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    ) -> torch.Tensor:  # fmt: skip
        """As `flash_attn.flash_attn_varlen_func`: (tokens, heads, width)."""
        self.layers += 1
        assert causal and dropout_p == 0 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert int(max_seqlen_q) == int(max_seqlen_k) >= int(cu_seqlens_q.diff().max()) and cu_seqlens_q[-1] == len(q)
        self.limits.add(int(max_seqlen_q))
        window = None if window_size[0] < 0 else window_size[0] + 1
        rows = packed_rows([cu_seqlens_q.diff().tolist()], len(q))
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return attention_row_by_row(q, k, v, RowMask(rows, window, None), softmax_scale)[0]


KEEPS_TO_ITSELF = {"stablelm"}
"""Its attention gets no more than its own arguments: it finds the rows of one sequence by position ids."""


def assert_flash_rows(
    model: Any, monkeypatch: pytest.MonkeyPatch, name: str = "flash_attention_2", computed: int = 1, alone: bool = False
) -> None:
    """``computed``: how often each layer is in a step. ``alone``: layers find the rows by themselves."""
    flash, layers = ReferenceFlash(monkeypatch), model.config.num_hidden_layers
    model.config._attn_implementation = name

    def after() -> None:
        assert (flash.layers, flash.looked) == (computed * layers, computed * layers if alone else 0)
        model.config._attn_implementation = "sdpa"

    assert_as_single_rows(LossModel(model, classifier=False), LENGTHS[:1] if alone else LENGTHS, after)


@pytest.mark.parametrize("kind", KINDS)
def test_flash_attention_is_told_the_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_flash_rows(model_of(kind).eval(), monkeypatch, alone=kind in KEEPS_TO_ITSELF)


def test_a_flash_kernel_of_the_hub_is_told_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers stores it by the name of its repository, also where the spec says flash_attention_2."""
    name = "kernels-community/flash-attn2"
    monkeypatch.setitem(AttentionInterface._global_mapping, name, flash_attention.flash_attention_forward)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, flash_attention_mask)
    assert_flash_rows(model_of("mistral").eval(), monkeypatch, name)


def test_kernels_are_launched_for_the_longest_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the sequence, and not for those of one batch: programs of compiled blocks depend on the number."""
    ids, none = np.arange(4, 16, dtype=np.int32), np.zeros(0, np.int64)
    packs, rows = np.array([0, 2, 3, 5]), np.array([0, 1, 2, 3, 2])  # of 3, 5, 2 and 2 tokens
    tokens = TokenSet(ids, np.ones(12, np.uint8), np.array([0, 3, 8, 10, 12]), packs, rows, none, none, none)
    model, flash = model_of("mistral").eval(), ReferenceFlash(monkeypatch)
    model.config._attn_implementation = "flash_attention_2"
    for sequences in ([0, 1], [2]):
        batch = collate(tokens, np.array(sequences), 0, 24)
        assert batch.rows is not None and batch.rows.longest <= 5 and batch.rows.ends[-1] == 24 * len(sequences)
        LossModel(model, classifier=False)(batch)
    assert flash.limits == {5} and flash.looked == 0


def test_flash_attention_of_recomputed_and_adapted_blocks_is_told_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation in backward has no packed batch around it."""
    inner = recomputed(model_of("mistral", sliding_window=5))
    assert_flash_rows(with_lora(inner, targets=["q_proj", "v_proj"]).train(), monkeypatch, computed=2)


@pytest.mark.full
def test_another_number_of_rows_does_not_compile_blocks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of static shapes: torch would give up after some compilations."""
    model = model_of("mistral", num_hidden_layers=1)

    def varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, **_: Any) -> Any:
        """Reads the lengths as a kernel in a compiled block does."""
        return q * cu_seqlens_q[-1]

    functions = (None, varlen, None, None, None), (lambda **_: {}, None)
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *_: functions)
    model.config._attn_implementation = "flash_attention_2"
    batches = [packed_batch([[12 - rows, *[1] * (rows - 1), 4]]) for rows in range(2, 6)]
    losses_of_blocks_compiled_once(LossModel(model, classifier=False).train(), batches)


FIRST = blockwise_attention.LENGTHS.start


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def projections(heads: int, kv_heads: int, length: int, value_width: int = 8, batch: int = 1) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient, laid out as layers of transformers make them."""
    torch.manual_seed(length)
    sizes = ((heads, 8), (kv_heads, 8), (kv_heads, value_width), (heads, value_width))
    return [torch.randn(batch, length, n, width).transpose(1, 2) for n, width in sizes]


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=rtol, atol=atol)


def in_blocks(given: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    query, key, value, slope = (t[0] for t in given)
    out, sums = torch.empty_like(query), query.new_empty(query.shape[:2])
    blockwise_attention.forward(query, key, value, scale, out, sums)
    return [out[None], *(t[None] for t in blockwise_attention.backward(slope, query, key, value, sums, scale))]


def expected(given: list[torch.Tensor], scale: float | None = None, mask: torch.Tensor | None = None) -> list[Any]:
    q, k, v, slope = (t.double() for t in given)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in leaves[1:])
    out = F.scaled_dot_product_attention(leaves[0], keys, values, mask, is_causal=mask is None, scale=scale)
    return [t.float() for t in (out.detach(), *torch.autograd.grad(out, leaves, slope))]


@pytest.mark.parametrize("elements", [1 << 12, blockwise_attention.MATRIX_ELEMENTS])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, 256])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_blocks_equal_torch(kv_heads: int, length: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with so little memory that heads are computed one by one."""
    monkeypatch.setattr(blockwise_attention, "MATRIX_ELEMENTS", elements)
    given = projections(6, kv_heads, length)
    assert_close(in_blocks(given, 0.3), expected(given, 0.3))


def test_large_scores_do_not_overflow() -> None:
    """The largest score of each query is subtracted before the exponential."""
    given = projections(2, 1, 100)
    # slopes are of the order of 100, and scores of 400 have errors of some 1e-4 that depend on the processor
    assert_close(in_blocks(given, 40.0), expected(given, 40.0), rtol=1e-3, atol=0.1)


def test_memory_is_used_again_also_after_inference() -> None:
    """New memory for each call fragments the heap; what inference mode makes could not be written to outside of it."""
    with torch.inference_mode():
        big = blockwise_attention._Matrices(2, 4, 2, 300)._memory
    assert blockwise_attention._Matrices(1, 2, 2, 100)._memory[0].data_ptr() == big[0].data_ptr() != big[1].data_ptr()
    in_blocks(projections(4, 2, 70), 0.3)


def trained_attention(given: list[torch.Tensor], mask: RowMask | None, **more: Any) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in given[:3]]
    out, _ = packed_attention._attention(no_sdpa, torch.nn.Identity(), *leaves, mask, **more)  # type: ignore[arg-type]
    return [out.detach().transpose(1, 2), *torch.autograd.grad(out, leaves, given[3].transpose(1, 2))]


def no_sdpa(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("computed by transformers")


def test_whole_sequences_are_trained_in_blocks() -> None:
    given = projections(4, 2, FIRST, batch=2)
    assert_close(trained_attention(given, None), expected(given))


@pytest.mark.parametrize("window", [None, FIRST, 100])
def test_rows_in_blocks_and_by_torch_stand_side_by_side(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row, which only without a shorter window is computed in blocks, between short ones."""
    called: list[int] = []
    plain = blockwise_attention.backward
    monkeypatch.setattr(blockwise_attention, "backward", lambda *a: called.append(a[1].shape[1]) or plain(*a))
    given = projections(4, 2, FIRST + 26, batch=2)
    mask = RowMask(packed_rows([[20, FIRST + 6], [FIRST, 26]], FIRST + 26), window, None)
    assert_close(trained_attention(given, mask), expected(given, mask=dense_mask(mask)))
    assert called == {None: [FIRST + 6, FIRST], FIRST: [FIRST], 100: []}[window]


@pytest.mark.parametrize("threads", [(1, 2), (2, 1)])
def test_either_backward_reads_what_the_other_forward_kept(threads: tuple[int, int]) -> None:
    """The number of threads, which decides between blocks and torch's kernel, may change in between."""
    given = projections(4, 2, FIRST)
    leaves = [t.detach().requires_grad_() for t in given[:3]]
    ends = torch.tensor([0, FIRST])
    torch.set_num_threads(threads[0])
    out = attention_in_rows(*leaves, ends, None, None)
    torch.set_num_threads(threads[1])
    assert_close(torch.autograd.grad(out, leaves, given[3].transpose(1, 2)), expected(given)[1:])


@pytest.mark.parametrize("why", ["short", "long", "threads", "bfloat16", "evaluation", "both directions", "dropout"])
def test_what_blocks_do_not_compute_is_left_to_transformers(why: str) -> None:
    length = {"short": FIRST - 1, "long": blockwise_attention.LENGTHS.stop}.get(why, FIRST)
    given = [t.to(torch.bfloat16) if why == "bfloat16" else t for t in projections(2, 1, length)[:3]]
    given[0].requires_grad_(why != "evaluation")
    torch.set_num_threads(2 if why == "threads" else 1)
    more: dict[str, Any] = {"both directions": {"is_causal": False}, "dropout": {"dropout": 0.1}}.get(why, {})
    with pytest.raises(AssertionError, match="computed by transformers"):
        packed_attention._attention(no_sdpa, torch.nn.Identity(), *given, None, **more)  # type: ignore[arg-type]


@pytest.mark.full
def test_compiled_blocks_of_long_sequences_compute_the_same() -> None:
    config = {"sliding_window": None, "max_position_embeddings": 2 * FIRST}
    plain, compiled = (packed_model(**config).train() for _ in range(2))
    for block in compiled.model.model.layers:  # type: ignore[union-attr]
        block.compile(backend="aot_eager", fullgraph=True)
    for batch in (single(torch.arange(4, 4 + FIRST) % 250), packed_batch([[FIRST + 6, 20], [20, FIRST + 6]])):
        torch.testing.assert_close(compiled(batch), plain(batch))
        for model in (plain, compiled):
            model.zero_grad()
            model(batch).backward()
        assert_close(gradients(compiled).values(), gradients(plain).values(), atol=1e-6)


@pytest.mark.parametrize("packing", ["isolated", "wrapped", "none"])
def test_long_sequences_are_trained_in_blocks(tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the packing is; what the model answers without gradients is computed as transformers does."""
    calls: list[int] = []
    plain = blockwise_attention.forward
    monkeypatch.setattr(blockwise_attention, "forward", lambda *a: calls.append(a[0].shape[1]) or plain(*a))
    more = {"data": {"source": "builtin:instructions", "subset": 90, "max_length": 256, "packing": packing}}
    _, task, data = prepared(tmp_path, more)
    module = task.loss_model(whole_model(task, data, "float32"))
    assert (module.packed is not None) == (packing == "isolated")
    layers = len(module.model.model.layers)
    whole = single(torch.arange(4, 244) % 200)
    module(whole).backward()
    assert calls == [240] * layers
    with torch.no_grad():
        module(whole)
    assert calls == [240] * layers


def test_keys_are_repeated_for_float32_attention_on_a_gpu() -> None:
    """Its only fused kernel there has no grouped queries."""

    def grouped(device: str, dtype: object) -> bool:
        key = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 2, 8, 64))
        return sdpa_attention.use_gqa_in_sdpa(None, key, key)

    for _ in range(2):
        repeat_keys_in_float32()
    assert not grouped("cuda", torch.float32)
    assert grouped("cuda", torch.bfloat16) and grouped("cpu", torch.float32)


LIMIT = 16
LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 4.0, 8.0]}
ROPES = {"phi3": LONG_ROPE, "llama": {"rope_type": "dynamic", "factor": 2.5}}
"""Rotary frequencies that depend on the length: each row gets those of the row alone in a new model."""
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}


def scaled_model(kind: str) -> Any:
    rope = {"rope_theta": 100.0, "original_max_position_embeddings": LIMIT, **ROPES[kind]}
    most = {"max_position_embeddings": 64 if kind == "phi3" else LIMIT, "original_max_position_embeddings": LIMIT}
    model = model_of(kind, **SIZES, **most, num_hidden_layers=2, rope_parameters=rope)
    for p in model.parameters():
        if p.ndim > 1:
            p.data.normal_(0, 0.3)
    return model


def padded_batch(rows: list[torch.Tensor]) -> Batch:
    pad = torch.nn.utils.rnn.pad_sequence
    targets = pad([targets_of(r) for r in rows], batch_first=True, padding_value=IGNORE)
    lengths = torch.tensor([len(r) for r in rows])
    trained = int((targets != IGNORE).sum())
    return Batch(pad(rows, batch_first=True), targets, None, None, int(lengths.sum()), trained, lengths=lengths)


@pytest.mark.parametrize("kind", ROPES)
def test_a_row_is_computed_as_if_it_were_alone(kind: str) -> None:
    """Packed or padded, in training and in evaluation, whatever came before."""
    plain = scaled_model(kind)
    loss_model = LossModel(copy.deepcopy(plain), classifier=False)
    loss_model.packed = use_packed_attention(loss_model.model, CPU, torch.float32)
    for lengths in ([40, 7, LIMIT, LIMIT + 1, 24], [24, LIMIT + 1, LIMIT, 7, 40]):
        rows = documents([lengths])
        alone = [copy.deepcopy(plain)(input_ids=row[None]).logits[0].detach() for row in rows]
        wanted = F.cross_entropy(torch.cat(alone), torch.cat([targets_of(row) for row in rows]), reduction="none")
        for batch in (padded_batch(rows), packed_batch([lengths])):
            each = loss_model.eval().token_losses(batch)
            torch.testing.assert_close(each[each != 0], wanted[wanted != 0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(loss_model.train()(batch), wanted.sum(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ROPES)
def test_replies_do_not_depend_on_the_other_prompts(kind: str) -> None:
    plain, (long, short) = scaled_model(kind).eval(), documents([[40, 7]])
    (wanted,) = copy.deepcopy(plain).generate(short[None], max_new_tokens=6, do_sample=False, use_cache=True).tolist()
    assert use_row_lengths(plain)
    mask = torch.cat([torch.zeros(len(long) - len(short)), torch.ones(len(short))]).long()
    ids = torch.stack([long, F.pad(short, (len(long) - len(short), 0))])
    more = {"attention_mask": torch.stack([torch.ones_like(mask), mask]), "max_new_tokens": 6, "do_sample": False}
    assert plain.generate(ids, use_cache=True, **more)[1][len(long) - len(short) :].tolist()[: len(wanted)] == wanted


def test_rows_are_told_apart_by_their_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [1, 1, 0, 1, 2, 3], [9, 9, 9, 9, 9, 9]])
    assert row_lengths(positions).tolist() == [[3, 3, 3, 2, 2, 1], [2, 2, 4, 4, 4, 4], [10] * 6]
    assert not use_row_lengths(model_of("llama"))
