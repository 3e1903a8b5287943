"""Writes what is kept of a trace analysis: summary.html, summary.csv, collectives.csv, merged.json.gz."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from allranks.errors import RequestError
from allranks.trace.csv import collectives_csv, summary_csv
from allranks.trace.diff import Comparison
from allranks.trace.merge import write_merged
from allranks.trace.page import summary_html
from allranks.trace.records import TraceReport

_ODD = re.compile(r"[^A-Za-z0-9._-]+")


def write_comparison(comparison: Comparison, out: Path) -> Path:
    """Write ``comparison.json`` into a folder, which is made if need be. Raises `RequestError` where it cannot be written."""
    path = out / "comparison.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(msgspec.to_builtins(comparison), indent=2) + "\n")
    except OSError as error:
        raise RequestError(f"{path} could not be written: {error.strerror}; give --out another folder") from error
    return path


def write_all(reports: Sequence[TraceReport], out: Path) -> list[Path]:
    """Write all files of each report; into `out` itself if there is one report, else into a folder of `out` for each.

    Raises `RequestError` where `out` cannot be written. Returns the files.
    """
    written: list[Path] = []
    for report, folder in zip(reports, _folders(reports, out), strict=True):
        try:
            written += _write(report, folder)
        except OSError as error:
            where = error.filename or folder
            raise RequestError(f"{where} could not be written: {error.strerror}; give --out another folder") from error
    return written


def _write(report: TraceReport, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [
        (folder / "summary.html", summary_html(report)),
        (folder / "summary.csv", summary_csv(report)),
        (folder / "collectives.csv", collectives_csv(report)),
    ]
    for path, text in files:
        path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")  # file names may be no UTF-8
    return [*(path for path, _ in files), write_merged(report, folder / "merged.json.gz").path]


def _folders(reports: Sequence[TraceReport], out: Path) -> list[Path]:
    if len(reports) == 1:
        return [out]
    folders: list[Path] = []
    for report in reports:
        parts = (report.name, f"window-{report.window.split()[0]}" if report.window else "")
        base = "-".join(_ODD.sub("-", p).strip(".-") for p in parts if p) or "run"
        name, n = base, 2
        while out / name in folders:
            name, n = f"{base}-{n}", n + 1
        folders.append(out / name)
    return folders
