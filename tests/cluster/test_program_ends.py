"""How a user's own program is stopped under Slurm: by `allranks cancel`, at the time limit, by `scancel`. Two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.lab.cluster import Box
from allranks.rundir.files import read_json
from tests.cluster.runs import Submitted, allranks, log_of
from tests.dist.harness import until

pytestmark = pytest.mark.full
SAVES = """
import os, signal, sys, time
def stop(number, frame):
    time.sleep(1.0)
    print("SAVED", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("READY", os.getcwd(), flush=True)
time.sleep(600)
"""


def started(shared: Path, **slurm: object) -> Submitted:
    """A module in a working directory of its own, on both nodes and at work."""
    folder = shared / "project" / "tools"
    folder.mkdir(parents=True)
    (folder / "fit.py").write_text(SAVES)
    spec = {
        "name": "own",
        "script": {"module": "tools.fit", "workdir": str(shared / "project"), "grace_s": 20},
        "run_root": str(shared / "runs"),
        "cluster": {"launcher": "slurm", "nodes": 2, "procs_per_node": 1, "slurm": slurm},
    }
    job = Submitted(shared, spec)
    until(lambda: [f"READY {shared / 'project'}" in text for text in logs(job)] == [True, True], limit_s=60)
    return job


def logs(job: Submitted) -> list[str]:
    return [path.read_text() for path in job.run.rank_logs(1).values()]


@pytest.mark.parametrize("how", ["cancel", "time limit", "scancel"])
def test_a_program_saves_on_sigterm_and_the_run_says_so(box: Box, shared: Path, how: str) -> None:
    job = started(shared, **({"time": "1", "signal_s": 45} if how == "time limit" else {}))
    if how == "cancel":
        done = allranks(shared, "cancel", job.run.name)
        assert done.returncode == 0 and "asked to stop" in done.stdout, done.stdout + done.stderr
    elif how == "scancel":
        box.run(["scancel", job.job()], cwd="/")
    code, out = job.wait(100)
    said = " ".join(out.split())
    assert code == 1, out + log_of(job.run)
    assert all("SAVED" in text for text in logs(job)), logs(job)
    why = "the time limit is near" if how == "time limit" else f"job {job.job()} was cancelled"
    assert f"stopped ({why}): the ranks received SIGTERM; rank 0, 1 ended with exit code 0" in said, said
    assert "checkpoint" not in said
    assert read_json(job.run.metrics)["status"] == "stopped"
    assert job.run.attempts() == [1]
