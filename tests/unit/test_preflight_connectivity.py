"""Sampled connections: who tries whom, and which node or link a failure is attributed to."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.errors import RunFailed
from allranks.nodes.network.choose import ChosenNetwork
from allranks.nodes.network.links import NodeLinks, faulty_nodes, judge_links, sampled_links
from allranks.nodes.preflight import link_tests, runner
from allranks.nodes.probes import connectivity_probe
from allranks.nodes.probes.probe import unused_port
from allranks.nodes.records import NodeRequirements, Probe
from allranks.nodes.slurm import srun as nodes
from allranks.nodes.slurm.allocations import Allocation
from allranks.nodes.staging.broadcast import StagingStep
from allranks.planning.network_policy import NetworkPolicy
from allranks.planning.planner import make_plan
from allranks.planning.records import NodeAddress
from allranks.spec.records import RunSpec
from allranks.utils.machine import machine_facts
from tests.unit.preflight_nodes import cut


@pytest.mark.parametrize("size", [2, 8, 9, 64, 4096])
def test_every_node_is_tried_by_as_many_distinct_others_as_it_tries(size: int) -> None:
    expected = size - 1 if size <= connectivity_probe.MESH_NODES else 1 + (size - 1).bit_length()
    tried_by: dict[int, set[int]] = {index: set() for index in range(size)}
    for index in range(size):
        targets = connectivity_probe.sampled_targets(index, size, "job 5")
        assert len(set(targets)) == len(targets) == expected and index not in targets
        assert (index + 1) % size in targets, "the ring holds all nodes together"
        for target in targets:
            tried_by[target].add(index)
    assert {len(sources) for sources in tried_by.values()} == {expected}
    for index in (0, 1, size - 1):
        assert set(connectivity_probe.sampled_visitors(index, size, "job 5")) == tried_by[index]


def hosts_of(nodes: int) -> list[str]:
    return [f"n{number}" for number in range(1, nodes + 1)]


def bad_nodes(size: int, works: Callable[[str, str], bool], silent: str = "") -> dict[str, NodeLinks]:
    """The nodes that are not well, where links fail in one direction unless `works` allows them."""
    targets = sampled_links(hosts_of(size), "7")
    answers = {h: cut(h, *(p for p in peers if not works(h, p))) for h, peers in targets.items() if h != silent}
    return {host: verdict for host, verdict in judge_links(targets, answers).items() if not verdict.ok}


@pytest.mark.parametrize("size", [4, 9, 64])
def test_one_bad_node_or_link_is_named_and_no_other(size: int) -> None:
    (down,) = bad_nodes(size, lambda source, target: "n2" not in (source, target)).values()
    assert down.host == "n2" and down.reached == down.reached_by == 0 and down.tried >= 3 and down.tried_by >= 3
    (deaf,) = bad_nodes(size, lambda source, target: target != "n2").values()
    assert deaf.host == "n2" and deaf.reached == deaf.tried > 0 and deaf.reached_by == 0
    assert deaf.failed[0].text() == f"{deaf.failed[0].source} -> n2 10.0.0.2:21001 timed out (4 of 4 attempts failed)"
    last = sampled_links(hosts_of(size), "7")["n1"][-1]
    (link,) = bad_nodes(size, lambda source, target: (source, target) != ("n1", last)).values()
    assert link.host == "n1" and link.peers == [last] and link.reached == link.tried - 1


def test_several_bad_nodes_are_all_named_and_no_other() -> None:
    for size, bad in ((64, 5), (256, 20)):
        chosen = set(random.Random(3).sample(hosts_of(size), bad))
        assert set(bad_nodes(size, lambda source, target, c=chosen: not c & {source, target})) == chosen
    first = set(hosts_of(64)[:20])
    halves = bad_nodes(64, lambda source, target: not (source in first and target not in first))
    assert set(halves) & first, "two halves that do not reach each other do not pass"
    (silent,) = bad_nodes(64, lambda source, target: target != "n9", silent="n9").values()
    assert silent.host == "n9" and not silent.answered, "it says nothing about the others"


def test_the_node_with_most_failures_is_blamed_first() -> None:
    links = {("a", "x"): 1, ("a", "y"): 1, ("b", "x"): 1, ("c", "x"): 1, ("b", "y"): 1, ("c", "y"): 1, ("b", "a"): 0}
    assert faulty_nodes(links) == {"x", "y"}, "a fails with all that it tried, because both are at fault"
    assert faulty_nodes({("a", "b"): 1, ("b", "a"): 1}) == set()


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called srun that writes down its standard input and answers nothing; its arguments pass the kernel's
    limits."""
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/input\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "input"


