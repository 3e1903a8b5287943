"""Serve the ranks' TCPStore on a socket that the agent has bound: ``python store_server.py FD ADDRESS PORT PARENT``.

Standard library and torch alone: the Python of a user's own program may have no allranks. Of torch it loads the
compiled part alone: importing the whole takes seconds of CPU time on the node of rank 0, also for programs that do not
use torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
import time
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
VERIFIED = "2.13."
"""Versions of torch whose compiled part is known to need no more of the package than its names."""
WHOLE = "ALLRANKS_STORE_IMPORTS_TORCH"


def main() -> None:
    sys.path.pop(0)  # this folder, whose names are no modules of torch
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ranks that save after a SIGTERM to the whole node still need it
    fd, address, port, parent = sys.argv[1:5]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    store = store_class()(address, int(port), None, True, timedelta(seconds=300), False, master_listen_fd=int(fd))
    # the kernel's signal does not come if the parent had ended before it was asked for
    while os.getppid() == int(parent):
        time.sleep(1.0)
    del store


def store_class() -> Any:
    """Return torch's TCPStore. A process that cannot load the compiled part alone starts anew and imports torch."""
    if WHOLE not in os.environ:
        try:
            if version("torch").startswith(VERIFIED):
                return _compiled_part().TCPStore
        except Exception:  # noqa: BLE001 - private names of torch; the part may be half loaded
            os.environ[WHOLE] = "1"
            os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606 - this program again
    from torch.distributed import TCPStore

    return TCPStore


def _compiled_part() -> Any:
    package = importlib.util.find_spec("torch")
    assert package is not None and package.origin is not None
    folder = Path(package.origin).parent
    for name in ("torch", "torch.distributed"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    (file,) = folder.glob("_C.*.so")
    spec = importlib.util.spec_from_file_location("torch._C", file)
    assert spec is not None and spec.loader is not None
    compiled = sys.modules["torch._C"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiled)
    compiled._c10d_init()
    return compiled._distributed_c10d


if __name__ == "__main__":
    main()
