"""Attention within each row of a packed sequence, without a mask of the sequence's length squared.

transformers finds packed rows by their position ids, and its ``sdpa`` then computes with a dense (B, 1, L, L) mask.
Here, the lengths of the rows reach attention instead, through transformers' public `AttentionInterface` and
`AttentionMaskInterface`: the "mask" of a packed batch is a `RowMask`. Because it is an argument of each block,
recomputation in backward gets the same one.

On CPUs, each row is computed by itself, by torch's attention kernel or in blocks (`blockwise_attention`). On GPUs,
torch's kernel of variable length does. It is used only after a trial on the device whose outputs and gradients equal
those of one row at a time; otherwise, the dense mask remains, and a remark says why. Whatever has no packed batch as
its input (evaluation, generation, training but where blocks are faster), or needs another mask than causal or
sliding-window attention within rows, is computed by ``sdpa``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from allranks.spec.models import dense_mask_reason, is_flash_attention
from allranks.train.data.batches import PackedRows
from allranks.train.data.tokenization import first_line
from allranks.train.models import blockwise_attention
from allranks.train.models.attention_in_rows import attention_in_rows, fits, spans_of, window_mask

NAME = "allranks_packed"
"""The attention implementation as transformers knows it."""

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "RowMask", float | None], torch.Tensor]
"""(query (B, H, L, D), key and value (B, K, L, D), mask, scale) -> (B, L, H, D)."""


@dataclass(frozen=True)
class RowMask:
    """What attention gets in place of a mask: each token attends to the tokens of its row up to itself.

    ``window``: only to this many, itself included; None: to all. ``kernel`` computes it; None: as on CPUs.
    """

    rows: PackedRows
    window: int | None
    kernel: Kernel | None


_rows: PackedRows | None = None  # rows of the batch in the current forward pass, if their lengths are known
_packed: bool | None = None  # whether the current forward pass has packed rows; None: unknown


@contextmanager
def known_packing(rows: PackedRows | None, *, packed: bool) -> Iterator[None]:
    """Tell transformers within this context whether the rows are packed, and their lengths if they are known.

    Without it, transformers finds out from the position ids in each forward pass, for which the host waits for the GPU.
    Versions of transformers without that function are not changed.
    """
    global _packed, _rows
    _answer_for_transformers()
    before, _packed, _rows = (_packed, _rows), packed, rows
    try:
        yield
    finally:
        _packed, _rows = before


def _answer_for_transformers() -> None:
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if original is None or hasattr(original, "asks_the_device"):
        return

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the number of the packed row of each token, or None if no rows are packed."""
        if _packed is None:
            return original(position_ids)
        if not _packed:
            return None
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    find_packed_sequence_indices.asks_the_device = False  # type: ignore[attr-defined]
    masks.find_packed_sequence_indices = find_packed_sequence_indices


class PackedAttention(NamedTuple):
    """How attention of packed rows is computed, and a sentence on it for the log."""

    within_rows: bool
    remark: str


def use_packed_attention(model: Any, device: torch.device, dtype: torch.dtype) -> PackedAttention:
    """Let a causal language model with ``sdpa`` attention compute packed rows without a dense mask, if it can.

    Args:
        model: a model of transformers, or PEFT's around it.
        dtype: that of its forward passes.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    attention = base.config._attn_implementation
    why = dense_mask_reason(config.model_type, attention)
    if not why and attention != "sdpa":
        return PackedAttention(True, f"packed rows: {attention} of transformers")
    kernel, used = None, "computed row by row"
    if not why and device.type != "cpu":
        used = "torch.nn.attention.varlen"
        kernel, why = _gpu_kernel(config, device, dtype)
    if not why:
        use_kernel(kernel)
        base.set_attn_implementation(NAME)
        if base.config._attn_implementation == NAME:
            return PackedAttention(True, f"packed rows: {used}")
        why = f"transformers does not let {type(base).__name__} use another attention implementation"
    return PackedAttention(False, f"packed rows: a dense mask of the sequence length squared; {why}")


def flash_lengths(model: Any, rows: PackedRows | None) -> dict[str, Any]:
    """Return the arguments with which transformers' flash attention is told the lengths of packed rows; none for other
    attention.

    Without them, layers find rows by position ids (the host waits for the GPU), and several sequences are one row each.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if rows is None or not is_flash_attention(str(base.config._attn_implementation)):
        return {}
    parameters = inspect.signature(type(base).forward).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return {}
    ends, limit = rows.ends_on_device, rows.length_limit
    torch._dynamo.maybe_mark_dynamic(ends, 0)  # type: ignore[attr-defined] - the number of rows differs between batches
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": limit, "max_length_k": limit}


