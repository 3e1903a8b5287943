"""Checkpoints: written aside, read again, published by one rename.

checkpoints/step-N/
    manifest.json                 step, mode, world size, and the hash of every file
    adapter_model.safetensors, adapter_config.json     or a Hugging Face model folder; and the tokenizer
    state/                        mode full: weights.safetensors, optimizer.pt, rank<R>.pt (random generators)
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from allranks import __version__
from allranks.errors import CheckpointError
from allranks.integrity import hash_files
from allranks.rundir import RunDir, write_json
from allranks.train import rng
from allranks.train.adapters import is_adapted
from allranks.train.strategies.contract import Strategy
from allranks.train.strategies.portable import fitted
from allranks.train.world import World

WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "module.", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Saver:
    """Writes the checkpoints of one run. `save` is collective."""

    run: RunDir
    world: World
    strategy: Strategy
    model: nn.Module
    tokenizer: Any
    keep: int
    identity: dict[str, Any]

    def save(self, steps_done: int, mode: str) -> float:
        """Save after `steps_done` steps; ``mode`` is lite (what is trained) or full (all that resuming needs).

        Returns:
            Seconds that training stood still.

        Raises:
            CheckpointError: on every rank, if any rank failed; what was there before is untouched.
        """
        started = time.perf_counter()
        final = self.run.checkpoint(steps_done)
        aside = final.with_name(f".{final.name}.tmp")
        state = self.strategy.state_dict() if mode == "full" else None
        weights = None if self.strategy.replicated else self._whole_weights()
        self._together("make its folder", lambda: self._begin(aside, state), only_first=True)
        if mode == "full":
            self._together("write its random state", lambda: self._write_rank(aside))
        self._together("write it", lambda: self._write(aside, state, weights), only_first=True)
        self._together(
            "prove and publish it",
            lambda: self._publish(aside, final, steps_done, mode, state, weights),
            only_first=True,
        )
        return time.perf_counter() - started

    def _together(self, what: str, action: Callable[[], None], *, only_first: bool = False) -> None:
        """Run a part on all ranks (or rank 0), and fail on all if it failed on one."""
        problem = None
        if self.world.is_first or not only_first:
            try:
                action()
            except CheckpointError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
            except RuntimeError as error:  # safetensors and torch.save report a full disk so
                problem = str(error).splitlines()[0]
        problems: list[Any] = [None] * self.world.size
        dist.all_gather_object(problems, problem, group=self.world.control)
        bad = [(r, p) for r, p in enumerate(problems) if p is not None]
        if bad:
            rank, text = bad[0]
            raise CheckpointError(
                f"the checkpoint could not be saved: rank {rank} failed to {what}: {text}. Earlier checkpoints are untouched"
            )

    def _begin(self, aside: Path, state: dict[str, Any] | None) -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if state is not None:
            (aside / "state").mkdir()
        need = _bytes_of(state or {}) + sum(
            p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad
        )
        free = shutil.disk_usage(aside).free
        if free < need * 1.05 + (1 << 20):
            raise CheckpointError(
                f"{self.run.checkpoints}: about {need / 2**20:.1f} MiB are needed, {free / 2**20:.1f} MiB are free"
            )

    def _write_rank(self, aside: Path) -> None:
        torch.save(rng.rng_state(), aside / "state" / f"rank{self.world.rank}.pt")

    def _whole_weights(self) -> dict[str, torch.Tensor]:
        """Of a sharded model, by the inner model's names; rank 0's alone are not empty."""
        whole = self.strategy.weights(trained_only=is_adapted(self.model))
        return {name.removeprefix("model."): tensor for name, tensor in whole.items()}

    def _write(self, aside: Path, state: dict[str, Any] | None, weights: dict[str, torch.Tensor] | None) -> None:
        if is_adapted(self.model):
            given = {} if weights is None else {"state_dict": weights}
            # "auto" would ask the hub whether the vocabulary was resized
            self.model.save_pretrained(str(aside), safe_serialization=True, save_embedding_layers=False, **given)  # type: ignore[operator]
        else:
            model = self.model if weights is None else whole_twin(self.model, weights)
            model.save_pretrained(str(aside))  # type: ignore[operator]
        self.tokenizer.save_pretrained(str(aside))
        if state is not None:
            save_file(
                {k: v.contiguous().clone() for k, v in state["model"].items()}, aside / "state" / "weights.safetensors"
            )
            torch.save(state["optimizer"], aside / "state" / "optimizer.pt")

    def _publish(
        self,
        aside: Path,
        final: Path,
        steps_done: int,
        mode: str,
        state: dict[str, Any] | None,
        weights: dict[str, torch.Tensor] | None,
    ) -> None:
        prove_weights(self.model, aside, weights)
        if state is not None:
            _prove_state(aside / "state", state)
        facts = {
            "step": steps_done,
            "mode": mode,
            "world_size": self.world.size,
            "allranks": __version__,
            "torch": str(torch.__version__),
            **self.identity,
        }
        write_json(aside / "manifest.json", {**facts, "created": time.time(), "files": hash_files(aside)})
        _sync_files(aside)
        _sync(aside)
        old = final.with_name(f".{final.name}.old")
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        aside.rename(final)
        _sync(final.parent)
        shutil.rmtree(old, ignore_errors=True)
        for step in self.run.checkpoint_steps()[: -self.keep]:
            shutil.rmtree(self.run.checkpoint(step), ignore_errors=True)


def whole_twin(model: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    """A plain model of the same class that holds `weights`: the sharded one has none that could be saved."""
    with torch.device("meta"):
        twin = type(model)(model.config)
    twin.load_state_dict(weights, strict=False, assign=True)
    twin.tie_weights()  # type: ignore[operator]
    return twin


def prove_weights(model: nn.Module, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Read the saved weights again and compare them, bit by bit, with those in memory (or with `weights`, if sharded).

    Raises:
        CheckpointError: a tensor is missing, has a wrapper's prefix, or differs.
    """
    if is_adapted(model):
        from peft import get_peft_model_state_dict

        wanted: dict[str, torch.Tensor] = get_peft_model_state_dict(
            model,  # type: ignore[arg-type]
            state_dict=weights,
            save_embedding_layers=False,
        )
        saved = load_file(folder / "adapter_model.safetensors")
        _compare(saved, wanted, "adapter_model.safetensors")
        return
    saved = {}
    for part in sorted(folder.glob("model*.safetensors")):
        saved.update(load_file(part))
    kept = {k: v for k, v in (weights or model.state_dict()).items() if k in saved}
    parameters = set(weights) if weights else {n for n, _ in model.named_parameters(remove_duplicate=True)}
    missing = parameters - saved.keys()
    if missing and not getattr(model.config, "tie_word_embeddings", False) and not _renamed(saved, parameters):
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(parameters)} weights are not in the file, first {min(missing)}"
        )
    _compare({k: v for k, v in saved.items() if k in kept}, kept, "model.safetensors")


