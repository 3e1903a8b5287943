"""What ``allranks smoke all --dry-run`` shows, in smoke.txt; of a batch script what differs from plain.sbatch.

After a wanted change: ``ALLRANKS_GOLDEN=write python -m pytest tests/golden``, then read the difference.
"""

from __future__ import annotations

import json
from pathlib import Path

from allranks.lab.smoke import TESTS
from allranks.lab.smoke.records import PlaceName
from allranks.lab.smoke.runner import SmokeOptions, prepare_test
from allranks.launch.slurm.script import render_batch_script
from allranks.planning.planner import make_plan
from allranks.rundir.paths import RunDir
from allranks.spec import spec_to_dict
from allranks.utils.machine import MachineFacts
from tests.golden.test_sbatch import changes, check_record
from tests.unit.test_plan import facts

PLACES: dict[str, tuple[PlaceName, MachineFacts, tuple[str, ...]]] = {
    "slurm": ("slurm", facts(), ("cluster.slurm.partition=gpu", "cluster.slurm.account=lab")),
    "cluster": ("cluster", facts(), ()),
    "local": ("local", facts(), ()),
    "two GPUs": ("local", facts(gpus=2), ()),
}


def test_what_a_dry_run_shows() -> None:
    """Each test's scaled sentences, what its spec sets, its ranks, and its batch script."""
    shown: dict[str, list[str]] = {}
    for name, (place, machine, sets) in PLACES.items():
        for test in TESTS:
            ready = prepare_test(test, SmokeOptions(place=place, sets=sets, run_root="/shared/runs"), machine)
            if ready.spec is None:
                shown[f"{name} {test.name}"] = [f"not run: {ready.unable}"]
                continue
            lines = [f"differs from the reference: {line}" for line in ready.scaled]
            lines.append(f"ranks: {ready.placement.world if ready.placement else 0}")
            for section in ("model", "strategy", "train"):
                values = {k: v for k, v in spec_to_dict(ready.spec)[section].items() if v is not None}
                lines.append(f"{section}: {json.dumps(values)}")
            if place != "local":
                run = RunDir(Path(f"/shared/runs/{ready.spec.name}-1"))
                script = render_batch_script(ready.spec, make_plan(ready.spec, machine), run, "/env/bin/python")
                lines += changes(script.replace(ready.spec.name, "job"))
            shown[f"{name} {test.name}"] = lines
    check_record("smoke.txt", shown)
