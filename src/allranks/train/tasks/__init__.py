"""What is trained on what: text by a language model, labels by a classifier, noise by a perceptron. One file a kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allranks.mlp import is_mlp
from allranks.spec.records import RunSpec
from allranks.train.tasks.contract import Task

if TYPE_CHECKING:
    from torch import nn

    from allranks.train.data.prepared import Prepared


def task_of(spec: RunSpec) -> Task:
    """The kind of work of a spec.

    Raises:
        SpecError, EnvironmentNotAble: no such model, or it cannot be had.
    """
    assert spec.model is not None
    if is_mlp(spec.model.name):
        from allranks.train.tasks.noise import NoiseTask

        return NoiseTask(spec)
    from allranks.train.model import is_classifier
    from allranks.train.tasks.tokens import TokenTask

    return TokenTask(spec, classifier=is_classifier(spec.model))


def whole_model(task: Task, data: Prepared, dtype: str) -> nn.Module:
    """The model with its weights, on the CPU, for this process alone."""
    from allranks.train.world import ALONE

    model, filler = task.load(ALONE, data, dtype, lambda model: None)
    filler.begin(model, model, in_parts=False)
    filler.whole(model.named_parameters())
    filler.finish()
    return model
