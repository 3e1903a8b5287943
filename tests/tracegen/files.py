"""Documents and files: the frame that all traces have, whichever the backend."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tracegen import gloo, nccl
from tests.tracegen.scenario import Scenario
from tests.tracegen.schedule import Timeline

PID = 4000
BASE_NS = 1_700_000_000_000_000_000
Event = dict[str, Any]


def write_traces(s: Scenario, timeline: Timeline, folder: Path) -> None:
    """One ``rank<R>.json.gz`` a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(s.world):
        if rank not in s.absent:
            text = json.dumps(document(s, timeline, rank))
            (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text.encode(), 1, mtime=0))


def document(s: Scenario, timeline: Timeline, rank: int) -> dict[str, Any]:
    """One rank's trace as JSON."""
    make = nccl.events if s.backend == "nccl" else gloo.events
    events = make(s, timeline, rank, PID + rank)
    clock = _clock(s, rank)
    for e in events:
        if "dur" in e:
            e["dur"] = _number(clock(e["ts"] + e["dur"]) - clock(e["ts"]))
        if "ts" in e:
            e["ts"] = _number(clock(e["ts"]))
    groups = [
        {
            "pg_name": "0",
            "pg_desc": "default_pg",
            "backend_config": f"cuda:{s.backend}",
            "pg_size": s.world,
            "ranks": list(range(s.world)),
        }
    ]
    if s.second_group:
        groups.append({**groups[0], "pg_name": "1", "pg_desc": "undefined"})
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Generated", "totalGlobalMem": 1}] if s.backend == "nccl" else [],
        "record_shapes": 1,
        "distributedInfo": {
            "backend": s.backend,
            "rank": rank,
            "world_size": s.world,
            "pg_count": len(groups),
            "pg_config": groups,
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
        "traceName": f"rank{rank}.json",
        "traceEvents": events,
    }


def _clock(s: Scenario, rank: int) -> Callable[[int], float]:
    offset, drift = s.offset_us.get(rank, 0), s.drift_ppm.get(rank, 0)
    return lambda t: t + offset + (t * drift / 1e6 if drift else 0)


def _number(value: float) -> float | int:
    value = round(value, 3)
    return int(value) if value == int(value) else value
