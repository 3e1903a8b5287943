"""Save CPU time in processes that import torch and transformers, which allocate hundreds of thousands of objects."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

RARELY = 100_000
"""Container objects that a short process allocates between two collections of the youngest generation (default of Python: 700)."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Import without garbage collection, and exclude the imported objects from all later collections.

    They live as long as the process. Collecting while they are imported takes a quarter of the time of the imports, and each full collection
    during training would visit them again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_short_process(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a process that imports torch for a short task, and exit with its code.

    Garbage is collected rarely. After the exit handlers the process ends at once: the interpreter would free every imported object, which
    takes about a second. An exception ends the process as usual.
    """
    gc.set_threshold(RARELY)
    code = main() or 0
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader has gone, or main closed it
            stream.flush()
    os._exit(code)
