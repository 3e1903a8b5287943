"""What the specs of the field notes would start: batch scripts and commands, equal to the files in seeds/.

After a wanted change: ``ALLRANKS_GOLDEN=write python -m pytest tests/golden``, then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allranks.launch.hosts import node_commands
from allranks.launch.slurm.script import render_batch_script
from allranks.planning.planner import make_plan
from allranks.planning.records import LaunchPlan
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec, load_spec
from tests.conftest import REPO
from tests.unit.test_plan import facts

HERE = Path(__file__).parent / "seeds"
SEEDS = REPO / "examples" / "seeds"
FULL = [str(p.relative_to(SEEDS).with_suffix("")) for p in sorted(SEEDS.glob("0*/*.yaml")) if "-tiny" not in p.name]


def planned(name: str, *sets: str) -> tuple[RunSpec, LaunchPlan, RunDir]:
    """A spec, planned on a machine without a GPU, and the folder that its run would get on a shared disk."""
    spec = load_spec(SEEDS / f"{name}.yaml", sets)
    root = Path(spec.run_root)
    root = root if root.is_absolute() else Path("/shared") / root
    return spec, make_plan(spec, facts()), RunDir(root / f"{spec.name}-1")


def check_golden(name: str, text: str) -> None:
    golden = HERE / name
    if os.environ.get("ALLRANKS_GOLDEN") == "write":
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", FULL)
def test_what_a_job_of_the_notes_starts_is_the_golden_one(name: str) -> None:
    spec, plan, run = planned(name)
    if spec.cluster.launcher == "slurm":
        check_golden(f"{name}.sbatch", render_batch_script(spec, plan, run, "/env/bin/python"))
    elif spec.cluster.launcher == "hosts":
        lines = node_commands(spec, run, plan, python="/env/bin/python", folder=Path("/shared"))
        check_golden(f"{name}.sh", "".join(f"# {n.host}\n{line}\n" for n, line in zip(plan.nodes, lines, strict=True)))
    else:
        assert not (HERE / f"{name}.sbatch").exists() and plan.launcher == "local"


def test_the_lab_asks_for_as_many_nodes_as_it_is_told_and_leaves_out_the_bad_one() -> None:
    spec, plan, run = planned("003/lab", "cluster.nodes=10", "cluster.slurm.exclude=[hpc42]")
    assert plan.world_size == 20 and plan.nodes[9].ranks == [18, 19]
    text = render_batch_script(spec, plan, run, "/env/bin/python")
    assert "#SBATCH --nodes=10\n" in text and "#SBATCH --exclude=hpc42\n" in text
