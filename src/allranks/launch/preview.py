"""Preview of a run before it starts: plan, memory of a rank, batch script or commands.

A separate module, so that `allranks plan` does not import the launch machinery.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.launch.launchers import get_launcher
from allranks.planning import memory
from allranks.planning.memory import Fit
from allranks.planning.model_checks import model_warnings
from allranks.planning.records import LaunchPlan
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec, load_spec, parse_spec
from allranks.utils.machine import MachineFacts

SpecLike = RunSpec | dict[str, Any] | str | Path


def read_spec(spec: SpecLike, sets: Sequence[str] = ()) -> RunSpec:
    """Return a spec from a file, a dictionary or a record."""
    if isinstance(spec, RunSpec):
        return spec
    return parse_spec(spec, sets) if isinstance(spec, dict) else load_spec(spec, sets)


def planning_facts(spec: RunSpec) -> MachineFacts:
    """Return the facts that the plan of a spec depends on: of this machine, and what its launcher adds, such as the GPUs of the partition."""
    return get_launcher(spec.cluster.launcher).planning_facts(spec)


def plan(spec: SpecLike, sets: Sequence[str] = (), *, facts: MachineFacts | None = None) -> LaunchPlan:
    """Return what would run, without side effects.

    Args:
        facts: the result of `planning_facts`; None: determine them.

    Raises:
        SpecError: the spec is wrong.
    """
    checked = read_spec(spec, sets)
    return plan_with_model(checked, facts or planning_facts(checked))


def plan_with_model(spec: RunSpec, facts: MachineFacts) -> LaunchPlan:
    """Return the plan with the warnings that need the model's config.

    Raises:
        SpecError, EnvironmentNotAble: as `planner.make_plan`.
    """
    found = memory.make_plan(spec, facts)
    return msgspec.structs.replace(found, warnings=[*found.warnings, *model_warnings(spec)])


def fit(spec: SpecLike, sets: Sequence[str] = (), *, facts: MachineFacts | None = None) -> Fit:
    """Return how much memory a rank will need, whether its device has it, and what would make it fit, without side effects.

    Raises:
        SpecError: the spec, or the model's config, is wrong.
    """
    checked = read_spec(spec, sets)
    known = facts or planning_facts(checked)
    return memory.fit(checked, memory.make_plan(checked, known), known)


def batch_script(spec: RunSpec, *, facts: MachineFacts | None = None) -> str | None:
    """Return the batch script for sbatch; None for launchers without a script."""
    launcher = get_launcher(spec.cluster.launcher)
    return launcher.batch_script(spec, _future_run(spec), lambda: plan(spec, facts=facts))


def hand_commands(spec: RunSpec, *, facts: MachineFacts | None = None) -> list[str] | None:
    """Return the commands to start manually, one per node; None for launchers that start the nodes themselves."""
    return get_launcher(spec.cluster.launcher).node_commands(spec, _future_run(spec), lambda: plan(spec, facts=facts))


def _future_run(spec: RunSpec) -> RunDir:
    """Return the folder that a run would get; TIME stands for its start time."""
    return RunDir(Path(spec.run_root).absolute() / f"{spec.name}-TIME")
