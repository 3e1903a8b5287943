"""Every criterion of every smoke test: met on made-up records of a good run, failed once these say otherwise.
`tests/dist/test_smoke.py` judges the records of real runs."""

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from allranks.errors import SpecError
from allranks.lab.smoke import TESTS, records, report, runner, select_tests
from allranks.lab.smoke.figures import figure_rows, state_gb_a_rank
from allranks.lab.smoke.records import CriterionResult, Evidence, FigureRow, SmokeTest, evaluate_criteria, read_evidence
from allranks.lab.smoke.runner import SmokeOptions, _judged, prepare_test
from allranks.planning.planner import make_plan
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import write_json
from allranks.rundir.paths import RunDir
from allranks.spec import spec_to_dict
from tests.unit.test_plan import facts
from tests.warm import allranks

BY_NAME = {test.name: test for test in TESTS}
Raw = dict[str, Any]
Change = Callable[[Raw], object]
STEPS, TRAINED = 6, 1000


def good(test: SmokeTest, *, gpu: bool = False) -> Raw:
    """Records of a run of a test that went well, as plain values."""
    place = "slurm" if gpu or test.min_nodes > 1 else "local"
    sets = () if gpu else ("cluster.device=cpu",)
    machine = facts(gpus=8 if gpu else 0)
    ready = prepare_test(test, SmokeOptions(place=place, scale="tiny", sets=sets), machine)
    assert ready.spec is not None
    plan = make_plan(ready.spec, machine)
    world, lora = plan.world_size, ready.spec.adapter.type == "lora"
    assert plan.batch is not None
    noise = ready.spec.data is not None and ready.spec.data.source == "builtin:noise"
    resumed: list[Raw] = [
        {"event": "start"},
        {"event": "resume", "from_step": STEPS},
        {"event": "proof", "weights_hash": "a" * 64, "world_size": world},
        {"event": "step", "step": STEPS + 1, "loss": 1.0},
    ]
    names = ["config.json", "tokenizer.json", "adapter_model.safetensors" if lora else "model.safetensors"]
    state = {f"state/__{r}_0.safetensors": 12 * TRAINED for r in range(world)}
    engine: Raw = {"zero_optimization": {"stage": 1}, "train_batch_size": plan.batch.global_batch_size}
    engine |= {"optimizer": {"type": "AdamW"}} if gpu else {}
    channels = {"P2P": 2, "NET/IB": 2} if len(plan.nodes) > 1 else {"P2P": 2}
    network = {"ok": True, "line": "interface eth0", "findings": []}
    return {
        "spec": ready.spec,
        "plan": msgspec.to_builtins(plan),
        "metrics": {"status": "succeeded", "tokens_per_s": 100.0, "network": network},
        "first": {r: _story(r, plan, lora, noise, gpu) for r in range(world)},
        "again": {r: [{**event, "rank": r} for event in resumed] for r in range(world)},
        "step": STEPS,
        "files": {**dict.fromkeys(names, 100), **state},
        "damage": None,
        "engine": engine if "deepspeed" in plan.strategy else {},
        "ways": {f"n{n.node}": dict(channels) for n in plan.nodes} if gpu else {},
        "heads": {r: f"[RANK {r}] WORLD_SIZE={world} n{r // 2} pid 1\n" for r in range(world)},
        "preflight": [f"n{n.node} proj=ok pkgs=ok OK" for n in plan.nodes],
        "message": "",
    }


