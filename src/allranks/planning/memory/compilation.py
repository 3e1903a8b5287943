"""Decide whether transformer blocks are compiled in training (``model.compile``), by what was measured. No torch.

``auto`` compiles where a measurement shows a gain and the run is long enough: the step time that it saves must be at
least `PAYBACK` times the time that compiling takes. Everything that is not like what was measured (shapes that vary,
experts, a model of unknown sizes) is left alone, and so is a run that must be exact (``train.deterministic``).
Only `decide_compilation` decides; the plan has the answer and the reason, and ranks and a resume follow it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from allranks.planning.memory.estimate import model_of
from allranks.planning.memory.families import ENCODERS
from allranks.planning.memory.model_config import find_config
from allranks.planning.records import LaunchPlan
from allranks.spec.models import is_mlp
from allranks.spec.records import COMPILE_AUTO, QUANTIZE_NONE, RunSpec
from allranks.spec.strategies import strategy_info
from allranks.utils.machine import MachineFacts


class MeasuredGain(msgspec.Struct, frozen=True, kw_only=True):
    """What compiled blocks gained on a kind of device."""

    ratio: float
    """Speed of training steps with compiled blocks relative to that without."""
    where: str


GAINS = {
    # plain against compiled of benchmarks/results/gpu/nvidia-h100-80gb-hbm3-2026-11-25.json
    "cuda": MeasuredGain(ratio=1.22, where="8 layers of a 7B model with LoRA in bfloat16 on an H100"),
    # k against c of benchmarks/results/train_throughput.json
    "cpu": MeasuredGain(ratio=0.82, where="a bare loop on two CPU ranks"),
}
ISOLATED_GAIN = MeasuredGain(
    # isolated of the record of 2026-11-25 against compiled_isolated of 2026-11-27
    ratio=1.15,
    where="8 layers of a 7B model with LoRA in bfloat16 and isolated rows on an H100",
)
"""On a GPU with ``data.packing: isolated``. The number of rows is variable in the compiled program."""
LEAST_RATIO = 1.05
COMPILE_S = 25.0
"""Measured on the H100. Equal blocks share one program, so that it does not grow with the number of layers."""
PAYBACK = 2.0
TRAINING_FLOPS_PER_S = 4e14
"""FLOP/s measured without compiled blocks: 41 % of an H100's dense bfloat16 peak. Slower GPUs save more."""
ASSUMED_STEPS = 2000
"""Number of steps that ``train.epochs`` over data of unknown size is taken for."""


def decide_compilation(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts) -> LaunchPlan:
    """Return the plan with ``compiled`` and, unless ``model.compile`` is false, ``compile_reason``.

    Raises:
        SpecError: the model's config is broken.
    """
    if spec.model is None or plan.batch is None or spec.model.compile is False:
        return msgspec.structs.replace(plan, compiled=False, compile_reason="")
    # what makes it impossible comes first, also for `true`; what makes it no gain is only asked for `auto`
    against = next(_reasons_against(spec, plan, facts), "")
    if against or spec.model.compile != COMPILE_AUTO:
        reason = against or "model.compile: true"
        return msgspec.structs.replace(plan, compiled=not against, compile_reason=reason)
    enough, reason = _by_time(spec, plan)
    return msgspec.structs.replace(plan, compiled=enough, compile_reason=reason)


def _reasons_against(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts) -> Iterator[str]:
    """Yield why blocks cannot be compiled; for ``auto`` also what of device, training or model has no measured gain."""
    assert spec.model is not None
    if strategy_info(plan.strategy).gathers_in_layers:
        yield f"{plan.strategy} gathers weights within the blocks"
    if spec.model.compile != COMPILE_AUTO:
        return
    if plan.device_is_provisional and plan.device != "cuda":
        yield "the nodes have not reported GPUs yet"
    gain = _gain(spec, plan)
    if gain.ratio < LEAST_RATIO:
        ran = f"compiled steps ran at {gain.ratio:.2f} times the speed in {gain.where}"
        yield f"{ran}; at least {LEAST_RATIO:.2f} is required"
    if spec.cluster.launched_by.runs_here and facts.c_compiler is False:
        yield "this machine has no C compiler (cc, gcc or clang)"
    if spec.train.deterministic:
        yield "train.deterministic: the compiler chooses some kernels by timing them"
    if spec.model.quantize != QUANTIZE_NONE:
        yield "the gain next to weights in 4 bits was not measured"
    if is_mlp(spec.model.name):
        yield f"{spec.model.name} has no transformer blocks"
    config = find_config(spec).config
    if config is None:
        yield "the sizes of the model are not known before it is loaded, nor is the time of a step"
    elif config.family in ENCODERS:
        yield "sequences of a classifier differ in length, and each length would be compiled"
    elif config.experts:
        yield "the gain for a mixture of experts was not measured"


def _gain(spec: RunSpec, plan: LaunchPlan) -> MeasuredGain:
    isolated = plan.device == "cuda" and spec.data is not None and spec.data.packing == "isolated"
    return ISOLATED_GAIN if isolated else GAINS[plan.device]


def _by_time(spec: RunSpec, plan: LaunchPlan) -> tuple[bool, str]:
    """Return whether the run saves enough time, and the numbers."""
    steps, known = _expected_steps(spec, plan)
    gain, step_s = _gain(spec, plan), expected_step_s(spec, plan)
    saved = steps * step_s * (1 - 1 / gain.ratio)
    needed = PAYBACK * COMPILE_S
    shown = f"{saved:,.0f} s" if saved >= 1 else "less than a second"
    epochs = f"{plan.epochs or 0:g} epoch{'s' * (plan.epochs != 1)}"
    amount = f"{steps:,} steps" if known else f"{steps:,} steps, assumed for {epochs},"
    return saved >= needed, (
        f"{amount} of at least {step_s:.2g} s would save {shown} ({gain.ratio:.2f} times as fast, measured with "
        f"{gain.where}), and compiling takes about {COMPILE_S:g} s; it is done from {needed:g} s saved"
    )


def _expected_steps(spec: RunSpec, plan: LaunchPlan) -> tuple[int, bool]:
    """Return the number of steps, at most, and whether it is known from the spec."""
    if plan.max_steps is not None:
        return plan.max_steps, True
    assert spec.data is not None and plan.batch is not None
    if spec.data.subset is None:
        return ASSUMED_STEPS, False
    rows = spec.data.subset * (1 - spec.data.eval_fraction)
    return math.ceil(rows * (plan.epochs or 1) / plan.batch.global_batch_size), True


def expected_step_s(spec: RunSpec, plan: LaunchPlan) -> float:
    """Return the seconds of a step's matrix products on an H100, of a model with known sizes.

    As for MFU: 6 FLOPs per trained parameter and token, 4 per frozen one. No attention, recomputation, communication.
    """
    config = find_config(spec).config
    assert config is not None and spec.data is not None and plan.batch is not None
    model = model_of(spec, plan, config)
    tokens = plan.batch.micro_batch_size * plan.batch.grad_accum * spec.data.max_length
    return tokens * (6 * model.trained + 4 * (model.parameters - model.trained)) / TRAINING_FLOPS_PER_S
