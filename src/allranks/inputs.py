"""Files that a verb is given to read; ``-`` is standard input."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

STDIN_NAME = "standard input"


class StdinClosed(Exception):
    """Standard input was asked for, and the caller had closed it (``<&-``)."""


def is_stdin(path: str | Path) -> bool:
    """Whether it means standard input."""
    return str(path) == "-"


def name_of(path: str | Path) -> str:
    """What messages call it."""
    return STDIN_NAME if is_stdin(path) else str(path)


def open_input(path: Path) -> AbstractContextManager[BinaryIO]:
    """The bytes of a file, or of standard input, which is left open.

    Raises:
        StdinClosed: there is no standard input.
        OSError: the file cannot be opened.
    """
    if not is_stdin(path):
        return path.open("rb")
    if sys.stdin is None:
        raise StdinClosed
    return nullcontext(sys.stdin.buffer)
