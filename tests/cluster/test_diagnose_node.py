"""A node that dies under a running job: `diagnose` names it, whatever the other nodes' ranks say of losing it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import inject
from tests.cluster.runs import Submitted, allranks, log_of, spec_in


@pytest.mark.full
def test_a_node_that_died_is_named(box: Box, shared: Path) -> None:
    spec = spec_in(shared, train={"max_steps": 4000}, cluster={"slurm": {"extra": ["--no-requeue"]}})
    job = Submitted(shared, spec)
    job.until_step(10)
    inject(box, "kill-node", node="n2")
    code, out = job.wait()
    assert code == 1, out + log_of(job.run)
    done = allranks(shared, "diagnose", job.run.name, "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["findings"][0]["host"] == "n2", json.dumps(found["findings"], indent=1) + log_of(job.run)
