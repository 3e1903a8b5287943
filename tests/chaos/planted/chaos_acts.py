"""What a planted fault does to its process. Each act first writes a mark, whose time is that of the fault."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

MARKS = "CHAOS_MARKS"


def mark(name: str) -> None:
    """Create the file ``NAME.RANK`` in the folder of the marks."""
    folder = os.environ.get(MARKS)
    if folder:
        (Path(folder) / f"{name}.{os.environ['RANK']}").touch()


ENDS: dict[str, Callable[[], object]] = {
    "exit7": lambda: sys.exit(7),
    "exittext": lambda: sys.exit("the planted text of chaos"),
    "exit0": lambda: os._exit(0),
    "exit3": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: ctypes.string_at(0),
    "sleep": lambda: time.sleep(3600),
    "import": lambda: import_module("no_such_module_of_chaos"),
}


def act(how: str, where: str, seconds: float = 0.0) -> None:
    """Do `how` at `where`; ``hold`` and ``pace`` return after `seconds`, the others end or stop the process."""
    if how != "pace":
        mark(where)
    if how in ("pace", "hold"):
        time.sleep(seconds)
    elif how == "raise":
        raise ValueError("planted by chaos")
    else:
        ENDS[how]()
