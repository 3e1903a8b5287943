"""Linting a text, and the table of cases."""

import csv
import json
from pathlib import Path
from typing import NamedTuple

from allranks.analysis.lint import LintReport, lint
from allranks.analysis.lint.rules import RULES


class Case(NamedTuple):
    """A script, and the one finding of the rule in it; line 0 for none."""

    rule: str
    line: int
    severity: str
    script: str


def read_cases() -> list[Case]:
    """The rows of ``cases.tsv``, whose scripts are JSON strings without their quotes."""
    with (Path(__file__).parent / "cases.tsv").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [Case(r["rule"], int(r["line"]), r["severity"], json.loads(f'"{r["script"]}"')) for r in rows]


CASES = read_cases()


def lint_text(tmp_path: Path, text: str, name: str = "job.sbatch", slurm_version: str | None = None) -> LintReport:
    """The report on one file of this text."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    return lint([path], slurm_version)


def found(report: LintReport) -> list[tuple[str, int]]:
    """Rules of allranks and lines, in order."""
    return [(f.id, f.line) for f in report.findings if f.id in RULES]


HEAD = "#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=2 --cpus-per-task=16 --mem=64G\n"


def script_of(fragment: str) -> str:
    """The script that the fragment of an example stands in."""
    if fragment.startswith("#!"):
        return fragment + "\n"
    return f"#!/bin/bash\n{'' if fragment.startswith('#SBATCH') else HEAD}{fragment}\n"
