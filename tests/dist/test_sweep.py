"""A sweep on ranks: a failed point does not end it, and it continues where it was ended."""

from __future__ import annotations

import json
from pathlib import Path

from allranks.experiments import sweep as sweeps
from tests.conftest import tiny_spec
from tests.unit.test_run_status import verb


def test_a_failed_point_does_not_end_a_sweep_that_then_continues(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    request = tiny_spec("builtin:instructions", tmp_path)
    request["cluster"] = {**request.get("cluster", {}), "procs_per_node": 1}
    request["train"] = {**request["train"], "max_steps": 2}
    spec.write_text(json.dumps(request))
    points = sweeps.grid_points([], ["train.lr=1e9 train.max_grad_norm=1e30 train.max_steps=4", "train.lr=1e-3"])
    sweep = sweeps.create_sweep(spec, [], points)
    folder = Path(sweep.folder)
    assert sweeps.run_sweep(sweep)
    first, second = sweeps.results_of(sweep)
    assert first.status in ("failed", "diverged") and second.status == "succeeded" and second.train_loss
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.json")}
    assert sweeps.run_sweep(sweeps.open_sweep(folder)), "nothing is left to run"
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.json")}
    code, shown = verb("sweep", str(folder), "--show", "--json")
    assert code == 1 and [p["name"] for p in json.loads(shown)["points"]] == ["p2", "p1"]
    assert (folder / "sweep.html").exists()
