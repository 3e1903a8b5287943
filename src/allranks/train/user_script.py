"""Run the user's own torchrun program (``script: {path, args}`` or ``{module, args}``) as a rank's main program."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import io
import os
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from allranks.errors import EnvironmentNotAble
from allranks.rundir.events import open_event_log, reporter
from allranks.rundir.heartbeat import DONE_PHASE, SCRIPT_PHASE, heartbeat
from allranks.rundir.paths import RUN_FOLDER_VARIABLE, RunDir
from allranks.train.progress_callbacks import add_progress_callbacks

_kept: list[ModuleType] = []


def run_user_script(run: RunDir, script: Any, attempt: int, arguments: list[str]) -> int:
    """Run the program like ``python PATH ARGS`` or ``python -m MODULE ARGS``, with torchrun's environment. Return 0 if
    it ended normally, also by ``sys.exit(0)``; other exits, and what else it raises, go on to the caller."""
    own = os.getpid()
    events = open_event_log(run, attempt, None)
    heartbeat.phase(SCRIPT_PHASE)
    reporter.open(events)
    os.environ[RUN_FOLDER_VARIABLE] = str(run.root)
    if getattr(script, "direct", False):
        heartbeat.phase(DONE_PHASE)  # from here on, only the exit code tells how it ends
        events.close()
        os.execvp(script.path, [script.path, *arguments])  # noqa: S606 - the user's own program
    add_progress_callbacks()
    atexit.register(_close_files, own)  # the first one is called last, after those of the program
    by_exit = False
    try:
        _run_as_main(script, arguments)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        by_exit = True
    finally:
        reporter.close()
    if os.getpid() == own:  # not in a child process forked by the program
        if by_exit:
            events.write("exit", attempt=attempt, exit_code=0, message="")
        events.write("phase", name="done")
        events.close()
    return 0


def _run_as_main(script: Any, arguments: list[str]) -> None:
    """Execute the program as module ``__main__``, which it stays, for threads and exit handlers that run later."""
    path = Path(script.path).expanduser().absolute() if script.path is not None else None
    if script.workdir is not None:
        try:
            os.chdir(Path(script.workdir).expanduser())
        except OSError as error:
            raise EnvironmentNotAble(f"script.workdir {script.workdir}: {error.strerror}") from None
    # The current folder is first, because this process was started with -m. With a script that is the place of its
    # folder.
    sys.path[:1] = [str(path.parent) if path is not None else str(Path.cwd())]
    if path is not None:
        with io.open_code(str(path)) as source:
            spec, code, file = None, compile(source.read(), str(path), "exec"), str(path)
    else:
        spec, code, file = _code_of_module(script.module or "")
    main = ModuleType("__main__")
    main.__file__, main.__spec__ = file, spec
    main.__package__ = spec.parent if spec is not None else None
    main.__loader__ = spec.loader if spec is not None else None
    main.__dict__["__builtins__"] = __builtins__
    sys.argv = [file, *arguments]
    _kept.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    exec(code, main.__dict__)  # noqa: S102 - the user's own program


def _code_of_module(name: str) -> tuple[ModuleSpec, CodeType, str]:
    """Find a module, or the ``__main__`` of a package, as ``python -m`` does, which imports the package around it."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(name) if get_code is not None else None
    if spec is None or code is None:
        raise ModuleNotFoundError(
            f"No module named {name!r} in {Path.cwd()} or among the installed packages", name=name
        )
    return spec, code, spec.origin or name


def _close_files(own: int) -> None:
    """Close files that the program left open, as Python does when it clears modules: ranks end without that."""
    if os.getpid() != own:
        return
    # `isinstance` would ask objects for their class: some warn or import modules on any attribute access.
    files = [file for file in gc.get_objects() if issubclass(type(file), io.IOBase)]
    # A text file writes to a buffer, and a compressed one to another; the outermost comes first.
    files = [file for file in files if isinstance(file, (io.TextIOBase, io.BufferedIOBase)) and not _is_standard(file)]
    files.sort(key=lambda f: (isinstance(f, io.BufferedIOBase), isinstance(f, (io.BufferedWriter, io.BufferedRandom))))
    for file in files:
        with suppress(Exception):
            file.close()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)  # what C extensions have printed


def _is_standard(file: io.IOBase) -> bool:
    """Return whether a file is standard input, output or error, or cannot say what it is."""
    try:
        return file.closed or file.fileno() <= 2
    except (OSError, ValueError, AttributeError):
        return isinstance(file, (io.StringIO, io.BytesIO))
