"""Check that the nodes have the packages that the user's own program imports, found by reading its source without executing it."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import msgspec

from allranks.nodes.checks import ChecksByHost, NodeCheck, NodeSurvey, failed_check, join_names, passed_check
from allranks.nodes.records import NodeRequirements
from allranks.spec.records import RunSpec
from allranks.spec.user_program import program_file, working_directory
from allranks.spec.validation import is_container
from allranks.utils.inputs import read_text

MAX_FILES = 200
MAX_FILE_BYTES = 1 << 20
CHANGES_PATH = ("sys", "site", "importlib", "pkgutil")
"""Modules with which a program changes where imports are found: what it imports after their use is not known."""


def imported_packages(script: Path, folders: list[Path]) -> dict[str, str]:
    """Return each package that a program imports in any case, with the place: ``{"numpy": "train.py line 3"}``.

    Only imports at the top level of a module count, outside of ``if`` and ``try``; in the program itself those with which
    ``if __name__ == "__main__"`` begins, too. Modules beside the program, or in `folders`, are read instead of being returned.
    A file that cannot be read or parsed imports nothing.
    """
    found: dict[str, str] = {}
    folders, left, seen = [script.parent, *folders], [script], {script}
    while left and len(seen) < MAX_FILES:
        path = left.pop(0)
        for name, line in _imports(path, main=path == script):
            own = next((file for folder in folders for file in _files_of(folder, name)), None)
            if own is None and name not in sys.stdlib_module_names and name != "__future__":
                found.setdefault(name, f"{path.name} line {line}")
            elif own is not None and own.suffix == ".py" and own not in seen:
                seen.add(own)
                left.append(own)
    return found


def _imports(path: Path, *, main: bool) -> Iterator[tuple[str, int]]:
    """Yield the first part of each imported name, with its line, until the module changes where imports are found."""
    try:
        module = ast.parse(read_text(path, MAX_FILE_BYTES))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    for statement in _always_run(module.body, main=main):
        if isinstance(statement, ast.Import):
            yield from ((alias.name.partition(".")[0], statement.lineno) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            if statement.level == 0 and statement.module:
                yield statement.module.partition(".")[0], statement.lineno
        elif any(
            isinstance(node, ast.Name) and node.id in CHANGES_PATH for node in ast.walk(statement)
        ) and not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return


def _always_run(body: list[ast.stmt], *, main: bool) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _always_run(statement.body, main=main)
        elif (
            main and isinstance(statement, ast.If) and _is_main(statement.test)
        ):  # later ones may follow a change of the path
            yield from takewhile(lambda inner: isinstance(inner, (ast.Import, ast.ImportFrom)), statement.body)
        else:
            yield statement


def _is_main(test: ast.expr) -> bool:
    """Return whether a condition is ``__name__ == "__main__"``."""
    if not (isinstance(test, ast.Compare) and len(test.comparators) == 1 and isinstance(test.ops[0], ast.Eq)):
        return False
    sides = {ast.unparse(side) for side in (test.left, test.comparators[0])}
    return sides == {"__name__", "'__main__'"}


def _files_of(folder: Path, name: str) -> list[Path]:
    """Return the file of a module in a folder; a folder without ``__init__.py`` counts as one, too."""
    package = folder / name
    candidates = [package / "__init__.py", package.with_suffix(".py")]
    try:
        compiled = sorted(folder.glob(f"{name}.*.so"))
        return [path for path in candidates if path.is_file()] or compiled or ([package] if package.is_dir() else [])
    except OSError:
        return []


def ask(spec: RunSpec, here: Path, wish: NodeRequirements) -> NodeRequirements:
    """Add the packages of the program; none where only the node knows: in a container, or where shell lines and modules change its Python."""
    if spec.script is None or is_container(spec.cluster.python):
        return wish
    script = program_file(spec.script)
    if script is None:  # a module among the installed packages, or one that only the nodes see
        return wish
    paths = {**os.environ, **spec.cluster.env}.get("PYTHONPATH", "").split(os.pathsep)
    found = imported_packages(script, [here, working_directory(spec.script), *(here / path for path in paths if path)])
    return msgspec.structs.replace(wish, program=found, program_unknown=_why_unknown(spec))


def _why_unknown(spec: RunSpec) -> str:
    if "SLURM_JOB_ID" in os.environ or spec.cluster.launched_by.runs_here:
        return ""
    if (spec.cluster.python or "").startswith("conda:"):
        return "cluster.python"
    return next((f"cluster.{key}" for key in ("modules", "setup") if getattr(spec.cluster, key)), "")


def judge(survey: NodeSurvey) -> ChecksByHost:
    """Check that each package is installed; not its version, and not what it contains."""
    verdicts: ChecksByHost = {}
    wanted = survey.wish.program
    for probe in survey.probes if wanted else []:
        missing = [name for name in wanted if probe.program.get(name) is False]
        if not missing:
            verdicts[probe.host] = passed_check("program", "ok")
        elif survey.wish.program_unknown:
            verdicts[probe.host] = passed_check("program", f"unknown({','.join(missing)})")
        else:
            python = probe.executable or survey.wish.python
            places = join_names([f"{name} ({wanted[name]})" for name in missing])
            cure = (
                f"the program imports {places}, which {python} on {probe.host} does not have: {python} -m pip install "
                f"{' '.join(missing)} (a package can have another name than its module), or one environment that all nodes share"
            )
            stageable = all(survey.program_here.get(name) for name in missing)
            verdicts[probe.host] = failed_check("program", f"MISSING({','.join(missing)})", cure, stageable=stageable)
    return verdicts


PROGRAM = NodeCheck(judge=judge, ask=ask)