def _story(rank: int, plan: Any, lora: bool, noise: bool, gpu: bool) -> list[Raw]:
    world, batch = plan.world_size, plan.batch
    parts = 1 if plan.strategy in ("pytorch_ddp", "single") else world
    steps = [
        {
            "event": "step", "step": i + 1, "loss": 1.0 + i, "loss_share": (1.0 + i) / world,
            "grad_norm": 0.5, **({"own_s": 0.1} if plan.device == "cuda" else {"forward_s": 0.1, "backward_s": 0.1}),
            "tokens": batch.micro_batch_size * batch.grad_accum if noise else 50,
            "step_time_s": 0.5 if i else 1.5, "peak_memory_bytes": 5 * 10**8,
        }
        for i in range(STEPS)
    ]  # fmt: skip
    scores = {"targets": 90, "collectives": 1, "seconds": 1.0}
    evals = [{"event": "eval", "step": s, "perplexity": 300.0 - s, **scores} for s in (0, 3, 6)]
    whole, device = TRAINED * (50 if lora else 1), "NVIDIA X" if gpu else "cpu"
    node, local_rank = divmod(rank, plan.procs_per_node)
    told: list[Raw] = [
        {"event": "start", "host": f"n{node}", "local_rank": local_rank, "world_size": world},
        {"event": "data", "how": "built" if rank == 0 else "waited", "vocab_size": 512},
        {"event": "engine", "engine": "deepspeed", "version": "1", "optimizer": "FusedAdam", "initialize_s": 3.0},
        {"event": "model", "torch": "2.13.0", "device": device, "parameters": whole, "parameters_trained": TRAINED},
        {"event": "phase", "name": "prove"},
        {"event": "proof", "world_size": world, "weights_equal": True, "data_disjoint": True, "rows_checked": 9,
         "weights_hash": "b" * 64},
        {"event": "phase", "name": "train", "total_steps": STEPS},
        {"event": "batch", "shape": [batch.micro_batch_size, 16], "dtype": plan.dtype, "weights": [plan.dtype]},
        *steps,
        *(evals if rank == 0 else []),
        {"event": "end", "step": STEPS, "state_elements": TRAINED // parts,
         "weights_hash": "a" * 64 if parts == 1 or "zero1" in plan.strategy else None},
        {"event": "phase", "name": "save"},
        {"event": "checkpoint", "step": STEPS, "seconds": 0.2, "bytes": 10},
        {"event": "phase", "name": "done"},
    ]  # fmt: skip
    return [{"rank": rank, "time": float(i), **e} for i, e in enumerate(told)]


def evidence(raw: Raw) -> Evidence:
    return Evidence(**{**raw, "plan": msgspec.convert(raw["plan"], LaunchPlan)})


def judged(test: SmokeTest, raw: Raw) -> dict[str, Any]:
    return {j.key: j for j in evaluate_criteria(test.criteria, evidence(raw))}


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("test", TESTS, ids=lambda t: t.name)
def test_a_good_run_has_every_criterion_ticked_off(test: SmokeTest, gpu: bool) -> None:
    found = judged(test, good(test, gpu=gpu))
    assert {k: (j.state, j.why) for k, j in found.items() if j.state not in ("passed", "not testable")} == {}
    untested = {k for k, j in found.items() if j.state == "not testable"}
    alone = {"transport", "within"} & set(found) if test.ranks == 1 else set()
    wanted = alone if gpu else {"gpu", "transport", "across", "within", "jit"} & set(found)
    assert untested == (wanted if test.name != "08_cpu_lab" else set())


def _events(raw: Raw, kind: str) -> list[Raw]:
    return [e for events in raw["first"].values() for e in events if e["event"] == kind]


def _all(raw: Raw, kind: str, **values: Any) -> None:
    for event in _events(raw, kind):
        event.update(values)


def _one(raw: Raw, kind: str, **values: Any) -> None:
    _events(raw, kind)[-1].update(values)


def _error(raw: Raw, message: str, kind: str = "RuntimeError") -> None:
    raw["first"][0].append({"event": "error", "rank": 0, "type": kind, "message": message})


def _drop(raw: Raw, kind: str, *ranks: int, name: str | None = None, story: str = "first") -> None:
    for rank in ranks:
        raw[story][rank] = [e for e in raw[story][rank] if e["event"] != kind or (name and e.get("name") != name)]


def _again(raw: Raw, kind: str, **values: Any) -> None:
    for event in [e for events in raw["again"].values() for e in events if e["event"] == kind]:
        event.update(values)


