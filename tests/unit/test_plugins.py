"""Strategies and launchers of installed packages: their entry points are found, broken ones disturb nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import allranks

PLUGIN = """
from allranks.launch.launchers import Launcher
from allranks.spec.launchers import LauncherInfo
from allranks.spec.strategies.base import StrategyInfo, StrategyState

BATCH = LauncherInfo("my_strategies:BatchLauncher", "a scheduler of mine", "laptop", runs_here=True)

class BatchLauncher(Launcher):
    def start(self, run, spec, plan, attempt, resume):
        raise NotImplementedError

    def batch_script(self, spec, run, plan):
        return f"submit {plan().world_size} ranks"

    def cancel(self, run, *, now):
        return "removed from the queue"

MINE = StrategyInfo("my_strategies_train:Mine", "one of mine", {"power": 1.0}, memory=lambda m, o: StrategyState(m))
"""
TRAIN = """
from allranks.train.strategies.data_parallel import SimpleDDP

class Mine(SimpleDDP):
    def __init__(self, power):
        self.power = power
"""
ENTRIES = """[allranks.strategies]
mine = my_strategies:MINE
damaged = my_strategies:NOTHING
wrong = my_strategies:StrategyInfo
single = my_strategies:MINE
[allranks.launchers]
batch = my_strategies:BATCH
local = my_strategies:BATCH
lost = my_strategies:NOTHING
"""
SPEC = "model: {name: 'tiny:llama'}\ndata: {source: 'builtin:instructions'}\nstrategy: {name: NAME}\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "my_strategies.py").write_text(PLUGIN)
    (folder / "my_strategies_train.py").write_text(TRAIN)
    info = folder / "my_strategies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-strategies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    return folder


def python(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(Path(allranks.__file__).parents[1])])}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, env=env)


def plan(site: Path, tmp_path: Path, name: str, more: str = "") -> subprocess.CompletedProcess[str]:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("NAME", name) + more)
    return python(site, "-m", "allranks", "plan", str(tmp_path / "spec.yaml"))


def test_a_strategy_of_a_package_is_planned_with_its_memory_and_options(site: Path, tmp_path: Path) -> None:
    done = plan(site, tmp_path, "mine, power: 2")
    assert done.returncode == 0 and "strategy mine" in done.stdout and "is unknown" not in done.stdout, done.stderr
    assert "power" in plan(site, tmp_path, "mine, force: 2").stderr  # the options that it has


@pytest.mark.full
def test_a_strategy_of_a_package_is_built_and_runs_in_the_loop(site: Path) -> None:
    code = (
        "from allranks.train import strategies; from allranks.train.engines import engine_of;"
        "print(strategies.create('mine', {'power': 3.0}).power, engine_of('mine').__name__)"
    )
    done = python(site, "-c", code)
    assert done.stdout.split() == ["3.0", "TrainingLoop"], done.stderr


@pytest.mark.parametrize(("name", "why"), [("damaged", "AttributeError"), ("wrong", "is no StrategyInfo")])
def test_a_package_that_cannot_be_loaded_is_named(site: Path, tmp_path: Path, name: str, why: str) -> None:
    done = plan(site, tmp_path, name)
    assert done.returncode == 3 and f"{name} cannot be loaded: package my-strategies" in done.stderr
    assert why in done.stderr


def test_all_others_are_listed_and_built_in_ones_stay(site: Path, tmp_path: Path) -> None:
    code = "from allranks.spec.strategies import REGISTRY as r; print(*r, r['single'].summary.split()[0], r['single'])"
    named, _, single = python(site, "-c", code).stdout.partition(" StrategyInfo(")
    assert named.split()[-2:] == ["mine", "one"] and "my" not in single  # 'one process', not 'one of mine'
    assert "mine" in plan(site, tmp_path, "nine").stderr  # did you mean


def test_a_launcher_of_a_package_shows_its_script_and_cancels_its_runs(site: Path, tmp_path: Path) -> None:
    done = plan(site, tmp_path, "zero1", "cluster: {launcher: batch}\n")
    assert "Batch script:\n\nsubmit 2 ranks\n" in done.stdout, done.stderr
    code = (
        "import sys; from pathlib import Path; from allranks import api; from allranks.rundir.paths import RunDir;"
        "print(api.cancel(RunDir(Path(sys.argv[1]))))"
    )
    (tmp_path / "plan.json").write_text('{"launcher": "batch"}')
    assert python(site, "-c", code, str(tmp_path)).stdout == "removed from the queue\n"
    (tmp_path / "plan.json").write_text('{"launcher": "removed_since"}')
    assert "there is nothing to cancel" in python(site, "-c", code, str(tmp_path)).stderr


def test_packages_are_not_read_for_a_built_in_name(site: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("NAME", "zero1"))
    code = (
        "import sys; from allranks.launch import preview; from pathlib import Path;"
        "preview.plan(preview.read_spec(Path(sys.argv[1]))); print('my_strategies' in sys.modules)"
    )
    done = python(site, "-c", code, str(tmp_path / "spec.yaml"))
    assert done.stdout.strip() == "False", done.stderr
