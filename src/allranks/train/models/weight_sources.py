"""Read safetensors headers, map stored tensors to the model's by transformers' rules, and read them one at a time.

Names and layouts in files may differ from the model's: experts may be separate in files and one tensor in the model, and
prefixes may differ. The rules run first on tensors without content, so that names, shapes and dtypes are checked before any weight is
read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.train.data.tokenization import first_line
from allranks.utils.safetensors_files import StoredTensor

OF_NAME = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAME_OF = {dtype: name for name, dtype in OF_NAME.items()}


Give = Callable[[str], torch.Tensor]


@dataclass
class WeightConversion:
    """A rule that converts stored tensors to one or more tensors of the model."""

    first: str  # the first target name in the model
    rule: Any = None  # transformers' converter; None: no conversion
    parts: list[tuple[str, str]] = field(default_factory=list)  # (the rule's pattern, stored name), in order

    @property
    def stored(self) -> list[str]:
        """Names of the stored tensors."""
        return [name for _, name in self.parts]

    def make(self, give: Give, model: Any) -> dict[str, torch.Tensor]:
        """Return the model's tensors by name; `give` returns the tensor of a stored name."""
        if self.rule is None:
            return {self.first: give(self.parts[0][1])}
        rule = deepcopy(self.rule)
        for pattern, name in self.parts:
            rule.add_tensor(self.first, name, pattern, lambda name=name: give(name))
        made = rule.convert(self.first, model=model, config=model.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}


@dataclass(frozen=True)
class WeightConversions:
    """Conversions for all tensors of the model.

    Attributes:
        by_name: conversion of each tensor that the files hold.
        dtypes: target dtype of each tensor of the model.
        rules_used: indices of transformers' rules for this model that match a name in the files.
    """

    by_name: dict[str, WeightConversion]
    dtypes: dict[str, torch.dtype]
    rules_used: list[int]


def conversions_for(model: Any, stored: Mapping[str, StoredTensor], dtype: torch.dtype, name: str) -> WeightConversions:
    """Match stored tensors with the model's tensors.

    Args:
        model: a transformers model; its tensors need no content.
        name: the model's name in the spec, for messages.

    Raises:
        SpecError: the shape of a stored tensor differs from the model's config, or its dtype cannot be trained.
    """
    wanted = model.state_dict()
    dtypes = dtypes_of(model, dtype)
    made: dict[str, WeightConversion] = {}
    rules = _rules(model)
    for recipe in _group(model, stored, wanted, rules):
        for target, tensor in _traced(recipe, model, stored, name).items():
            if target not in wanted:
                continue
            files = f"{stored[recipe.stored[0]].file}: {recipe.stored[0]}" + (
                f" and {len(recipe.parts) - 1} more" if len(recipe.parts) > 1 else ""
            )
            if tensor.shape != wanted[target].shape:
                raise SpecError(
                    f"model.name {name}: {files}: gives {target} the shape {tuple(tensor.shape)}, the model's config requires "
                    f"{tuple(wanted[target].shape)}: config.json does not match the weight files"
                )
            for part in recipe.stored:
                _check_dtype(stored[part], part, dtypes[target], name)
            made[target] = recipe
    return WeightConversions(made, dtypes, [i for i, rule in enumerate(rules) if rule.was_used()])


def remember_rules(model: Any, used: list[int]) -> None:
    """Store the indices of the rules that were used on the model: saving inverts them on every rank."""
    model._weight_conversions = [rule for i, rule in enumerate(_rules(model)) if i in used]


