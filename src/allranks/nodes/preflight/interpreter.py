"""Ask the Python of ``cluster.python`` on this machine what it has; refuse one that is missing or lacks allranks."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence

import msgspec

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.planning.python_environment import environment_commands, in_environment, needed_file
from allranks.spec.validation import is_container
from allranks.version import __version__

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
    _, python = environment_commands(wanted, "")
    command = [*in_environment(wanted, python), "-c", _QUESTION, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentNotAble(f"cluster.python {wanted} cannot be started: {error}") from None
    try:
        found = msgspec.convert(json.loads(done.stdout.strip().splitlines()[-1]), InterpreterFacts)
    except (ValueError, IndexError, msgspec.ValidationError):
        said = (done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"])[-1]
        raise EnvironmentNotAble(f"cluster.python {wanted} cannot be used: {said}") from None
    if found.allranks != __version__:
        has = f"has allranks {found.allranks}, not {__version__}" if found.allranks else "has no allranks"
        raise EnvironmentNotAble(
            f"cluster.python {wanted} {has}, which must start the ranks; install this version there: {found.python} -m pip install allranks=={__version__}"
        )
    return found
