from __future__ import annotations

from allranks.rundir import RunDir


def write_report(run: RunDir) -> None:
    pass
