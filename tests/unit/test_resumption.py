"""What a resume may change, and what it keeps."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks import api
from allranks.errors import RequestError, SpecError
from allranks.launch import resumption, runs
from allranks.launch.resumption import global_batch_of, keep_global_batch, require_resumable, resume_notes
from allranks.planning.memory import make_plan
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import SCHEMA_VERSION, read_record, write_json
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec, parse_spec
from allranks.utils.machine import MachineFacts
from allranks.utils.redaction import HIDDEN

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
    runs.write_request(folder, parse_spec(RAW), planned(parse_spec(RAW)))
    return folder


def go_on(run: RunDir, *sets: str, allow_inexact: bool = False, **facts: Any) -> RunSpec:
    before, asked = parse_spec(RAW), parse_spec(RAW, sets)
    spec = keep_global_batch(before, asked, planned, global_batch_of(run, 8)) if allow_inexact else asked
    require_resumable(run, before, spec, planned(spec), {**FACTS, **facts}, 8, allow_inexact=allow_inexact)
    return spec


def notes(asked: RunSpec, spec: RunSpec) -> list[str]:
    return resume_notes(asked, asked, spec, planned(spec))


def test_nondeterministic_kernels_of_gpus_are_told_with_the_switch() -> None:
    spec = parse_spec(RAW)
    on_gpu = msgspec.structs.replace(planned(spec), device="cuda")
    assert "train.deterministic: true" in resume_notes(spec, spec, spec, on_gpu)[0]
    exact = parse_spec(RAW, ["train.deterministic=true"])
    assert resume_notes(exact, exact, exact, on_gpu) == []


def test_what_does_not_touch_the_checkpoint_may_change(run: RunDir) -> None:
    may_change = ("model.gradient_checkpointing=true", "data.source=moved.json")
    spec = go_on(run, "train.max_steps=20", "checkpoint.every=2", *may_change)
    assert spec.train.max_steps == 20


def test_compiled_steps_are_only_bitwise_with_the_same_recomputation(run: RunDir) -> None:
    sets = ("train.max_steps=20", "model.compile=true")
    was = parse_spec(RAW, sets)
    write_json(run.plan, msgspec.to_builtins(planned(was)))
    facts = {"mode": "full", "world_size": 2, "strategy": "pytorch_ddp"}
    spec = parse_spec(RAW, [*sets, "model.gradient_checkpointing=selective"])
    require_resumable(run, was, was, planned(was), facts, 8, allow_inexact=False)
    with pytest.raises(RequestError, match="trained with recomputation none, the plan has selective"):
        require_resumable(run, was, spec, planned(spec), facts, 8, allow_inexact=False)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("train.max_steps=8",), "has done its 8 steps"),
        (("train.max_steps=3",), "has done 8 steps already, and 3 are requested"),
        (("train.max_steps=null", "train.epochs=0.5"),
         "has done 8 steps already, and 5 are requested; raise them with --set train.epochs"),
        (("adapter.r=8",), "was saved with adapter.r 4"),
        (("adapter={type: none}",), "was saved with adapter.type lora"),
        (("strategy.name=zero2",), "was written by pytorch_ddp, the plan has zero2"),
        (("cluster.procs_per_node=4",), "was written by 2 ranks, the plan has 4"),
        (("data.subset=7",), "was saved with data.subset None"),
        (("train.lr=0.1",), "was saved with train.lr 5e-05; the steps would compute something else"),
        (("train.schedule=constant",), "was saved with train.schedule linear"),
        (("train.weight_decay=0.1",), "was saved with train.weight_decay 0.0"),
        (("train.max_grad_norm=null",), "was saved with train.max_grad_norm 1.0"),
        (("train.seed=1",), "was saved with train.seed 42"),
        (("model.dtype=bfloat16",), "was saved with model.dtype auto"),
        (("adapter.dropout=0.5",), "was saved with adapter.dropout 0.0"),
        (("strategy.bucket_mb=1.0",), "was saved with strategy.options"),
        (("train.global_batch_size=8",), "trained with 4 sequences per step, the plan has 8"),
        (("train.grad_accum=2",), "--set train.global_batch_size=4"),
    ],
)  # fmt: skip
def test_what_would_go_on_with_something_else_is_refused_before_a_write(run: RunDir, sets: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        go_on(run, *sets)


def test_allow_inexact_allows_what_can_go_on_at_all(run: RunDir) -> None:
    for sets in (("strategy.name=zero2",), ("data.subset=7",), ("train.global_batch_size=8",)):
        go_on(run, *sets, allow_inexact=True)
    go_on(run, mode="weights_only", allow_inexact=True)
    with pytest.raises(RequestError, match="weights-only checkpoint"):
        go_on(run, mode="weights_only")
    with pytest.raises(RequestError, match=r"adapter\.r"):
        go_on(run, "adapter.r=8", allow_inexact=True)


def test_another_number_of_ranks_keeps_the_global_batch(run: RunDir) -> None:
    """The place in the data counts steps of so many sequences: another batch would leave rows out or see them twice."""
    spec = go_on(run, "cluster.procs_per_node=1", allow_inexact=True)
    assert spec.train.global_batch_size == 4
    batch = planned(spec).batch
    assert batch is not None and (batch.grad_accum, batch.global_batch_size) == (2, 4)
    assert "global_batch_size stays 4" in notes(parse_spec(RAW), spec)[0]
    spec = go_on(run, "cluster.procs_per_node=1", "train.global_batch_size=6", allow_inexact=True)
    assert spec.train.global_batch_size == 6
    cannot = keep_global_batch(parse_spec(RAW), parse_spec(RAW, ["cluster.procs_per_node=3"]), planned, 4)
    with pytest.raises(SpecError, match="not divisible"):
        planned(cannot)


@pytest.mark.parametrize(
    ("version", "words"),
    [(SCHEMA_VERSION + 1, f"has schema_version {SCHEMA_VERSION + 1}"), (None, "has no schema_version")],
)
def test_a_run_of_another_version_is_refused_by_plan_and_not_by_spec(run: RunDir, version: Any, words: str) -> None:
    resumption.require_same_schema(run)
    plan = read_record(run.plan)
    assert plan.pop("schema_version") == SCHEMA_VERSION
    write_json(run.plan, plan if version is None else {**plan, "schema_version": version})
    run.spec.write_text("train: {clip_norm: 1.0}\n")
    with pytest.raises(RequestError) as caught:
        api.resume(run.root)
    assert caught.value.exit_code == 2 and f"{run.plan} {words}" in str(caught.value)
    assert f"has schema_version {SCHEMA_VERSION}: use the version of allranks that wrote it" in str(caught.value)


def test_a_weights_only_checkpoint_has_its_batch_from_the_plan(run: RunDir) -> None:
    (run.checkpoint(8) / "state" / "progress.json").unlink()
    assert global_batch_of(run, 8) == 4


def test_a_secret_that_is_no_longer_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec({**RAW, "cluster": {"env": {"HF_TOKEN": HIDDEN, "A": "b"}}})
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert "cluster.env.HF_TOKEN" in notes(spec, spec)[0]
    monkeypatch.setenv("HF_TOKEN", "x")
    assert notes(spec, spec) == []
