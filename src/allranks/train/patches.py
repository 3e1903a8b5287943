"""Change objects of other libraries, where they have no public hook for it. All such changes are made here, for the
versions in `VERIFIED`:

- torch: ``torch.distributed.Work.wait`` (measures waits), ``distributed_c10d._unregister_process_group`` (releases the
  GIL, see `let_collectives_end`), ``torch.cpu.set_device`` (missing), settings of ``torch._dynamo`` and
  ``torch._functorch`` (blocks are compiled one by one, with their backward in the first forward; settings that a
  version lacks are left out).
- transformers: ``integrations.sdpa_attention.use_gqa_in_sdpa`` (float32 attention on GPUs), the forward of experts with
  adapters (an implementation in ALL_EXPERTS_FUNCTIONS gets weights, not adapters), of output projections (the loss is
  computed where the logits would be), of rotary embeddings (frequencies of each row's own length), and of modules under
  autocast (torch has hooks before and after a forward pass, and none around it); ``trainer.DEFAULT_CALLBACKS``, in a
  user's own program.
- lightning: ``Trainer.__init__``, in a user's own program (its public hook for callbacks is a package's entry point,
  which would be active in all programs of the environment).
- accelerate: ``utils.other.is_deepspeed_available`` (``save_pretrained`` imports DeepSpeed to look for its engine).
- peft: the forward of LoRA's Linear and ParamWrapper (PEFT registers custom layers only by a private method of its
  config).

torch is not imported here: a user's own program may not use it. Attributes that a library reads by its own protocol
(``found_inf`` of fused optimizers, ``_weight_conversions`` of transformers' models) are set where they belong.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


RELEASE_S = 0.05  # a thread of gloo that waits for the GIL gets it within 5 ms on an idle core


VERIFIED = {"torch": "2.13", "transformers": "5.23", "peft": "0.21", "accelerate": "1.15"}
"""The versions for which all changes were verified, without patch releases; a test checks them."""


def replace_work_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``Work.wait`` in this process, and return the original."""
    import torch.distributed as dist

    original = dist.Work.wait
    dist.Work.wait = wait  # pyright: ignore[reportAttributeAccessIssue]
    return original


def import_no_deepspeed_to_save() -> None:
    """Have ``save_pretrained`` look for DeepSpeed only where that was imported: its import takes 2 s and 60 MiB."""
    other: Any = importlib.import_module("accelerate.utils.other")
    original = other.is_deepspeed_available
    other.is_deepspeed_available = lambda: "deepspeed" in sys.modules and original()


def let_collectives_end(c10d: Any) -> None:
    """Make ``destroy_process_group`` release the GIL briefly before the group can be freed. A second call does nothing.

    torch 2.13 frees a gloo group with the GIL held and joins its threads, which need the GIL to free the tensors of the
    last collective. A program that destroys its group within 5 ms of it hangs, also under torchrun.
    """
    for name in ("_unregister_all_process_groups", "_unregister_process_group"):
        original = getattr(c10d, name, None)
        if callable(original) and not hasattr(original, "__wrapped__"):
            setattr(c10d, name, _after_pause(original))


def _after_pause(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pause_first(*arguments: Any, **named: Any) -> Any:
        time.sleep(RELEASE_S)
        return original(*arguments, **named)

    return pause_first


def compile_blocks_separately(blocks: int) -> None:
    """Set this process's compiler for `blocks` blocks, each compiled by itself, with backward in the first forward."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = True
    if hasattr(dynamo, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        # what a layer notes for others in its forward pass is not needed again in a compiled recomputation
        dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # blocks whose inner modules have their own forward are compiled one by one
    dynamo.recompile_limit = max(dynamo.recompile_limit, 8 + blocks)  # type: ignore[attr-defined]


def define_cpu_set_device() -> None:
    """Define `torch.cpu.set_device` if torch lacks it: Accelerate calls it for ranks on CPUs."""
    import torch

    if not hasattr(torch.cpu, "set_device"):
        torch.cpu.set_device = lambda device: None


def repeat_keys_in_float32() -> None:
    """Let transformers repeat keys and values for float32 attention on GPUs, which is fused then. Do nothing the second
    time.

    torch's memory-efficient kernel, the only one for float32, has no grouped queries: with ``enable_gqa`` attention
    falls back to plain products.
    """
    import torch

    sdpa: Any = importlib.import_module("transformers.integrations.sdpa_attention")
    original = getattr(sdpa, "use_gqa_in_sdpa", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def use_gqa_in_sdpa(attention_mask: Any, key: Any, *more: Any, **named: Any) -> bool:
        plain = key.device.type == "cuda" and key.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
        return not plain and original(attention_mask, key, *more, **named)

    sdpa.use_gqa_in_sdpa = use_gqa_in_sdpa


def add_default_callback(trainer: Any, callback: type) -> None:
    """Give every Trainer of ``transformers.trainer`` a callback, as those that it has by default."""
    trainer.DEFAULT_CALLBACKS = [*trainer.DEFAULT_CALLBACKS, callback]


def append_lightning_callback(trainer_class: Any, callback: Callable[[], Any]) -> None:
    """Give every Trainer of Lightning a callback, after those of the program."""
    original = trainer_class.__init__

    @functools.wraps(original)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        with suppress(Exception):  # a version with another list
            self.callbacks.append(callback())

    trainer_class.__init__ = init


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward pass of one module; its class, its hooks and its saved state stay as they are."""
    module.forward = forward
