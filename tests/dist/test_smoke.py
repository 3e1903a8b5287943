"""The smoke tests on two gloo ranks, tiny: each planted fault turns its criterion red, no other."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import sampling
from tests.dist.harness import Background, allranks

PLANTED = Path(__file__).parent / "planted_smoke"


def smoke(folder: Path, *words: str, plant: str = "") -> tuple[int, dict[str, Any]]:
    env = {"HF_HOME": str(folder / "hf")}
    if plant:
        env |= {"SMOKE_PLANT": plant, "PYTHONPATH": f"{PLANTED}:{os.environ.get('PYTHONPATH', '')}"}
    words = (*words, "--scale", "tiny", "--json", "--set", "observe.telemetry_s=0")
    done = allranks("smoke", *words, cwd=folder, limit_s=280, env=env)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def states(test: dict[str, Any]) -> dict[str, str]:
    return {c["key"]: c["state"] for c in test["criteria"]}


def test_the_first_two_rungs(tmp_path: Path) -> None:
    """02, really run, and 01 before it in `make test-all`."""
    code, found = smoke(tmp_path, *(["01"] if sampling.ALL else []), "02")
    assert code == 0 and found["passed"], found
    *before, two = found["tests"]
    assert len(before) == sampling.ALL and {t["status"] for t in found["tests"]} == {"passed"}
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
    assert code == 1 and test["status"] == "failed", test
    assert [c["key"] for c in red] == [key], test
    assert red[0]["measured"] != red[0]["threshold"]


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
