"""Check that nodes have the packages that the user's own program imports, found in its source without executing it."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import msgspec

from allranks.nodes.checks import NodeSurvey, each_node, failed_check, passed_check
from allranks.nodes.rank_command import program_file, working_directory
from allranks.nodes.records import Check, NodeRequirements, Probe
from allranks.spec.records import RunSpec, ScriptSpec
from allranks.spec.validation import is_container
from allranks.utils.inputs import read_text
from allranks.utils.redaction import redact
from allranks.utils.text import format_list

MAX_FILES = 200
MAX_FILE_BYTES = 1 << 20
CHANGES_PATH = ("sys", "site", "importlib", "pkgutil", "pyximport", "subprocess")
"""Modules that change where imports are found, or make what is imported: imports after their use are unknown."""


def imported_packages(script: Path, folders: list[Path]) -> dict[str, str]:
    """Return each package that a program imports in any case, with the place: ``{"numpy": "train.py line 3"}``.

    Only imports at the top level of a module count, outside of ``if`` and ``try``; in the program itself those with
    which ``if __name__ == "__main__"`` begins, too. Modules in `folders`, where Python looks first, are read instead of
    being returned. A file that cannot be read or parsed imports nothing.
    """
    imports: dict[str, str] = {}
    left, seen = [script], {script}
    while left and len(seen) < MAX_FILES:
        path = left.pop(0)
        for name, line in _imports(path, main=path == script):
            parts = name.split(".")
            if parts[0] in sys.stdlib_module_names or parts[0] == "__future__":
                continue
            modules = [".".join(parts[: i + 1]) for i in range(len(parts))]
            files = [next((f for folder in folders for f in _files_of(folder, one)), None) for one in modules]
            if files[0] is None:
                imports.setdefault(parts[0], f"{path.name} line {line}")
            more = [file for file in files if file is not None and file.suffix == ".py" and file not in seen]
            seen.update(more)
            left += more
    return imports


def source_problem(script: ScriptSpec, path: Path, *, same_python: bool = True) -> str | None:
    """Return why a program cannot be executed, as its source shows: a syntax error, another language.

    Args:
        same_python: the ranks use this interpreter, so that its syntax is theirs.
    """
    key = f"script.path {script.path}" if script.path is not None else f"script.module {script.module}"
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except (OSError, ValueError):  # left to Python, which says why
        return None
    first = text.partition("\n")[0].strip()
    if first.startswith("#!") and "python" not in first:
        return (
            f"{key}: its first line is {redact(first)!r}, so it is not a Python program; name the Python file that it "
            "starts as script.path, and the arguments as script.args"
        )
    try:
        _parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        if not same_python:
            return None
        place = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        return f"{key}: {place}{what}; Python {sys.version_info[0]}.{sys.version_info[1]} cannot read this program"
    return None


def _parse(source: str | bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the user's strings; Python shows them when it runs the program
        return ast.parse(source)


def _imports(path: Path, *, main: bool) -> Iterator[tuple[str, int]]:
    """Yield each imported module, with its line, until the module changes where imports are found."""
    try:
        module = _parse(read_text(path, MAX_FILE_BYTES))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    for statement in _always_run(module.body, main=main):
        if isinstance(statement, ast.Import):
            yield from ((alias.name, statement.lineno) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            if statement.level == 0 and statement.module:
                yield statement.module, statement.lineno
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
    package = folder.joinpath(*name.split("."))
    candidates = [package / "__init__.py", package.with_name(f"{package.name}.py")]
    try:
        compiled = sorted(package.parent.glob(f"{package.name}.*.so"))
        return [path for path in candidates if path.is_file()] or compiled or ([package] if package.is_dir() else [])
    except OSError:
        return []


def ask(spec: RunSpec, base_folder: Path, required: NodeRequirements) -> NodeRequirements:
    """Add the program's packages; none if only nodes know: container, or shell lines or modules that change Python."""
    if spec.script is None or is_container(spec.cluster.python):
        return required
    script = program_file(spec.script)
    if script is None:  # a module among the installed packages, or one that only the nodes see
        return required
    variable = {**os.environ, **spec.cluster.env}.get("PYTHONPATH", "")
    paths = [base_folder / path for path in variable.split(os.pathsep)] if variable else []
    folder = script.parent if spec.script.path is not None else working_directory(spec.script)
    imports = imported_packages(script, [folder, *paths])
    return msgspec.structs.replace(required, program=imports, program_unknown=_why_unknown(spec))


def _why_unknown(spec: RunSpec) -> str:
    if "SLURM_JOB_ID" in os.environ or spec.cluster.launched_by.runs_here:
        return ""
    if (spec.cluster.python or "").startswith("conda:"):
        return "cluster.python"
    return next((f"cluster.{key}" for key in ("modules", "setup") if getattr(spec.cluster, key)), "")


@each_node
def program(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check that each package is installed; not its version and submodules."""
    wanted = survey.required.program
    missing = [name for name in wanted if probe.program.get(name) is False]
    if not missing:
        return passed_check("program", "ok") if wanted else None
    if survey.required.program_unknown:
        return passed_check("program", f"unknown({','.join(missing)})")
    stageable = all(survey.program_here.get(name) for name in missing)
    python = probe.executable or survey.required.python
    cure = (
        f"the program imports {format_list([f'{name} ({wanted[name]})' for name in missing], 4)}, which {python} on "
        f"{probe.host} does not have: {python} -m pip install {' '.join(missing)} (a package can have another name "
        "than its module), or one environment that all nodes share; a module of your own must be in the program's "
        "folder (script.module: in script.workdir) or in PYTHONPATH (cluster.env)"
    )
    return failed_check("program", f"MISSING({','.join(missing)})", cure, stageable=stageable)
