"""Check what the launcher's machine knows before any node is asked. `run` and `doctor` make the same checks, from here."""

from __future__ import annotations

from pathlib import Path

from allranks.errors import SpecError
from allranks.nodes.preflight.hub import check_hub
from allranks.nodes.preflight.request import check_rows
from allranks.nodes.preflight.requirements import local_report
from allranks.nodes.records import PreflightReport, require
from allranks.planning.records import LaunchPlan
from allranks.spec.records import RunSpec
from allranks.utils.machine import MachineFacts


def check_start(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts, *, required: bool = True) -> PreflightReport:
    """Return the report on this machine.

    Args:
        required: refuse to continue if the report has a failed check; False where the caller shows these checks itself.

    Raises:
        SpecError, DataError: the program is not where the spec says, the hub does not know a name, or a row cannot be used.
        EnvironmentNotAble: this machine lacks something.
    """
    check_script(spec)
    report = local_report(spec, plan, facts, Path(spec.run_root))
    if required:
        require(report)
    check_hub(spec)
    check_rows(spec)
    return report


def check_script(spec: RunSpec) -> None:
    """Refuse a program that is missing here, unless only the nodes may see its folder.

    A relative path starts from the current folder, which the nodes share; a folder that this machine sees is the nodes' own, except one for
    temporary files.

    Raises:
        SpecError: names the path.
    """
    if spec.script is None:
        return
    from allranks.nodes.staging.broadcast import is_node_local  # loads much, and most runs have no program

    path = Path(spec.script.path).expanduser()
    if path.is_file() or (
        path.is_absolute() and (not path.parent.is_dir() or is_node_local(path, Path(spec.run_root)))
    ):
        return
    what = "this is a folder" if path.is_dir() else "there is no such file"
    raise SpecError(f"script.path {path}: {what}; current folder: {Path.cwd()}")
