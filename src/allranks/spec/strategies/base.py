"""Define the record of a strategy without torch (`StrategyInfo`), and the memory layouts that several strategies share.

One class per layout, a `StrategyState`. It says for each phase of a step which bytes of weights, gradients and
optimizer state a rank holds. The planner computes a `ModelSizes` from the spec; `StrategyInfo.memory` makes the layout
from it. At most two full gradient buffers are in flight, and a buffer is freed only when a later one replaces it.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

if TYPE_CHECKING:
    from allranks.spec.records import TrainSpec

ADAM_MOMENTS = 2  # AdamW's
ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8  # under every strategy
BUFFERS_IN_FLIGHT = 2
"""Full gradient buffers whose reduce-scatter runs: more need memory and hide no more communication."""
MB = 1 << 20
DEFAULT_BUCKET_MB = 25.0


class UnitSizes(msgspec.Struct, frozen=True):
    """Element counts of one unit, and of its trained part.

    ``base`` is from the config, with copies of modules that are trained in full; ``adapters`` is what LoRA adds.

    ``largest_trained`` is the largest single parameter that gets a gradient.
    """

    base: int
    adapters: int
    trained_base: int
    largest_trained: int
    quantized: int = 0
    """Elements of the base in 4 bits."""
    quantized_bytes: int = 0
    """Their bytes, with scales."""

    @property
    def trained(self) -> int:
        return self.trained_base + self.adapters


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What memory layouts read of a model and its plan. Sizes are in bytes, unless they are called elements."""

    blocks: tuple[UnitSizes, ...]
    """Transformer blocks, in order."""
    rest: UnitSizes
    """Weights outside of blocks."""
    trained_elements: tuple[int, ...]
    """Elements of every trained parameter, in the model's order."""
    trained_outside: tuple[tuple[int, ...], tuple[int, ...]]
    """Elements of the trained parameters of the base before the first block, and after the last one."""
    largest_weight: int
    """Elements of the largest weight."""
    has_adapters: bool
    """Adapters are trained next to a frozen base."""
    world: int
    """Number of ranks over which a strategy shards."""
    node_ranks: int
    accumulates: bool
    """A step has several micro-steps."""
    device: str
    element: int
    """Bytes of a weight of the base that is not trained."""
    trained_element: int
    """Bytes of a trained element, its gradient, and each of its moments."""
    autocast: int | None
    """Bytes of an element in the dtype of compute, where forward passes run under autocast; else None."""
    copies: int
    """Copies of a reduce-scatter's input: gloo reduces a copy."""

    @property
    def parameters(self) -> int:
        """Return all elements, also of adapters."""
        return sum(u.base + u.adapters for u in (*self.blocks, self.rest))

    @cached_property
    def base(self) -> int:
        """Return bytes of the weights of the base."""
        return sum(self._base_bytes(u) for u in (*self.blocks, self.rest))

    @cached_property
    def adapters(self) -> int:
        """Return bytes of the weights of the adapters."""
        return sum(u.adapters for u in (*self.blocks, self.rest)) * self.trained_element

    @cached_property
    def trained(self) -> int:
        """Return the trained elements."""
        return sum(u.trained for u in (*self.blocks, self.rest))

    @property
    def gradients(self) -> int:
        """Return bytes of all gradients."""
        return self.trained * self.trained_element

    @cached_property
    def largest_gradient(self) -> int:
        """Return bytes of the largest gradient of one parameter."""
        return max(u.largest_trained for u in (*self.blocks, self.rest)) * self.trained_element

    @property
    def head_gradient_bytes(self) -> int:
        """Return bytes of the gradients of the weights after the last block, the first ones of backward."""
        return sum(self.trained_outside[1]) * self.trained_element

    def share(self, n: int) -> int:
        """Return a rank's share of `n` bytes or elements."""
        return share_per_rank(n, self.world)

    def gradient_of(self, unit: UnitSizes) -> int:
        """Return bytes of a unit's gradients."""
        return unit.trained * self.trained_element

    def frozen_bytes_of(self, unit: UnitSizes) -> int:
        """Return bytes of a unit's base, if nothing of it is trained."""
        return (unit.base - unit.quantized) * self.element + unit.quantized_bytes

    def _base_bytes(self, unit: UnitSizes) -> int:
        return self.frozen_bytes_of(unit) + unit.trained_base * (self.trained_element - self.element)

    def bytes_of(self, unit: UnitSizes) -> int:
        """Return bytes of a unit's weights as they are stored, including adapters."""
        return self._base_bytes(unit) + unit.adapters * self.trained_element

    def gathered_bytes_of(self, unit: UnitSizes) -> int:
        """Return bytes of a unit's weights gathered for a forward pass, in the dtype of compute."""
        if not self.autocast:
            return self.bytes_of(unit)
        return (unit.base - unit.quantized + unit.adapters) * self.autocast + unit.quantized_bytes

    @cached_property
    def gradient_bytes_before(self) -> list[int]:
        """Return bytes of the gradients that exist when backward reaches each block."""
        backwards = accumulate((self.gradient_of(b) for b in self.blocks[::-1]), initial=self.head_gradient_bytes)
        return list(backwards)[-2::-1]

    def first_of(self, at: int, *, gathered: bool = False) -> int:
        """Return bytes of the largest gradient of block `at` when backward has computed it.

        Args:
            gathered: weights are gathered in the dtype of compute; gradients too. Else autocast casts them: both exist.
        """
        return self.blocks[at].largest_trained * self._fresh_element(gathered)

    def head_gradient(self, *, gathered: bool = False) -> int:
        """Return bytes of the gradients that come as soon as backward begins, as `first_of`."""
        return sum(self.trained_outside[1]) * self._fresh_element(gathered)

    def _fresh_element(self, gathered: bool) -> int:
        if self.autocast is None:
            return self.trained_element
        return self.autocast if gathered else self.autocast + self.trained_element


