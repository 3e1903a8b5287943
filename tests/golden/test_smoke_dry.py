"""What ``allranks smoke all --dry-run`` shows: equal to the files beside this test.

After a wanted change: ``ALLRANKS_GOLDEN=write python -m pytest tests/golden``, then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from allranks.lab.smoke import TESTS
from allranks.lab.smoke.records import PlaceName
from allranks.lab.smoke.runner import SmokeOptions, prepare_test
from allranks.launch.slurm.script import render_batch_script
from allranks.planning.planner import make_plan
from allranks.rundir.paths import RunDir
from allranks.spec import spec_to_dict
from allranks.utils.machine import MachineFacts
from tests.unit.test_plan import facts

HERE = Path(__file__).parent
CASES: dict[str, tuple[PlaceName, MachineFacts, tuple[str, ...]]] = {
    "smoke-slurm": ("slurm", facts(), ("cluster.slurm.partition=gpu", "cluster.slurm.account=lab")),
    "smoke-cluster": ("cluster", facts(), ()),
    "smoke-local": ("local", facts(), ()),
    "smoke-two-gpus": ("local", facts(gpus=2), ()),
}


def shown(place: PlaceName, machine: MachineFacts, sets: tuple[str, ...]) -> str:
    """Each test's scaled sentences, what its spec has, and its batch script."""
    parts = []
    for test in TESTS:
        ready = prepare_test(test, SmokeOptions(place=place, sets=sets, run_root="/shared/runs"), machine)
        parts.append(f"# {test.name}")
        if ready.spec is None:
            parts.append(f"# not run: {ready.unable}\n")
            continue
        parts += [f"# differs from the reference: {line}" for line in ready.scaled]
        raw = spec_to_dict(ready.spec)
        kept = {k: raw[k] for k in ("model", "strategy", "train")} | {
            "world": ready.placement.world if ready.placement else 0
        }
        parts.append("".join(f"# {line}\n" for line in yaml.safe_dump(kept, sort_keys=False, width=1000).splitlines()))
        if place != "local":
            run = RunDir(Path(f"/shared/runs/{ready.spec.name}-1"))
            parts.append(render_batch_script(ready.spec, make_plan(ready.spec, machine), run, "/env/bin/python"))
    return "\n".join(parts)


@pytest.mark.parametrize("name", CASES)
def test_what_a_dry_run_shows(name: str) -> None:
    path = HERE / f"{name}.txt"
    text = shown(*CASES[name])
    if os.environ.get("ALLRANKS_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text(), "ALLRANKS_GOLDEN=write writes it anew"
