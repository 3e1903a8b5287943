"""What cannot be together in a spec with an ``mlp:`` model or ``builtin:noise``. Pure."""

from __future__ import annotations

from allranks.errors import SpecError
from allranks.mlp import NOISE, is_mlp, mlp_shape
from allranks.spec.records import RunSpec


def mlp_problems(spec: RunSpec) -> list[str]:
    """A sentence for each contradiction."""
    if spec.model is None or spec.data is None:
        return []
    name, source = spec.model.name, spec.data.source
    if not is_mlp(name):
        return [f"data.source {NOISE} is for mlp: models, {name} reads text"] if source == NOISE else []
    problems = []
    try:
        mlp_shape(name, spec.model.config)
    except SpecError as error:
        problems.append(str(error))
    refused = (
        (source != NOISE, f"data.source is {source}: {name} knows no text; set it to {NOISE}"),
        (spec.eval.source is not None, "eval.source: an mlp: model is evaluated on noise of its own; leave it out"),
        (spec.adapter.type != "none", f"adapter.type is {spec.adapter.type}: {name} is trained whole"),
        (spec.model.gradient_checkpointing, f"model.gradient_checkpointing: {name} has nothing to compute again"),
    )
    return [*problems, *(text for wrong, text in refused if wrong)]
