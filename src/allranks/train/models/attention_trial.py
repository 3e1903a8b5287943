"""Choose the kernel of attention by a short trial on the run's device, for ``model.attention: auto``.

A candidate is out unless, on every rank, its outputs and gradients are those of single rows in float32 and a row's
output does not depend on its neighbours (`packed_attention.trial`). Rank 0 then times forward and backward of the
others on the shapes of the run's first micro-batch. The first candidate is what ``sdpa`` would use; another one is
chosen if it is at least 3 % faster. A resumed attempt does not time again, because kernels round differently.

torch computes flash attention by version 3 or 4 instead of its own kernel where their package is installed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.attention as torch_attention
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from allranks.errors import EnvironmentNotAble
from allranks.train.data.batches import Batch, packed_rows
from allranks.train.data.tokenization import first_line
from allranks.train.distributed import DistContext, from_first
from allranks.train.models import packed_attention
from allranks.train.models.packed_attention import (
    Kernel,
    RowMask,
    attention_row_by_row,
    rows_on_cpu,
    torch_varlen,
    trial,
)

GAIN = 1.03
REPEATS, MOST_S = 7, 2.0  # of a candidate; it has at least one
_FLASH, _CUDNN, _MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
_ORDER = [_FLASH, _CUDNN, SDPBackend.EFFICIENT_ATTENTION, _MATH]
_kept = ExitStack()  # settings of the chosen candidate, until the process ends


class Candidate(NamedTuple):
    """A way to compute attention: its kernel, and torch's implementation of flash attention, and backend, it needs."""

    name: str
    make: Callable[[], Kernel]
    flash: str | None = None
    backend: SDPBackend | None = None

    @contextmanager
    def set(self, *, alone: bool) -> Iterator[None]:
        """Set what it needs; unless `alone`, what its backend cannot compute, such as masks, is left to the others."""
        with ExitStack() as stack:
            if self.flash is not None:
                torch_attention.activate_flash_attention_impl(self.flash)
                stack.callback(torch_attention.restore_flash_attention_impl, _raise_warn=False)
            if self.backend is not None:
                rest = [] if alone or self.backend is _MATH else _ORDER
                stack.enter_context(sdpa_kernel([self.backend, *rest], set_priority=bool(rest)))
            yield


def candidates(device: torch.device, *, isolated: bool) -> list[Candidate]:
    """Return the candidates; the first one is what is used without a trial."""
    flash = getattr(torch_attention, "list_flash_attention_impls", list)()
    if not isolated:
        named = [("cudnn", _CUDNN), ("flash", _FLASH)] if device.type != "cpu" else [("math", _MATH)]
        choices = [Candidate("sdpa", lambda: _whole)]
        choices += [Candidate(f"sdpa.{name}", lambda: _whole, backend=backend) for name, backend in named]
        return choices + [Candidate(f"sdpa.{n}", lambda: _whole, n, _FLASH) for n in flash if device.type != "cpu"]
    if device.type == "cpu":
        return [
            Candidate("rows", lambda: rows_on_cpu),
            Candidate("rows.math", lambda: attention_row_by_row, backend=_MATH),
        ]
    return [Candidate("varlen", torch_varlen), *(Candidate(f"varlen.{name}", torch_varlen, name) for name in flash)]


