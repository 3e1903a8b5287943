"""Run cases one after another and write the table: ``python -m tests.chaos [--only REGEX] [--table FILE]``."""

import argparse
import json
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.machine import facts

from tests.chaos.cases import SEED, Case, all_cases
from tests.chaos.harness import Outcome, cluster, run_case
from tests.conftest import REPO

EXPECTED = ("codes", "bound_s", "says", "resume", "requeue")
GOT = ("ended", "code", "status", "message", "left", "restarts", "excluded", "resumed", "reasons")
TABLE = REPO / "benchmarks" / "results" / "chaos.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.chaos")
    parser.add_argument("--only", default="", help="a regular expression for the names of cases")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--new", action="store_true", help="leave out cases that the table holds already")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # the case under way is cleaned up
    cases = [case for case in all_cases() if re.search(args.only, case.id)]
    rows = {row["id"]: row for row in _read(args.table)}
    cases = [case for case in cases if not (args.new and case.id in rows)]
    with ExitStack() as stack:
        slurm = any(case.launcher == "slurm" for case in cases)
        box = stack.enter_context(cluster()) if slurm else None
        for case in cases:
            seen = run_case(case, box)
            rows[case.id] = row_of(case, seen)
            _write(args.table, rows)
            mark = "ok  " if seen.ok else "FAIL"
            print(f"{mark} {seen.seconds:6.1f} s  {seen.id:44} {'; '.join(seen.reasons)}", flush=True)
    good = sum(row["ok"] for row in rows.values())
    print(f"{good} of {len(rows)} as expected")


def row_of(case: Case, seen: Outcome) -> dict[str, Any]:
    wanted, found = msgspec.to_builtins(case), msgspec.to_builtins(seen)
    row = {"id": case.id, "defect": case.defect, "ok": seen.ok, "seconds": seen.seconds}
    row["expected"] = {key: wanted[key] for key in EXPECTED}
    return row | {"got": {key: found[key] for key in GOT}}


def _read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cases"] if path.exists() else []


def _write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    order = {case.id: i for i, case in enumerate(all_cases())}
    kept = sorted((row for row in rows.values() if row["id"] in order), key=lambda row: order[row["id"]])
    summary = {"machine": facts(), "seed": SEED, "cases_ok": sum(row["ok"] for row in kept), "cases_run": len(kept)}
    summary["cases"] = kept
    path.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
