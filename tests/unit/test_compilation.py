"""What `model.compile: auto` means: the measured gain, the length of the run, and what it leaves alone."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from allranks.errors import RequestError
from allranks.experiments.compare import without_compilation
from allranks.launch import runs
from allranks.launch.driver import Driver
from allranks.launch.resumption import keep_compilation
from allranks.planning.memory import fit, make_plan
from allranks.planning.memory.compilation import COMPILE_S, GAINS, PAYBACK, expected_step_s
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import write_json
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from tests.unit.fit_specs import facts, raw

ROOT = Path(__file__).parents[2]
LONG: dict[str, Any] = {
    "model": {"name": "mistralai/Mistral-7B-v0.1"},
    "data": {"source": "builtin:instructions", "max_length": 2048, "packing": "wrapped"},
    "adapter": {"type": "lora"},
    "train": {"max_steps": 1000, "micro_batch_size": 4},
}
H100 = facts(gpus=1)
NEWS = ("data.source=builtin:news", "adapter.type=none")


def planned(*sets: str, there: Any = H100, **sections: Any) -> LaunchPlan:
    return make_plan(parse_spec({**LONG, **sections}, sets), there)


def test_a_long_run_on_a_gpu_is_compiled_and_a_short_one_is_not() -> None:
    step_s = expected_step_s(parse_spec(LONG), planned())
    assert 0.5 < step_s < 0.65  # 16,400 tokens/s with compiled blocks: 0.49 s
    enough = PAYBACK * COMPILE_S / (step_s * (1 - 1 / GAINS["cuda"].ratio))
    for steps, compiled in ((int(enough) + 1, True), (int(enough), False), (10, False), (0, False)):
        plan = planned(f"train.max_steps={steps}")
        assert plan.compiled is compiled, steps
        assert f"{steps:,} steps of at least 0.6 s would save" in plan.compile_reason
        assert "1.22 times as fast" in plan.compile_reason and "compiling takes about 25 s" in plan.compile_reason
    assert planned("train.max_steps=500").compiled and not planned("train.max_steps=200").compiled


def test_isolated_rows_are_compiled_by_their_own_gain() -> None:
    plan = planned("data.packing=isolated")
    assert plan.compiled and "1.15 times as fast" in plan.compile_reason


def test_epochs_count_by_the_rows_and_are_assumed_where_those_are_unknown() -> None:
    epochs = ("train.max_steps=null", "train.epochs=2")
    assert planned(*epochs).compiled
    assert "2,000 steps, assumed for 2 epochs," in planned(*epochs).compile_reason
    few = planned(*epochs, "data.subset=400", "data.eval_fraction=0.1")
    assert not few.compiled and few.compile_reason.startswith("180 steps of at least")


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("cluster.device=cpu",), "compiled steps ran at 0.82 times the speed"),
        (("strategy.name=deepspeed_zero3",), "deepspeed_zero3 gathers weights within the blocks"),
        (("train.deterministic=true",), "train.deterministic"),
        (("model.name=mistralai/Mixtral-8x7B-v0.1",), "a mixture of experts was not measured"),
        (("model.name=nobody/unknown",), "the sizes of the model are not known"),
        ((*NEWS, "model.name=bert-base-uncased", "data.max_length=512"), "a classifier differ in length"),
        (("model.name=mlp:64x2", "data.source=builtin:noise", "adapter.type=none"), "no transformer blocks"),
        (("cluster.launcher=slurm",), "the nodes have not reported GPUs yet"),
    ],
)  # fmt: skip
def test_what_is_unlike_the_measurement_is_not_compiled(sets: tuple[str, ...], words: str) -> None:
    plan = planned("train.max_steps=1000000", *sets)
    assert not plan.compiled and words in plan.compile_reason, plan.compile_reason


def test_a_machine_without_a_c_compiler_is_told_and_the_nodes_of_slurm_have_their_own() -> None:
    without = msgspec.structs.replace(H100, c_compiler=False)
    assert "no C compiler" in planned(there=without).compile_reason
    assert planned("cluster.launcher=slurm", "cluster.slurm.gpus_per_node=1", there=without).compiled


def test_memory_must_suffice_if_the_compiler_fails() -> None:
    values = {value: f"model.compile={value}" for value in ("auto", "true", "false")}
    needed = {value: fit(parse_spec(LONG, [key]), planned(key), H100) for value, key in values.items()}
    assert needed["auto"].needed_bytes == needed["false"].needed_bytes == needed["true"].needed_bytes
    assert "estimated without compiled blocks" in needed["auto"].notes[0]


@pytest.mark.parametrize(
    ("plan", "metrics", "compiled"),
    [
        ({"compiled": True, "compile_reason": "it was long"}, {}, True),
        ({"compiled": True}, {"compiled": True}, True),
        ({"compiled": True}, {"compiled": False}, False),  # the compiler failed
        ({"compiled": False}, {}, False),
        ({}, {}, False),  # planned before there was auto
    ],
)
def test_a_resume_keeps_what_the_run_did(tmp_path: Path, plan: Any, metrics: Any, compiled: bool) -> None:
    run = RunDir(tmp_path)
    write_json(run.plan, plan)
    write_json(run.metrics, metrics)
    for steps in (10, 100000):  # auto alone would decide otherwise
        spec = parse_spec(LONG, [f"train.max_steps={steps}"])
        kept = keep_compilation(run, spec, make_plan(spec, H100))
        assert (kept.compiled, kept.compile_reason) == (compiled, plan.get("compile_reason", ""))
    for value in ("true", "false"):  # what the user asks for stays
        asked = parse_spec(LONG, [f"model.compile={value}"])
        assert keep_compilation(run, asked, make_plan(asked, H100)).compiled is (value == "true")


@pytest.mark.parametrize("value", ["auto", "true", "false"])
def test_a_comparison_is_not_compiled(value: str) -> None:
    assert not make_plan(without_compilation(parse_spec(LONG, [f"model.compile={value}"])), H100).compiled


def test_the_gain_on_cpus_is_the_recorded_one() -> None:
    found = json.loads((ROOT / "benchmarks/results/train_throughput.json").read_text())["summary"]
    bare, compiled = (found[name]["tokens_per_s_per_rank"]["median"] for name in ("c", "k"))
    assert GAINS["cpu"].ratio == pytest.approx(compiled / bare, abs=0.005)


def test_the_gain_on_gpus_is_the_recorded_one() -> None:
    found = json.loads((ROOT / "benchmarks/results/gpu/nvidia-h100-80gb-hbm3-2026-11-25.json").read_text())
    checks = found["stages"]["speed"]["checks"]
    plain, compiled = (checks[name]["figures"]["step_time_s"]["median"] for name in ("plain", "compiled"))
    assert GAINS["cuda"].ratio == pytest.approx(plain / compiled, abs=0.005)


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bool], tuple[RunDir, list[LaunchPlan]]]:
    """A run on a CPU, as if it had been planned with or without compiled blocks; and the plans with which it is
    resumed.
    """

    def begin(value: str, compiled: bool) -> tuple[RunDir, list[LaunchPlan]]:
        spec = parse_spec(raw(train={"max_steps": 10}, checkpoint={"mode": "full"}), [f"model.compile={value}"])
        run, plans, plan = RunDir(tmp_path), [], make_plan(spec, facts())
        runs.write_request(run, spec, msgspec.structs.replace(plan, compiled=compiled, compile_reason="it was long"))
        (run.checkpoint(8) / "state").mkdir(parents=True)
        manifest = {"mode": "full", "world_size": plan.world_size, "strategy": plan.strategy, "step": 8}
        monkeypatch.setattr(runs.checkpoints, "newest_checkpoint", lambda run, *, full: (8, []))
        monkeypatch.setattr(runs.checkpoints, "read_manifest", lambda run, step: manifest)
        monkeypatch.setattr(runs, "launch", lambda run, spec, plan, **more: plans.append(plan))
        return run, plans

    return begin


def test_resume_goes_on_as_the_run_did(begun: Callable[[str, bool], tuple[RunDir, list[LaunchPlan]]]) -> None:
    """On a CPU `auto` alone would not compile."""
    run, plans = begun("auto", True)
    runs.resume(run.root)
    runs.resume(run.root, sets=["train.max_steps=20"])
    runs.resume(run.root, sets=["model.compile=true"])
    assert [plan.compiled for plan in plans] == [True] * 3
    assert [plan.compile_reason for plan in plans[:2]] == ["it was long"] * 2
    with pytest.raises(RequestError, match=r"trained with compiled blocks, .* --set model\.compile=true"):
        runs.resume(run.root, sets=["model.compile=false"])
    runs.resume(run.root, sets=["model.compile=false"], allow_inexact=True)
    assert not plans[-1].compiled


@pytest.mark.parametrize(("value", "planned", "remarks"), [("auto", False, 0), ("auto", True, 0), ("true", False, 1)])
def test_ranks_do_what_the_plan_says(value: str, planned: bool, remarks: int) -> None:
    setup = pytest.importorskip("allranks.train.setup")
    spec = parse_spec(LONG, [f"model.compile={value}"])
    plan = msgspec.structs.replace(make_plan(spec, facts()), compiled=planned, compile_reason="so it is")
    events, said = [], []
    log = SimpleNamespace(write=lambda name, **more: events.append((name, more)))
    here = SimpleNamespace(spec=spec, model=spec.model, plan=plan, events=log, say=said.append)
    assert (setup._compilation(here, classifier=False) is not None) is planned
    assert len(events) == len(said) == remarks and all("so it is" in text for text in said)


@pytest.mark.parametrize(("attempts", "compiled"), [((1,), False), ((1, 2), True)])
def test_a_driver_that_plans_again_keeps_what_an_attempt_did(tmp_path: Path, attempts: Any, compiled: bool) -> None:
    """On a CPU `auto` alone would not compile."""
    run, spec = RunDir(tmp_path), parse_spec(raw())
    for attempt in attempts:
        run.logs_of(attempt).mkdir(parents=True)
    again = object.__new__(Driver)
    again._run, again._spec = run, spec
    again._plan = msgspec.structs.replace(make_plan(spec, facts()), compiled=True, compile_reason="it was long")
    again._make_plan()
    assert again._plan.compiled is compiled and (again._plan.compile_reason == "it was long") is compiled