def _renamed(saved: dict[str, torch.Tensor], parameters: set[str]) -> bool:
    """True where transformers stores a weight in another layout (fused experts apart), with as many elements."""
    return len(saved) > len(parameters)


def _compare(saved: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], name: str) -> None:
    wrapped = [k for k in saved if any(w in k for w in WRAPPERS)]
    if wrapped:
        raise CheckpointError(f"{name}: {wrapped[0]} has a wrapper's prefix; nothing else could load it")
    if saved.keys() != wanted.keys() or not saved:
        odd = sorted(saved.keys() ^ wanted.keys())
        raise CheckpointError(
            f"{name}: {len(saved)} tensors saved, {len(wanted)} expected"
            + (f"; first difference: {odd[0]}" if odd else "")
        )
    for key, tensor in wanted.items():
        if saved[key].dtype != tensor.dtype or not same_bits(saved[key], tensor):
            raise CheckpointError(f"{name}: {key} differs from the weight in memory after it was read again")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape and bytes (NaN equals NaN)."""
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    return a.shape == b.shape and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _prove_state(folder: Path, state: dict[str, Any]) -> None:
    _compare(load_file(folder / "weights.safetensors"), state["model"], "state/weights.safetensors")
    if not _equal(torch.load(folder / "optimizer.pt", weights_only=True), state["optimizer"]):
        raise CheckpointError("state/optimizer.pt differs from the optimizer's state after it was read again")


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_bytes_of(v) for v in value.values())
    return sum(_bytes_of(v) for v in value) if isinstance(value, (list, tuple)) else 0


def _sync_files(folder: Path) -> None:
    """All files below a folder to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)


def _sync(path: Path) -> None:
    """A file, or a folder's list of names, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load_full(folder: Path, strategy: Strategy, rank: int) -> dict[str, torch.Tensor]:
    """Weights, optimizer and this rank's random generators from a full checkpoint. Every rank calls.

    Returns:
        The weights as this rank read them.
    """
    state = {
        "model": load_file(folder / "state" / "weights.safetensors"),
        "optimizer": torch.load(folder / "state" / "optimizer.pt", weights_only=True),
    }
    try:
        strategy.load_state_dict(fitted(state, keeps_master=getattr(strategy, "keeps_master", False)))
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: does not fit this model: {str(error).splitlines()[0]}") from None
    own = folder / "state" / f"rank{rank}.pt"
    if own.exists():
        rng.set_rng_state(torch.load(own, weights_only=True))
    return state["model"]


def load_lite(folder: Path, model: nn.Module) -> None:
    """The trained weights alone; optimizer and random generators start anew."""
    if is_adapted(model):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))  # type: ignore[arg-type]
        return
    merged: dict[str, torch.Tensor] = {}
    for part in sorted(folder.glob("model*.safetensors")):
        merged.update(load_file(part))
    problems = model.load_state_dict(merged, strict=False)
    tied = getattr(model.config, "tie_word_embeddings", False)
    if problems.unexpected_keys or (problems.missing_keys and not tied):
        raise CheckpointError(
            f"{folder}: does not fit this model: {(problems.unexpected_keys or problems.missing_keys)[0]}"
        )
