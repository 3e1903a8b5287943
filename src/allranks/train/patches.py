"""Change objects of other libraries, where they have no public hook for it. All such changes are made here, for the
versions in `VERIFIED`:

- torch: ``torch.distributed.Work.wait`` (measures waits), ``distributed_c10d._unregister_process_group`` (releases the
  GIL, see `let_collectives_end`), ``torch.cpu.set_device`` (missing), settings of ``torch._dynamo`` and
  ``torch._functorch`` (blocks are compiled one by one, with their backward in the first forward; settings that a
  version lacks are left out).
- transformers: ``import_utils.create_import_structure_from_path`` (below),
  ``integrations.sdpa_attention.use_gqa_in_sdpa`` (float32 attention on GPUs), the forward of experts with adapters (an
  implementation in ALL_EXPERTS_FUNCTIONS gets weights, not adapters), of output projections (the loss is computed where
  the logits would be), of rotary embeddings (frequencies of each row's own length), and of modules under autocast
  (torch has hooks before and after a forward pass, and none around it).
- peft: the forward of LoRA's Linear and ParamWrapper (PEFT registers custom layers only by a private method of its
  config).

torch is not imported here: a user's own program may not use it. Attributes that a library reads by its own protocol
(``found_inf`` of fused optimizers, ``_weight_conversions`` of transformers' models) are set where they belong.

``import transformers`` reads some 2,500 files, which takes a fifth of the time that a rank needs for its imports, and
more on a network file system. The result depends on these files alone, so that only the first process reads them:
`cached_scan` keeps the names that transformers finds in the user's private folder of the cache, under a name made of
the paths, sizes and modification times of all of them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from allranks.rundir.files import make_folder, write_text_atomic
from allranks.utils.filesystem import hf_home, private_root
from allranks.utils.inputs import read_regular
from allranks.version import __version__

if TYPE_CHECKING:
    from torch import nn


RELEASE_S = 0.05  # a thread of gloo that waits for the GIL gets it within 5 ms on an idle core


VERIFIED = {
    "torch": ("2.13", "2.13"),
    "transformers": ("5.23", "5.23"),
    "peft": ("0.21", "0.21"),
    "accelerate": ("1.15", "1.15"),
}
"""The oldest and the newest version for which all changes were verified, without patch releases; a test checks them."""


def replace_work_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``Work.wait`` in this process, and return the original."""
    import torch.distributed as dist

    original = dist.Work.wait
    dist.Work.wait = wait  # pyright: ignore[reportAttributeAccessIssue]
    return original


def let_collectives_end(c10d: Any) -> None:
    """Make ``destroy_process_group`` release the GIL for a moment before the group can be freed. Do nothing the second
    time.

    torch 2.13 frees a gloo group with the GIL held and joins its threads, and such a thread needs the GIL to free the
    tensors of the last collective. A program that destroys its group within 5 ms of that collective hangs, under
    torchrun as well.
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
    """Set the compiler of this process for `blocks` blocks, each of which is compiled by itself, with its backward in
    the first forward."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = True
    if hasattr(dynamo, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        # what a layer notes for others in its forward pass is not needed again in a compiled recomputation
        dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # blocks whose inner modules have their own forward are compiled one by one
    dynamo.recompile_limit = max(dynamo.recompile_limit, 8 + blocks)  # type: ignore[attr-defined]


IMPORT_UTILS = "transformers.utils.import_utils"
SCAN = "create_import_structure_from_path"


class _ScanOnce:
    """Finder of one module of transformers, which changes its function `SCAN` before the package uses it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != IMPORT_UTILS:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                original = getattr(module, SCAN, None)
                if callable(original) and hasattr(original, "cache_info"):
                    setattr(module, SCAN, _of_folder(original))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _of_folder(original: Callable[..., Any]) -> Callable[..., Any]:
    scans: dict[str, Any] = {}

    @functools.wraps(original)
    def scan(module_path: Any) -> Any:
        path = str(module_path)
        folder = os.path.dirname(path) if path.endswith(".py") else path  # noqa: PTH120 - as transformers
        if folder not in scans:
            scans[folder] = cached_scan(original, folder)
        return scans[folder]

    return scan


def scan_transformers_once() -> None:
    """Let the import of transformers read the sources of its models only if they have changed. Do nothing if it was
    imported."""
    if "transformers" not in sys.modules:
        sys.meta_path.insert(0, _ScanOnce())  # type: ignore[arg-type]


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


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward pass of one module; its class, its hooks and its saved state stay as they are."""
    module.forward = forward


SCAN_FOLDER = "imports"
MANY_FOLDERS = 100  # folders: less is scanned as fast as it is read


def cached_scan(scan: Callable[[str], dict[Any, Any]], folder: str) -> dict[Any, Any]:
    """Return what `scan` finds in a folder of packages: from the cache if no file has changed since. A folder of few is
    always scanned.

    Args:
        scan: returns a nested dict with the keys str and frozenset[str]; the innermost values are sets of str.
    """
    try:
        if sum(entry.is_dir() for entry in os.scandir(folder)) < MANY_FOLDERS:
            return scan(folder)
        own = private_root(hf_home()) / SCAN_FOLDER
        file = own / f"transformers-{_fingerprint_of_sources(folder)}.json"
    except OSError:
        return scan(folder)
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):  # absent, damaged, or not ours to read
        if file.stat().st_uid == os.geteuid() and (kept := _decoded_scan(json.loads(read_regular(file)))):
            return kept
    structure = scan(folder)
    with suppress(OSError, TypeError):  # a full or read-only disk, or a form that is not known here
        text = json.dumps(_encoded_scan(structure), separators=(",", ":"))
        old = list(own.glob("transformers-*.json")) if own.is_dir() else []
        write_text_atomic(make_folder(own) / file.name, text, private=True)
        for other in sorted(old, key=lambda path: path.stat().st_mtime)[:-3]:
            other.unlink(missing_ok=True)
    return structure


def _fingerprint_of_sources(folder: str) -> str:
    digest = hashlib.sha256(f"{__version__} {folder}".encode())
    for line in sorted(_source_files(folder)):
        digest.update(line.encode())
    return digest.hexdigest()[:24]


def _source_files(folder: str) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.name == "__pycache__":
            continue
        if entry.is_dir():
            yield from _source_files(entry.path)
        elif entry.name.endswith(".py"):
            facts = entry.stat()
            yield f"{entry.path} {facts.st_size} {facts.st_mtime_ns}\n"


def _encoded_scan(structure: dict[Any, Any] | set[str]) -> Any:
    """Return a form that JSON can hold: a set as a list, a dict as pairs, whose key is a list if it was a frozenset."""
    if isinstance(structure, set):
        return sorted(structure)
    return {"": [[sorted(k) if isinstance(k, frozenset) else k, _encoded_scan(v)] for k, v in structure.items()]}


def _decoded_scan(text: Any) -> Any:
    """Reverse `_encoded_scan`. Other content raises TypeError, LookupError or ValueError."""
    if isinstance(text, list):
        return {str(name) for name in text}
    return {frozenset(map(str, k)) if isinstance(k, list) else str(k): _decoded_scan(v) for k, v in text[""]}
