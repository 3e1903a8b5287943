"""Serve the ranks' TCPStore on a socket that the agent has bound: ``python store_server.py FD ADDRESS PORT PARENT``.

Standard library and torch alone: the Python of a user's own program may have no allranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta

PR_SET_PDEATHSIG = 1


def main() -> None:
    sys.path.pop(0)  # this folder, whose names are no modules of torch
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ranks that save after a SIGTERM to the whole node still need it
    fd, address, port, parent = sys.argv[1:5]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    from torch.distributed import TCPStore

    store = TCPStore(address, int(port), None, True, timedelta(seconds=300), False, master_listen_fd=int(fd))
    while os.getppid() == int(parent):
        time.sleep(1.0)
    del store


if __name__ == "__main__":
    main()
