"""DeepSpeed's JSON and TrainingArguments against the spec: filled in, checked, and refused by name, without torch."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import SpecError
from allranks.planning.planner import make_plan
from allranks.spec import load_spec, parse_spec, spec_to_yaml
from allranks.spec.loader import parse_yaml
from allranks.spec.records import TrainSpec
from allranks.spec.strategies.deepspeed_zero import KNOWN_IN_ZERO, DeepSpeedExpectations, complete_config, without_auto
from allranks.spec.strategies.hf_trainer import FREE, TrainerExpectations, complete_arguments
from allranks.utils.machine import MachineFacts

FACTS = MachineFacts(host="h", cpus=8, memory_bytes=0, gpus=[], cpu_model="", system="")
ASKED = DeepSpeedExpectations(
    stage=2, world_size=4, micro_batch_size=8, grad_accum=3, dtype="bfloat16", clip_norm=1.0, lr=1e-4, weight_decay=0.1,
    device="cuda",
)  # fmt: skip


def problem(config: dict[str, Any], asked: DeepSpeedExpectations = ASKED) -> str:
    with pytest.raises(SpecError) as caught:
        complete_config(config, asked, "ds.json")
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_an_empty_configuration_is_completed_from_the_spec() -> None:
    assert complete_config(None, ASKED, "x") == {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3, "train_batch_size": 96,
        "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0,
    }  # fmt: skip


def test_auto_is_filled_in_wherever_it_stands() -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config: dict[str, Any] = dict.fromkeys(names, "auto") | {
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "weight_decay", "betas", "eps"), "auto")},
    }
    found = complete_config(config, ASKED, "x")
    assert found["train_batch_size"] == 96
    assert found["optimizer"]["params"] == {"lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8}
    assert found["fp16"] == {"enabled": False}
    assert config["train_batch_size"] == "auto"  # the caller's own is left alone
    rest = without_auto(found)
    assert "auto" not in json.dumps(rest)
    assert rest["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_batch_size": 64}, ["ds.json: train_batch_size is 64", "8 x 3 x 4 is 96"]),
        ({"train_micro_batch_size_per_gpu": 4}, ["train_micro_batch_size_per_gpu is 4", "train.micro_batch_size is 8"]),
        ({"zero_optimization": {"stage": 3}}, ["zero_optimization.stage is 3", "the stage of strategy.name is 2"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["fp16.enabled is true", "model.dtype: bfloat16"]),
        ({"gradient_clipping": 0.5}, ["gradient_clipping is 0.5", "train.max_grad_norm", "1.0"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 5e-5}}}, ["optimizer.params.lr is 5e-05"]),
        ({"optimizer": {"type": "OneBitAdam"}}, ["OneBitAdam uses its own communication"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["scheduler cannot be used", "train.schedule"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["zero_optimization.offload_optimizer"]),
        ({"zero_optimisation": {"stage": 2}}, ["would ignore the key 'zero_optimisation'", "zero_optimization"]),
        ({"zero_optimization": {"overlap_com": True}}, ["refuses the key 'overlap_com'", "'overlap_comm'"]),
        ({"bf16": True}, ["bf16 is true", "JSON object"]),
    ],
)
def test_a_contradiction_names_the_key_and_both_values(config: dict[str, Any], words: list[str]) -> None:
    said = problem(config)
    assert all(word in said for word in words), said


def test_keys_of_the_installed_deepspeed_and_of_unknown_versions_pass() -> None:
    package = find_spec("deepspeed")
    if package and package.origin:
        text = (Path(package.origin).parent / "runtime/zero/config.py").read_text()
        text = text.split("class DeepSpeedZeroConfig")[-1]
        assert set(re.findall(r"(?:^    (?=\w+: )|alias=\")(\w+)", text, re.MULTILINE)) <= set(KNOWN_IN_ZERO)
    complete_config({"zero_optimization": {"of_a_later_version": 1}}, ASKED, "x")


def test_float32_refuses_bf16_and_a_cpu_refuses_what_would_be_compiled() -> None:
    plain = DeepSpeedExpectations(stage=1, world_size=2, dtype="float32", device="cpu")
    assert "bf16.enabled is true" in problem({"bf16": {"enabled": True}}, plain)
    assert "torch_adam" in problem({"optimizer": {"type": "AdamW", "params": {}}}, plain)
    complete_config({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, plain, "x")


def spec_of(tmp_path: Path, strategy: dict[str, Any], **train: Any) -> Path:
    path = tmp_path / "spec.yaml"
    content = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}, "strategy": strategy}
    path.write_text(json.dumps(content | {"train": train, "cluster": {"procs_per_node": 2, "device": "cpu"}}))
    return path


def test_the_file_becomes_part_of_spec_and_plan(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"overlap_comm": True}}))
    spec = load_spec(spec_of(tmp_path, {"name": "deepspeed_zero2", "config": str(file)}, micro_batch_size=4))
    file.unlink()  # a resumed run must not need it
    again = parse_spec(parse_yaml(spec_to_yaml(spec), "spec"))
    assert again == spec
    plan = make_plan(again, FACTS)
    assert plan.strategy_options["config_from"] == str(file)
    config: Any = plan.strategy_options["config"]
    assert config["zero_optimization"] == {"overlap_comm": True, "stage": 2}
    assert config["train_batch_size"] == 8
    assert next(e for e in plan.environment if e.name == "DS_ACCELERATOR").value == "cpu"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "file not found"), ("{", "is not valid JSON"), ("[1]", "found a list"),
        ('{"bf16": {}, "bf16": {}}', "'bf16' occurs twice"), ("[" * 100_000, "is not valid JSON"),
        ("\xff", "is not valid JSON"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    with pytest.raises(SpecError, match=words) as caught:
        load_spec(spec_of(tmp_path, {"name": "deepspeed_zero1", "config": str(file)}))
    assert str(file) in str(caught.value) and "strategy.config" in str(caught.value)


def test_the_plan_stores_weights_as_an_enabled_bf16_does() -> None:
    """DeepSpeed then casts the model and keeps float32 master weights; all else follows the plan."""
    raw: Any = {
        "model": {"name": "mlp:64x2", "dtype": "bfloat16"}, "data": {"source": "builtin:noise"},
        "strategy": {"name": "deepspeed_zero1"},
        "cluster": {"procs_per_node": 2},
    }  # fmt: skip
    for enabled, stored in ((True, "bfloat16"), ("auto", "float32")):
        raw["strategy"]["config"] = {"bf16": {"enabled": enabled}}
        assert make_plan(parse_spec(raw), FACTS).param_dtype == stored
    raw["strategy"]["config"], raw["model"]["dtype"] = {"bf16": {"enabled": True}}, "float32"
    with pytest.raises(SpecError, match=r"bf16\.enabled is true"):
        make_plan(parse_spec(raw), FACTS)


def arguments_of(**more: Any) -> TrainerExpectations:
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
def test_an_argument_that_contradicts_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(SpecError, match=r"strategy\.args") as error:
        complete_arguments(given, arguments_of())
    assert words in str(error.value)


def test_an_argument_that_agrees_or_turns_nothing_on_is_taken() -> None:
    given = {
        "learning_rate": 5e-5, "bf16": False, "report_to": "none", "save_strategy": "no", "push_to_hub": False,
        "max_steps": 10, "torch_empty_cache_steps": 5,
    }  # fmt: skip
    assert complete_arguments(given, arguments_of())["torch_empty_cache_steps"] == 5


def test_arguments_are_those_of_transformers() -> None:
    known = set(pytest.importorskip("transformers").TrainingArguments.__dataclass_fields__)
    assert set(FREE) <= known
    assert set(complete_arguments(None, arguments_of(backend="gloo", train=TrainSpec(epochs=1.0)))) <= known
