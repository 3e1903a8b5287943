"""Packed rows give what single rows give, in loss and gradients, and no tensor grows with the square of the packed
length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.spec.models import TYPES, dense_mask_reason, packs_rows
from allranks.spec.records import AdapterSpec, ModelSpec
from allranks.train.data.batches import IGNORE, Batch, collate, packed_rows
from allranks.train.data.prepared import TokenSet
from allranks.train.data.tokenization import train_tokenizer
from allranks.train.models import packed_attention, precision
from allranks.train.models.adapters import add_adapter
from allranks.train.models.block_forward import Compilation, set_block_forward
from allranks.train.models.losses import LossModel
from allranks.train.models.packed_attention import RowMask, attention_row_by_row, trial, use_packed_attention
from tests.dist.architecture_cases import CONFIGS
from tests.dist.making import build_model

CPU = torch.device("cpu")
LENGTHS = [[9, 12, 3], [14, 10]]
WITHIN_ROWS = [
    e.model_type
    for e in TYPES.tested
    if e.task == "text" and e.attention == "sdpa" and not dense_mask_reason(e.model_type, "sdpa")
]
USUAL = {"mistral", "gemma3_text", "deepseek_v3", "gpt2", "granite"}
"""Grouped heads; windows in some layers; values narrower than keys; learned positions; logits multiplied by a
number."""


def model_of(kind: str, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "use_cache": False}
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **{**CONFIGS[kind], **tokens, **more})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


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


def assert_equal_to_single_rows(
    model: LossModel, batch: Batch, each: list[torch.Tensor], after: Callable[[], None] = lambda: None
) -> None:
    """``after``: what is called between the packed rows and the single ones."""
    loss = model(batch)
    loss.backward()
    after()
    packed = gradients(model)
    model.zero_grad()
    alone = torch.tensor(0.0)
    for document in each:
        part = model(single(document))
        part.backward()
        alone = alone + part.detach()
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-4)
    wanted = gradients(model)
    assert packed.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(packed[name], gradient, rtol=1e-4, atol=2e-5 * float(gradient.abs().max() + 1e-3))


@pytest.mark.parametrize("kind", [k if k in USUAL else pytest.param(k, marks=pytest.mark.full) for k in WITHIN_ROWS])
def test_packed_rows_give_the_loss_and_gradients_of_single_rows(kind: str) -> None:
    model = LossModel(model_of(kind).eval(), classifier=False)
    assert use_packed_attention(model.model, CPU, torch.float32).within_rows
    assert packs_rows(kind) and not model.whole_logits
    assert_equal_to_single_rows(model, packed_batch(), documents())


@pytest.mark.parametrize("window", [5, 12, 100])
def test_windows_are_counted_within_rows(window: int) -> None:
    """A window that is shorter than the longest row, as long as a row, and longer than all."""
    model = LossModel(model_of("mistral", sliding_window=window), classifier=False)
    use_packed_attention(model.model, CPU, torch.float32)
    assert_equal_to_single_rows(model, packed_batch(), documents())


def test_recomputed_blocks_attend_within_rows() -> None:
    inner = model_of("mistral")
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = LossModel(inner, classifier=False).train()
    use_packed_attention(inner, CPU, torch.float32)
    assert_equal_to_single_rows(model, packed_batch(), documents())


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_near_to_float32_as_with_a_dense_mask(autocast: bool) -> None:
    exact = LossModel(model_of("mistral"), classifier=False)
    wanted = float(exact(packed_batch()).detach())
    found = []
    for within in (True, False):
        model = model_of("mistral")
        if autocast:
            precision.use_autocast(model, torch.bfloat16, CPU)
        else:
            model.bfloat16()
        if within:
            use_packed_attention(model, CPU, torch.bfloat16)
        loss = LossModel(model, classifier=False)
        out = loss(packed_batch())
        out.backward()
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in loss.parameters())
        found.append(abs(float(out.detach()) - wanted))
    assert found[0] <= max(2 * found[1], 2e-3 * wanted)


def test_what_is_not_packed_is_computed_by_sdpa() -> None:
    """Evaluation and generation: the same logits and answers as of the model as it was."""
    plain, ours = model_of("mistral").eval(), model_of("mistral").eval()
    use_packed_attention(ours, CPU, torch.float32)
    ids = documents()[1][None]
    mask = torch.ones_like(ids)
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, ours(input_ids=ids).logits)
        answers = [
            m.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, use_cache=True) for m in (plain, ours)
        ]
    assert torch.equal(*answers)


def test_a_saved_model_does_not_name_the_implementation(tmp_path: Any) -> None:
    model = model_of("mistral")
    use_packed_attention(model, CPU, torch.float32)
    model.save_pretrained(tmp_path)
    assert packed_attention.NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(
    ("kind", "attention", "why"),
    [("mistral", "eager", "model.attention is eager"), ("bert", "sdpa", "bert is not among")],
)
def test_other_models_keep_the_dense_mask_and_say_why(kind: str, attention: str, why: str) -> None:
    if kind == "bert":
        assert why in dense_mask_reason(kind, attention)
        return
    tokenizer = train_tokenizer(["hello world 123"], 300, classifier=False)
    model = build_model(
        ModelSpec(name=f"tiny:{kind}", attention=attention), tokenizer, dtype="float32", labels={}, seed=1
    )
    remark = use_packed_attention(model, CPU, torch.float32)
    assert not remark.within_rows and "dense mask" in remark.remark and why in remark.remark
    assert model.config._attn_implementation == attention


@pytest.mark.full
def test_a_compiled_block_is_one_graph_for_all_rows() -> None:
    """As many rows as before need no other graph, whatever their lengths are."""
    plain, compiled = (LossModel(model_of("mistral", sliding_window=None), classifier=False) for _ in range(2))
    for model in (plain, compiled):
        use_packed_attention(model.model, CPU, torch.float32)
    for block in compiled.model.model.layers:  # type: ignore[union-attr]
        block.compile(backend="aot_eager", fullgraph=True)
    with torch.compiler.set_stance("default"):
        compiled(packed_batch()).backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ([[4, 4, 16], [20, 4]], [[8, 8, 8], [6, 18]]):
            loss = compiled(packed_batch(lengths))
            loss.backward()
            torch.testing.assert_close(loss, plain(packed_batch(lengths)))


def test_compiled_blocks_of_static_shapes_take_any_number_of_rows() -> None:
    """Otherwise each number of rows is compiled, until torch gives up."""
    plain, compiled = (LossModel(model_of("mistral", sliding_window=None), classifier=False).train() for _ in range(2))
    for model in (plain, compiled):
        use_packed_attention(model.model, CPU, torch.float32)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    set_block_forward(compiled.model, "none", Compilation(static=True, report=pytest.fail, backend=backend))
    counts = []
    for rows in range(2, 7):
        batch = packed_batch([[20, 4], [*[2] * (rows - 1), 26 - 2 * rows]])
        torch.testing.assert_close(compiled(batch), plain(batch))
        counts.append(len(graphs))
    assert graphs and len(set(counts)) == 1, counts


class Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def largest_of(length: int, *, within: bool) -> int:
    model = model_of("mistral", vocab_size=40)
    if within:
        use_packed_attention(model, CPU, torch.float32)
    loss_model = LossModel(model, classifier=False)
    rows = [[32] * (length // 32)]
    batch = packed_batch(rows)
    batch.input_ids.remainder_(40)
    batch.targets.masked_fill_(batch.targets >= 40, 7)
    with Largest() as largest:
        loss_model(batch).backward()
    return largest.elements


def test_no_tensor_grows_with_the_square_of_the_packed_length() -> None:
    short, long = largest_of(512, within=True), largest_of(2048, within=True)
    assert long <= 4.01 * short and long < 2048 * 2048
    assert largest_of(2048, within=False) >= 2048 * 2048  # the dense mask, which this test would see


def drawn(heads: int, kv_heads: int, width: int, value_width: int | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = ((heads, width), (kv_heads, width), (kv_heads, value_width or width))
    return [torch.randn(2, 24, n, d).transpose(1, 2).requires_grad_() for n, d in sizes]


def dense_mask(mask: RowMask, device: torch.device) -> torch.Tensor:
    """Return the boolean mask (B, 1, L, L) that says the same."""
    batch, length = mask.rows.shape
    starts = torch.zeros(batch * length, dtype=torch.int64)
    starts[mask.rows.ends[:-1]] = 1
    number = starts.cumsum(0).view(batch, 1, length)
    allowed = (number.unsqueeze(-1) == number.unsqueeze(-2)).tril()
    return (allowed if mask.window is None else allowed.triu(1 - mask.window)).to(device)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "value_width"), [(4, 4, None), (4, 2, None), (4, 4, 5)])
def test_rows_equal_a_dense_mask(window: int | None, heads: int, kv_heads: int, value_width: int | None) -> None:
    mask = RowMask(packed_rows(LENGTHS, 24), window, None)
    given = drawn(heads, kv_heads, 8, value_width)
    slope = torch.randn(2, 24, heads, value_width or 8)
    ours = packed_attention._attention(None, torch.nn.Identity(), *given, mask, scaling=0.3)[0]  # type: ignore[arg-type]
    found = [ours, *torch.autograd.grad(ours, given, slope)]
    keys, values = (t.repeat_interleave(heads // kv_heads, 1) for t in given[1:])
    theirs = torch.nn.functional.scaled_dot_product_attention(
        given[0], keys, values, dense_mask(mask, CPU), scale=0.3
    ).transpose(1, 2)
    for mine, its in zip(found, [theirs, *torch.autograd.grad(theirs, given, slope)], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_the_operation_is_right_for_autograd_and_for_tracing() -> None:
    given = drawn(4, 2, 8)
    ends = packed_rows(LENGTHS, 24).ends
    for window in (None, 4):
        torch.library.opcheck(torch.ops.allranks.attention_in_rows.default, (*given, ends, None, window))


def test_a_kernel_is_used_only_if_it_computes_the_same() -> None:
    """The trial that decides on GPUs, with kernels that are right and wrong."""

    def leaks(query: Any, key: Any, value: Any, mask: RowMask, scale: float | None) -> torch.Tensor:
        joined = packed_rows([[128], [128]], 128)
        return attention_row_by_row(query, key, value, RowMask(joined, None, None), scale)

    def ignores_the_window(query: Any, key: Any, value: Any, mask: RowMask, scale: float | None) -> torch.Tensor:
        return attention_row_by_row(query, key, value, RowMask(mask.rows, None, None), scale)

    def wrong_gradient(query: Any, key: Any, value: Any, mask: RowMask, scale: float | None) -> torch.Tensor:
        return attention_row_by_row(query, key, value.detach() * 0.5 + value * 0.5, mask, scale)

    for dtype in (torch.float32, torch.bfloat16):
        assert trial(attention_row_by_row, CPU, dtype, 4, 2, 16, window=True) == ""
        assert "output differs" in trial(leaks, CPU, dtype, 4, 2, 16, window=False)
        assert "output differs" in trial(ignores_the_window, CPU, dtype, 4, 2, 16, window=True)
        assert "value's gradient differs" in trial(wrong_gradient, CPU, dtype, 4, 2, 16, window=False)


def test_without_a_kernel_for_the_device_the_reason_is_named() -> None:
    """On this machine, torch's kernel of variable length does not run."""
    kernel, why = packed_attention._gpu_kernel(model_of("mistral").config, CPU, torch.bfloat16)
    assert kernel is None and why.startswith("torch.nn.attention.varlen: ")


