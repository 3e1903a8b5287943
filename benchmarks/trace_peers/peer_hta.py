"""HolisticTraceAnalysis on a folder: ``python peer_hta.py FOLDER``. Runs in a venv of its own, so it imports nothing of ours.

Prints one JSON line: seconds for import and for work, figures of each rank in microseconds, and what failed.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import sys
import time
import warnings
from typing import Any

BEGIN = time.perf_counter()
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)

from hta.trace_analysis import TraceAnalysis  # noqa: E402 - its import is timed

IMPORTED = time.perf_counter()


def attempt(errors: dict[str, str], name: str, work: Any) -> Any:
    """The result, or None with the error noted: what fails is a figure too."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - the edge of a peer that raises whatever comes
        errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
        return None


def analyse(folder: str) -> tuple[dict[str, dict[str, float | None]], dict[str, Any], dict[str, str]]:
    """The same work that ours does as far as it goes: breakdown, overlap, kernels, stragglers; no charts."""
    errors: dict[str, str] = {}
    ranks: dict[str, dict[str, float | None]] = {}
    analysis = attempt(errors, "load", lambda: TraceAnalysis(trace_dir=folder, include_last_profiler_step=True))
    if analysis is None:
        return ranks, {}, errors
    breakdown = attempt(errors, "breakdown", lambda: analysis.get_temporal_breakdown(visualize=False))
    overlap = attempt(errors, "overlap", lambda: analysis.get_comm_comp_overlap(visualize=False))
    attempt(errors, "kernels", lambda: analysis.get_gpu_kernel_breakdown(visualize=False))
    late = attempt(errors, "stragglers", lambda: analysis.get_potential_stragglers(num_candidates=1))
    for row in [] if breakdown is None else breakdown.to_dict("records"):
        ranks[str(int(row["rank"]))] = {
            "compute_us": float(row["compute_time(us)"]),
            "non_compute_us": float(row["non_compute_time(us)"]),
            "busy_window_us": float(row["kernel_time(us)"]),
        }
    for row in [] if overlap is None else overlap.to_dict("records"):
        value = float(row["comp_comm_overlap_pctg"])
        ranks.setdefault(str(int(row["rank"])), {})["overlap_percent"] = None if math.isnan(value) else value
    return ranks, {"stragglers": None if late is None else [int(r) for r in late]}, errors


def main() -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ranks, more, errors = analyse(sys.argv[1])
    done = time.perf_counter()
    result = {"import_s": IMPORTED - BEGIN, "work_s": done - IMPORTED, "ranks": ranks, "errors": errors, **more}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
