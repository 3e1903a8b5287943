"""What the launcher asks of a container program: a stand-in takes the part of Apptainer, so this proves the calls, not
Apptainer itself. Like a container, it has neither srun nor scontrol, and a Python of its own name."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from allranks.lab.cluster import Box
from allranks.rundir.files import read_json
from tests.cluster.runs import log_of, program_in, run, spec_in

STAND_IN = """#!/bin/bash
echo "$(hostname) $*" >> {calls}
while [[ $1 != *.sif ]]; do shift; done
[ "$2" = python ] || exit 9
shift 2
unset ${{!SLURM_JOB_*}}
PATH=/nowhere exec {python} "$@"
"""


@pytest.mark.parametrize("what", ["program", pytest.param("training", marks=pytest.mark.full)])
def test_ranks_run_in_the_container_and_the_driver_outside(box: Box, shared: Path, what: str) -> None:
    (shared / "bin").mkdir()
    apptainer, calls = shared / "bin" / "apptainer", shared / "calls"
    apptainer.write_text(STAND_IN.format(calls=calls, python=shlex.quote(sys.executable)))
    apptainer.chmod(0o755)
    (shared / "image.sif").touch()
    cluster = {"nodes": 2, "python": str(shared / "image.sif"), "setup": [f"export PATH={shared}/bin:$PATH"]}
    program = program_in(shared, "import os\nprint('RAN', os.environ['PATH'], flush=True)\n", **cluster)
    training = spec_in(shared, cluster=cluster, train={"max_steps": 2})
    done, run_dir = run(shared, training if what == "training" else program)
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    if what == "training":
        assert read_json(run_dir.metrics)["sync_proof"]["world_size"] == 2
    else:
        logs = [log.read_text() for log in run_dir.rank_logs(1).values()]
        assert len(logs) == 2 and all("RAN " in log and "/nowhere" in log for log in logs), logs
    lines = sorted(calls.read_text().splitlines())
    assert [line.split()[0] for line in lines] == ["n1", "n2"]
    assert all(f"--bind={run_dir.root}" in line and "allranks.launch.agent" in line for line in lines)