Parts = dict[str, int]
Options = dict[str, Any]


class StrategyState:
    """Memory that this rank holds in each phase of a step, in bytes by part. `kept` is there in each of them, except in
    `setup`.

    This class itself has everything on every rank, and a gradient for each parameter. ``at`` counts blocks from the
    front; backward goes from the last block to 0.
    """

    copies_weights = True
    """Trained weights are in their own dtype in forward passes, so that autocast casts them."""
    offload = "none"
    """What is kept in host memory: none, optimizer, or all."""

    def __init__(self, model: ModelSizes) -> None:
        self._m = model

    def kept(self) -> Parts:
        """Return bytes of weights and optimizer state."""
        m = self._m
        return {"weights": m.base, "adapters": m.adapters, "optimizer_state": ADAM_MOMENTS * m.gradients}

    def kept_on_device(self) -> Parts:
        """Return the same without what is offloaded. On CPUs nothing is saved; the optimizer's weight copy is extra."""
        parts = self.kept()
        if self.offload == "none":
            return parts
        if self._m.device == "cpu":
            copied = self._m.share(self._m.gradients) if self.offload == "optimizer" else 0
            return parts | {"optimizer_state": parts["optimizer_state"] + copied}
        gone = ("optimizer_state",) if self.offload == "optimizer" else ("optimizer_state", "weights", "adapters")
        return {key: n for key, n in parts.items() if key not in gone}

    def setup(self) -> Parts:
        """Return the peak while the strategy is set up, when the full model is on the device."""
        return {"weights": self._m.base, "adapters": self._m.adapters}

    def in_loss(self) -> Parts:
        """Return memory between forward and backward of the last micro-step."""
        return {"gradients": self._m.gradients if self._m.accumulates else 0}

    def at_head(self) -> Parts:
        """Return memory when the gradient of the layers after the last block and all activations exist."""
        return {"gradients": self._m.head_gradient() + self.in_loss()["gradients"]}

    def in_backward(self, at: int) -> Parts:
        """Return memory inside backward of block `at`, at its activation peak, after its first gradient."""
        m = self._m
        return {"gradients": (m.gradients if m.accumulates else m.gradient_bytes_before[at]) + m.first_of(at)}

    def at_end(self) -> Parts:
        """Return memory when the gradient of the layers before the first block is computed."""
        return {"gradients": self._m.gradients + (self._m.largest_gradient if self._m.accumulates else 0)}

    def at_update(self) -> Parts:
        """Return memory during the optimizer update, which is fused: AdamW updates in place."""
        return {"gradients": self._m.gradients}


