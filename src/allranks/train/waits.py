"""How long this process has waited for other ranks, as far as it waits in Python.

`torch.distributed`'s calls and the strategies wait by ``Work.wait``. It is measured there, at one place, so that no strategy
has to know of it. On a GPU ``wait`` does not hold up the host, and nothing is measured.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

_waited = 0.0
_plain: Any = None


def waited_s() -> float:
    """Seconds so far; only differences mean something."""
    return _waited


def measure() -> None:
    """Measure from now on. A second call changes nothing."""
    global _plain  # noqa: PLW0603 - one a process, as the class that it measures is
    if _plain is None:
        _plain = dist.Work.wait
        dist.Work.wait = _measured  # pyright: ignore[reportAttributeAccessIssue]


def _measured(work: dist.Work, *args: Any, **more: Any) -> Any:
    global _waited  # noqa: PLW0603
    began = time.perf_counter()
    try:
        return _plain(work, *args, **more)
    finally:
        _waited += time.perf_counter() - began
