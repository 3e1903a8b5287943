"""Skip without a GPU; ALLRANKS_GPU_REHEARSAL=1 runs on a CPU; ALLRANKS_GPU_LOG: a file for each test's result."""

import json
import os
from pathlib import Path

import pytest

from allranks.utils.machine import visible_gpus

REHEARSAL = os.environ.get("ALLRANKS_GPU_REHEARSAL") == "1"


@pytest.fixture(scope="session")
def device() -> str:
    """The device of the ranks: cuda, or cpu in a rehearsal."""
    if REHEARSAL:
        return "cpu"
    if not visible_gpus():
        pytest.skip("this machine has no GPU (nvidia-smi -L); ALLRANKS_GPU_REHEARSAL=1 rehearses on the CPU")
    return "cuda"


@pytest.fixture
def cuda(device: str) -> str:
    """For a test that a CPU cannot rehearse."""
    if device != "cuda":
        pytest.skip("needs CUDA; a rehearsal on the CPU cannot do it")
    return device


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write each result as it is known: a test that hangs until the kit kills pytest must not lose those before it."""
    log = os.environ.get("ALLRANKS_GPU_LOG")
    if not log or "PYTEST_XDIST_WORKER" in os.environ or not (report.when == "call" or report.outcome != "passed"):
        return
    reason = ""
    if isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
    elif report.longrepr is not None:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash is not None else str(report.longrepr)
    line = {"test": report.nodeid, "status": report.outcome, "reason": reason[:1500]}
    line["seconds"] = round(report.duration, 1)
    with Path(log).open("a") as file:
        file.write(json.dumps(line) + "\n")
