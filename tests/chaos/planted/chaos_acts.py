"""What a planted fault does to its process. Each act first writes a mark, whose time is that of the fault."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

MARKS = "CHAOS_MARKS"


def mark(name: str) -> None:
    """Create the file ``NAME.RANK`` in the folder of the marks."""
    folder = os.environ.get(MARKS)
    if folder:
        (Path(folder) / f"{name}.{os.environ['RANK']}").touch()


def act(how: str, where: str, seconds: float = 0.0) -> None:
    """Do `how` at `where`; ``hold`` and ``pace`` return after `seconds`, the others end or stop the process."""
    if how == "pace":
        time.sleep(seconds)
        return
    mark(where)
    if how == "hold":
        time.sleep(seconds)
    elif how == "raise":
        raise ValueError("planted by chaos")
    elif how == "import":
        import no_such_module_of_chaos  # noqa: F401 # pyright: ignore
    elif how == "exit7":
        sys.exit(7)
    elif how == "exittext":
        sys.exit("the planted text of chaos")
    elif how == "exit0":
        os._exit(0)
    elif how == "exit3":
        os._exit(3)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "segv":
        ctypes.string_at(0)
    elif how == "sleep":
        time.sleep(3600)
    else:
        raise AssertionError(how)
