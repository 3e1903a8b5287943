"""Which weights are trained: all of them, or LoRA's beside a frozen base (by PEFT's own rules)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from allranks.fit.config import ENCODERS
from allranks.fit.shapes import Shapes, Unit, Weight
from allranks.spec.records import AdapterSpec

SCORES = ("classifier", "score")  # PEFT trains a new classification head whole, in a copy beside the frozen one

FUSED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")  # projections that transformers has fused in experts


class Sizes(msgspec.Struct, frozen=True):
    """Numbers of one unit: ``base`` as the config has it, with the copies that are trained whole, ``adapters`` added by LoRA; of both, what is trained.

    ``largest_trained`` is the largest single parameter that gets a gradient.
    """

    base: int
    adapters: int
    trained_base: int
    largest_trained: int

    @property
    def trained(self) -> int:
        return self.trained_base + self.adapters


class Adapted(msgspec.Struct, frozen=True):
    """What LoRA does to a model; ``lora`` False: every weight is trained."""

    lora: bool
    r: int = 0
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None
    parameters: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    classifier: bool = False
    moe: bool = False

    def rank_of(self, weight: Weight) -> int:
        """The rank of the pair of small matrices beside this weight; 0 where there is none."""
        if not self.lora:
            return 0
        module = weight.name.removesuffix(".weight")
        if weight.kind in ("experts", "router"):
            return self._rank_in_experts(weight, module)
        if weight.kind != "linear" or not weight.name.endswith(".weight"):
            return 0
        if self.moe and module.rsplit(".", 1)[-1] in FUSED:
            return 0  # PEFT takes these names for the experts' own, and leaves other layers of that name alone
        if self.targets is not None:
            return self.r if any(_ends(module, t) for t in self.targets) else 0
        apart = module.split(".")[0] in SCORES or _ends(module, "lm_head")
        return 0 if apart or self.parameters else self.r

    def _rank_in_experts(self, weight: Weight, module: str) -> int:
        """Where the projections that were fused are all named, the fused one gets their ranks together."""
        if any(_ends(module, name) or _ends(weight.name, name) for name in self.parameters):
            return self.r
        named = set(FUSED) | {"gate"} if self.targets is None else {t.rsplit(".", 1)[-1] for t in self.targets}
        if self.targets is None and self.parameters:
            return 0
        if weight.kind == "router":
            return self.r if "gate" in named else 0
        if _ends(module, "gate_up_proj"):
            return 2 * self.r if {"gate_proj", "up_proj"} <= named or {"w1", "w3"} <= named else 0
        return self.r if named & {"down_proj", "w2"} else 0

    def has_lora(self, weight: Weight) -> bool:
        """True where a pair of small matrices stands beside this weight."""
        return self.rank_of(weight) > 0

    def is_trained(self, weight: Weight) -> bool:
        """True where the weight itself gets a gradient."""
        if not self.lora:
            return True
        module = weight.name.rsplit(".", 1)[0]
        return any(_ends(module, name) for name in self.whole)

    def numel(self, weight: Weight) -> int:
        """Parameters that LoRA adds for this weight."""
        if rank := self.rank_of(weight):
            *several, out, into = weight.shape
            return rank * (out + into) * (several[0] if several else 1)
        if self.classifier and self.lora and weight.name.split(".")[0] in SCORES:
            return weight.numel  # the trained copy
        return 0

    def unit(self, unit: Unit) -> Sizes:
        """The numbers of a unit."""
        return _sizes(self, unit)


def _sizes(adapted: Adapted, unit: Unit) -> Sizes:
    trained = [w.numel for w in unit.weights if adapted.is_trained(w)]
    added = [adapted.numel(w) for w in unit.weights]
    largest_added = max((_larger_half(adapted, w) for w in unit.weights), default=0)
    frozen_too = (
        sum(trained) if adapted.lora else 0
    )  # PEFT trains a copy of such a module; the original stays beside it
    return Sizes(unit.numel + frozen_too, sum(added), sum(trained), max([*trained, largest_added], default=0))


def _larger_half(adapted: Adapted, weight: Weight) -> int:
    if not adapted.has_lora(weight):
        return adapted.numel(weight)
    *several, out, into = weight.shape
    return adapted.rank_of(weight) * max(out, into) * (several[0] if several else 1)


def adapted(spec: AdapterSpec, shapes: Shapes) -> Adapted:
    """What the spec's adapter does to these weights."""
    if spec.type == "none":
        return Adapted(False)
    return Adapted(
        lora=True,
        r=spec.r,
        dropout=spec.dropout,
        targets=None if spec.targets is None else tuple(spec.targets),
        parameters=tuple(spec.target_parameters),
        whole=tuple(spec.modules_to_save),
        classifier=shapes.config.family in ENCODERS or bool(shapes.config.labels),
        moe=bool(shapes.config.experts),
    )


def totals(model: Shapes, what: Adapted) -> Sizes:
    """The numbers of the whole model."""
    return add([what.unit(u) for u in (*model.blocks, model.rest)])


def add(parts: Sequence[Sizes]) -> Sizes:
    """Several units as one."""
    return Sizes(
        sum(p.base for p in parts),
        sum(p.adapters for p in parts),
        sum(p.trained_base for p in parts),
        max((p.largest_trained for p in parts), default=0),
    )


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)
