"""Which stored tensors make which of the model's, by transformers' own rules.

Names and layouts in files are not always those of the model: experts lie apart in files and are one tensor in the model,
prefixes came and went. The rules are run here on tensors without content first, so that every name, shape and dtype is
checked before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.train.data.tokenizer import first_line
from allranks.train.dtypes import OF_NAME
from allranks.train.loading.files import Stored

Give = Callable[[str], torch.Tensor]


@dataclass
class Recipe:
    """Stored tensors that are turned into one or more of the model's together."""

    first: str  # the first of the model's names
    rule: Any = None  # transformers' converter; None: taken as it is
    parts: list[tuple[str, str]] = field(default_factory=list)  # (the rule's pattern, stored name), in order

    @property
    def stored(self) -> list[str]:
        """Names in the files."""
        return [name for _, name in self.parts]

    def make(self, give: Give, model: Any) -> dict[str, torch.Tensor]:
        """The model's tensors by name, from what `give` has for stored names."""
        if self.rule is None:
            return {self.first: give(self.parts[0][1])}
        rule = deepcopy(self.rule)
        for pattern, name in self.parts:
            rule.add_tensor(self.first, name, pattern, lambda name=name: give(name))
        made = rule.convert(self.first, model=model, config=model.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}


@dataclass(frozen=True)
class Recipes:
    """How to make each of the model's tensors.

    Attributes:
        by_name: of every tensor that the files give.
        dtypes: what each of the model's tensors is to be.
        rules_used: which of transformers' rules for this model fit a name in the files.
    """

    by_name: dict[str, Recipe]
    dtypes: dict[str, torch.dtype]
    rules_used: list[int]


def recipes_for(model: Any, stored: Mapping[str, Stored], dtype: torch.dtype, name: str) -> Recipes:
    """Match files and model.

    Args:
        model: a transformers model; its tensors need no content.
        name: the model's name in the spec, for messages.

    Raises:
        SpecError: a stored tensor has another shape than the model's config asks for, or a dtype that is not trained.
    """
    wanted = model.state_dict()
    dtypes = dtypes_of(model, dtype)
    made: dict[str, Recipe] = {}
    rules = _rules(model)
    for recipe in _group(model, stored, wanted, rules):
        for target, tensor in _rehearsed(recipe, model, stored, name).items():
            if target not in wanted:
                continue
            files = f"{stored[recipe.stored[0]].file}: {recipe.stored[0]}" + (
                f" and {len(recipe.parts) - 1} more" if len(recipe.parts) > 1 else ""
            )
            if tensor.shape != wanted[target].shape:
                raise SpecError(
                    f"model.name {name}: {files}: gives {target} the shape {tuple(tensor.shape)}, the model's config asks for "
                    f"{tuple(wanted[target].shape)}: files and config.json are not of one model"
                )
            for part in recipe.stored:
                _check_dtype(stored[part], part, dtypes[target], name)
            made[target] = recipe
    return Recipes(made, dtypes, [i for i, rule in enumerate(rules) if rule.was_used()])


def remember_rules(model: Any, used: list[int]) -> None:
    """Saving turns round the rules by which a model was read: every rank must know which they were, as all save."""
    model._weight_conversions = [rule for i, rule in enumerate(_rules(model)) if i in used]


def _rules(model: Any) -> list[Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError as error:  # it is transformers' own, and other versions may keep it elsewhere
        raise EnvironmentNotAble(
            f"this version of transformers lacks the rules by which weights are read: {first_line(error)}; install 5.23"
        ) from None
    return get_model_conversion_mapping(model)


def _group(model: Any, stored: Mapping[str, Stored], wanted: Mapping[str, Any], rules: list[Any]) -> list[Recipe]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [r for r in rules if isinstance(r, WeightRenaming)]
    converters = [r for r in rules if isinstance(r, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    recipes: dict[str, Recipe] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)  # type: ignore[arg-type]
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)  # type: ignore[arg-type]
        if target not in wanted:  # such as the head of another task
            continue
        rule = None if pattern is None else by_pattern[pattern]
        recipes.setdefault(target, Recipe(target, rule)).parts.append((pattern or name, name))
    return list(recipes.values())


def _rehearsed(recipe: Recipe, model: Any, stored: Mapping[str, Stored], name: str) -> dict[str, torch.Tensor]:
    def give(part: str) -> torch.Tensor:
        entry = stored[part]
        return torch.empty(entry.shape, dtype=OF_NAME.get(entry.dtype, torch.uint8), device="meta")

    try:
        return recipe.make(give, model)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise SpecError(
            f"model.name {name}: {stored[recipe.stored[0]].file}: {', '.join(recipe.stored[:3])} do not make {recipe.first}: "
            f"{first_line(error)[:200]}"
        ) from None


def _check_dtype(entry: Stored, part: str, target: torch.dtype, name: str) -> None:
    have = OF_NAME.get(entry.dtype)
    if have is not None and have.is_floating_point == target.is_floating_point:
        return
    raise SpecError(
        f"model.name {name}: {entry.file}: {part} is {entry.dtype}, the model wants {str(target).removeprefix('torch.')}: "
        "quantised weights are not trained here; take a revision in F32, F16 or BF16"
    )


def dtypes_of(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """By name, as the model was built in `dtype`, but for parts that its authors keep in float32."""
    kept = [p for p, d in model._get_dtype_plan(dtype).items() if d == torch.float32]
    pattern = re.compile("|".join("(?:{})".format(p.replace("*", ".*")) for p in kept)) if kept else None
    return {
        n: torch.float32 if pattern is not None and t.is_floating_point() and pattern.search(n) else t.dtype
        for n, t in model.state_dict().items()
    }
