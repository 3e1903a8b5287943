"""What a run of allranks wrote down about itself beside its logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from allranks.rundir import RunDir


class _Connections(Struct):
    interfaces: dict[str, int] = {}


def connections(paths: Sequence[Path]) -> dict[str, int]:
    """Connections between ranks by interface, such as ``{"TCP/eth0": 12}``, of the newest attempt of each run folder."""
    found: dict[str, int] = {}
    for path in paths:
        if not (path / "plan.json").is_file():
            continue
        run = RunDir(path)
        for file in sorted(run.logs_of(max(run.attempts(), default=1)).glob("*.connections.json")):
            try:
                counted = msgspec.json.decode(file.read_bytes(), type=_Connections).interfaces
            except (OSError, msgspec.DecodeError):
                continue  # a record of the run, no log: what is not there is not told
            for name, count in counted.items():
                found[f"TCP/{name}"] = found.get(f"TCP/{name}", 0) + count
    return found