def _rules(model: Any) -> list[Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError as error:  # private module of transformers; other versions may not have it
        raise EnvironmentNotAble(
            f"this version of transformers lacks the conversion rules for weights: {first_line(error)}; install 5.23"
        ) from None
    return get_model_conversion_mapping(model)


def _group(
    model: Any, stored: Mapping[str, StoredTensor], wanted: Mapping[str, Any], rules: list[Any]
) -> list[WeightConversion]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [r for r in rules if isinstance(r, WeightRenaming)]
    converters = [r for r in rules if isinstance(r, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    recipes: dict[str, WeightConversion] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)  # type: ignore[arg-type]
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)  # type: ignore[arg-type]
        if target not in wanted:  # such as the head of another task
            continue
        rule = None if pattern is None else by_pattern[pattern]
        recipes.setdefault(target, WeightConversion(target, rule)).parts.append((pattern or name, name))
    return list(recipes.values())


def _traced(
    recipe: WeightConversion, model: Any, stored: Mapping[str, StoredTensor], name: str
) -> dict[str, torch.Tensor]:
    def give(part: str) -> torch.Tensor:
        entry = stored[part]
        return torch.empty(entry.shape, dtype=OF_NAME.get(entry.dtype, torch.uint8), device="meta")

    try:
        return recipe.make(give, model)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise SpecError(
            f"model.name {name}: {stored[recipe.stored[0]].file}: {', '.join(recipe.stored[:3])} cannot be converted to {recipe.first}: "
            f"{first_line(error)[:200]}"
        ) from None


def _check_dtype(entry: StoredTensor, part: str, target: torch.dtype, name: str) -> None:
    have = OF_NAME.get(entry.dtype)
    if have is not None and have.is_floating_point == target.is_floating_point:
        return
    raise SpecError(
        f"model.name {name}: {entry.file}: {part} is {entry.dtype}, the model needs {str(target).removeprefix('torch.')}: "
        "quantised weights cannot be trained; use a revision in F32, F16 or BF16"
    )


def dtypes_of(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return dtypes by name: `dtype`, except for modules that transformers keeps in float32."""
    kept = [p for p, d in model._get_dtype_plan(dtype).items() if d == torch.float32]
    pattern = re.compile("|".join("(?:{})".format(p.replace("*", ".*")) for p in kept)) if kept else None
    return {
        n: torch.float32 if pattern is not None and t.is_floating_point() and pattern.search(n) else t.dtype
        for n, t in model.state_dict().items()
    }


MAPPED_BYTES = 64 << 20  # limit of pages that stay mapped after they are read


class WeightSource(Protocol):
    """Provide weights on the CPU. Only the rank that reads has a source."""

    read_bytes: int

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor. It may be requested again: PEFT keeps a fully trained module beside its frozen original."""
        ...

    def forget(self, name: str) -> None:
        """Release a tensor that will not be requested again."""
        ...


class FileSource:
    """Read tensors from safetensors files on demand: pages are mapped, used and released."""

    def __init__(self, stored: Mapping[str, StoredTensor], recipes: WeightConversions, model: Any) -> None:
        self.model = model
        self._stored, self._recipes = stored, recipes
        self._open: dict[Path, Any] = {}
        self._since = 0
        self._made: dict[str, torch.Tensor] = {}
        self.read_bytes = 0

    @property
    def names(self) -> list[str]:
        """Names of the model's tensors that the files hold."""
        return sorted(self._recipes.by_name)

    @property
    def rules_used(self) -> list[int]:
        """See `WeightConversions`."""
        return self._recipes.rules_used

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return next(iter(self._stored.values())).file.parent

    def unconverted(self) -> dict[str, StoredTensor]:
        """Return the model's tensors that a file holds as they are, except for their names and dtypes."""
        return {
            name: self._stored[recipe.parts[0][1]]
            for name, recipe in self._recipes.by_name.items()
            if recipe.rule is None and name == recipe.first
        }

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
        """Do nothing: no tensor is kept in memory."""

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
    """Take tensors from a model that was initialized in this process; each is freed when it is no longer needed."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {n: p.detach() for n, p in model.named_parameters()} | dict(model.named_buffers())
        self.read_bytes = 0

    def take(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def forget(self, name: str) -> None:
        """Free the tensor."""
        del self._tensors[name]