def use_kernel(kernel: Kernel | None) -> None:
    """Let `NAME` compute rows by a kernel; None: as CPUs do."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, partial(_attention, sdpa_attention_forward))
    AttentionMaskInterface.register(NAME, partial(_mask, sdpa_mask, kernel))


@torch.compiler.disable()
def _mask(dense: Callable[..., Any], kernel: Kernel | None, **arguments: Any) -> Any:
    """Return the `RowMask` of a packed batch, else ``sdpa``'s mask. Called by transformers for each kind of layer."""
    rows, config, window = _rows, arguments["config"], arguments.get("local_size")
    ours = (
        rows is not None
        and arguments["mask_function"] is not None
        and arguments.get("attention_mask") is None
        and arguments["q_length"] == arguments["kv_length"]
        and not arguments.get("use_vmap")  # a mask function of the model's own
        and "allow_is_causal_skip" in arguments  # else attention in both directions
        and (window is None or window == getattr(config, "sliding_window", None))
        and rows.shape == (arguments["batch_size"], arguments["q_length"])
    )
    if not ours:
        return dense(**arguments)
    assert rows is not None
    for ends in (rows.ends, rows.ends_on_device):  # the number of rows differs between batches: one program for all
        torch._dynamo.maybe_mark_dynamic(ends, 0)  # type: ignore[attr-defined]
    return RowMask(rows, window if window is not None and window < rows.longest else None, kernel)


def _attention(
    sdpa: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention as transformers' ``sdpa``, with a `RowMask` within rows; in CPU training possibly in blocks."""
    if attention_mask is None and dropout == 0.0 and _whole_in_blocks(module, query, key, value, kwargs):
        batch, _, length, _ = query.shape
        ends = torch.arange(0, (batch + 1) * length, length)
        attention_mask = RowMask(PackedRows(ends, ends, (batch, length), length, length), None, None)
    if not isinstance(attention_mask, RowMask):
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    fused = query.device.type == "cpu" or query.dtype in (torch.float16, torch.bfloat16)
    if fused and dropout == 0.0 and query.dtype == key.dtype == value.dtype:
        return (attention_mask.kernel or rows_on_cpu)(query, key, value, attention_mask, scaling), None
    return attention_row_by_row(query, key, value, attention_mask, scaling, dropout), None


def _whole_in_blocks(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
) -> bool:
    """Return whether unpacked sequences train faster in blocks, and ``sdpa`` would compute plain causal attention."""
    # any of these is something that blocks do not compute, or computes it otherwise than sdpa
    causal = arguments.get("is_causal")
    return (
        not torch.compiler.is_compiling()  # the number of threads is not known to a compiled graph
        and query.requires_grad
        and (getattr(module, "is_causal", True) if causal is None else causal)
        and not any(arguments.get(name) is not None for name in ("position_bias", "softcap", "cache"))
        and not torch.is_autocast_enabled(query.device.type)
        and query.shape[1] % key.shape[1] == 0
        and blockwise_attention.blocks_pay(query, key, value)
    )


def rows_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: RowMask, scale: float | None
) -> torch.Tensor:
    """Compute attention as usual on CPUs. See `Kernel`."""
    if fits(query, value):
        return attention_in_rows(query, key, value, mask.rows.ends, scale, mask.window)
    return attention_row_by_row(query, key, value, mask, scale)


@torch.compiler.disable()
def attention_row_by_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: RowMask,
    scale: float | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute attention with one call of `scaled_dot_product_attention` per row. See `Kernel`."""
    sequences = []
    lengths: list[list[int]] = [[] for _ in range(query.shape[0])]
    for sequence, low, high in spans_of(mask.rows.ends, query.shape[2]):
        lengths[sequence].append(high - low)
    for i, own in enumerate(lengths):
        each = zip(*(t[i : i + 1].split(own, dim=2) for t in (query, key, value)), strict=True)
        outputs = []
        for q, k, v in each:
            window = window_mask(q, mask.window)
            outputs.append(
                F.scaled_dot_product_attention(
                    q, k, v, window, dropout, is_causal=window is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
                )
            )
        sequences.append(torch.cat(outputs, dim=2).transpose(1, 2))
    return torch.cat(sequences)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return (B, H, L, D) as (B L, H, D), which is a view of what transformers' layers make."""
    return tensor.transpose(1, 2).flatten(0, 1)


