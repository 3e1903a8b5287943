"""Logs of real runs, which nobody here wrote: the stated cause comes first, and healthy ones give nothing."""

from __future__ import annotations

import csv

from allranks.analysis.diagnose import diagnose
from tests.conftest import shared


def _rows() -> list[dict[str, str]]:
    with shared("logs", "INDEX.tsv").open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


def _first(row: dict[str, str]) -> str:
    findings = diagnose([shared("logs", row["file"])]).findings
    return findings[0].id if findings else "healthy"


def test_stated_causes_come_first() -> None:
    stated = [row for row in _rows() if row["basis"] != "log-only"]
    wrong = {row["file"]: (row["id"], found) for row in stated if (found := _first(row)) != row["id"]}
    assert len(wrong) <= 0.1 * len(stated), wrong


def test_healthy_logs_give_no_finding() -> None:
    healthy = [row for row in _rows() if row["id"] == "healthy"]
    assert healthy
    assert not [row["file"] for row in healthy if _first(row) != "healthy"]
