"""A wrong name of a strategy, key, verb or file: the message names what was meant, also if it is another tool's word
for it.
"""

from __future__ import annotations

import pytest

from allranks.cli.main import SYNONYMS, VERBS, main
from allranks.errors import SpecError
from allranks.spec.loader import KEY_SYNONYMS, parse_spec
from allranks.spec.records import RunSpec
from allranks.spec.strategies import REGISTRY, STRATEGY_SYNONYMS
from allranks.spec.validation import all_keys

BASE = {"model": {"name": "tiny:llama"}, "data": {"source": "builtin:instructions"}}


def refusal(*sets: str) -> str:
    with pytest.raises(SpecError) as error:
        parse_spec(BASE, sets)
    return str(error.value)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    {
        "ddp": "pytorch_ddp", "DDP": "pytorch_ddp", "fsdp": "pytorch_zero3", "fsdp2": "pytorch_zero3",
        "deepspeed": "deepspeed_zero3", "DeepSpeed-Stage-2": "deepspeed_zero2", "ZeRO-3": "zero3", "Zero3": "zero3",
        "zero": "zero1", "pytorchddp": "pytorch_ddp", "simple_dpp": "simple_ddp", "Trainer": "hf_trainer",
    }.items(),
)  # fmt: skip
def test_strategies(wrong: str, meant: str) -> None:
    assert f"unknown strategy {wrong!r}; did you mean {meant!r}" in refusal(f"strategy.name={wrong}")


def test_a_strategy_in_place_of_its_section_is_corrected_twice() -> None:
    assert "strategy: write it as {name: ddp}; did you mean 'pytorch_ddp'?" in refusal("strategy=ddp")
    assert refusal("strategy=zero1").endswith("strategy: write it as {name: zero1}")


def test_tables_name_only_what_exists_and_nothing_that_is_right() -> None:
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
