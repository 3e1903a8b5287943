"""The spec: what is refused, how it is said, and that the schema says the same."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from allranks.cli.main import SYNONYMS, VERBS, main
from allranks.errors import SpecError
from allranks.spec import load_spec, parse_spec, spec_to_dict, spec_to_yaml
from allranks.spec.loader import KEY_SYNONYMS, json_schema, parse_yaml
from allranks.spec.records import RunSpec
from allranks.spec.strategies import REGISTRY, STRATEGY_SYNONYMS
from allranks.spec.validation import all_keys

MINIMAL: dict[str, Any] = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}


def refusal(sets: list[str]) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(MINIMAL, sets, where="my.yaml")
    assert caught.value.exit_code == 2
    return str(caught.value)


SYNONYMS_OF_STRATEGIES = {
    "ddp": "pytorch_ddp", "DDP": "pytorch_ddp", "fsdp": "pytorch_zero3", "fsdp2": "pytorch_zero3",
    "deepspeed": "deepspeed_zero3", "DeepSpeed-Stage-2": "deepspeed_zero2", "Zero3": "zero3", "zero": "zero1",
    "simple_dpp": "simple_ddp", "Trainer": "hf_trainer",
}  # fmt: skip
WITHIN_STRATEGY = ["strategy.name=pytorch_zero3", "strategy.adapters=ignored"]
REFUSED = [
    ("trian.lr=1", "my.yaml: unknown key 'trian'; did you mean 'train'"),
    ("train.Lr=1", "unknown key 'train.Lr'; did you mean 'train.lr'"),
    ("train.max_length=3", "unknown key 'train.max_length'; it belongs to 'data.max_length'"),
    ("cluster.slurm.acount=x", "unknown key 'cluster.slurm.acount'; did you mean 'cluster.slurm.account'"),
    ("data.eval_file=x", "unknown key 'data.eval_file'; did you mean 'eval.source' (rows"),
    ("eval.file=x", "did you mean 'eval.source' (rows"),
    ("data.test_size=0.1", "or 'data.eval_fraction'"),
    ("data.train_file=x", "did you mean 'data.source'?"),
    ("train.lr=fast", "my.yaml: train.lr: "),
    ("train.max_steps=-1", "my.yaml: train.max_steps: "),
    ("train.micro_batch_size=1.5", "my.yaml: train.micro_batch_size: "),
    ("name=a/b", "my.yaml: name: "),
    ("train.lr=1e999", "my.yaml: train.lr: "),
    ("train.weight_decay=.nan", "my.yaml: train.weight_decay: "),
    ("train=3", "my.yaml: train: "),
    ("cluster.env.X=true", "my.yaml: cluster.env.X: "),
    ("model.config.sizes=[1, .nan]", "my.yaml: model.config.sizes[1]: "),
    ("checkpoint.mode=fulll", "my.yaml: checkpoint.mode: unknown value 'fulll'; did you mean 'full'?"),
    ("observe.hang_s=soon", "observe.hang_s: unknown value 'soon' (known: auto)"),
    (["model=tiny:mistral", "data=x.json"], "{name: tiny:mistral}; data: write it as {source: x.json}"),
    ("strategy=ddp", "strategy: write it as {name: ddp}; did you mean 'pytorch_ddp'?"),
    ("strategy=zero1", "strategy: write it as {name: zero1}"),
    ("strategy={name: zero1, options: 3}", "strategy.options: write options next to the name"),
    ("adapter={type: lora, targets: q_proj}", "adapter.targets: expected list or null, got str"),
    ("cluster.env.A=null", "cluster.env.A: expected a string, got None"),
    ("cluster.profile=nowhere.yaml", "my.yaml: cluster.profile: nowhere.yaml: there is no such file"),
    ("cluster.launcher=hosts", "cluster.hosts is empty"),
    ("train.lr", "--set"),
    ("=3", "--set"),
    ("train..lr=3", "--set"),
    ("train.lr.x=3", "train.lr"),
    (["train.max_steps=5", "train.epochs=1"], "train.max_steps and train.epochs"),
    (["train.grad_accum=2", "train.global_batch_size=8"], "train.grad_accum and train.global_batch_size"),
    ("cluster.nodes=2", "launcher local"),
    ("strategy.bucket=1", "strategy.bucket"),
    ("strategy.bucket_mb=x", "expected float"),
    ("script.path=a.py", "script replaces"),
    (["cluster.launcher=hosts", "cluster.nodes=2", "cluster.hosts=[n1]"], "names 1 hosts, cluster.nodes says 2"),
    (["train.lr=1", "train.lr.x=3"], "train.lr is a value, not a section"),
    (["adapter.type=lora", "adapter.target_parameters=[w]", "adapter.dropout=0.1"], "adapter.dropout is 0.1"),
    (WITHIN_STRATEGY, "adapter.type is none"),
    (["strategy.name=pytorch_ddp", "strategy.offload=optimizer"], "pytorch_ddp has no option 'offload'"),
    (["strategy.name=zero3", "strategy.offload=all"], "expected one of none, optimizer, got 'all'"),
    ([*WITHIN_STRATEGY, "strategy.offload=optimizer", "adapter.type=lora"], "has nothing to keep in host memory"),
    *((f"strategy.name={w}", f"unknown strategy {w!r}; did you mean {m!r}") for w, m in SYNONYMS_OF_STRATEGIES.items()),
]


@pytest.mark.parametrize(("items", "words"), REFUSED)
def test_what_is_wrong_is_said_with_its_key_and_what_was_meant(items: str | list[str], words: str) -> None:
    assert words in refusal([items] if isinstance(items, str) else items)


def test_all_unknown_keys_are_listed_at_once() -> None:
    message = refusal(["train.foo=1", "data.bar=2"])
    assert "train.foo" in message and "data.bar" in message


def test_tables_of_synonyms_name_only_what_exists_and_nothing_that_is_right() -> None:
    keys = all_keys(RunSpec)
    assert set(KEY_SYNONYMS.values()) <= set(keys)
    assert not set(KEY_SYNONYMS) & {name for name in keys if "." not in name}
    assert {name for meant in STRATEGY_SYNONYMS.values() for name in meant} <= set(REGISTRY)
    assert not set(STRATEGY_SYNONYMS) & set(REGISTRY)
    words = [word for words in SYNONYMS.values() for word in words]
    assert set(SYNONYMS) <= set(VERBS) and len(set(words)) == len(words) and not set(words) & set(VERBS)


@pytest.mark.parametrize(("wrong", "meant"), [("train", "run"), ("stop", "cancel"), ("paln", "plan"), ("Plan", "plan")])
def test_verbs(wrong: str, meant: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["allranks", wrong, "spec.yaml"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert f"unknown verb {wrong!r}; did you mean {meant}?" in capfd.readouterr().err


def test_numbers_among_arguments_and_variables_are_kept_as_they_are_written() -> None:
    text = "script: {path: p.py, args: [--steps, 3, --lr, 1e-4, --v, 1.10, --t, 1:30:00, --on, yes]}\n"
    text += "cluster: {env: {V: 1.10, N: 007}}"
    spec = parse_spec(parse_yaml(text, "x"))
    assert spec.script is not None and spec.script.args[1::2] == ["3", "1e-4", "1.10", "1:30:00", "yes"]
    assert spec.cluster.env == {"V": "1.10", "N": "007"}
    spec = parse_spec({"script": {"path": "p.py", "args": ["--n", 3]}}, ["script.args=[--n, 0x10]"])
    assert spec.script is not None and spec.script.args == ["--n", "0x10"]


def test_a_section_whose_keys_are_all_commented_out_has_its_defaults() -> None:
    empty = {**MINIMAL, "train": None, "strategy": None, "cluster": {"slurm": None}, "observe": {"profile": None}}
    assert parse_spec(empty) == parse_spec(MINIMAL)
    with pytest.raises(SpecError, match=r"model\.name is missing"):
        parse_spec({**MINIMAL, "model": None})


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", ".0001", "+1e-4"])
def test_exponents_are_numbers(text: str) -> None:
    assert parse_spec(MINIMAL, [f"train.lr={text}"]).train.lr == pytest.approx(1e-4)


def test_set_reaches_deep_and_wins() -> None:
    raw = {**MINIMAL, "cluster": {"slurm": {"partition": "a"}}}
    spec = parse_spec(raw, ["cluster.slurm.partition=b", "cluster.env.X=a,b=c"])
    assert spec.cluster.slurm.partition == "b"
    assert spec.cluster.env == {"X": "a,b=c"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: [1", "invalid YAML"),
        (b"name: x\nname: y\n", "duplicate key"),
        (b"", "empty"),
        (b"1: 2\n", "not a string"),
        (b"a: !!python/object:os.system x", "invalid YAML"),
        (b"[1]", "mapping"),
        (b"strategy: {name: zero1}", "model.name is missing"),
        (b"model: {name: x}", "data.source is missing"),
        (b"model: 3", "model"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"#" * 1_100_000, "larger"),
        (None, r"did you mean .*demo\.yaml"),
    ],
)  # fmt: skip
def test_files_that_are_no_spec(tmp_path: Path, content: bytes | None, words: str) -> None:
    (tmp_path / "demo.yaml").write_bytes(content or b"")
    with pytest.raises(SpecError, match=words) as caught:
        load_spec(tmp_path / ("demp.yaml" if content is None else "demo.yaml"))
    assert caught.value.exit_code == 2


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
    strategies = ({"name": "nope"}, {"name": "zero2", "bucket": 3})
    for bad in ({"trian": {}}, {"train": {"lr": "x"}}, *({"strategy": strategy} for strategy in strategies)):
        assert not check.is_valid({**MINIMAL, **bad}), bad
