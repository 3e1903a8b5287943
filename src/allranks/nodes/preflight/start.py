"""Check on the launcher's machine before any node is contacted. `run` and `doctor` make the same checks with this module."""

from __future__ import annotations

from pathlib import Path

import msgspec

from allranks.errors import SpecError
from allranks.nodes.preflight.request import check_hub, check_rows, check_weights, missing_program_paths
from allranks.nodes.preflight.requirements import local_report, node_requirements
from allranks.nodes.records import PreflightReport, require
from allranks.planning.rank_environment import needed_file
from allranks.planning.records import LaunchPlan
from allranks.spec.records import RunSpec
from allranks.spec.validation import is_container
from allranks.utils.machine import MachineFacts


def check_start(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts, *, required: bool = True) -> PreflightReport:
    """Return the report on this machine.

    Args:
        required: refuse to continue if the report has a failed check; False where the caller shows these checks itself.

    Raises:
        SpecError, DataError: the program is not where the spec says, the hub does not know a name, or a row cannot be used.
        EnvironmentNotAble: this machine lacks something.
    """
    check_paths(spec)
    check_weights(spec)
    report = local_report(spec, plan, facts, Path(spec.run_root))
    if required:
        require(report)
    check_hub(spec)
    check_rows(spec)
    if required and spec.cluster.launched_by.runs_here:
        return _with_node_checks(report, spec, plan)
    return report


def _with_node_checks(report: PreflightReport, spec: RunSpec, plan: LaunchPlan) -> PreflightReport:
    """Return the report with the checks that ``doctor`` makes of a node that runs ranks; a port is chosen when they start.

    Raises:
        EnvironmentNotAble: a check failed that blocks a run.
    """
    from allranks.nodes.preflight.runner import TargetNodes, require_usable_nodes, run_preflight  # with all checks

    run_root = Path(spec.run_root)
    found = run_preflight(
        TargetNodes(), spec, plan, run_root, required=node_requirements(spec, run_root, imports=False)
    )
    require_usable_nodes(found.reports)
    more = [check for one in found.reports for check in one.checks]
    names = {check.name for check in more}
    return msgspec.structs.replace(report, checks=[*(c for c in report.checks if c.name not in names), *more])


def check_paths(spec: RunSpec) -> None:
    """Refuse a program, an environment or a working directory that is missing here, unless only the nodes may see its folder.

    Raises:
        SpecError: names key and path.
    """
    launcher, python, chdir = spec.cluster.launched_by, spec.cluster.python, spec.cluster.slurm.chdir
    for path, problem in missing_program_paths(spec.script) if spec.script is not None else ():
        if _counts(path, spec):
            raise SpecError(problem)
    needed = needed_file(python) if not launcher.runs_here and python is not None else None
    image = python is not None and is_container(python)
    if needed is not None and not needed.is_file() and _counts(needed if image else needed.parent.parent, spec):
        raise SpecError(
            f"cluster.python {python}: there is no {needed}; name a virtual environment's folder, an interpreter, conda:NAME, or a container's image"
        )
    if launcher.uses_slurm and chdir is not None and not Path(chdir).is_dir() and _counts(Path(chdir), spec):
        raise SpecError(
            f"cluster.slurm.chdir {chdir}: there is no such folder; Slurm would start the job in /tmp instead"
        )


def _counts(missing: Path, spec: RunSpec) -> bool:
    """Return whether a path that is missing here is missing on the nodes, too, as far as this machine can tell.

    A relative path starts from the current folder, which the nodes share. An absolute one may be in a folder that only they see, such as
    a folder for temporary files.
    """
    from allranks.nodes.staging.broadcast import is_node_local  # loads much, and most runs have nothing that is missing

    return not missing.is_absolute() or (missing.parent.is_dir() and not is_node_local(missing, Path(spec.run_root)))
