"""Will it fit? Memory of one rank from the model's config alone, before anything runs. No torch, no weights.

source.py, known.py    where the config comes from (files, no network)
config.py              its sizes, checked
shapes.py, adapters.py every weight, and which are trained
activations.py         what forward keeps for backward
sharing.py, sharded.py, deepspeed.py, strategies.py   what a rank holds of weights, gradients and state
moments.py             one step, moment by moment
runtime.py, device.py  what is there beside tensors, and what there is to use
advice.py, text.py     what would make it fit, the cheapest first; in words
"""

from __future__ import annotations

from allranks.errors import EnvironmentNotAble
from allranks.facts import MachineFacts
from allranks.fit.advice import with_remedies
from allranks.fit.device import capacity
from allranks.fit.estimate import estimate
from allranks.fit.records import Fit
from allranks.fit.source import find
from allranks.fit.text import refusal
from allranks.planning import LaunchPlan
from allranks.spec.records import RunSpec

__all__ = ["Fit", "fit", "known_bytes", "require"]


def fit(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts) -> Fit:
    """What one rank of a plan needs, whether its device has it, and what would make it fit.

    Raises:
        SpecError: the model's config is broken.
    """
    found = find(spec)
    there = capacity(spec, plan, facts)
    return with_remedies(estimate(spec, plan, found, there), spec, plan, facts, found)


def known_bytes(found: Fit) -> int | None:
    """What a rank needs at its peak; None where nothing is known of the model."""
    return None if found.unknown else found.needed_bytes


def require(found: Fit) -> None:
    """Refuse what cannot fit.

    Raises:
        EnvironmentNotAble: the device has too little memory; says for what, and what would make it fit.
    """
    if found.refused:
        raise EnvironmentNotAble(refusal(found))
