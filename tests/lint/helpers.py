"""Linting a text."""

from __future__ import annotations

from pathlib import Path

from allranks.analysis.lint import LintReport, lint


def lint_text(tmp_path: Path, text: str, name: str = "job.sbatch") -> LintReport:
    """The report on one file of this text."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    return lint([path])


def found(report: LintReport) -> list[tuple[str, int]]:
    """Rules and lines, in order."""
    return [(f.id, f.line) for f in report.findings]
