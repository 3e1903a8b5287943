"""The spec: what is refused, how it is said, and that the schema says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from allranks.errors import SpecError
from allranks.spec import load_spec, parse_spec, spec_to_dict, spec_to_yaml
from allranks.spec.loader import json_schema, parse_yaml

MINIMAL: dict[str, Any] = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}


def refusal(sets: list[str], raw: Any = None) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(MINIMAL if raw is None else raw, sets, where="my.yaml")
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("item", "wrong", "nearest"),
    [
        ("trian.lr=1", "trian", "'train'"),
        ("train.Lr=1", "train.Lr", "'train.lr'"),
        ("train.max_length=3", "train.max_length", "'data.max_length'"),
        ("cluster.slurm.acount=x", "cluster.slurm.acount", "'cluster.slurm.account'"),
        ("data.eval_file=x", "data.eval_file", "did you mean 'eval.source' (rows"),
        ("data.validation=x", "data.validation", "did you mean 'eval.source' (rows"),
        ("train.eval_dataset=x", "train.eval_dataset", "did you mean 'eval.source' (rows"),
        ("eval.file=x", "eval.file", "did you mean 'eval.source' (rows"),
        ("data.test_size=0.1", "data.test_size", "or 'data.eval_fraction'"),
        ("data.train_file=x", "data.train_file", "did you mean 'data.source'?"),
    ],
)
def test_unknown_key_names_the_nearest(item: str, wrong: str, nearest: str) -> None:
    message = refusal([item])
    assert f"unknown key {wrong!r}" in message
    assert nearest in message
    assert message.startswith("my.yaml:")


def test_numbers_among_arguments_and_variables_are_kept_as_they_are_written() -> None:
    text = "script: {path: p.py, args: [--steps, 3, --lr, 1e-4, --v, 1.10, --t, 1:30:00, --on, yes]}\n"
    text += "cluster: {env: {V: 1.10, N: 007}}"
    spec = parse_spec(parse_yaml(text, "x"))
    assert spec.script is not None and spec.script.args[1::2] == ["3", "1e-4", "1.10", "1:30:00", "yes"]
    assert spec.cluster.env == {"V": "1.10", "N": "007"}
    spec = parse_spec({"script": {"path": "p.py", "args": ["--n", 3]}}, ["script.args=[--n, 0x10]"])
    assert spec.script is not None and spec.script.args == ["--n", "0x10"]


def test_all_unknown_keys_are_listed_at_once() -> None:
    message = refusal(["train.foo=1", "data.bar=2"])
    assert "train.foo" in message
    assert "data.bar" in message


@pytest.mark.parametrize(
    ("item", "key"),
    [
        ("train.lr=fast", "train.lr"),
        ("train.max_steps=-1", "train.max_steps"),
        ("train.micro_batch_size=1.5", "train.micro_batch_size"),
        ("name=a/b", "name"),
        ("train.lr=1e999", "train.lr"),
        ("train.weight_decay=.nan", "train.weight_decay"),
        ("train=3", "train"),
        ("cluster.env.X=true", "cluster.env.X"),
        ("model.config.sizes=[1, .nan]", "model.config.sizes[1]"),
    ],
)
def test_wrong_type_names_the_key(item: str, key: str) -> None:
    assert f"my.yaml: {key}: " in refusal([item])


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["checkpoint.mode=fulll"], "my.yaml: checkpoint.mode: unknown value 'fulll'; did you mean 'full'?"),
        (["observe.hang_s=soon"], "observe.hang_s: unknown value 'soon' (known: auto)"),
        (["model=tiny:mistral", "data=x.json"], "{name: tiny:mistral}; data: write it as {source: x.json}"),
        (["strategy=zero1"], "strategy: write it as {name: zero1}"),
        (["strategy={name: zero1, options: 3}"], "strategy.options: write options next to the name"),
        (["adapter={type: lora, targets: q_proj}"], "adapter.targets: expected list or null, got str"),
        (["cluster.env.A=null"], "cluster.env.A: expected a string, got None"),
        (["cluster.profile=nowhere.yaml"], "my.yaml: cluster.profile: nowhere.yaml: there is no such file"),
        (["cluster.launcher=hosts"], "cluster.hosts is empty"),
    ],
)  # fmt: skip
def test_what_a_value_may_be_is_said(items: list[str], words: str) -> None:
    assert words in refusal(items)


def test_a_section_whose_keys_are_all_commented_out_has_its_defaults() -> None:
    empty = {**MINIMAL, "train": None, "strategy": None, "cluster": {"slurm": None}, "observe": {"profile": None}}
    assert parse_spec(empty) == parse_spec(MINIMAL)
    with pytest.raises(SpecError, match=r"model\.name is missing"):
        parse_spec({**MINIMAL, "model": None})


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.0001", "1.e-4", ".0001", "+1e-4"])
def test_exponents_are_numbers(text: str) -> None:
    assert parse_spec(MINIMAL, [f"train.lr={text}"]).train.lr == pytest.approx(1e-4)


def test_set_reaches_deep_and_wins() -> None:
    spec = parse_spec(
        {**MINIMAL, "cluster": {"slurm": {"partition": "a"}}}, ["cluster.slurm.partition=b", "cluster.env.X=a,b=c"]
    )
    assert spec.cluster.slurm.partition == "b"
    assert spec.cluster.env == {"X": "a,b=c"}


@pytest.mark.parametrize("item", ["train.lr", "=3", "train..lr=3", "train.lr.x=3"])
def test_malformed_set_is_refused(item: str) -> None:
    assert "--set" in refusal([item]) or "train.lr" in refusal([item])


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["train.max_steps=5", "train.epochs=1"], "train.max_steps and train.epochs"),
        (["train.grad_accum=2", "train.global_batch_size=8"], "train.grad_accum and train.global_batch_size"),
        (["cluster.nodes=2"], "launcher local"),
        (["strategy.name=pytorch_dpd"], "did you mean 'pytorch_ddp'"),
        (["strategy.bucket=1"], "strategy.bucket"),
        (["strategy.bucket_mb=x"], "expected float"),
        (["script.path=a.py"], "script replaces"),
        (["cluster.launcher=hosts", "cluster.nodes=2", "cluster.hosts=[n1]"], "names 1 hosts, cluster.nodes says 2"),
        (["train.lr=1", "train.lr.x=3"], "train.lr is a value, not a section"),
        (["adapter.type=lora", "adapter.target_parameters=[w]", "adapter.dropout=0.1"], "adapter.dropout is 0.1"),
        (["strategy.name=pytorch_zero3", "strategy.adapters=ignored"], "adapter.type is none"),
        (
            [
                "strategy.name=pytorch_zero3", "strategy.adapters=ignored", "strategy.offload=optimizer",
                "adapter.type=lora",
            ],
            "has nothing to keep in host memory",
        ),
    ],
)  # fmt: skip
def test_values_that_contradict_each_other(items: list[str], words: str) -> None:
    assert words in refusal(items)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([1], "mapping"),
        ({}, "model.name is missing"),
        ({"model": {"name": "x"}}, "data.source is missing"),
        ({"model": 3}, "model"),
    ],
)
def test_incomplete_documents(raw: Any, words: str) -> None:
    assert words in refusal([], raw)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "invalid YAML"),
        ("name: x\nname: y\n", "duplicate key"),
        ("", "empty"),
        ("1: 2\n", "not a string"),
        ("a: !!python/object:os.system x", "invalid YAML"),
    ],
)
def test_files_that_are_no_spec(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=words):
        load_spec(path)


def test_missing_binary_and_huge_files(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("x: 1")
    with pytest.raises(SpecError, match=r"did you mean .*demo\.yaml"):
        load_spec(tmp_path / "demp.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="UTF-8"):
        load_spec(tmp_path / "b.yaml")
    (tmp_path / "h.yaml").write_bytes(b"#" * 1_100_000)
    with pytest.raises(SpecError, match="larger"):
        load_spec(tmp_path / "h.yaml")


def test_round_trip() -> None:
    spec = parse_spec(MINIMAL, ["strategy.bucket_mb=2", "checkpoint.async=true", "train.lr=1e-4"])
    assert parse_spec(spec_to_dict(spec)) == spec
    assert parse_spec(yaml.safe_load(spec_to_yaml(spec))) == spec


def test_every_field_of_the_schema_has_a_description() -> None:
    bare = [
        f"{record}.{name}"
        for record, form in json_schema()["$defs"].items()
        for name, field in form.get("properties", {}).items()
        if not field.get("description", "").strip()
    ]
    assert bare == []


def test_schema_agrees_with_the_parser() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    check.validate(spec_to_dict(parse_spec(MINIMAL)))
    for bad in (
        {"trian": {}},
        {"train": {"lr": "x"}},
        {"strategy": {"name": "nope"}},
        {"strategy": {"name": "zero2", "bucket": 3}},
    ):
        assert not check.is_valid({**MINIMAL, **bad}), bad
