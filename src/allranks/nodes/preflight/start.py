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
    report = local_report(spec, plan, facts, Path(spec.run_root))
    if required:
        require(report)
    check_hub(spec)
    check_rows(spec)
    return report


def check_paths(spec: RunSpec) -> None:
    """Refuse a program or an environment that is missing here, unless only the nodes may see its folder.

    Raises:
        SpecError: names key and path.
    """
    if spec.script is not None and _is_missing(path := Path(spec.script.path).expanduser(), spec):
        what = "this is a folder" if path.is_dir() else "there is no such file"
        raise SpecError(f"script.path {path}: {what}; current folder: {Path.cwd()}")
    python = spec.cluster.python
    if python is None or is_container(python) or python.startswith("conda:") or spec.cluster.launcher == "local":
        return
    if _is_missing(Path(python).expanduser() / "bin" / "python", spec, Path(python).expanduser()):
        raise SpecError(
            f"cluster.python {python}: there is no virtual environment (no bin/python); name its folder, conda:NAME, or a container's image"
        )


def _is_missing(file: Path, spec: RunSpec, folder: Path | None = None) -> bool:
    """Return whether a file is missing on the nodes, too, as far as can be told from here.

    A relative path starts from the current folder, which the nodes share. An absolute one may be in a folder that only they see, such as
    a folder for temporary files.

    Args:
        folder: what the spec names, if it is not the file.
    """
    from allranks.nodes.staging.broadcast import is_node_local  # loads much, and most runs name neither

    named = folder or file
    return not file.is_file() and (
        not named.is_absolute() or (named.parent.is_dir() and not is_node_local(named, Path(spec.run_root)))
    )
