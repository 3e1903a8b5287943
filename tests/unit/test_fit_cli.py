"""What a user sees of `fit`: the table of `plan`, the refusal of `run`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.unit.fit_specs import raw
from tests.warm import allranks


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump({**raw(), "name": "small", "run_root": str(tmp_path / "runs")}))
    return path


def ends(*words: str) -> tuple[int, str, str]:
    done = allranks(*words)
    return done.returncode, done.stdout, done.stderr


def test_plan_shows_parts_moments_and_verdict(spec_file: Path) -> None:
    code, out, _ = ends("plan", str(spec_file))
    assert code == 0
    for words in ("Memory of one rank", "optimizer state", "activations", "together", "it fits"):
        assert words in out
    verdict = next(line for line in out.splitlines() if line.startswith("memory: "))
    assert verdict.endswith("it fits"), "through a pipe a sentence is one line, for grep"


def test_run_refuses_what_cannot_fit_before_anything_is_made(spec_file: Path) -> None:
    code, _, err = ends("run", str(spec_file), "--set", "cluster.device_memory_gib=0.01")
    assert code == 3
    assert "does not fit" in err
    assert "--force" in err
    assert "Traceback" not in err
    assert not (spec_file.parent / "runs").exists()


def test_a_broken_config_ends_with_2_and_no_traceback(spec_file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": -1}')
    for verb in ("plan", "run"):
        code, _, err = ends(verb, str(spec_file), "--set", f"model.name={tmp_path}", "--set", "model.config={}")
        assert code == 2
        assert "hidden_size is -1" in err
        assert "Traceback" not in err
