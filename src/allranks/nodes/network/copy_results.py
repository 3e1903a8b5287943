"""Keep the results of copy tests between the GPUs of a node next to the runs, so that later runs respect them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from allranks.nodes.records import Probe
from allranks.rundir.files import read_json, write_json

COPY_TESTS_FOLDER = ".copy-tests"
COPY_TEST_VALID_S = 30 * 86400
"""Maximum age of a valid test."""


class CopyTestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One node's result: pairs with a wrong or hanging copy. Valid for these GPUs and this driver."""

    host: str
    failed: list[str]
    tested: int
    gpus: list[str]
    driver: str
    time: float


def save_copy_test(run_root: Path, probe: Probe, failed: Sequence[str], tested: int) -> None:
    """Save the test. If the folder cannot be written, only the record is lost."""
    test = CopyTestRecord(
        host=probe.host,
        failed=list(failed),
        tested=tested,
        gpus=_gpu_names(probe),
        driver=_driver_version(probe),
        time=time.time(),
    )
    try:
        (run_root / COPY_TESTS_FOLDER).mkdir(parents=True, exist_ok=True)
        write_json(run_root / COPY_TESTS_FOLDER / f"{probe.host}.json", msgspec.to_builtins(test))
    except OSError:
        return


def load_copy_tests(run_root: Path, probes: Sequence[Probe]) -> dict[str, list[str]]:
    """Return failed pairs by tested host; nodes with changed GPUs or driver count as untested."""
    failed_pairs = {}
    for probe in probes:
        raw = read_json(run_root / COPY_TESTS_FOLDER / f"{probe.host}.json")
        try:
            test = msgspec.convert(raw, CopyTestRecord)
        except msgspec.ValidationError:
            continue
        same = test.gpus == _gpu_names(probe) and test.driver == _driver_version(probe)
        if same and test.tested > 0 and time.time() - test.time < COPY_TEST_VALID_S:
            failed_pairs[probe.host] = test.failed
    return failed_pairs


def _gpu_names(probe: Probe) -> list[str]:
    return [str(gpu.get("name")) for gpu in probe.gpus]


def _driver_version(probe: Probe) -> str:
    return str(probe.gpus[0].get("driver")) if probe.gpus else ""
