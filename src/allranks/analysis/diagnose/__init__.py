"""Find out from logs why a job failed. Needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from allranks.analysis.diagnose.records import (
    BenignFinding,
    ClockOffsets,
    Diagnosis,
    DiagnosisCase,
    DiagnosisFinding,
    JobHealth,
    LastGoodRun,
    LogEvidence,
    ReadProblem,
    RunChange,
    UnexplainedFailure,
)

__all__ = [
    "BenignFinding", "ClockOffsets", "Diagnosis", "DiagnosisFinding", "JobHealth", "LastGoodRun", "LogEvidence",
    "ReadProblem", "RunChange", "UnexplainedFailure", "diagnose",
]  # fmt: skip


def diagnose(paths: Sequence[Path | str], *, workers: int | None = None) -> Diagnosis:
    """Read logs and report what went wrong.

    Args:
        paths: run folders, folders of logs, or files (also gz, bz2, xz).
        workers: processes that read in parallel; None uses one per core if there is enough to read.

    Raises:
        RequestError: a path does not exist.
    """
    return diagnose_with_kinds(paths, workers=workers)[0]


def diagnose_with_kinds(paths: Sequence[Path | str], *, workers: int | None = None) -> tuple[Diagnosis, list[str]]:
    """Return the diagnosis, and the kind of rule behind each finding (`kind_of`), for measurements."""
    # The processes that scan files import this package too, and need none of these.
    from allranks.analysis.diagnose.causes import (
        decide,
        describe_candidates,
        describe_harmless,
        find_candidates,
        kind_of,
    )
    from allranks.analysis.diagnose.job_summary import (
        align_clocks,
        build_timeline,
        compare_with_last_good,
        count_connections,
        describe_health,
    )
    from allranks.analysis.diagnose.logs import find_logs
    from allranks.analysis.diagnose.parallel_scan import scan_files
    from allranks.analysis.diagnose.run_outcome import add_outcomes, apply_outcomes, read_outcomes
    from allranks.utils.redaction import redact

    sources, left_out = find_logs([Path(p) for p in paths])
    scans = scan_files(sources, workers)
    problems = [ReadProblem(file=name, text=text) for name, text in left_out]
    problems += [ReadProblem(file=sources[s.file].name, text=redact(p)) for s in scans for p in s.problems]
    case = DiagnosisCase([s.name for s in sources], scans)
    outcomes = read_outcomes([Path(p) for p in paths])
    add_outcomes(case, outcomes)
    clocks = align_clocks(case)
    candidates, survived = find_candidates(case)
    candidates = apply_outcomes(case, candidates)
    verdict, kept, unexplained = decide(case, candidates)
    survived += [s for c in candidates if c not in kept for s in c.signals]
    diagnosis = Diagnosis(
        verdict=verdict,
        findings=describe_candidates(case, kept),
        benign=describe_harmless(case, survived),
        unexplained=unexplained,
        last_good_run=compare_with_last_good([Path(p) for p in paths]) if verdict != "healthy" else None,
        health=describe_health(case, count_connections([Path(p) for p in paths])),
        story=build_timeline(case, {candidate.id for candidate in kept}),
        clocks=clocks,
        problems=problems,
        files=len(sources),
        bytes_read=sum(s.bytes_read for s in scans) + sum(len(message) for _, _, message, _ in outcomes),
    )
    diagnosis = structs.replace(diagnosis, summary=diagnosis.headline())
    return diagnosis, [kind_of(candidate) for candidate in kept]
