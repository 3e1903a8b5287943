"""The list of launchers, and what `allranks plan` loads of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from allranks.launch.launchers import LAUNCHERS, Launcher, get_launcher, launcher_of
from allranks.launch.slurm.launcher import SlurmLauncher
from allranks.rundir.files import write_json
from allranks.rundir.paths import RunDir
from allranks.spec.records import ClusterSpec

HEAVY = ["allranks.launch.supervisor", "allranks.launch.channel", "allranks.nodes.slurm", "jinja2", "torch", "asyncio"]


def test_every_launcher_that_a_spec_may_name_is_listed() -> None:
    assert list(LAUNCHERS) == list(get_args(get_type_hints(ClusterSpec)["launcher"]))
    assert all(isinstance(get_launcher(name), Launcher) for name in LAUNCHERS)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_loads_what_starts_jobs_only_when_it_starts_one(name: str) -> None:
    code = f"""
import sys
from pathlib import Path
from allranks.launch import preview
from allranks.launch.launchers import get_launcher
get_launcher({name!r})
print([m for m in {HEAVY!r} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_launcher_of_a_run_is_known_by_what_it_left(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert not isinstance(launcher_of(run), SlurmLauncher)
    run.driver.parent.mkdir()
    write_json(run.driver, {"state": "done"})
    assert isinstance(launcher_of(run), SlurmLauncher)
