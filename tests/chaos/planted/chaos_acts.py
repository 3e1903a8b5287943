"""What a planted fault does to its process. Each act first writes a mark, whose time is that of the fault."""

import ctypes
import errno
import os
import resource
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


def use_up_memory() -> None:
    """Ask for more memory than this process may have."""
    import torch

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    torch.empty(1 << 30)


def set_clock(offset_s: float) -> None:
    """Give this process another time of day."""
    usual = time.time
    time.time = lambda: usual() + offset_s


def refuse(number: int) -> None:
    raise OSError(number, os.strerror(number))


ENDS: dict[str, Callable[[], object]] = {
    "exit7": lambda: sys.exit(7),
    "exittext": lambda: sys.exit("the planted text of chaos"),
    "exit0": lambda: os._exit(0),
    "exit3": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: ctypes.string_at(0),
    "sleep": lambda: time.sleep(3600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "memory": use_up_memory,
    "clock": lambda: set_clock(-3600.0),
    "stale": lambda: refuse(errno.ESTALE),
    "readonly": lambda: refuse(errno.EROFS),
    "import": lambda: import_module("no_such_module_of_chaos"),
}


def act(how: str, where: str, seconds: float = 0.0) -> None:
    """Do `how` at `where`; ``hold``, ``pace`` and ``pause`` return after `seconds`."""
    if how != "pace":
        mark(where)
    if how not in ("pace", "hold"):
        mark("fault")
    if how in ("pace", "hold", "pause"):
        time.sleep(seconds)
    elif how == "raise":
        raise ValueError("planted by chaos")
    else:
        ENDS[how]()
