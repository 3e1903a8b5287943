"""What copy tests between GPUs have shown, kept beside the runs, so that later runs on the same node heed it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from allranks.preflight.records import Probe
from allranks.rundir import read_json, write_json

FOLDER = ".copy-tests"
FRESH_S = 30 * 86400
"""A test older than this says nothing any more."""


class CopyTest(msgspec.Struct, frozen=True, kw_only=True):
    """One node's result: pairs whose copy came out wrong, or did not come. Valid for these GPUs and this driver."""

    host: str
    failed: list[str]
    tested: int
    gpus: list[str]
    driver: str
    time: float


def save(run_root: Path, probe: Probe, failed: Sequence[str], tested: int) -> None:
    """Keeps it. A folder that cannot be written loses only the memory of it."""
    test = CopyTest(
        host=probe.host, failed=list(failed), tested=tested, gpus=_names(probe), driver=_driver(probe), time=time.time()
    )
    try:
        (run_root / FOLDER).mkdir(parents=True, exist_ok=True)
        write_json(run_root / FOLDER / f"{probe.host}.json", msgspec.to_builtins(test))
    except OSError:
        return


def load(run_root: Path, probes: Sequence[Probe]) -> dict[str, list[str]]:
    """Failed pairs by tested host; nodes whose GPUs or driver have changed since count as untested."""
    found = {}
    for probe in probes:
        raw = read_json(run_root / FOLDER / f"{probe.host}.json")
        try:
            test = msgspec.convert(raw, CopyTest)
        except msgspec.ValidationError:
            continue
        same = test.gpus == _names(probe) and test.driver == _driver(probe)
        if same and test.tested > 0 and time.time() - test.time < FRESH_S:
            found[probe.host] = test.failed
    return found


def _names(probe: Probe) -> list[str]:
    return [str(gpu.get("name")) for gpu in probe.gpus]


def _driver(probe: Probe) -> str:
    return str(probe.gpus[0].get("driver")) if probe.gpus else ""