class ShardedGradients(StrategyState):
    """A rank has only its share of the gradients when it updates."""

    def at_update(self) -> Parts:
        return {"gradients": self._m.share(self._m.gradients)}


class ShardedWeights(ShardedGradients):
    """A rank keeps its share of the weights too, and a block is whole on it only while it computes."""

    def setup(self) -> Parts:
        return sharded_setup(self._m, max((self._m.bytes_of(b) for b in self._m.blocks), default=0))


MakeState = Callable[[ModelSizes, Options], StrategyState]


class PlannedWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a `StrategyPlanner` knows of the plan."""

    strategy: str
    micro_batch_size: int
    grad_accum: int
    world_size: int
    dtype: str
    """In which the model computes: float32 or bfloat16."""
    device: str


class StrategyPlanner(Protocol):
    """The module without torch that plans the options of another library's engine."""

    def read_options(self, options: Options) -> Options:
        """Return the options with the content of files that they name."""
        ...

    def param_dtype(self, options: Options) -> str | None:
        """Return the dtype of trained weights that the options set; None if they set none."""
        ...

    def plan_options(self, options: Options, train: TrainSpec, work: PlannedWork) -> Options:
        """Return the options for the ranks.

        Raises:
            SpecError: an option contradicts the spec.
        """
        ...


class StrategyInfo(msgspec.Struct, frozen=True):
    """Where a strategy is implemented, and its options with their defaults."""

    target: str
    """The class, as ``module:class``."""
    summary: str
    options: Options = {}
    choices: dict[str, tuple[str, ...]] = {}  # options that are one of some words
    single_process: bool = False
    memory: MakeState | None = None
    """Returns the memory layout of a model; None: unknown."""
    node_sends: Callable[[ModelSizes, Options, int, int], int] | None = None
    """Returns the bytes that a node sends to others per optimizer step, from the number of nodes and of micro-steps."""
    package: str = ""
    """The package of another library's engine, which the nodes need."""
    imports_bytes: int = 0
    """What importing that library adds to a rank's process."""
    gathers_in_layers: bool = False
    """Weights are gathered in hooks of layers inside of blocks, so that blocks cannot be compiled.

    With LoRA a block is gathered as a whole, unless ``find_unused_parameters`` needs hooks of its layers.
    """
    shards_weights: bool = False
    """A rank holds a part of each weight between steps, not all of it."""
    refuses_quantized: str = ""
    """Why it cannot train next to weights in 4 bits, as the end of a sentence; empty if it can."""
    keeps_master_weights: bool = False
    """The optimizer updates float32 weights, also of a model in lower precision."""
    builds_extensions: bool = False
    """The library compiles extensions when ranks start."""
    cpu_environment: dict[str, tuple[str, str]] = {}
    """Variables that the library needs where ranks compute on CPUs: (value, reason)."""
    planner: str = ""
    """The full name of a module that is a `StrategyPlanner`."""
    engine: str = "allranks.train.loop:TrainingLoop"
    """What runs the optimizer steps, as ``module:class``."""


class GradientBuffers:
    """Flat gradient buffers in the order in which backward fills them, in bytes.

    Args:
        copies: copies of each buffer in flight: gloo reduces a copy of its input.
    """

    def __init__(self, flats: Sequence[int], world: int, *, copies: int) -> None:
        self._flats, self._world, self._copies = list(flats), world, copies
        self._ends = list(accumulate(self._flats))

    def at(self, done: int, *, filling: bool) -> tuple[int, int]:
        """Return (shards that this rank keeps, buffers) after `done` bytes of gradients.

        Args:
            filling: more gradients are being written to the buffer after the full ones.
        """
        full = bisect_right(self._ends, done)
        total = self._ends[full - 1] if full else 0
        travelling = sum(self._flats[max(0, full - BUFFERS_IN_FLIGHT) : full]) * self._copies
        begun = self._flats[full] if full < len(self._flats) and (filling or done > total) else 0
        return share_per_rank(total, self._world), travelling + begun

    def after_last_launch(self) -> tuple[int, int]:
        """Return the same at the start of the last transfer, before the oldest buffer is freed."""
        return share_per_rank(sum(self._flats), self._world), sum(self._flats[-BUFFERS_IN_FLIGHT - 1 :]) * self._copies