def torch_varlen() -> Kernel:
    """Return attention of variable length by `torch.nn.attention.varlen`, torch 2.10 and later.

    Raises:
        ImportError, AttributeError: this torch does not have it.
    """
    varlen_attn: Any = import_module("torch.nn.attention.varlen").varlen_attn
    names = inspect.signature(varlen_attn).parameters

    def run(query: Any, key: Any, value: Any, mask: RowMask, scale: float | None) -> torch.Tensor:
        batch, length = mask.rows.shape
        heads, width = query.shape[1], value.shape[-1]
        # the kernel has one width, and some models' values (MLA) are narrower than their keys
        if width != query.shape[-1]:
            value = F.pad(value, (0, query.shape[-1] - width))
        more: dict[str, Any] = {"window_size": ((mask.window or 0) - 1, 0)} if "window_size" in names else {}
        if not more and mask.window is not None:
            return attention_row_by_row(query, key, value, mask, scale)[..., :width]
        if "is_causal" in names:
            more["is_causal"] = True
        if "scale" in names:
            more["scale"] = scale
        elif scale is not None:  # torch 2.10: always 1 / sqrt(D)
            query = query * (scale * query.shape[-1] ** 0.5)
        if "enable_gqa" in names:
            more["enable_gqa"] = heads != key.shape[1]
        ends, limit = mask.rows.ends_on_device, mask.rows.length_limit
        out = varlen_attn(_flat(query), _flat(key), _flat(value), ends, ends, limit, limit, **more)
        return out.view(batch, length, heads, -1)[..., :width]

    return run


def attention_shape(config: Any) -> tuple[int, int, int]:
    """Return the numbers of heads of queries and of keys, and their width."""
    heads = config.num_attention_heads
    width = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, width


def _gpu_kernel(config: Any, device: torch.device, dtype: torch.dtype) -> tuple[Kernel | None, str]:
    """Return torch's kernel of variable length, or why it cannot be used."""
    try:
        kernel = torch_varlen()
        windowed = getattr(config, "sliding_window", None) is not None
        why = trial(kernel, device, dtype, *attention_shape(config), window=windowed)
    except Exception as error:  # noqa: BLE001 - a kernel that this GPU or torch does not support, whatever it raises
        kernel, why = None, f"{type(error).__name__}: {first_line(error)[:200]}"
    if not why:
        return kernel, ""
    return None, f"torch.nn.attention.varlen: {why}; model.attention: flex_attention needs no such mask"


TRIAL_LENGTHS = (37, 64, 27, 100, 28)  # of rows in two sequences of 128 tokens
TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference, relative to the largest value."""


def trial(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
    *,
    window: bool,
    lengths: tuple[int, ...] = TRIAL_LENGTHS,
    setting: Callable[[], AbstractContextManager[Any]] | None = None,
) -> str:
    """Return how a kernel's output or gradients differ from those of one row at a time in float32, or nothing if they
    agree.

    Args:
        window: also try a sliding window.
        setting: where the kernel runs; also change the other rows, which must not change a bit of a row's output.
    """
    draw = torch.Generator().manual_seed(1)
    plain = [
        torch.randn(2, 128, n, width, generator=draw).to(dtype).float().transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    ]
    slope = torch.randn(2, 128, heads, width, generator=draw).to(dtype)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rows = PackedRows(ends, ends.to(device, torch.int32), (2, 128), max(lengths), 128)
    for size in (None, 16) if window else (None,):
        mask = RowMask(rows, size, None)
        wanted = _with_gradients(attention_row_by_row, plain, mask, slope.float())
        there = [t.to(device, dtype) for t in plain]
        changed = [t.clone() for t in there]
        for t in changed:
            t[0, :, lengths[0] :] *= 8
            t[1:] *= 8
        with setting() if setting else nullcontext():
            gradients = _with_gradients(kernel, there, mask, slope.to(device))
            neighbours = _with_gradients(kernel, changed, mask, slope.to(device))[0]
        for name, mine, its in zip(("output", "query's", "key's", "value's"), wanted, gradients, strict=True):
            off = float((its.float().cpu() - mine).abs().max() / mine.abs().max())
            if not off <= TRIAL_TOLERANCE.get(dtype, 1e-3):
                what = name if name == "output" else f"the {name} gradient"
                return f"its {what} differs by {off:.2g} from that of single rows"
        if setting and not torch.equal(neighbours[0, : lengths[0]], gradients[0][0, : lengths[0]]):
            return "the output of a row changes with its neighbours"
    return ""


def _with_gradients(
    kernel: Kernel, given: list[torch.Tensor], mask: RowMask, slope: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in given]
    with torch.enable_grad():
        out = kernel(*leaves, mask, None)  # type: ignore[call-arg]
        return [out.detach(), *torch.autograd.grad(out, leaves, slope)]