# by criterion: what the records say instead; on a run with GPUs where the criterion needs them
CHANGES: dict[str, tuple[Change, bool]] = {
    "gpu": (lambda raw: _one(raw, "model", device="cpu"), True),
    "torch": (lambda raw: _one(raw, "model", torch="2.2.0"), False),
    "world": (lambda raw: raw["first"].pop(max(raw["first"])), False),
    "nodes": (lambda raw: _all(raw, "start", host="n0"), False),
    "transport": (lambda raw: raw["ways"]["n0"].update({"NET/Socket": 2}), True),
    "across": (lambda raw: raw["ways"]["n0"].update({"NET/Socket": 2}), True),
    "within": (lambda raw: raw["ways"]["n0"].update({"SHM": 2}), True),
    "barriers": (lambda raw: _error(raw, "collective operation timeout"), False),
    "network": (
        lambda raw: raw["metrics"]["network"].update(
            ok=False, findings=[{"host": "n1", "level": "bad", "text": "eno1"}]
        ),
        False,
    ),
    "wrapper": (lambda raw: raw["plan"].update(strategy="zero2"), False),
    "engine": (lambda raw: _one(raw, "engine", version="2"), False),
    "zero": (lambda raw: raw["engine"]["zero_optimization"].update(stage=2), False),
    "bf16": (lambda raw: _one(raw, "batch", dtype="float32"), False),
    "jit": (lambda raw: _all(raw, "engine", optimizer="AdamW"), True),
    "data": (lambda raw: _one(raw, "proof", data_disjoint=False), False),
    "race": (lambda raw: _all(raw, "data", how="built"), False),
    "batch": (lambda raw: raw["plan"]["batch"].update(global_batch_size=3), False),
    "forward": (lambda raw: _error(raw, "the loss is not finite"), False),
    "backward": (lambda raw: _error(raw, "the loss is not finite"), False),
    "sync": (lambda raw: _one(raw, "end", weights_hash="c" * 64), False),
    "loss": (lambda raw: _one(raw, "step", loss=9.0), False),
    "steps": (lambda raw: _all(raw, "phase", total_steps=STEPS + 1), False),
    "save": (lambda raw: raw.update(damage="model.safetensors has the wrong hash"), False),
    "state": (lambda raw: raw.update(files=dict.fromkeys(raw["files"], 1)), False),
    "reload": (lambda raw: _again(raw, "resume", from_step=1), False),
    "lora": (lambda raw: _all(raw, "model", parameters=TRAINED), False),
    "metrics": (lambda raw: raw["metrics"].update(tokens_per_s=0.0), False),
    "eval": (lambda raw: _one(raw, "eval", targets=91), False),
    "quick": (lambda raw: _one(raw, "checkpoint", seconds=1800.0), False),
    "preflight": (lambda raw: raw["preflight"].__setitem__(1, "n1 proj=missing pkgs=ok"), False),
    "banner": (lambda raw: raw["heads"].update({0: "[RANK 0] WORLD_SIZE=1 n0 pid 1"}), False),
    "artifacts": (lambda raw: raw["files"].pop("tokenizer.json"), False),
}  # fmt: skip
TOGETHER = {"forward": {"backward"}, "backward": {"forward"}}  # one fault, two lines of the notes


@pytest.mark.parametrize("test", TESTS, ids=lambda t: t.name)
def test_each_criterion_turns_red_and_no_other(test: SmokeTest) -> None:
    assert {c.key for c in test.criteria} <= CHANGES.keys()
    for criterion in test.criteria:
        change, gpu = CHANGES[criterion.key]
        if criterion.key == "torch" and test.ranks == 1:
            continue  # one rank has one version
        raw = copy.deepcopy(good(test, gpu=gpu))
        change(raw)
        found = judged(test, raw)
        red = {k for k, j in found.items() if j.state == "failed"}
        said = {k: (j.state, j.measured, j.why) for k, j in found.items()}
        assert red == {criterion.key} | (TOGETHER.get(criterion.key, set()) & found.keys()), said


def _state_of(raw: Raw, size: int) -> None:
    """With master weights, which count too."""
    raw["engine"]["bf16"] = {"enabled": True}
    raw["files"].update({name: size for name in raw["files"] if name.startswith("state/")})


