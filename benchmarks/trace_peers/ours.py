"""Our analysis on a folder: ``python ours.py FOLDER``. Prints one JSON line as `peer_hta.py` does."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

BEGIN = time.perf_counter()

from allranks.analysis.trace import analyse  # noqa: E402 - its import is timed

IMPORTED = time.perf_counter()


def main() -> None:
    reports = analyse([Path(sys.argv[1])])
    done = time.perf_counter()
    ranks = {
        str(rank.rank): {
            "compute_us": rank.total.compute_s * 1e6,
            "non_compute_us": (rank.total.exposed_comm_s + rank.total.copy_s) * 1e6,
            "exposed_comm_us": rank.total.exposed_comm_s * 1e6,
            "overlap_percent": None if rank.total.overlap is None else 100 * rank.total.overlap,
            "steps": len(rank.steps),
        }
        for report in reports
        for rank in report.ranks
    }
    late = [row.rank for r in reports for row in sorted(r.stragglers, key=lambda row: -row.caused_wait_s)[:1]]
    problems = [f"{p.severity}: {p.kind}" for r in reports for p in r.problems]
    result = {"import_s": IMPORTED - BEGIN, "work_s": done - IMPORTED, "ranks": ranks, "stragglers": late}
    print(json.dumps({**result, "problems": problems}))


if __name__ == "__main__":
    main()
