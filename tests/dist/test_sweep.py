"""A sweep on ranks: a failed point does not end it, and it continues where it was ended."""

import json
from pathlib import Path

from tests.dist.harness import allranks, rows_spec, write_spec

TRACKER = """
class Mine:
    def __init__(self, run):
        self.path = run.folder / "mine.txt"
        self.write(run.tracking.group)
    def log(self, step, values):
        self.write(step)
    def finish(self, status):
        self.write(status)
    def write(self, what):
        with self.path.open("a") as file:
            print(what, file=file)
"""


def test_a_failed_point_does_not_end_a_sweep_that_then_continues(tmp_path: Path) -> None:
    cluster = {"procs_per_node": 1, "price_per_gpu_hour": 3.6, "currency": "EUR"}
    request = rows_spec(tmp_path, train={"max_steps": 2}, cluster=cluster, observe={"trackers": ["mine:Mine"]})
    spec = write_spec(tmp_path, request)
    (tmp_path / "mine.py").write_text(TRACKER)
    points = tmp_path / "points.txt"
    points.write_text("train.lr=1e9 train.max_grad_norm=1e30 train.max_steps=4\ntrain.lr=1e-3\n")
    document = json.loads(allranks("sweep", str(spec), "--list", str(points), "--json", cwd=tmp_path, code=1).stdout)
    second, first = document["points"]
    assert (first["name"], second["name"]) == ("p1", "p2")
    assert first["status"] == "diverged" and second["status"] == "succeeded" and second["train_loss"]
    assert second["cost"]["currency"] == "EUR" and 0 < second["cost"]["amount"] < 1
    folder = tmp_path / document["folder"]
    (text,) = (path.read_text() for path in folder.glob("p2-*/mine.txt"))
    assert text.split() == [folder.name, "1", "2", "2", "succeeded"]  # the group; two steps and an evaluation
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.json")}
    assert json.loads(allranks("sweep", str(folder), "--json", cwd=tmp_path, code=1).stdout) == document
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.json")}, "nothing is left to run"
    shown = allranks("sweep", str(folder), "--show", "--json", cwd=tmp_path, code=1)
    assert json.loads(shown.stdout)["points"] == document["points"] and (folder / "sweep.html").exists()
