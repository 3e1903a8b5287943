"""Two runs that were given one meeting place: the second is refused by name, the first goes on unharmed."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from allranks.rundir import RunDir, read_json
from allranks.testcluster import Box
from tests.cluster.runs import LIMIT_S
from tests.dist.harness import ALLRANKS, until

pytestmark = pytest.mark.python_on_nodes
PROGRAM = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group('gloo')
x = torch.ones(1)
until = time.time() + float(sys.argv[1])
while time.time() < until:
    dist.all_reduce(x)
    time.sleep(0.1)
dist.barrier()
"""


class ByHand:
    """A run on n1 and n2 with `launcher: hosts`, whose commands the test starts."""

    def __init__(self, box: Box, shared: Path, name: str, port: int, seconds: float) -> None:
        self.box, self.shared, self.out = box, shared, shared / f"{name}.out"
        cluster = {
            "launcher": "hosts",
            "nodes": 2,
            "procs_per_node": 1,
            "hosts": [node.address for node in box.plan.nodes[:2]],
            "rendezvous": {"port": port},
        }
        script = {"path": str(shared / "own.py"), "args": [str(seconds)]}
        spec = {"name": name, "script": script, "run_root": str(shared / name), "cluster": cluster}
        (shared / f"{name}.yaml").write_text(yaml.safe_dump(spec))
        self.launcher = subprocess.Popen(
            [*ALLRANKS, "run", f"{name}.yaml"], cwd=shared, stdout=self.out.open("w"), stderr=subprocess.STDOUT
        )
        until(lambda: "  node 1:  " in self.out.read_text(), limit_s=30)
        self.run = RunDir(next((shared / name).iterdir()))

    def start(self, node: int) -> None:
        line = next(text for text in self.out.read_text().splitlines() if text.startswith(f"  node {node}:  "))
        command = [*self.box.node_prefix(f"n{node + 1}", str(self.shared)), "bash", "-c", line.split(":  ", 1)[1]]
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_second_run_at_the_same_place_is_refused_and_the_first_goes_on(box: Box, shared: Path) -> None:
    (shared / "own.py").write_text(PROGRAM)
    with ExitStack() as ends:
        first = ByHand(box, shared, "first", 23456, 12)
        second = ByHand(box, shared, "second", 23456, 1)
        for job in (first, second):
            ends.callback(job.launcher.kill)
        first.start(0)
        first.start(1)
        until(lambda: len(first.run.rank_logs(1)) == 2, limit_s=30)
        time.sleep(1)
        second.start(1)  # this one alone would have joined the first one's store
        until(lambda: second.run.agent_exit(1, "n2").exists(), limit_s=30)
        second.start(0)
        assert second.launcher.wait(timeout=LIMIT_S) == 3, second.out.read_text()
        assert first.launcher.poll() is None, first.out.read_text()
        assert first.launcher.wait(timeout=LIMIT_S) == 0, first.out.read_text()
    said = second.out.read_text()
    assert f"held by run {first.run.name}" in said and f"run {second.run.name}" in said, said
    told = read_json(second.run.agent_exit(1, "n2"))["refused"]
    assert f"belongs to run {first.run.name}" in told and second.run.name in told
    assert not second.run.rank_logs(1)