def test_all_nodes_that_srun_cannot_reach_are_left_out_at_once(srun: Path) -> None:
    """Slurm ends a step for each of them; asking again for every 20 of 100 would not come to an end."""
    hosts = hosts_of(200)
    line = "srun: error: Task launch for StepId=1.0 failed on node n%d: Communication connection failure\\n"
    program = srun.parent / "bin" / "srun"
    program.write_text(
        f"#!/bin/sh\ncat >/dev/null; echo >> {srun}\n[ $(wc -l < {srun}) = 1 ] || exit 0\n"
        f"for i in $(seq 1 100); do printf '{line}' $i >&2; done\n"
    )
    probe = runner.NodeProgram(name="probe.py", python="true")
    answers, silent = runner._ask(runner.TargetNodes(hosts=hosts), probe, 10)
    assert srun.read_text().count("\n") == 2 and answers.returncode == 0
    why = {report.host: report.checks[0].cure for report in silent}
    assert all("failed on node" in why[host] for host in hosts[:100]) and len(why) == 200


HOSTS = [f"compute-{n:05d}" for n in range(10_000)]


def test_the_connection_test_holds_10000_nodes(srun: Path) -> None:
    """Linux refuses an argument of more than 128 KiB, so nothing that grows with the number of nodes may be one."""
    where = runner.TargetNodes(hosts=HOSTS, slurm_job="1", job_id="1")
    seats = {host: NodeAddress(interface="eth0", address=f"10.1.{n >> 8}.{n & 255}") for n, host in enumerate(HOSTS)}
    probes = [Probe(host=host, node_id=n, free_ports=[21000], unused_port=30000 + n) for n, host in enumerate(HOSTS)]
    network = ChosenNetwork(network="10.1.0.0/16", seats=seats, reason="")
    found, _ = runner._test_connectivity(where, NodeRequirements(python=sys.executable), probes, network)
    assert found is not None and not any(verdict.answered for verdict in found.values())
    namespace: dict[str, str] = {"__name__": "sent"}
    exec(compile(srun.read_text(), "connectivity_probe.py", "exec"), namespace)  # noqa: S102 - our own program
    request = json.loads(zlib.decompress(base64.b64decode(namespace["REQUEST"])))
    node = connectivity_probe.node_of(request, connectivity_probe.index_of(request, HOSTS[77]) or 0)
    assert {peer for peer, _, _ in node.peers} == set(sampled_links(HOSTS, "1")[HOSTS[77]])


def test_collectives_and_staging_hold_10000_nodes(srun: Path) -> None:
    probes = [Probe(host=host, node_id=n) for n, host in enumerate(HOSTS)]
    found = runner.PreflightResult(reports=[], probes=probes, network=None, port=21000, probe_s=0, reach_s=0)
    plan = make_plan(RunSpec(), machine_facts())
    with pytest.raises(RunFailed, match="gave no results"):
        link_tests.measure_collectives(runner.TargetNodes(hosts=HOSTS), found, plan, 1, NetworkPolicy(nodes=[]))
    assert json.loads(srun.read_text())["hosts"] == HOSTS
    step = StagingStep(Allocation(job_id="1", nodes=tuple(HOSTS)), HOSTS, ["python3"], {"verb": "ask"})
    with step, pytest.raises(RunFailed, match="did not answer"):
        step.answers(1)


@pytest.mark.parametrize(
    ("hosts", "folded"),
    [
        ("n1 n2 n3 n5 login", "n[1-3,5],login"), ("gpu08 gpu09 gpu10", "gpu[08-09],gpu10"), ("n9 n10 n11", "n[9-11]"),
        ("r1n2 r1n3 r2n2", "r1n[2-3],r2n2"), ("n1 n1-ib n2-ib", "n1,n1-ib,n2-ib"), ("n7", "n7"),
    ],
)  # fmt: skip
def test_host_lists_are_folded_as_slurm_does(hosts: str, folded: str) -> None:
    assert nodes.compress_hosts(hosts.split()) == folded


def test_16_processes_reach_each_other() -> None:
    """Real sockets, each process on an address of its own."""
    hosts = hosts_of(16)
    seats = [[host, f"127.0.61.{n}", [21000, unused_port()]] for n, host in enumerate(hosts, 1)]
    request = {"seats": connectivity_probe.encode_seats(seats), "seed": "7", "window_s": 60.0}
    program = [sys.executable, "-I", "-S", "-"]
    started = []
    for host in hosts:
        env = {**os.environ, "SLURMD_NODENAME": host}
        process = subprocess.Popen(program, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdin is not None
        process.stdin.write(nodes.program_text("connectivity_probe.py", request))
        process.stdin.close()
    answers = [json.loads(process.stdout.read()) for process in started if process.stdout]
    assert [process.wait(60) for process in started] == [0] * 16
    assert [answer["host"] for answer in answers] == hosts and not any(a["unreached"] + a["errors"] for a in answers)
