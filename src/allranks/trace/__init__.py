"""Analysis of PyTorch profiler traces: standard library and msgspec only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from allranks.trace.records import TraceReport


def analyse(
    paths: Sequence[Path], *, select: Literal["latest", "all"] = "latest", workers: int | None = None
) -> list[TraceReport]:
    """Reports of the traces under `paths` (files or folders), one for each run and window, oldest first.

    `select`: only the newest window of each rank, or every one. `workers`: processes that read ranks in parallel; None takes the cores of
    this machine. Raises `RequestError` if no file of `paths` could be read as a trace.
    """
    raise NotImplementedError
