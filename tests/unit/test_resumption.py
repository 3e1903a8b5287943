"""What a resume may change, and what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks import api
from allranks.errors import RequestError, SpecError
from allranks.facts import MachineFacts
from allranks.planning import LaunchPlan, make_plan
from allranks.redact import HIDDEN
from allranks.resumption import global_batch_of, notes, require_resumable, with_its_batch
from allranks.rundir import RunDir, write_json
from allranks.spec import RunSpec, parse_spec

RAW: dict[str, Any] = {
    "model": {"name": "tiny:mistral"},
    "data": {"source": "builtin:instructions"},
    "adapter": {"type": "lora", "r": 4},
    "train": {"max_steps": 10, "micro_batch_size": 2},
    "checkpoint": {"mode": "full"},
}
FACTS = {"mode": "full", "world_size": 2, "strategy": "pytorch_ddp", "step": 8}


def planned(spec: RunSpec) -> LaunchPlan:
    return make_plan(spec, MachineFacts(host="n1", cpus=8, memory_bytes=1 << 34, gpus=[], cpu_model="", system=""))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of ten steps of four sequences, with a full checkpoint after the eighth."""
    folder = RunDir(tmp_path)
    (folder.checkpoint(8) / "state").mkdir(parents=True)
    write_json(folder.checkpoint(8) / "state" / "progress.json", {"global_batch_size": 4, "sequences": 40})
    api._write_request(folder, parse_spec(RAW), planned(parse_spec(RAW)))
    return folder


def go_on(run: RunDir, *sets: str, inexact: bool = False, **facts: Any) -> RunSpec:
    before, asked = parse_spec(RAW), parse_spec(RAW, sets)
    spec = with_its_batch(before, asked, planned, global_batch_of(run, 8)) if inexact else asked
    require_resumable(run, before, spec, planned(spec), {**FACTS, **facts}, 8, inexact=inexact)
    return spec


def test_what_does_not_touch_the_checkpoint_may_change(run: RunDir) -> None:
    spec = go_on(run, "train.max_steps=20", "checkpoint.every=2", "model.gradient_checkpointing=true", "train.lr=1e-3")
    assert spec.train.max_steps == 20


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("train.max_steps=8",), "has done its 8 steps"),
        (("train.max_steps=3",), "has done 8 steps already, and 3 are asked for"),
        (("train.max_steps=null", "train.epochs=0.5"), "has done 8 steps already, and 5 are asked for; raise them with --set train.epochs"),
        (("adapter.r=8",), "was saved with adapter.r 4"),
        (("adapter={type: none}",), "was saved with adapter.type lora"),
        (("strategy.name=zero2",), "was written by pytorch_ddp, the plan has zero2"),
        (("cluster.procs_per_node=4",), "was written by 2 ranks, the plan has 4"),
        (("data.subset=7",), "was saved with data.subset None"),
        (("train.global_batch_size=8",), "trained with 4 sequences a step, the plan has 8"),
        (("train.grad_accum=2",), "--set train.global_batch_size=4"),
    ],
)  # fmt: skip
def test_what_would_go_on_with_something_else_is_refused_before_anything_is_written(
    run: RunDir, sets: tuple[str, ...], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        go_on(run, *sets)


def test_inexact_allows_what_can_go_on_at_all(run: RunDir) -> None:
    for sets in (("strategy.name=zero2",), ("data.subset=7",), ("train.global_batch_size=8",)):
        go_on(run, *sets, inexact=True)
    go_on(run, mode="lite", inexact=True)
    with pytest.raises(RequestError, match="lite checkpoint"):
        go_on(run, mode="lite")
    with pytest.raises(RequestError, match=r"adapter\.r"):
        go_on(run, "adapter.r=8", inexact=True)


def test_another_number_of_ranks_keeps_the_global_batch(run: RunDir) -> None:
    """The place in the data counts steps of so many sequences: with another batch, rows would be left out or seen twice."""
    spec = go_on(run, "cluster.procs_per_node=1", inexact=True)
    assert spec.train.global_batch_size == 4
    batch = planned(spec).batch
    assert batch is not None and (batch.grad_accum, batch.global_batch_size) == (2, 4)
    assert "global_batch_size stays 4" in notes(parse_spec(RAW), spec)[0]
    assert (
        go_on(run, "cluster.procs_per_node=1", "train.global_batch_size=6", inexact=True).train.global_batch_size == 6
    )
    cannot = with_its_batch(parse_spec(RAW), parse_spec(RAW, ["cluster.procs_per_node=3"]), planned, 4)
    with pytest.raises(SpecError, match="not divisible"):
        planned(cannot)


def test_a_lite_checkpoint_has_its_batch_from_the_plan(run: RunDir) -> None:
    (run.checkpoint(8) / "state" / "progress.json").unlink()
    assert global_batch_of(run, 8) == 4


def test_a_secret_that_is_no_longer_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec({**RAW, "cluster": {"env": {"HF_TOKEN": HIDDEN, "A": "b"}}})
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert "cluster.env.HF_TOKEN" in notes(spec, spec)[0]
    monkeypatch.setenv("HF_TOKEN", "x")
    assert notes(spec, spec) == []
