"""What a spec asks for, before anything is started: its plan, the memory of a rank, what would be handed to a launcher.

By itself, so that `allranks plan` need not load what launches and follows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allranks import fit as memory
from allranks.facts import machine_facts
from allranks.fit import Fit
from allranks.planning import LaunchPlan, make_plan
from allranks.rundir import RunDir
from allranks.spec import RunSpec, load_spec, parse_spec

SpecLike = RunSpec | dict[str, Any] | str | Path


def read_spec(spec: SpecLike, sets: Sequence[str] = ()) -> RunSpec:
    """A spec from a file, a dictionary or a record."""
    if isinstance(spec, RunSpec):
        return spec
    return parse_spec(spec, sets) if isinstance(spec, dict) else load_spec(spec, sets)


def plan(spec: SpecLike, sets: Sequence[str] = ()) -> LaunchPlan:
    """What would run. Touches nothing.

    Raises:
        SpecError: the spec is wrong.
    """
    return make_plan(read_spec(spec, sets), machine_facts())


def fit(spec: SpecLike, sets: Sequence[str] = ()) -> Fit:
    """How much memory a rank will need, whether its device has it, and what would make it fit. Touches nothing.

    Raises:
        SpecError: the spec, or the model's config, is wrong.
    """
    checked, facts = read_spec(spec, sets), machine_facts()
    return memory.fit(checked, make_plan(checked, facts), facts)


def batch_script(spec: RunSpec) -> str | None:
    """What would be handed to sbatch; None for launchers that need no script."""
    if spec.cluster.launcher != "slurm":
        return None
    from allranks.slurm.script import render

    return render(spec, make_plan(spec, machine_facts()), _future_run(spec), sys.executable)


def hand_commands(spec: RunSpec) -> list[str] | None:
    """What would be started by hand, one command a node; None for launchers that start the nodes themselves."""
    if spec.cluster.launcher != "hosts":
        return None
    from allranks.launch import hosts

    return hosts.commands(_future_run(spec), make_plan(spec, machine_facts()))


def _future_run(spec: RunSpec) -> RunDir:
    """The folder that a run would get; TIME stands for the moment at which it is started."""
    return RunDir(Path(spec.run_root).absolute() / f"{spec.name}-TIME")
