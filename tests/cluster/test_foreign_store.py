"""Two runs that were given the same fixed port: the second is refused with the port and the address, the first is
unharmed."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import yaml

from allranks.lab.cluster import Box
from allranks.rundir.files import read_json, write_json
from allranks.rundir.paths import RunDir
from tests.cluster.runs import LIMIT_S
from tests.dist.harness import ALLRANKS, until

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

    def __init__(self, box: Box, shared: Path, name: str, port: int, seconds: float, *, on: str | None = None) -> None:
        """Start its launcher on the login side, or on a node."""
        self.box, self.shared, self.out = box, shared, shared / f"{name}.out"
        self.agents: list[subprocess.Popen[bytes]] = []
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
        prefix = box.node_prefix(on, str(shared)) if on else box.command_prefix(shared)
        self.launcher = subprocess.Popen(
            [*prefix, *ALLRANKS, "run", f"{name}.yaml"], cwd=shared, stdout=self.out.open("w"), stderr=subprocess.STDOUT
        )
        until(lambda: "  node 1:  " in self.out.read_text() or self.launcher.poll() is not None, limit_s=30)
        self.run = RunDir(next((shared / name).iterdir()))

    def start(self, node: int) -> None:
        line = next(text for text in self.out.read_text().splitlines() if text.startswith(f"  node {node}:  "))
        command = [*self.box.node_prefix(f"n{node + 1}", str(self.shared)), "bash", "-c", line.split(":  ", 1)[1]]
        self.agents.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def end(self) -> None:
        """Kill everything; an agent, whose nsenter is killed here, ends by itself and writes its record."""
        for process in (self.launcher, *self.agents):
            process.kill()
            process.wait()
        until(
            lambda: not any(str(self.run.root) in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
        )


PORT = 23456


def test_a_second_run_at_the_same_port_is_refused_and_the_first_goes_on(box: Box, shared: Path) -> None:
    (shared / "own.py").write_text(PROGRAM)
    address = box.plan.nodes[0].address
    with ExitStack() as ends:
        first = ByHand(box, shared, "first", PORT, 20)
        ends.callback(first.end)
        first.start(0)
        first.start(1)
        until(lambda: len(first.run.rank_logs(1)) == 2, limit_s=30)

        here = ByHand(box, shared, "here", PORT, 1)  # on the machine of the first one's launcher
        ends.callback(here.end)
        assert here.launcher.wait(timeout=LIMIT_S) == 3, here.out.read_text()
        assert f":{PORT + 1} for the control channel" in " ".join(here.out.read_text().split()), here.out.read_text()

        second = ByHand(box, shared, "second", PORT, 1, on="n3")
        ends.callback(second.end)
        second.start(1)  # its ranks would find the first one's store
        until(lambda: "1 of 2 nodes have joined" in second.out.read_text(), limit_s=30)
        second.start(0)
        assert second.launcher.wait(timeout=LIMIT_S) == 3, second.out.read_text()
        assert second.agents[0].wait(timeout=30) == 1  # told to end; no rank was started
        assert second.agents[1].wait(timeout=30) == 3
        assert first.launcher.poll() is None, first.out.read_text()
        assert first.launcher.wait(timeout=LIMIT_S) == 0, first.out.read_text()
    words = f"cannot listen on {address}:{PORT} for the store of the ranks: Address already in use"
    said = " ".join(second.out.read_text().split())
    assert words in said, said
    assert "cluster.rendezvous.port" in said
    assert words in read_json(second.run.agent_exit(1, "n1"))["refused"]
    assert not second.run.rank_logs(1)


def test_an_agent_of_one_run_never_joins_another(box: Box, shared: Path) -> None:
    """Even where it is sent to the other's control channel: the token of its own run opens nothing there."""
    (shared / "own.py").write_text(PROGRAM)
    with ExitStack() as ends:
        first = ByHand(box, shared, "first", 23456, 3)
        ends.callback(first.end)
        second = ByHand(box, shared, "second", 23466, 1)
        ends.callback(second.end)
        there, own = read_json(first.run.channel(1)), read_json(second.run.channel(1))
        assert there["token"] != own["token"] and there["port"] != own["port"]
        write_json(second.run.channel(1), {**there, "token": own["token"]}, private=True)
        second.start(1)
        until(lambda: "refused: " in first.out.read_text(), limit_s=30)
        first.start(0)
        until(lambda: "1 of 2 nodes have joined" in first.out.read_text(), limit_s=30)
        time.sleep(3)  # the stranger tries again every second
        assert "2 of 2" not in first.out.read_text(), first.out.read_text()
        assert not first.run.rank_logs(1)
        first.start(1)
        assert first.launcher.wait(timeout=LIMIT_S) == 0, first.out.read_text()
        assert sorted(first.run.rank_logs(1)) == [0, 1]
        assert not second.run.rank_logs(1)
        assert second.launcher.poll() is None
