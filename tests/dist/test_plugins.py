"""A strategy and a launcher of an installed package: planned, run and compared as those of allranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.conftest import tiny_spec
from tests.dist.harness import ALLRANKS

pytestmark = pytest.mark.dist

RECORD = """
from allranks.spec.launchers import LauncherInfo
from allranks.spec.strategies.base import StrategyInfo, StrategyState

NICE = LauncherInfo("toy_launcher:NiceLauncher", "this machine, with low priority", "nice", runs_here=True)
RIGHT = StrategyInfo("toy_ranks:Right", "mean of the gradients", {}, memory=lambda m, o: StrategyState(m))
"""
RANKS = """
import os
from allranks.train.strategies.data_parallel import SimpleDDP


class Right(SimpleDDP):
    def __init__(self):
        super().__init__()
        print("niceness", os.nice(0))

"""
LAUNCHER = """
import sys
from allranks.launch.launchers import Launcher, write_attempt_args
from allranks.planning.rank_environment import as_variables


class NiceLauncher(Launcher):
    def start(self, run, spec, plan, attempt, resume):
        from allranks.launch.local_job import LocalJob

        write_attempt_args(run, attempt, resume)
        return LocalJob(run, plan, attempt, as_variables(plan.environment), 0, ["nice", "-n", "7", sys.executable])
"""
ENTRIES = """[allranks.strategies]
toy_right = toy_record:RIGHT
[allranks.launchers]
nice = toy_record:NICE
"""


def niced_ranks(folder: Path) -> int:
    """Return how many ranks ran at the niceness that only the toy launcher sets."""
    return len({log for log in folder.rglob("*.log") if "niceness 7\n" in log.read_text()})


@pytest.fixture
def project(tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a spec of the toy package's strategy and launcher; the package is on the Python path."""
    site = tmp_path / "site"
    info = site / "toy-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "toy_record.py").write_text(RECORD)
    (site / "toy_ranks.py").write_text(RANKS)
    (site / "toy_launcher.py").write_text(LAUNCHER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    spec = tiny_spec(rows_file, tmp_path, strategy={"name": "toy_right"})
    spec["cluster"] = {**spec.get("cluster", {}), "launcher": "nice", "procs_per_node": 2}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(spec))
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ALLRANKS, *words], cwd=folder, capture_output=True, text=True, timeout=200)


def test_they_are_planned_and_run(project: Path) -> None:
    planned = run(project, "plan", "s.yaml", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert (plan["launcher"], plan["world_size"]) == ("nice", 2)
    kept = {moment["name"]: moment["parts"] for moment in plan["fit"]["moments"]}["loss"]
    assert (
        kept["optimizer_state"] == 8 * plan["fit"]["parameters_trained"]
    )  # of `StrategyState`: two moments in float32
    done = run(project, "run", "s.yaml", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["strategy"], result["world_size"]) == ("toy_right", 2)
    assert niced_ranks(project) == 2