def test_adapters_get_the_gradients_of_single_rows() -> None:
    spec = AdapterSpec(type="lora", r=4, targets=["q_proj", "v_proj", "down_proj", "lm_head"])
    adapted = add_adapter(model_of("mistral"), spec, classifier=False, base="b", seed=1)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    model = LossModel(adapted, classifier=False)
    use_packed_attention(adapted, CPU, torch.float32)
    assert_equal_to_single_rows(model, packed_batch(), documents())


class ReferenceFlash:
    """Stands in for the functions of flash-attn, which need a GPU, where transformers takes them; it says nothing of
    those themselves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers import modeling_flash_attention_utils as utils
        from transformers.integrations import flash_attention

        # real kernels do not compute in float32; transformers looks for the dtype in a layer that GPT-2 does not have
        monkeypatch.setattr(flash_attention, "get_target_dtype", lambda *_: None)
        self.layers = self.looked = 0  # computed; of these, which found the rows by position ids
        self.limits: set[int] = set()
        process = utils._lazy_define_process_function(self.varlen)
        monkeypatch.setattr(
            utils,
            "lazy_import_flash_attention",
            lambda *_, **__: ((None, self.varlen, None, None, None), (process, None)),
        )
        usual = utils._is_packed_sequence

        def is_packed(*args: Any) -> Any:
            self.looked += 1
            return usual(*args)

        monkeypatch.setattr(utils, "_is_packed_sequence", is_packed)

    def varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int | torch.Tensor,
        max_seqlen_k: int | torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
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
"""Its attention does not get what a forward pass is told beyond its own arguments: it finds the rows of one sequence by
position ids."""


@pytest.mark.parametrize("kind", [k if k in USUAL else pytest.param(k, marks=pytest.mark.full) for k in WITHIN_ROWS])
def test_flash_attention_is_told_the_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind).eval()
    flash, layers = ReferenceFlash(monkeypatch), model.config.num_hidden_layers
    model.config._attn_implementation = "flash_attention_2"
    lengths = LENGTHS[:1] if kind in KEEPS_TO_ITSELF else LENGTHS

    def after() -> None:
        assert (flash.layers, flash.looked) == (layers, layers if kind in KEEPS_TO_ITSELF else 0)
        model.config._attn_implementation = "sdpa"

    assert_equal_to_single_rows(LossModel(model, classifier=False), packed_batch(lengths), documents(lengths), after)


def test_a_flash_kernel_of_the_hub_is_told_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers stores it by the name of its repository, also where the spec says flash_attention_2."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import flash_attention_mask

    name = "kernels-community/flash-attn2"
    monkeypatch.setitem(AttentionInterface._global_mapping, name, flash_attention_forward)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, flash_attention_mask)
    model = model_of("mistral").eval()
    flash = ReferenceFlash(monkeypatch)
    model.config._attn_implementation = name

    def after() -> None:
        assert (flash.layers, flash.looked) == (model.config.num_hidden_layers, 0)
        model.config._attn_implementation = "sdpa"

    assert_equal_to_single_rows(LossModel(model, classifier=False), packed_batch(), documents(), after)


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
    inner = model_of("mistral", sliding_window=5)
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapter = AdapterSpec(type="lora", targets=["q_proj", "v_proj"])
    model = LossModel(add_adapter(inner, adapter, classifier=False, base="b", seed=1), classifier=False).train()
    flash = ReferenceFlash(monkeypatch)
    inner.config._attn_implementation = "flash_attention_2"

    def after() -> None:
        assert (flash.layers, flash.looked) == (2 * inner.config.num_hidden_layers, 0)
        inner.config._attn_implementation = "sdpa"

    assert_equal_to_single_rows(model, packed_batch(), documents(), after)


def test_another_number_of_rows_does_not_compile_blocks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of static shapes: torch would give up after some compilations."""
    from transformers import modeling_flash_attention_utils

    model = model_of("mistral", num_hidden_layers=1)
    compiled: list[Any] = []

    def varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, **_: Any) -> Any:
        """Reads the lengths as a kernel in a compiled block does."""
        return q * cu_seqlens_q[-1]

    functions = (None, varlen, None, None, None), (lambda **_: {}, None)
    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", lambda *_: functions)
    model.config._attn_implementation = "flash_attention_2"

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    set_block_forward(model, "none", Compilation(static=True, report=pytest.fail, backend=backend))
    loss = LossModel(model, classifier=False).train()
    counts = []
    for rows in range(2, 6):
        loss(packed_batch([[12 - rows, *[1] * (rows - 1), 4]]))
        counts.append(len(compiled))
    assert compiled and len(set(counts)) == 1, counts
