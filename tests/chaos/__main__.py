"""Run cases one after another and write the table.

``python -m tests.chaos [--only REGEX] [--table FILE] [--lock FILE]``
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.machine import facts

from tests.chaos.cases import SEED, Case, all_cases
from tests.chaos.harness import Outcome, run_case
from tests.chaos.places import Cluster, cluster
from tests.conftest import REPO

TABLE = REPO / "benchmarks" / "results" / "chaos.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.chaos")
    parser.add_argument("--only", default="", help="a regular expression for the names of cases")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--lock", type=Path, help="a file that is locked while a case runs")
    parser.add_argument("--new", action="store_true", help="leave out cases that the table holds already")
    parser.add_argument("--list", action="store_true", help="show the cases and run none")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no case after so many minutes")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # the case under way is cleaned up
    cases = [case for case in all_cases() if re.search(args.only, case.id)]
    if args.list:
        for case in cases:
            print(msgspec.json.encode(case).decode())
        return
    rows = {row["id"]: row for row in _read(args.table)}
    cases = [case for case in cases if not (args.new and case.id in rows)]
    deadline = time.monotonic() + 60 * args.minutes
    with ExitStack() as stack:
        box: Cluster | None = None
        if any(case.launcher == "slurm" for case in cases):
            box = stack.enter_context(cluster())
        for case in cases:
            if time.monotonic() > deadline:
                break
            with _locked(args.lock):
                seen = run_case(case, box)
            rows[case.id] = row_of(case, seen)
            _write(args.table, rows)
            print(line_of(seen), flush=True)
    good = sum(row["ok"] for row in rows.values())
    print(f"{good} of {len(rows)} as expected")


def row_of(case: Case, seen: Outcome) -> dict[str, Any]:
    """One object of the table."""
    expected = {
        "codes": list(case.codes),
        "bound_s": case.bound_s,
        "says": case.says,
        "resume": case.resume,
        "requeue": case.requeue,
    }
    got = {
        "ended": seen.ended,
        "code": seen.code,
        "status": seen.status,
        "message": seen.message,
        "left": list(seen.left),
        "restarts": seen.restarts,
        "excluded": seen.excluded,
        "resumed": seen.resumed,
        "reasons": list(seen.reasons),
    }
    return {
        "id": case.id,
        "defect": case.defect,
        "ok": seen.ok,
        "seconds": seen.seconds,
        "expected": expected,
        "got": got,
    }


def line_of(seen: Outcome) -> str:
    """One line of the table, for a person."""
    return f"{'ok  ' if seen.ok else 'FAIL'} {seen.seconds:6.1f} s  {seen.id:44} {'; '.join(seen.reasons)}"


def _read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cases"] if path.exists() else []


def _write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    order = {case.id: i for i, case in enumerate(all_cases())}
    kept = sorted((row for row in rows.values() if row["id"] in order), key=lambda row: order[row["id"]])
    summary = {
        "machine": facts(),
        "seed": SEED,
        "cases_ok": sum(row["ok"] for row in kept),
        "cases_run": len(kept),
        "cases": kept,
    }
    path.write_text(json.dumps(summary, indent=1) + "\n")


@contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
