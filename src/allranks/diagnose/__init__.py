"""Why it failed: logs of any kind in, findings out, most likely root cause first. Needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from allranks.diagnose.judge import judge
from allranks.diagnose.judge.case import Case
from allranks.diagnose.judge.clocks import align
from allranks.diagnose.judge.health import describe
from allranks.diagnose.judge.story import tell
from allranks.diagnose.pool import scan_all
from allranks.diagnose.records import Benign, Clocks, Diagnosis, Evidence, Finding, Health, Problem
from allranks.diagnose.rundata import connections
from allranks.diagnose.secrets import clean
from allranks.diagnose.sources import find

__all__ = ["Benign", "Clocks", "Diagnosis", "Evidence", "Finding", "Health", "Problem", "diagnose"]


def diagnose(paths: Sequence[Path | str], *, workers: int | None = None) -> Diagnosis:
    """Read logs and say what went wrong.

    Args:
        paths: run folders, folders of logs, or files (also gz, bz2, xz, zst).
        workers: processes that read in parallel; None takes one a core where there is enough to read.

    Raises:
        RequestError: a path is not there.
    """
    sources, left_out = find([Path(p) for p in paths])
    scans = scan_all(sources, workers)
    problems = [Problem(file=name, text=text) for name, text in left_out]
    problems += [Problem(file=sources[s.file].name, text=clean(p)) for s in scans for p in s.problems]
    case = Case([s.name for s in sources], scans)
    clocks = align(case)
    findings, benign = judge(case)
    return Diagnosis(
        findings=findings,
        benign=benign,
        health=describe(case, connections([Path(p) for p in paths])),
        story=tell(case),
        clocks=clocks,
        problems=problems,
        files=len(sources),
        bytes_read=sum(s.bytes_read for s in scans),
    )