class Bucketed(StrategyState):
    """Gradients are views of buckets; a new gradient is copied there. For hand-written buckets and DDP.

    Args:
        keeps_local_gradients: gradients of micro-steps that are not reduced stay outside of the buckets (DDP's
        ``no_sync``).
        shards_moments: this rank keeps its share of the optimizer state only.
    """

    def __init__(self, model: ModelSizes, *, keeps_local_gradients: bool = False, shards_moments: bool = False) -> None:
        super().__init__(model)
        self._gradients = model.gradients * (2 if keeps_local_gradients and model.accumulates else 1)
        self._shards_moments = shards_moments

    def kept(self) -> Parts:
        return super().kept() | ({"optimizer_state": sharded_moments(self._m)} if self._shards_moments else {})

    def setup(self) -> Parts:
        return super().setup() | {"gradients": self._m.gradients}

    def in_loss(self) -> Parts:
        return {"gradients": self._gradients}

    def in_backward(self, at: int) -> Parts:
        return {"gradients": self._gradients + self._m.first_of(at)}

    def at_end(self) -> Parts:
        return {"gradients": self._gradients + self._m.largest_gradient}


def add_parts(a: Parts, b: Parts) -> Parts:
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}


T = TypeVar("T")


def cut_into_buckets(
    items: Iterable[T],
    bytes_of: Callable[[T], int],
    bucket_bytes: float,
    kind_of: Callable[[T], Any] = lambda item: None,
) -> list[list[T]]:
    """Group adjacent items of one kind into buckets of up to `bucket_bytes`; a larger item gets its own bucket.

    Ranks fill their buckets by it, and the planner counts by it.
    """
    buckets: list[list[T]] = []
    size = 0
    for item in items:
        own = bytes_of(item)
        if buckets and kind_of(buckets[-1][0]) == kind_of(item) and size + own <= bucket_bytes:
            buckets[-1].append(item)
            size += own
        else:
            buckets.append([item])
            size = own
    return buckets


def bucket_sizes(sizes: Iterable[int], bucket_bytes: float) -> list[int]:
    """Return the bytes of the buckets of gradients with these bytes."""
    return [sum(bucket) for bucket in cut_into_buckets(sizes, int, bucket_bytes)]


def share_per_rank(n: int, world: int) -> int:
    return -(-n // world)


def as_sharded(m: ModelSizes, options: Options) -> ModelSizes:
    """Return the model with ``world``: the number of ranks that these options shard it over, a node's under HSDP."""
    return msgspec.structs.replace(m, world=m.node_ranks) if options.get("replicate") == "nodes" else m


def sharded_setup(m: ModelSizes, unit: int) -> Parts:
    """Return the setup peak: GPUs receive weights one unit at a time; on CPUs the first rank builds the full model."""
    if m.device == "cpu":
        return {"weights": m.base, "adapters": m.adapters, "gathered_weights": m.share(m.base)}
    return {"weights": m.share(m.base), "adapters": m.share(m.adapters), "gathered_weights": unit}


def sharded_moments(m: ModelSizes) -> int:
    return ADAM_MOMENTS * m.share(m.gradients)


ENGINE_SETTINGS: dict[str, dict[str, str]] = {
    table: {name: why for names, why in rows for name in names.split()}
    for table, rows in json.loads((Path(__file__).parent / "engine_settings.json").read_text()).items()
}
"""Settings of other libraries' engines by table, with the reason why each cannot be used."""


def same_setting(theirs: Any, ours: Any) -> bool:
    """Return whether two settings are equal; numbers compare as numbers (1 equals 1.0, but not true)."""
    if isinstance(theirs, bool) != isinstance(ours, bool):
        return False
    if isinstance(theirs, (int, float)) and isinstance(ours, (int, float)):
        return math.isclose(theirs, ours, rel_tol=1e-9)
    return theirs == ours