def _whole(query: Any, key: Any, value: Any, mask: RowMask, scale: float | None) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def choose_attention(
    world: DistContext, model: Any, dtype: torch.dtype, batch: Batch, *, isolated: bool, earlier: str | None
) -> dict[str, Any]:
    """Choose a kernel, and let the model use it. Collective.

    Args:
        model: a causal language model of transformers with ``sdpa`` attention, or PEFT's around it.
        dtype: that of its forward passes.
        batch: a micro-batch of the run.
        isolated: `packed_attention` computes its packed rows.
        earlier: the name that an earlier attempt has chosen.

    Returns:
        ``chosen`` and whether it is ``reused``; ``tried``: ``name``, ``seconds`` and ``problem`` of each candidate;
        ``shape``: sequences, heads of queries and of keys, tokens, width of a head.

    Raises:
        EnvironmentNotAble: some rank cannot use the earlier choice.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    heads = packed_attention.attention_shape(config)
    window = getattr(config, "sliding_window", None) if isolated else None
    wanted = [c for c in candidates(world.device, isolated=isolated) if earlier in (None, c.name)]
    lengths = packed_attention.TRIAL_LENGTHS if isolated else (128, 128)

    def problem(one: Candidate) -> str:
        try:
            where = partial(one.set, alone=True)
            windowed = window is not None
            return trial(one.make(), world.device, dtype, *heads, window=windowed, lengths=lengths, setting=where)
        except Exception as error:  # noqa: BLE001 - a kernel that this device or torch does not support
            return f"{type(error).__name__}: {first_line(error)[:120]}"

    own = [problem(one) for one in wanted]
    every: list[Any] = [own] * world.size
    if world.size > 1:
        dist.all_gather_object(every, own, group=world.control)
    problems = {c.name: next(filter(None, each), "") for c, *each in zip(wanted, *every, strict=True)}
    fit = {one.name: one for one in wanted if not problems[one.name]}
    if not fit:
        why = next(iter(problems.values()), "it is not known here")
        what = f"no kernel computes what single rows give ({why}): set model.attention: eager"
        if earlier:
            what = f"{earlier}, which the run has used, is not possible now ({why}): resume with the same GPUs and "
            what += "packages, or with --allow-inexact"
        raise EnvironmentNotAble(f"model.attention auto: {what}")
    size, length = batch.input_ids.shape
    seconds: dict[str, float] = {}
    if world.is_first and len(fit) > 1:
        rows = batch.rows if batch.rows is not None and isolated else packed_rows([[length]] * size, length)
        rows = rows.map_tensors(lambda t: t.to(world.device))
        mask = RowMask(rows, window if window is not None and window < rows.longest else None, None)
        draw = torch.Generator(world.device).manual_seed(1)
        more: dict[str, Any] = {"device": world.device, "dtype": dtype, "generator": draw}
        given = [torch.randn(size, length, n, heads[2], **more).transpose(1, 2) for n in (*heads[:2], heads[1])]
        seconds = {name: _seconds(one, given, mask) for name, one in fit.items()}
        del given
        if world.device.type == "cuda":  # the memory of the trial is not the run's
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)
    chosen = next(iter(fit))
    if seconds and seconds[chosen] > GAIN * min(seconds.values()):
        chosen = min(seconds, key=seconds.__getitem__)
    chosen, seconds = from_first(world, (chosen, seconds))
    _kept.enter_context(fit[chosen].set(alone=False))
    if isolated:
        packed_attention.use_kernel(fit[chosen].make())
    tried = [{"name": name, "seconds": seconds.get(name), "problem": why} for name, why in problems.items()]
    shape = [size, *heads[:2], length, heads[2]]
    return {"chosen": chosen, "reused": earlier is not None, "tried": tried, "shape": shape}


def _seconds(candidate: Candidate, given: list[torch.Tensor], mask: RowMask) -> float:
    kernel, times = candidate.make(), []
    leaves = [t.detach().requires_grad_() for t in given]
    slope = torch.ones_like(given[0].transpose(1, 2))
    began = time.perf_counter()
    with candidate.set(alone=True), torch.enable_grad():
        while len(times) < REPEATS + 1 and (len(times) < 2 or time.perf_counter() - began < MOST_S):
            start = time.perf_counter()
            torch.autograd.grad(kernel(*leaves, mask, None), leaves, slope)  # type: ignore[call-arg]
            if slope.is_cuda:
                torch.cuda.synchronize(slope.device)
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def remark_of(choice: dict[str, Any]) -> str:
    """Return a sentence on a choice."""
    if choice["reused"]:
        return f"attention: {choice['chosen']}, as in the run's first attempt"
    each = (
        f"{t['name']} {t['problem'] or 'alone'}" if t["seconds"] is None else f"{t['name']} {1e3 * t['seconds']:.3g} ms"
        for t in choice["tried"]
    )
    return f"attention: {choice['chosen']}, by a trial of forward and backward ({'; '.join(each)})"
