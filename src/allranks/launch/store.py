"""Store through which ranks exchange addresses: its location, and the process on node 0 that serves it.

Training on one node uses a file in a folder of mode 0700, which no other user can access. Several nodes, or a user's own
program (which calls ``init_process_group()`` itself), use torch's TCPStore, served by a separate process on one address.
TCPStore has no authentication (SECURITY.md); allranks' own training uses keys with a random prefix.

    python -m allranks.launch.store FD ADDRESS PORT PARENT_PID
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from allranks.rundir.heartbeat import STORE_VARIABLE

LOOPBACK = "127.0.0.1"
BACKLOG = 4096


class FileStoreFolder:
    """Folder of mode 0700 on this node for torch's FileStore."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix=_prefix(os.getpid()))

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables for the ranks."""
        return {STORE_VARIABLE: f"file:{self._folder}/store"}

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _prefix(agent_pid: int) -> str:
    return f"allranks-{os.getuid()}-store-{agent_pid}-"


def remove_leftover_stores(agent_pid: int) -> None:
    """Remove stores that a killed agent has left; its ranks must have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix(agent_pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


class TcpStoreServer:
    """Process that serves a TCPStore on a socket bound by this process, so that no other program can take the port.

    Args:
        address: the address to listen on. If this node does not have it (a forwarded address), the store listens on all.
        port: 0 for any free one.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, address: str, port: int) -> None:
        self.note = ""
        try:
            bound = _bind(address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            bound = _bind("", port)
            self.note = f"{address} is not an address of this node, so the store listens on all addresses"
            address = LOOPBACK
        with bound:
            self.port: int = bound.getsockname()[1]
            words = [str(bound.fileno()), address, str(self.port), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "allranks.launch.store", *words],
                stdin=subprocess.DEVNULL,
                pass_fds=[bound.fileno()],
            )

    def exit_code(self) -> int | None:
        """Return the process's exit code; None while it serves."""
        return self._process.poll()

    def close(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.wait(timeout=10)


def _bind(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def serve_store(fd: int, address: str, port: int, parent: int) -> None:
    """Serve until the parent exits."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore(address, port, None, True, timedelta(seconds=300), False, master_listen_fd=fd)
    while os.getppid() == parent:
        time.sleep(1.0)
    del store


def main() -> None:
    from allranks.launch.rank import end_with_parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ranks that save after a SIGTERM to the whole node still need it
    fd, address, port, parent = sys.argv[1:5]
    end_with_parent(signal.SIGKILL, int(parent))
    serve_store(int(fd), address, int(port), int(parent))


if __name__ == "__main__":
    main()