def _uneven(raw: Raw) -> None:
    """One of two ranks holds nearly all of the state."""
    _all(raw, "end", state_elements=TRAINED // 10)
    _one(raw, "end", state_elements=TRAINED * 9 // 10)


FAILED, OPEN = "failed", "not reached"
# test, on GPUs, what the records say besides, the criterion that tells it, its state, and a word that it says
MORE: list[tuple[str, bool, Change, str, str, str]] = [
    ("02", True, lambda raw: _all(raw, "start", local_rank=0), "gpu", FAILED, "1 GPUs"),
    ("02", False, lambda raw: _all(raw, "proof", world_size=1), "world", OPEN, ""),
    ("02", False, lambda raw: (_drop(raw, "proof", 0, 1), _error(raw, "2 ranks were planned, but 1 answered")),
     "world", FAILED, "another number"),
    ("03", False, _uneven, "zero", FAILED, "0.900 per rank"),
    ("03", False, lambda raw: _all(raw, "end", state_elements=100), "zero", FAILED, "0.100 per rank"),
    ("03", False, lambda raw: _one(raw, "batch", weights=["bfloat16", "float32"]), "bf16", FAILED, "float32"),
    ("02", True, lambda raw: raw["ways"].clear(), "transport", OPEN, ""),
    ("02", False, lambda raw: _error(raw, "timeout while the checkpoint was saved"),
     "barriers", "passed", "no timeout"),
    ("02", False, lambda raw: _drop(raw, "phase", 1, name="done"), "barriers", OPEN, ""),
    ("02", False, lambda raw: _one(raw, "step", loss=float("nan")), "forward", FAILED, ""),
    ("02", False, lambda raw: _all(raw, "step", backward_s=0.0), "backward", OPEN, ""),
    ("02", True, lambda raw: _all(raw, "step", grad_norm=0.0), "backward", OPEN, ""),
    ("02", True, lambda raw: _all(raw, "step", grad_norm=0.0), "forward", "passed", ""),
    ("02", True, lambda raw: raw["plan"].update(procs_per_node=1), "transport", "not testable", "opens no channel"),
    ("03", True, lambda raw: raw["engine"].pop("optimizer"), "jit", "not testable", "no nvcc"),
    ("02", False, lambda raw: _one(raw, "end", weights_hash=None), "sync", FAILED, "2 hashes"),
    ("02", False, lambda raw: raw["first"][1].remove(_events(raw, "step")[-1]), "steps", FAILED, "5 steps"),
    ("02", False, lambda raw: (raw["first"][1].remove(_events(raw, "step")[-1]), _error(raw, "x")), "steps", OPEN, ""),
    ("02", False, lambda raw: _all(raw, "step", loss=1.0, loss_share=0.6), "loss", FAILED, "1"),
    ("02", False, lambda raw: _one(raw, "batch", shape=[3, 16]), "batch", FAILED, ""),
    ("03", False, lambda raw: raw["engine"].update(train_batch_size=99), "batch", FAILED, ""),
    ("02", False, lambda raw: _one(raw, "step", tokens=1), "batch", FAILED, ""),
    ("02", False, lambda raw: _drop(raw, "phase", 1, name="save"), "save", FAILED, "1 of 2"),
    ("02", False, lambda raw: _error(raw, "6 ranges were not saved", "CheckpointError"),
     "save", FAILED, "not published"),
    ("03", False, lambda raw: _state_of(raw, 10 * TRAINED), "state", "passed", "20,000"),
    ("03", False, lambda raw: _state_of(raw, 5 * TRAINED), "state", FAILED, "10,000"),
    ("02", False, lambda raw: _again(raw, "proof", weights_hash="9" * 64), "reload", FAILED, ""),
    ("02", False, lambda raw: raw["again"][1][2].update(weights_hash="9" * 64), "reload", FAILED, ""),
    ("02", False, lambda raw: _drop(raw, "resume", 1, story="again"), "reload", FAILED, "1 of 2"),
    ("05", False, lambda raw: raw["files"].update({"model.safetensors": 7}), "lora", FAILED, "model.safetensors"),
    ("05", False, lambda raw: _all(raw, "model", parameters=2 * TRAINED), "lora", FAILED, "50.00%"),
    ("05", False, lambda raw: _all(raw, "data", how="rebuilt"), "race", FAILED, "2 built"),
    ("05", False, lambda raw: raw["metrics"].update(tokens_per_s=float("inf")), "metrics", FAILED, ""),
    ("05", False, lambda raw: raw["metrics"].update(tokens_per_s=None, status="failed"), "metrics", OPEN, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "gpu", "change", "key", "state", "said"), MORE, ids=[f"{m[0]}-{m[3]}-{i}" for i, m in enumerate(MORE)]
)
def test_what_the_records_say_besides(number: str, gpu: bool, change: Change, key: str, state: str, said: str) -> None:
    (test,) = select_tests([number])
    raw = copy.deepcopy(good(test, gpu=gpu))
    change(raw)
    found = judged(test, raw)[key]
    assert found.state == state, found
    assert said in f"{found.measured} {found.why}", found


def test_where_a_run_broke_off_only_one_line_is_red() -> None:
    """The first that was not reached; one that is known at the very end only, wherever it stands, comes last."""
    test = BY_NAME["02_ddp"]
    raw = copy.deepcopy(good(test))
    for rank in raw["first"]:
        early = ("start", "data", "proof", "model", "batch")
        raw["first"][rank] = [e for e in raw["first"][rank] if e["event"] in early]
    raw |= {"again": {}, "step": None, "files": {}, "message": "rank 1 fell over"}
    red = {k: j for k, j in judged(test, raw).items() if j.state == "failed"}
    assert list(red) == ["wrapper"]
    assert red["wrapper"].why == "rank 1 fell over"
    assert judged(test, raw)["barriers"].state == "not reached"
    assert not [k for k, j in judged(test, raw | {"message": ""}).items() if j.state == "failed"]
    raw["first"][1] = [{**e, "data_disjoint": False} for e in raw["first"][1]]
    assert [k for k, j in judged(test, raw).items() if j.state == "failed"] == ["data"]  # it says why itself


def test_a_figure_that_no_run_here_can_be_held_against_says_why() -> None:
    test = BY_NAME["02_ddp"]
    raw = good(test, gpu=True)
    _all(raw, "model", parameters=test.parameters)
    unknown = {name for name, seed in test.figures.items() if seed is None}
    assert {f.name for f in figure_rows(test, evidence(raw)) if f.not_comparable} == unknown
    found = {f.name: f.not_comparable for f in figure_rows(test, evidence(good(test, gpu=True)))}
    assert found["parameters"] == "different model size"
    seven = BY_NAME["07_fsdp_lora_moe"]
    told = {f.name: f.not_comparable for f in figure_rows(seven, evidence(good(seven)))}
    assert told["evaluation"] == "different hardware; different model size; 2 ranks instead of 16"


def test_figures_by_their_definitions() -> None:
    test = BY_NAME["05_lora_sft"]
    e = evidence(good(test))
    batch = e.plan.batch
    assert batch is not None and e.spec.data is not None
    seconds = next(p["time"] for p in e.first[0] if p.get("name") == "save")
    seconds -= next(p["time"] for p in e.first[0] if p.get("name") == "train")
    rows = batch.micro_batch_size * 3
    raw = good(test)
    raw["plan"]["batch"].update(grad_accum=3, global_batch_size=rows * e.plan.world_size)
    padded = {f.name: f.ours for f in figure_rows(test, evidence(raw))}
    assert padded["wall time"] == seconds
    assert padded["tokens per rank, with padding"] == pytest.approx(STEPS * rows * e.spec.data.max_length / seconds)
    assert state_gb_a_rank(evidence(good(BY_NAME["03_deepspeed_zero1"]))) == pytest.approx(TRAINED / 2 * 12 / 1e9)
    assert state_gb_a_rank(evidence(good(BY_NAME["02_ddp"]))) == pytest.approx(TRAINED * 8 / 1e9)


def placed(name: str, place: records.PlaceName, gpus: int = 0) -> tuple[int, int, bool, list[str]]:
    ready = prepare_test(BY_NAME[name], SmokeOptions(place=place, scale="tiny"), facts(gpus=gpus))
    assert ready.placement is not None, ready.unable
    return ready.placement.nodes, ready.placement.ranks, ready.placement.gpu, ready.scaled


def test_where_a_test_can_be_run() -> None:
    four = BY_NAME["04_multinode_deepspeed"]
    assert "needs 4 nodes" in prepare_test(four, SmokeOptions(), facts()).unable
    assert placed(four.name, "local", gpus=1)[:3] == (1, 1, True)
    assert placed(four.name, "cluster")[:3] == (4, 2, False)
    assert placed("02_ddp", "local", gpus=1)[3][0] == "1 rank on 1 node instead of 2 on 1; 1 GPUs here"
    assert "instead of 2 on 1" not in placed("02_ddp", "local", gpus=8)[3][0]
    assert not placed("08_cpu_lab", "slurm")[2]
    assert [t.name for t in select_tests(["02", "01_single"])] == ["01_single", "02_ddp"]
    assert len(select_tests(["all"])) == 8
    with pytest.raises(SpecError, match="did you mean 02_ddp"):
        select_tests(["2_ddp"])


@pytest.mark.parametrize(("cpus", "slow"), [(2, True), (4096, False)])
def test_what_would_take_cpus_too_long_is_made_smaller_and_says_so(cpus: int, slow: bool) -> None:
    machine = msgspec.structs.replace(facts(cpus=cpus), memory_bytes=2**42)
    ready = prepare_test(BY_NAME["02_ddp"], SmokeOptions(sets=("cluster.device=cpu",)), machine)
    assert ("would take about" in " ".join(ready.scaled)) == slow, ready.scaled


def result(**more: Any) -> records.TestResult:
    judgements = [
        CriterionResult(key=k, title=k, state=s, measured="1", threshold="2", why="")  # type: ignore[arg-type]
        for k, s in (("a", "passed"), ("b", "passed"), ("c", "failed"), ("d", "not testable"))
    ]
    seed: Any = {"seed": 10.7, "correct": 343.0, "correction": "c"}
    figure = FigureRow(name="samples", unit="1/s", definition="d", ours=None, not_comparable="", **seed)
    usual: dict[str, Any] = {
        "name": "t", "title": "<b>T</b>", "source": "s", "status": "failed", "message": "", "seconds": 3.0,
        "folder": None, "setting": "2 ranks", "hardware": "h", "seed_hardware": "sh", "scaled": [], "untested": [],
        "criteria": judgements, "figures": [figure], "path": "gloo",
    }  # fmt: skip
    return records.TestResult(**{**usual, **more})


def ladder(*results: records.TestResult) -> records.SmokeReport:
    how: Any = {"name": "l", "place": "local", "scale": "fit", "started": "now", "seconds": 1.0, "versions": {}}
    return records.SmokeReport(**how, machine=msgspec.to_builtins(facts()), tests=list(results))


def test_the_report_counts_what_could_be_tested_and_escapes_what_it_shows() -> None:
    from rich.console import Console

    console = Console(width=200, file=io.StringIO())
    console.print(report.overview_table(ladder(result())))
    console.print(report.figures_table(result()))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "2 of 3" in text
    assert "10.7 1/s, corrected 343 1/s" in text
    page = report.html_page(ladder(result(message="HF_TOKEN=hf_0123456789abcdefghij")))
    assert "<b>T</b>" not in page and "&lt;b&gt;T&lt;/b&gt;" in page
    assert "hf_0123456789abcdefghij" not in page


def test_what_became_of_a_test_is_said_with_where_it_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = BY_NAME["04_multinode_deepspeed"]
    ready = prepare_test(test, SmokeOptions(place="cluster", scale="tiny"), facts())
    raw = good(test, gpu=True)
    raw["plan"]["device"] = "cpu"
    e = evidence(raw)
    states = {"passed": "passed", "not testable": "passed", "not reached": "failed", "failed": "failed"}
    for state, status in states.items():
        one = CriterionResult(key="k", title="t", state=state, measured="", threshold="", why="w")
        monkeypatch.setattr(runner, "evaluate_criteria", lambda *_, result=one: [result])
        found = _judged(ready, facts(), e, RunDir(tmp_path))
        assert found.status == status, state
        assert found.untested == (["t: w"] if state == "not testable" else [])
    assert found.setting.endswith("on CPU cores") and "8 ranks on 4 nodes" in found.setting
    assert found.hardware.endswith(", all nodes of the box on one machine")
    assert found.path == "NCCL: 8 channels by NET/IB, 8 channels by P2P"
    assert prepare_test(BY_NAME["02_ddp"], SmokeOptions(scale="tiny"), facts(gpus=8)).setting.endswith("on GPUs")


def test_a_climb_has_passed_only_if_something_ran() -> None:
    for status in ("failed", "not run"):
        assert not report.as_document(ladder(result(status=status)))["passed"]
    assert report.as_document(ladder(result(status="passed"), result(status="not run")))["passed"]


def test_a_run_that_went_on_is_read_as_two(tmp_path: Path) -> None:
    """The second start begins the second story; how many steps there were to be, the first says."""
    test = BY_NAME["02_ddp"]
    ready = prepare_test(test, SmokeOptions(place="local", scale="tiny", sets=("cluster.device=cpu",)), facts())
    assert ready.spec is not None
    run = RunDir(tmp_path / "r")
    run.events.mkdir(parents=True)
    run.logs_of(1).mkdir(parents=True)
    write_json(run.plan, msgspec.to_builtins(make_plan(ready.spec, facts())))
    run.spec.write_text(yaml.safe_dump(spec_to_dict(ready.spec)))
    told = [
        {"event": "start"}, {"event": "phase", "name": "train", "total_steps": 4}, {"event": "step", "step": 4},
        {"event": "start"}, {"event": "phase", "name": "train", "total_steps": 5}, {"event": "step", "step": 5},
    ]  # fmt: skip
    for rank in (0, 1):
        lines = [json.dumps({"rank": rank, "time": float(i), **e}) + "\n" for i, e in enumerate(told)]
        run.events_of(rank).write_text("".join(lines))
    found = read_evidence(run)
    assert [e["step"] for e in found.events("step")[1]] == [4]
    assert [e["step"] for e in found.events("step", again=True)[1]] == [5]
    assert found.steps == 4
    assert (found.step, found.files, found.damage) == (None, {}, None)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("01", "--set", "train.max_step=3"), 2, "did you mean 'train.max_steps'"),
        (("04", "--json"), 3, "needs 4 nodes"),
        (("all", "--on", "slurm", "--dry-run", "--json"), 0, "#SBATCH --gpus-per-node=2"),
    ],
)
def test_the_verbs_answers(words: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    done = allranks("smoke", *words, cwd=tmp_path)
    assert done.returncode == code and said in done.stdout + done.stderr, done
    if "--json" in words:
        assert [t["name"] for t in json.loads(done.stdout)["tests"]]
    if code != 3:
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("nvcc", [True, False])
def test_fused_adam_is_used_only_where_it_compiles(nvcc: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    if nvcc:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
    ready = prepare_test(BY_NAME["03_deepspeed_zero1"], SmokeOptions(place="local", scale="tiny"), facts(gpus=2))
    assert ready.spec is not None
    plan = make_plan(ready.spec, facts(gpus=2))
    optimizer = plan.strategy_options["config"].get("optimizer")
    assert (optimizer or {}).get("type") == ("AdamW" if nvcc else None), plan.strategy_options
    assert (optimizer or {"params": {"lr": ready.spec.train.lr}})["params"]["lr"] == ready.spec.train.lr
    assert any("FusedAdam" in line for line in ready.scaled) is not nvcc
