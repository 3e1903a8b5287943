"""Check the nodes of a job before the first command of a user's own script, in the job.

Checked is what every distributed program needs: nodes that answer, connections, GPUs, limits. The program's own
environment is unknown: the script loads it later.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from allranks.errors import EXIT_ENVIRONMENT, EXIT_OK
from allranks.nodes.checks import PlanRequirements
from allranks.nodes.preflight.runner import INTERFACE_NAMES, TargetNodes, failure_lines, run_preflight
from allranks.nodes.records import NodeRequirements, PreflightReport
from allranks.nodes.slurm.allocations import Allocation
from allranks.spec.records import RunSpec

STOPS = ("probe", "reach", "gpus")
"""Checks that end the job. The script may still change variables, and nodes may have only IPv6 or routed networks."""
SHOWN = (*STOPS, "net", "ifname", "shm", "files", "memlock", "p2p", "ib", "clock")


def main() -> int:
    """Check the nodes, print the result, and return 3 if the job must not start."""
    job = Allocation.current()
    hosts = list(job.nodes) if len(job.nodes) > 1 else []
    where = TargetNodes(hosts=hosts, job_id=job.job_id, cpus=int(os.environ.get("SLURM_CPUS_PER_TASK") or 1))
    need = PlanRequirements(
        procs_per_node=0,  # any number of GPUs will do
        device="cuda" if os.environ.get("SLURM_GPUS_ON_NODE") else "cpu",
        named={name: os.environ[name] for name in INTERFACE_NAMES if os.environ.get(name)},
    )
    result = run_preflight(where, RunSpec(), need, Path.cwd(), required=NodeRequirements(python=sys.executable))
    reports = [PreflightReport(host=r.host, checks=[c for c in r.checks if c.name in SHOWN]) for r in result.reports]
    for line in failure_lines(reports):
        # There is no spec whose keys could be changed.
        line = re.sub(r"--exclude-bad(, cluster\.slurm\.exclude)?", "sbatch --exclude", line)  # noqa: PLW2901
        _say(re.sub(r"cluster\.(env or cluster\.)?rendezvous\.interface", "the environment", line))
    bad = {r.host for r in reports for c in r.checks if not c.ok and c.blocks and c.name in STOPS}
    if bad and result.probes:  # else the step of the check itself could not start
        names = ", ".join(sorted(bad))
        _say(f"the job ends before its first command because of {names} (allranks sbatch --no-preflight: no check)")
        return EXIT_ENVIRONMENT
    _say(f"{len(reports)} node{'s' * (len(reports) != 1)} checked in {result.probe_s + result.reach_s:.1f} s")
    return EXIT_OK


def _say(text: str) -> None:
    print(f"allranks: preflight: {text}", flush=True)  # noqa: T201 - the job's log


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:  # noqa: BLE001 - the user's job must not end because a check cannot be made
        _say(f"skipped: {type(error).__name__}: {error}")
