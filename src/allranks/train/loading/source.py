"""Where weights come from, one tensor at a time, by their names in the bare model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from allranks.errors import EnvironmentNotAble
from allranks.train.data.tokenizer import first_line
from allranks.train.loading.files import Stored
from allranks.train.loading.recipes import Recipes

MAPPED_BYTES = 64 << 20  # of a file's pages that stay mapped behind the reader


class Source(Protocol):
    """Gives weights on the CPU. Only the rank that reads has one."""

    read_bytes: int

    def take(self, name: str) -> torch.Tensor:
        """The tensor. It may be asked for again: PEFT keeps a module that it trains whole beside its frozen original."""
        ...

    def forget(self, name: str) -> None:
        """It will not be asked for again."""
        ...


class FileSource:
    """From safetensors files, read as they are asked for: pages are mapped, used, and given back."""

    def __init__(self, stored: Mapping[str, Stored], recipes: Recipes, model: Any) -> None:
        self.model = model
        self._stored, self._recipes = stored, recipes
        self._open: dict[Path, Any] = {}
        self._since = 0
        self._made: dict[str, torch.Tensor] = {}
        self.read_bytes = 0

    @property
    def names(self) -> list[str]:
        """What the files give of the model."""
        return sorted(self._recipes.by_name)

    @property
    def rules_used(self) -> list[int]:
        """See `Recipes`."""
        return self._recipes.rules_used

    @property
    def folder(self) -> Path:
        """Where they lie."""
        return next(iter(self._stored.values())).file.parent

    def take(self, name: str) -> torch.Tensor:
        if name in self._made:
            return self._made.pop(name)
        recipe = self._recipes.by_name[name]
        made = recipe.make(lambda part: self._read(part, self._recipes.dtypes[name]), self.model)
        tensor = made.pop(name).to(self._recipes.dtypes[name])
        self._made |= {n: t for n, t in made.items() if n in self._recipes.by_name}
        if self._since > MAPPED_BYTES:
            self._open.clear()
            self._since = 0
        return tensor

    def forget(self, name: str) -> None:
        """Nothing of it is kept: what is asked for again is read again."""

    def _read(self, part: str, dtype: torch.dtype) -> torch.Tensor:
        self.read_bytes += self._stored[part].bytes
        self._since += self._stored[part].bytes
        tensor = self._tensor(part)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def _tensor(self, part: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._stored[part].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file].get_tensor(part)
        except (OSError, SafetensorError) as error:
            raise EnvironmentNotAble(f"{file}: {part} cannot be read: {first_line(error)}") from None


class ModelSource:
    """From a model that was drawn whole in this process: each tensor is let go once nothing waits for it."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {n: p.detach() for n, p in model.named_parameters()} | dict(model.named_buffers())
        self.read_bytes = 0

    def take(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def forget(self, name: str) -> None:
        """Let it go."""
        del self._tensors[name]
