"""Make standard output and error safe: a closed pipe or terminal, or a full disk, must not end a run."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

CLOSED_ERRNOS = {
    errno.EPIPE,
    errno.EIO,
    errno.EBADF,
}  # the output has no reader: a closed pipe, a terminal that hung up


class Output(io.FileIO):
    """File descriptor that discards all output after its first write error."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self.error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write the data, or discard it after an earlier error, so that the caller continues in both cases."""
        if self.error is None:
            try:
                return super().write(data) or 0
            except BlockingIOError:
                raise
            except OSError as error:
                self._give_up(error)
        return memoryview(data).nbytes

    def _give_up(self, error: OSError) -> None:
        self.error = error
        null = os.open(os.devnull, os.O_WRONLY)  # for child processes, which share the descriptor
        os.dup2(null, self.fileno())
        os.close(null)


def protect() -> dict[str, Output]:
    """Replace sys.stdout and sys.stderr by streams that do not fail. Closed standard descriptors are opened on
    /dev/null.

    Returns:
        The outputs that are open, by ``"stdout"`` and ``"stderr"``.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:  # else the next file that is opened would get this number, and take a child's output
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    outputs: dict[str, Output] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            outputs[name] = raw = Output(stream.fileno())
            text = io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering or name == "stderr",
                write_through=stream.write_through,
            )
            setattr(sys, name, text)
    return outputs


def is_closed(stream: Any) -> bool:
    """Return whether output to the stream is discarded; a command that only displays something may then exit."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", None)
    return isinstance(raw, Output) and raw.error is not None
