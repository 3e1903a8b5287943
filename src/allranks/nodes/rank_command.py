"""Determine the command that starts a rank: the Python of ``cluster.python``, and a user's own program.

Paths and shell lines follow from the spec; `require_interpreter`, `ask_interpreter` and `require_program` look at this
machine. No program of the user is imported.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.spec.records import ScriptSpec
from allranks.spec.validation import is_container
from allranks.version import __version__

_INTERPRETER = re.compile(r"python[0-9.]*")
ANSWER_S = 60.0
_QUESTION = """
import importlib.util, json, sys
names = sys.argv[1:]
try:
    from allranks.version import __version__ as version
except ImportError:
    version = None
missing = [name for name in names if importlib.util.find_spec(name) is None]
print(json.dumps({"python": sys.executable, "allranks": version, "missing": missing}))
"""


def is_interpreter(wanted: str) -> bool:
    """Return whether ``cluster.python`` is an interpreter (``/opt/py/bin/python3.12``), not an environment's folder."""
    path = Path(wanted)
    return path.parent.name == "bin" and _INTERPRETER.fullmatch(path.name) is not None


def needed_file(wanted: str) -> Path | None:
    """Return the file that ``cluster.python`` needs; None for conda environments and images of a registry."""
    if wanted.startswith(("conda:", "pyxis:")):
        return None
    path = Path(wanted).expanduser()
    return path if is_interpreter(wanted) or is_container(wanted) else path / "bin" / "activate"


def environment_commands(wanted: str | None, python: str) -> tuple[list[str], list[str]]:
    """Return shell lines that activate the environment, and the command of its Python, outside of containers.

    ``cluster.python`` is a virtual environment's folder, an interpreter, ``conda:NAME``, an Apptainer image (``.sif``),
    or ``pyxis:IMAGE``, which srun enters itself. Slurm's driver runs outside of containers, because they lack srun and
    scontrol.

    Raises:
        SpecError: the value cannot be written into a shell line.
    """
    if wanted is None:
        return [], [python]
    if any(ord(c) < 32 or ord(c) == 127 for c in wanted):
        raise SpecError(
            f"cluster.python: {wanted!r} has a line break or a control character, which a batch script cannot contain"
        )
    if is_container(wanted):
        return [], [python]
    if wanted.startswith("conda:"):
        name = shlex.quote(wanted.removeprefix("conda:"))
        return ['eval "$(conda shell.bash hook)"', f"conda activate {name}"], ["python"]
    if is_interpreter(wanted):
        return [], [str(Path(wanted).expanduser())]
    return [f"source {shlex.quote(str(needed_file(wanted)))}"], ["python"]


def in_environment(wanted: str | None, python: list[str]) -> list[str]:
    """Return the command that starts a Python of `environment_commands` in its environment; Python arguments follow."""
    lines, _ = environment_commands(wanted, "")
    return ["bash", "-c", " && ".join([*lines, 'exec "$@"']), "bash", *python] if lines else python


def node_python(wanted: str | None) -> str:
    """Return the interpreter that the nodes must have: that of ``cluster.python`` if it is a path, else the current
    one.

    Containers bring their own, and what conda activates is only known inside the job.
    """
    if wanted is None or is_container(wanted) or wanted.startswith("conda:"):
        return sys.executable
    path = Path(wanted).expanduser().absolute()
    return str(path if is_interpreter(wanted) else path / "bin" / "python")


class InterpreterFacts(msgspec.Struct, frozen=True):
    """What an interpreter has: its path, the version of allranks (None without), and which packages it lacks."""

    python: str
    allranks: str | None
    missing: list[str]


def require_interpreter(wanted: str) -> None:
    """Refuse a ``cluster.python`` that this machine does not have, without starting it.

    Raises:
        SpecError: names the key and the file.
    """
    path = needed_file(wanted)
    if path is not None and not path.is_file():
        raise SpecError(f"cluster.python {wanted}: there is no {path}; create the environment, or name another one")
    for prefix, program in (("conda:", "conda"), ("", "apptainer")):
        if (wanted.startswith(prefix) if prefix else is_container(wanted)) and shutil.which(program) is None:
            raise SpecError(f"cluster.python {wanted}: there is no command {program} on this machine")


