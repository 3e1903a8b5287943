"""The smoke tests on two gloo ranks, tiny: each planted fault turns its criterion red, no other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.lab.smoke import TESTS
from allranks.lab.smoke.records import CriterionResult, Evidence, evaluate_criteria, read_evidence
from allranks.rundir.paths import RunDir
from tests import sampling
from tests.dist.harness import Background, allranks

pytestmark = pytest.mark.dist
PLANTED = Path(__file__).parent / "planted_smoke"
BY_NAME = {test.name: test for test in TESTS}


def smoke(folder: Path, *words: str, plant: str = "") -> tuple[int, dict[str, Any]]:
    """`allranks smoke --json`, tiny: its exit code and its document."""
    env = {"HF_HOME": str(folder / "hf")}
    if plant:
        env |= {"SMOKE_PLANT": plant, "PYTHONPATH": f"{PLANTED}:{os.environ.get('PYTHONPATH', '')}"}
    words = (*words, "--scale", "tiny", "--json", "--set", "observe.telemetry_s=0")
    done = allranks("smoke", *words, cwd=folder, limit_s=280, env=env)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def states(test: dict[str, Any]) -> dict[str, str]:
    return {c["key"]: c["state"] for c in test["criteria"]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """02, really run, and 01 before it in `make test-all`."""
    return smoke(tmp_path_factory.mktemp("smoke"), *(["01"] if sampling.ALL else []), "02")


def test_the_first_two_rungs(results: tuple[int, dict[str, Any]]) -> None:
    code, found = results
    assert code == 0 and found["passed"], found
    *before, two = found["tests"]
    assert len(before) == sampling.ALL
    assert {t["status"] for t in found["tests"]} == {"passed"}
    assert all(set(states(one).values()) == {"passed", "not testable"} for one in before)
    assert {key for key, state in states(two).items() if state == "not testable"} == {"transport", "gpu"}
    for test in found["tests"]:
        assert all(c["measured"] and c["threshold"] for c in test["criteria"])
        figures = {f["name"]: f for f in test["figures"]}
        assert figures["samples"]["ours"] > 0 and figures["training time"]["not_comparable"]
        assert figures["parameters"]["not_comparable"] == "different model size"
        assert any("instead of" in line for line in test["scaled"])
        page = Path(found["report"]).read_text()
        assert test["name"] in page and "Not testable here" in page
    rates = {f["name"]: f["ours"] for f in two["figures"]}
    assert rates["global batch"] == 8
    assert rates["samples"] == pytest.approx(8 * rates["steps"])  # rows over all ranks, not steps times ranks


# what is planted: the test, the criterion that must turn red, more words
PLANTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "missing_rank": ("02", "world", ()),
    "saved_by_rank_0_alone": ("02", "save", ("--set", "checkpoint.timeout_s=3")),
    "float32_inputs": ("03", "bf16", ()),
    "gradients_not_synchronised": ("02", "sync", ()),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_turns_its_criterion_red(plant: str, tmp_path: Path) -> None:
    name, key, more = PLANTS[plant]
    if name == "03":
        pytest.importorskip("deepspeed")
    code, found = smoke(tmp_path, name, *more, plant=plant)
    (test,) = found["tests"]
    red = [c for c in test["criteria"] if c["state"] == "failed"]
    assert code == 1 and test["status"] == "failed"
    assert [c["key"] for c in red] == [key], test
    assert red[0]["measured"] != red[0]["threshold"]


Change = Callable[[dict[str, Any]], object]


def altered(evidence: Evidence, change: Change) -> Evidence:
    """The same records with something changed in them."""
    raw = msgspec.to_builtins(evidence)
    for name in ("first", "again", "heads"):
        raw[name] = {int(k): v for k, v in raw[name].items()}
    change(raw)
    plan = msgspec.convert(raw["plan"], type(evidence.plan))
    kept = {name: value for name, value in raw.items() if name not in ("spec", "plan")}
    return Evidence(spec=evidence.spec, plan=plan, **kept)


def events(raw: dict[str, Any], kind: str, rank: int = 1, story: str = "first") -> list[dict[str, Any]]:
    return [e for e in raw[story][rank] if e["event"] == kind]


def each(raw: dict[str, Any], kind: str, story: str = "first", **values: Any) -> None:
    for rank in raw[story]:
        for event in events(raw, kind, rank, story):
            event.update(values)


def keep(raw: dict[str, Any], wanted: Callable[[dict[str, Any]], bool], story: str = "first") -> None:
    """What rank 1 leaves of its records."""
    raw[story][1] = [e for e in raw[story][1] if wanted(e)]


def _sum_for_mean(raw: dict[str, Any]) -> None:
    for rank in raw["first"]:
        for e in events(raw, "step", rank):
            e["loss"] *= 2


def _few_steps(raw: dict[str, Any]) -> None:
    for rank in raw["first"]:
        raw["first"][rank].remove(events(raw, "step", rank)[-1])


TIMEOUT = {"event": "error", "rank": 1, "message": "Watchdog: collective operation timeout", "type": "RuntimeError"}
# a change of the records of 02, and what turns red by it
CHANGES: dict[str, tuple[str, Change]] = {
    "another torch on one rank": ("torch", lambda raw: events(raw, "model")[0].update(torch="2.2.0")),
    "a rank that began and never joined": ("world", lambda raw: raw["first"].pop(1)),
    "rows of two ranks overlap": ("data", lambda raw: each(raw, "proof", data_disjoint=False)),
    "another strategy": ("wrapper", lambda raw: raw["plan"].update(strategy="simple_ddp")),
    "other hashes of the weights": ("sync", lambda raw: events(raw, "end")[0].update(weights_hash="f" * 64)),
    "a rank logs its own loss": ("loss", lambda raw: (e := events(raw, "step")[2]).update(loss=e["loss"] * 1.01)),
    "a sum instead of a mean": ("loss", _sum_for_mean),
    "a step too few": ("steps", _few_steps),
    "a plan whose product is wrong": ("batch", lambda raw: raw["plan"]["batch"].update(global_batch_size=16)),
    "a damaged file": ("save", lambda raw: raw.update(damage="model.safetensors has the wrong hash")),
    "one rank alone saves": ("save", lambda raw: keep(raw, lambda e: e.get("name") != "save")),
    "other weights after the reload": ("reload", lambda raw: each(raw, "proof", "again", weights_hash="0" * 64)),
    "a rank that did not load": ("reload", lambda raw: keep(raw, lambda e: e["event"] != "resume", "again")),
    "a collective that timed out": ("barriers", lambda raw: raw["first"][1].append(TIMEOUT)),
    "sockets instead of shared memory": ("transport", lambda raw: raw.update(ways={"n1": {"NET/Socket": 2}})),
    "a CPU where a GPU was planned": ("gpu", lambda raw: raw["plan"].update(device="cuda")),
    "no finite loss": ("forward", lambda raw: each(raw, "step", loss=None)),
}


def judged(name: str, evidence: Evidence) -> dict[str, CriterionResult]:
    return {j.key: j for j in evaluate_criteria(BY_NAME[name].criteria, evidence)}


@pytest.fixture(scope="module")
def two(results: tuple[int, dict[str, Any]]) -> Evidence:
    """The records of 02."""
    return read_evidence(RunDir(Path(results[1]["tests"][-1]["folder"])))


def test_each_criterion_of_02_can_fail(results: tuple[int, dict[str, Any]], two: Evidence) -> None:
    assert {j.state for j in judged("02_ddp", altered(two, lambda raw: None)).values()} == {"passed", "not testable"}
    for what, (key, change) in CHANGES.items():
        found = judged("01_single" if key == "torch" else "02_ddp", altered(two, change))
        red = {k for k, j in found.items() if j.state == "failed"}
        wanted = {key} if what != "no finite loss" else {"forward", "backward"}
        assert red == wanted, (what, {k: (j.state, j.why) for k, j in found.items()})
    seen = {key for key, _ in CHANGES.values()} | {"backward"}
    assert {c.key for c in BY_NAME["02_ddp"].criteria} <= seen
    for one in results[1]["tests"][:-1]:
        assert judged("01_single", read_evidence(RunDir(Path(one["folder"]))))["world"].state == "passed"


def test_ctrl_c_ends_the_whole_climb_and_what_was_found_is_kept(tmp_path: Path) -> None:
    climb = Background(tmp_path, "smoke", "01", "02", "--scale", "tiny", "--set", "train.max_steps=100000")
    climb.until_step(3)
    climb.signal(signal.SIGINT)
    code, out = climb.wait()
    assert code == 1 and "Traceback" not in out, out
    kept = json.loads(next((tmp_path / "runs").glob("smoke-*/smoke.json")).read_text())
    assert [t["status"] for t in kept["tests"]] == ["failed", "not run"]
    assert "interrupted" in kept["tests"][0]["message"] and "interrupted" in kept["tests"][1]["message"]
    assert len(list((tmp_path / "runs").glob("smoke-0*"))) == 1, "the second test was not begun"
