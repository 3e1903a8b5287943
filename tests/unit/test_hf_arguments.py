"""TrainingArguments that a user adds: what contradicts the spec is refused by name, without torch."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.errors import SpecError
from allranks.spec.records import TrainSpec
from allranks.spec.strategies.hf_trainer import FREE, TrainerExpectations, complete_arguments


def asked(**more: Any) -> TrainerExpectations:
    usual = {"train": TrainSpec(max_steps=10), "micro_batch_size": 2, "grad_accum": 3, "world_size": 2, "device": "cpu"}
    return TrainerExpectations(**{**usual, "find_unused_parameters": False, **more})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learning_rate": 1e-4}, "learning_rate is 0.0001, but train.lr is 5e-05"),
        ({"per_device_train_batch_size": 8}, "train.micro_batch_size is 2"),
        ({"max_steps": 3}, "train.max_steps is 10"),
        ({"num_train_epochs": 3}, "train.epochs is not set"),
        ({"seed": 1}, "train.seed is 42"),
        ({"ddp_find_unused_parameters": True}, "strategy.find_unused_parameters"),
        ({"bf16": True}, "model.dtype"),
        ({"gradient_checkpointing": True}, "model.gradient_checkpointing"),
        ({"save_steps": 100}, "the section checkpoint"),
        ({"deepspeed": "ds.json"}, "deepspeed_zero3"),
        ({"label_smoothing_factor": 0.1}, "it changes the loss"),
        ({"lerning_rate": 1e-4}, "did you mean 'learning_rate'"),
        ({"tf32": 1}, "expected bool, got 1"),
        ([1], "expected a mapping"),
    ],
)
def test_what_contradicts_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(SpecError, match=r"strategy\.args") as error:
        complete_arguments(given, asked())
    assert words in str(error.value)


def test_what_agrees_or_turns_nothing_on_is_taken() -> None:
    given = {
        "learning_rate": 5e-5, "bf16": False, "report_to": "none", "save_strategy": "no", "push_to_hub": False,
        "max_steps": 10, "torch_empty_cache_steps": 5,
    }  # fmt: skip
    assert complete_arguments(given, asked())["torch_empty_cache_steps"] == 5


def test_names_are_those_of_training_arguments() -> None:
    transformers = pytest.importorskip("transformers")
    known = set(transformers.TrainingArguments.__dataclass_fields__)
    assert set(FREE) <= known
    assert set(complete_arguments(None, asked(backend="gloo", train=TrainSpec(epochs=1.0)))) <= known