def ask_interpreter(wanted: str, packages: Sequence[str]) -> InterpreterFacts:
    """Start the interpreter and return what it has.

    Args:
        packages: names to look for, which are not imported.

    Raises:
        EnvironmentNotAble: it cannot be started, or it has no allranks or another version of it.
    """
    import subprocess

    _, python = environment_commands(wanted, "")
    command = [*in_environment(wanted, python), "-c", _QUESTION, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentNotAble(f"cluster.python {wanted} cannot be started: {error}") from None
    try:
        facts = msgspec.convert(json.loads(done.stdout.strip().splitlines()[-1]), InterpreterFacts)
    except (ValueError, IndexError, msgspec.ValidationError):
        said = (done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"])[-1]
        raise EnvironmentNotAble(f"cluster.python {wanted} cannot be used: {said}") from None
    if facts.allranks != __version__:
        has = f"has allranks {facts.allranks}, not {__version__}" if facts.allranks else "has no allranks"
        raise EnvironmentNotAble(
            f"cluster.python {wanted} {has}, which must start the ranks; install this version there: {facts.python} -m "
            f"pip install allranks=={__version__}"
        )
    return facts


def working_directory(script: ScriptSpec) -> Path:
    """Return the folder in which the ranks run the program."""
    return Path(script.workdir).expanduser().absolute() if script.workdir else Path.cwd()


def file_of_module(module: str, folder: Path) -> Path | None:
    """Return the file that ``python -m MODULE`` runs if the module is in a folder; None if it is not."""
    base = folder.joinpath(*module.split("."))
    candidates = (base.with_name(f"{base.name}.py"), base / "__main__.py")
    return next((path for path in candidates if path.is_file()), None)


def program_file(script: ScriptSpec) -> Path | None:
    """Return the program's file; None for a module that is not in the working directory, such as an installed one."""
    if script.path is not None:
        return Path(script.path).expanduser().absolute()
    return file_of_module(script.module or "", working_directory(script))


def missing_program_paths(script: ScriptSpec) -> Iterator[tuple[Path, str]]:
    """Yield a program's working directory and file, as in the spec, that this machine lacks, each with a message."""
    folder = working_directory(script)
    if script.workdir is not None and not folder.is_dir():
        problem = f"script.workdir {folder}: there is no such folder; current folder: {Path.cwd()}"
        yield Path(script.workdir).expanduser(), problem
    if script.path is None or (path := Path(script.path).expanduser()).is_file():
        return
    what = "this is a folder" if path.is_dir() else "there is no such file"
    hint = (
        f"; {folder / path} exists: script.path does not depend on script.workdir" if (folder / path).is_file() else ""
    )
    yield path, f"script.path {path}: {what}; current folder: {Path.cwd()}{hint}"


def require_program(script: ScriptSpec, python: str | None) -> None:
    """Refuse a program or a working directory that this machine does not have; `SpecError` names it."""
    for _, problem in missing_program_paths(script):
        raise SpecError(problem)
    folder, module = working_directory(script), script.module or ""
    if script.path is not None or python is not None:
        return
    if file_of_module(module, folder) is not None:
        return
    if folder.joinpath(*module.split("."), "__init__.py").is_file():
        raise SpecError(
            f"script.module {module}: this package in {folder} has no __main__.py, so it cannot be started; name one "
            f"of its modules, such as {module}.train"
        )
    if not _is_installed(module):
        raise SpecError(
            f"script.module {module}: there is no such module in {folder}, the program's working directory, and no "
            "installed package has it, or it has no __main__.py; set script.workdir to the folder that contains it"
        )


def _is_installed(module: str) -> bool:
    """Return whether a folder of this interpreter's packages has a module that can be started; nothing is imported."""
    top, *rest = module.split(".")
    if top in sys.builtin_module_names:
        return True
    module_spec = PathFinder.find_spec(top)
    if module_spec is None or module_spec.submodule_search_locations is None:
        return module_spec is not None and not rest
    folders = [Path(folder) for folder in module_spec.submodule_search_locations]
    return any(file_of_module(".".join(rest) or "__main__", folder) is not None for folder in folders)
