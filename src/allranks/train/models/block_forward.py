"""Recompute the activations of transformer blocks in the backward pass, and compile the blocks' forward passes.

Both replace the ``forward`` of each block for training passes: evaluation and generation run the model's own code.
Hooks of a block (of FSDP2, ZeRO 3 and DeepSpeed) stay outside, and its modules, weights and names do not change.

Recomputation is non-reentrant: the reentrant form calls DDP's hooks twice for LoRA weights ("marked ready twice"). With
``full``, a block keeps its input only. With ``selective``, it also keeps the outputs of matrix products and of
attention, so that only element-wise operations run again
(`torch.utils.checkpoint.create_selective_checkpoint_contexts`); narrow products, such as LoRA's second one, run again
as well, because they are cheap and their outputs are wide.

A block is compiled by itself ("regional compilation"): equal blocks share one compiled program, masks are built
outside, and shapes are static where all batches have one. With ``selective`` the compiler sees the recomputation, and
with ``full`` it is around the compiled program. The backward program is compiled in the first forward pass, so that a
compiler that fails does so before anything has
changed: the block then runs uncompiled, and so do all others from the next pass on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from allranks.spec.records import RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, keeps_product
from allranks.train.data.tokenization import first_line
from allranks.train.patches import compile_blocks_separately, replace_forward

_SECOND_FACTOR = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2}


class Compilation:
    """How blocks are compiled, and why they are not any more.

    Args:
        static: all batches have one shape. Otherwise torch decides which sizes are variable.
        report: called once with the reason if the compiler fails.
    """

    def __init__(
        self, *, static: bool, report: Callable[[str], None], backend: str | Callable[..., Any] = "inductor"
    ) -> None:
        self.failure: str | None = None
        self._report = report
        self._how: dict[str, Any] = {"dynamic": False if static else None, "backend": backend}

    def compiled(self, function: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled function; it calls `plain` from the call on in which the compiler fails."""
        program, failed = torch.compile(function, **self._how), False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal failed
            if not failed:
                try:
                    return program(*args, **kwargs)
                except Exception as error:
                    from torch._dynamo.exc import TorchDynamoException

                    if not isinstance(error, TorchDynamoException):
                        raise
                    failed = True
                    if self.failure is None:
                        cause = getattr(error, "inner_exception", error)  # what the backend raised
                        self.failure = f"{type(cause).__name__}: {first_line(cause)}"
                        self._report(self.failure)
            return plain(*args, **kwargs)

        return run


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated blocks in execution order: the children of its outermost module lists."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            blocks += [block for block in child if any(True for _ in block.parameters())]
        else:
            blocks += transformer_blocks(child)
    return blocks


def set_block_forward(model: nn.Module, recomputation: str, compilation: Compilation | None = None) -> int:
    """Recompute and compile the model's blocks in training passes; return the number of blocks.

    Args:
        recomputation: none | selective | full.
        compilation: None: the blocks are not compiled.
    """
    if recomputation == RECOMPUTE_NONE and compilation is None:
        return 0
    blocks = transformer_blocks(model)
    if compilation is not None:
        compile_blocks_separately(len(blocks))
    for block in blocks:
        plain = block.forward
        eager = _recomputed(plain, recomputation)
        fast = _compiled(plain, recomputation, compilation) if compilation else None
        replace_forward(block, partial(_forward, block, plain, eager, fast, compilation))
    return len(blocks)


def _forward(
    block: nn.Module,
    plain: Callable[..., Any],
    eager: Callable[..., Any],
    fast: Callable[..., Any] | None,
    compilation: Compilation | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return plain(*args, **kwargs)
    if fast is None or (compilation is not None and compilation.failure is not None):
        return eager(*args, **kwargs)
    return fast(*args, **kwargs)


def _recomputed(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    if mode == RECOMPUTE_NONE:
        return function
    more: dict[str, Any] = {}
    if mode == RECOMPUTE_SELECTIVE:
        more["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return partial(checkpoint, function, use_reentrant=False, **more)


def _compiled(plain: Callable[..., Any], mode: str, compilation: Compilation) -> Callable[..., Any]:
    if mode != RECOMPUTE_SELECTIVE:
        return _recomputed(compilation.compiled(plain, plain), mode)
    if not isinstance(plain, MethodType):
        return compilation.compiled(_recomputed(plain, mode), _recomputed(plain, mode))
    # as arguments, so that the compiled program does not depend on the block
    program = compilation.compiled(_selective, _selective)
    return partial(program, plain.__func__, plain.__self__)


def _selective(forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _recomputed(forward, RECOMPUTE_SELECTIVE)(block, *args, **kwargs)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether an operation's output is kept: wide matrix products and attention are, the rest runs again."""
    if operator in _SECOND_FACTOR:
        inner, width = args[_SECOND_FACTOR[operator]].shape
        kept = keeps_product(inner, width)
    else:
        name = str(operator)
        kept = any(part in name for part in ("attn", "attention", "grouped_mm", "scaled_mm", "sum_of_products"))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
