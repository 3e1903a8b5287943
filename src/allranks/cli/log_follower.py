"""Show what logs gain while something runs. It imports nothing heavy: `allranks torchrun` starts with it."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Self


class LogFollower(threading.Thread):
    """Show what logs gain until the block ends; as a context manager around what writes them.

    Args:
        every_s: seconds between two reads.
    """

    def __init__(self, every_s: float) -> None:
        super().__init__(name="output", daemon=True)
        self._every_s, self._stopped = every_s, threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join(timeout=10.0)
        self._look(last=True)

    def run(self) -> None:
        while not self._stopped.wait(self._every_s):
            self._look()

    @abstractmethod
    def _look(self, *, last: bool = False) -> None:
        """Show new lines; with `last` also an incomplete one."""
