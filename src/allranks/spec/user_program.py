"""Where a user's own program is: its working directory, and the file of ``script.path`` or ``script.module``. No imports of it."""

from __future__ import annotations

import shlex
from pathlib import Path

from allranks.spec.records import ScriptSpec
from allranks.utils.redaction import redact_arguments


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


def command_line(script: ScriptSpec) -> str:
    """Return the program as a shell command, with placeholders for secret arguments."""
    program = [script.path] if script.path is not None else ["-m", script.module or ""]
    return shlex.join(["python", *program, *redact_arguments(script.args)])
