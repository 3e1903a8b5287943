"""`run --exclude-bad` in the box: a node that cannot run is left out, named, and the rest goes on; if the spec
allows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import injected
from allranks.rundir.files import read_json
from tests.cluster.runs import log_of, program_in, run, spec_in

pytestmark = pytest.mark.cluster


def package_of(name: str) -> str:
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    return str(Path(found.origin).parent)


@pytest.mark.parametrize("what", ["program", pytest.param("training", marks=pytest.mark.full)])
def test_a_bad_node_is_left_out_and_the_others_train(box: Box, shared: Path, what: str) -> None:
    program = program_in(shared, "import safetensors\nprint('RAN', flush=True)\n", nodes=3, stage="never")
    spec, check = (spec_in(shared, cluster={"stage": "never"}), "pkgs") if what == "training" else (program, "program")
    with injected(box, "hide-folder", "n2", path=package_of("safetensors")):
        done, _ = run(shared, spec)
        assert done.returncode == 3 and f"n2: {check}:" in done.stderr, done.stderr
        done, left = run(shared, spec, "--exclude-bad")
    log = log_of(left)
    assert done.returncode == 0, done.stderr + log
    metrics = read_json(left.metrics)
    assert isinstance(metrics, dict)
    assert metrics["world_size"] == 2 and metrics["nodes"] == 2
    if what == "training":
        assert metrics["sync_proof"]["world_size"] == 2
    else:
        assert ["RAN" in log.read_text() for log in left.rank_logs(1).values()] == [True, True]
    assert "continuing without n2: 2 ranks on 2 nodes" in log
    assert sorted(p.name.split(".")[0] for p in left.logs_of(1).glob("*.rank*.log")) == ["n1", "n3"]
    assert "n2" in left.preflight_text.read_text() and "MISSING(safetensors)" in left.preflight_text.read_text()


def test_a_batch_that_the_rest_cannot_share_is_refused(box: Box, shared: Path) -> None:
    spec = spec_in(shared, cluster={"stage": "never"})
    spec["train"] = {"max_steps": 2, "global_batch_size": 3}
    with injected(box, "hide-folder", "n2", path=package_of("safetensors")):
        done, _ = run(shared, spec, "--exclude-bad")
    assert done.returncode == 3
    assert "does not allow a run without n2" in done.stderr
