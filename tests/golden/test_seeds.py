"""What the specs of the field notes would start: commands, and batch scripts as what differs from
everything.sbatch (with modules) or plain.sbatch.

After a wanted change: ``ALLRANKS_GOLDEN=write python -m pytest tests/golden``, then read the difference.
"""

from __future__ import annotations

from pathlib import Path

from allranks.launch.hosts import node_commands
from allranks.launch.slurm.script import render_batch_script
from allranks.planning.planner import make_plan
from allranks.planning.records import LaunchPlan
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec, load_spec
from tests.conftest import REPO
from tests.golden.test_sbatch import changes, check_record
from tests.unit.test_plan import facts

SEEDS = REPO / "examples" / "seeds"
FULL = [str(p.relative_to(SEEDS).with_suffix("")) for p in sorted(SEEDS.glob("0*/*.yaml")) if "-tiny" not in p.name]


def planned(name: str, *sets: str) -> tuple[RunSpec, LaunchPlan, RunDir]:
    """A spec, planned on a machine without a GPU, and the folder that its run would get on a shared disk."""
    spec = load_spec(SEEDS / f"{name}.yaml", sets)
    root = Path(spec.run_root)
    root = root if root.is_absolute() else Path("/shared") / root
    return spec, make_plan(spec, facts()), RunDir(root / f"{spec.name}-1")


def test_what_a_job_of_the_notes_starts_is_the_golden_one() -> None:
    shown = {}
    for name in FULL:
        spec, plan, run = planned(name)
        if spec.cluster.launcher == "slurm":
            text = render_batch_script(spec, plan, run, "/env/bin/python").replace(spec.name, "job")
            shown[name] = changes(text, "everything" if spec.cluster.modules else "plain")
        elif spec.cluster.launcher == "hosts":
            lines = node_commands(spec, run, plan, python="/env/bin/python", folder=Path("/shared"))
            shown[name] = [f"{node.host}: {line}" for node, line in zip(plan.nodes, lines, strict=True)]
        else:
            assert plan.launcher == "local"
    check_record("seeds.txt", shown)


def test_the_lab_asks_for_as_many_nodes_as_it_is_told_and_leaves_out_the_bad_one() -> None:
    spec, plan, run = planned("003/lab", "cluster.nodes=10", "cluster.slurm.exclude=[hpc42]")
    assert plan.world_size == 20 and plan.nodes[9].ranks == [18, 19]
    text = render_batch_script(spec, plan, run, "/env/bin/python")
    assert "#SBATCH --nodes=10\n" in text and "#SBATCH --exclude=hpc42\n" in text
