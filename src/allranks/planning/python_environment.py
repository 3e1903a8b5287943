"""How the Python of ``cluster.python`` is started: the same under every launcher. Pure."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from allranks.errors import SpecError
from allranks.spec.validation import is_container

_INTERPRETER = re.compile(r"python[0-9.]*")


def is_interpreter(wanted: str) -> bool:
    """Return whether ``cluster.python`` names an interpreter, such as ``/opt/py/bin/python3.12``, and not an environment's folder."""
    path = Path(wanted)
    return path.parent.name == "bin" and _INTERPRETER.fullmatch(path.name) is not None


def needed_file(wanted: str) -> Path | None:
    """Return the file without which ``cluster.python`` cannot be used; None for conda environments and images of a registry."""
    if wanted.startswith(("conda:", "pyxis:")):
        return None
    path = Path(wanted).expanduser()
    return path if is_interpreter(wanted) or is_container(wanted) else path / "bin" / "activate"


def environment_commands(wanted: str | None, python: str) -> tuple[list[str], list[str]]:
    """Return shell lines that activate the environment, and the command of its Python, outside of containers.

    ``cluster.python`` is a virtual environment's folder, an interpreter, ``conda:NAME``, an Apptainer image (``.sif``), or
    ``pyxis:IMAGE``, which srun enters itself. Slurm's driver runs outside of containers, because they lack srun and scontrol.

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
    """Return words that start a Python of `environment_commands` in its environment; the arguments of Python follow them."""
    lines, _ = environment_commands(wanted, "")
    return ["bash", "-c", " && ".join([*lines, 'exec "$@"']), "bash", *python] if lines else python
