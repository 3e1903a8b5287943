"""Estimate the memory of one rank from the model's config, before anything runs. No torch, no weights.

model_config.py   finds the config (files only, no network), and checks its sizes
weights.py        lists every weight, which ones are trained, and their bytes under a strategy
activations.py    bytes that forward keeps for backward
estimate.py       memory in each phase of a step, runtime overhead, device capacity
compilation.py    whether transformer blocks are compiled, by what was measured
remedies.py       weight copies per node (HSDP) and recomputation, for auto; changes that make a run fit, cheapest first
"""

from __future__ import annotations

from allranks.errors import EnvironmentNotAble
from allranks.planning.memory.estimate import DTYPE_BYTES, Fit, capacity, estimate
from allranks.planning.memory.model_config import find_config
from allranks.planning.memory.remedies import make_plan, refusal, with_remedies
from allranks.planning.records import LaunchPlan
from allranks.spec.records import RunSpec
from allranks.utils.machine import MachineFacts

__all__ = ["Fit", "fit", "known_bytes", "make_plan", "require", "saved_bytes"]


def fit(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts) -> Fit:
    """Return what one rank of a plan needs, whether its device has it, and what would make it fit.

    Raises:
        SpecError: the model's config is broken.
    """
    config = find_config(spec)
    there = capacity(spec, plan, facts)
    return with_remedies(estimate(spec, plan, config, there), spec, plan, facts, config)


def known_bytes(fit: Fit) -> int | None:
    """Return what a rank needs at its peak, or None for an unknown model."""
    return None if fit.unknown else fit.needed_bytes


def saved_bytes(fit: Fit, spec: RunSpec, plan: LaunchPlan) -> int:
    """Return the bytes of the weights in a checkpoint: all, or the adapter; 0 for an unknown model."""
    weights = fit.parameters if spec.adapter.type == "none" else fit.parameters_trained
    return weights * DTYPE_BYTES[plan.param_dtype]


def require(fit: Fit) -> None:
    """Refuse a plan that cannot fit.

    Raises:
        EnvironmentNotAble: the device has too little memory; the message names the phase and what would make it fit.
    """
    if fit.refused:
        raise EnvironmentNotAble(refusal(fit))
