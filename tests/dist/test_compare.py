"""Real comparisons on two gloo ranks: honest strategies pass, each defect, also of planted/*.yaml, is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import allranks as package
from tests import sampling
from tests.dist.harness import allranks

PLANTED = Path(__file__).parent / "planted"


def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategies: str, **train: Any) -> tuple[int, Any, Any]:
    """The exit code, the rows by strategy, and the setting of a comparison."""
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    spec = {
        "name": "c",
        "model": {"name": "tiny:llama", "config": config},
        "data": {"source": "builtin:reviews", "subset": 200, "max_length": 32, "template": "text"},
        "strategy": {"name": "pytorch_ddp", "bucket_mb": 0.2},
        "train": {"max_steps": 3, "micro_batch_size": 2, "lr": 1e-3, **train},
        "cluster": {"procs_per_node": 2, "cache": str(tmp_path / "cache")},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(spec))
    monkeypatch.setenv("PYTHONPATH", str(PLANTED), prepend=":")
    words = ("c.yaml", "--strategies", strategies, "--repeats", "1", "--json")
    done = allranks("compare", *words, cwd=tmp_path, limit_s=400)
    assert done.returncode in (0, 1), done.stderr
    document = json.loads(done.stdout)
    return done.returncode, {row["strategy"]: row for row in document["rows"]}, document["setting"]


DEFECTIVE = {"tiring": "in repeat 1 ", "localnorm": "in the uneven trial "}


@pytest.mark.timeout(450)  # a minute where nothing else runs
def test_honest_strategies_pass_and_hold_what_theory_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, defective = ("simple_ddp", "bucket_ddp_async", "zero3"), ("tiring", "localnorm")[: 1 + sampling.ALL]
    clip = 100.0  # above every norm
    train = {"grad_accum": 2, "max_steps": 6, "max_grad_norm": clip}
    code, found, setting = compare(tmp_path, monkeypatch, ",".join(honest + defective), **train)
    assert code == 1
    for name in honest:
        assert all(found[name]["gates"].values()), found[name]["reasons"]
        assert all(error < 1e-5 for error in found[name]["parity_errors"].values()), found[name]["parity_errors"]
    # a defect that begins after the verification is in the timed steps; clipping that the spec leaves inactive, in the
    # uneven trial
    for name in defective:
        assert found[name]["parity_error"] < 1e-5 and found[name]["reasons"][0].startswith(f"parity: {DEFECTIVE[name]}")
        assert found[name]["tokens_per_s"] is None
    found = {name: found[name] for name in honest}
    whole = 4 * setting["trained_bytes"]  # weights, gradients and two moments in float32
    ratios = {name: row["memory"]["state_bytes"] / whole for name, row in found.items()}
    assert ratios == pytest.approx({"simple_ddp": 1.0, "bucket_ddp_async": 1.0, "zero3": 1 / 2}, rel=0.02)
    calls = {name: {(c["kind"], c["phase"]): c["count"] for c in row["collectives"]} for name, row in found.items()}
    n = calls["simple_ddp"]["all_reduce", "after_backward"]
    assert n % 2 == 0, "each parameter on each of two micro-steps"
    assert 1 < calls["bucket_ddp_async"]["all_reduce", "backward"] < n / 2
    folder = next((tmp_path / "runs").iterdir())
    assert all((folder / f"comparison.{kind}").stat().st_size > 500 for kind in ("json", "csv", "html"))


def test_each_defect_shuts_its_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defective = "silent,late,twice,lazy,broken,undivided,halfway"
    code, found, _ = compare(tmp_path, monkeypatch, f"simple_ddp_ga,{defective}")
    assert code == 1
    gates = {name: row["gates"] for name, row in found.items()}
    assert gates["simple_ddp_ga"] == {"parity": True, "mechanism": True, "equal_work": True}
    verdicts = {name: (gate["parity"], gate["mechanism"]) for name, gate in gates.items()}
    assert (verdicts["silent"], verdicts["twice"]) == ((False, False), (True, False))
    assert verdicts["undivided"] == verdicts["halfway"] == (False, True)
    assert not gates["lazy"]["equal_work"]
    assert found["undivided"]["parity_error"] < 1e-4, "its weights alone would have passed"
    assert "not today" in found["broken"]["reasons"][0]
    assert any("launches no collective during backward" in mark for mark in found["late"]["marks"])
    for name in ("silent", "twice", "lazy", "broken", "undivided", "halfway"):
        assert found[name]["tokens_per_s"] is None, name


SPEC: dict[str, Any] = {
    "name": "defect",
    "model": {"name": "tiny:llama", "config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}},
    "data": {"source": "builtin:instructions", "subset": 160, "max_length": 96},
    "strategy": {"name": "pytorch_ddp", "bucket_mb": 0.05},
    "train": {"max_steps": 10, "micro_batch_size": 2, "grad_accum": 2, "lr": 1e-3},
    "cluster": {"procs_per_node": 2, "restarts": {"max": 0}},
}


def edits(file: str) -> list[dict[str, Any]]:
    """Each with its id and its file; `by` is parity unless it says otherwise."""
    files = yaml.safe_load((PLANTED / file).read_text())
    named = [(f, name, edit) for f, entries in files.items() for name, edit in entries.items()]
    return [{"file": f, "id": name, "by": "parity", **edit} for f, name, edit in named]


def strategies_of(edit: dict[str, Any]) -> str:
    own = {
        "train/strategies/sharded_optimizer.py": "zero1,zero2,zero3", "train/strategies/base.py": "simple_ddp_ga,zero3",
        "train/strategies/gradient_sync.py": "bucket_ddp_async,zero1",
    }  # fmt: skip
    return edit.get("strategies") or own.get(edit["file"], "simple_ddp_ga")


def plant(edit: dict[str, Any], folder: Path) -> Path:
    source = Path(package.__file__).parent
    copy = folder / "source" / "allranks"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / edit["file"]).write_text(edited(edit))
    return copy.parent


def edited(edit: dict[str, Any]) -> str:
    """The file with the defect. The old text must be there exactly once."""
    text = (Path(package.__file__).parent / edit["file"]).read_text()
    assert text.count(edit["old"]) == 1, f"{edit['id']}: the old text occurs {text.count(edit['old'])} times"
    return text.replace(edit["old"], edit["new"])


def run(edit: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compare with the defect; return ``by`` (the gates that refused, or ``run``, or nothing) and ``reasons``."""
    source = plant(edit, folder)
    spec = json.loads(json.dumps(SPEC))
    for key, value in edit.get("spec", {}).items():
        part, _, name = key.partition(".")
        spec.setdefault(part, {})[name] = value
    spec["cluster"]["cache"] = str(folder / "cache")
    (folder / "defect.yaml").write_text(yaml.safe_dump(spec))
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "allranks.cli.main", "compare", "defect.yaml", "--repeats", "1", "--json"]
    command += ["--strategies", strategies_of(edit)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    if not done.stdout.strip():
        return {"by": ["run"], "reasons": [done.stderr.strip().splitlines()[-1]], "rows": {}}
    rows = json.loads(done.stdout)["rows"]
    gates = [gate for gate in ("parity", "mechanism", "equal_work") if not all(row["gates"][gate] for row in rows)]
    return {
        "by": gates,
        "reasons": list(dict.fromkeys(reason for row in rows for reason in row["reasons"])),
        "rows": {row["strategy"]: all(row["gates"].values()) for row in rows},
    }


def test_each_defect_still_finds_its_place() -> None:
    for edit in edits("edits.yaml") + edits("blind_edits.yaml"):
        compile(edited(edit), edit["file"], "exec")


@pytest.mark.parametrize("edit", edits("edits.yaml"), ids=lambda edit: edit["id"])
def test_a_planted_defect_is_refused(edit: dict[str, Any], tmp_path: Path) -> None:
    found = run(edit, tmp_path)
    assert edit["by"] in found["by"], found


@pytest.mark.parametrize("edit", edits("blind_edits.yaml"), ids=lambda edit: edit["id"])
def test_a_defect_written_without_looking_at_the_gates_is_refused(edit: dict[str, Any], tmp_path: Path) -> None:
    assert run(edit, tmp_path)["by"]
